"""Prepares a source as a TFDS dataset, without TensorFlow:
python scripts/prepare.py --source="text(path='books/*.txt', documents='paragraph')"
--name=my_books --data_dir=DIR

--source is anything that config.data.source may be; its splits and their order are kept. Prints
the tfds(...) to use as config.data.source instead. The dataset's configuration is named after the
content, so changed files make another one, and unchanged ones are not prepared again.
"""

import sys

sys.path[0] += "/.."  # the repository: here, inspect.py would shadow the standard library's


from typing import Any

from absl import flags

from transformer import cli, spec
from transformer.data import prepared
from transformer.data.source import SOURCES

SOURCE = flags.DEFINE_string("source", None, "what to prepare, as in a config", required=True)
NAME = flags.DEFINE_string("name", None, "the dataset's name, such as my_books", required=True)
DATA_DIR = flags.DEFINE_string("data_dir", None, "the directory of datasets", required=True)


def main() -> None:
    choice: Any = spec.pick(SOURCES, SOURCE.value, path="--source")
    print(prepared.write(choice(), NAME.value, DATA_DIR.value))


if __name__ == "__main__":
    cli.main(main)
