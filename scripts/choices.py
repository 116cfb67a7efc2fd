"""Writes the current table of choices into README.md: python scripts/choices.py"""

import sys

sys.path[0] += "/.."  # the repository: here, inspect.py would shadow the standard library's

from pathlib import Path

from transformer import choices

if __name__ == "__main__":
    readme = Path(__file__).resolve().parents[1] / "README.md"
    readme.write_text(choices.inserted(readme.read_text()))
