"""Shows what a config means before it runs: python scripts/inspect.py --config=FILE [--config.a=b]

Prints the resolved config, the choices of each layer where they vary, the parameter table (name,
shape, logical axes, count, share) and totals. Tokenises the data into --workdir if it must.
"""

import sys

sys.path[0] += "/.."  # the repository: here, inspect.py would shadow the standard library's


from absl import flags

from transformer import cli, inspection
from transformer.experiment import RunSpec

WORKDIR = flags.DEFINE_string("workdir", None, "where tokenised data is kept; none: not kept")
CONFIG = cli.define_config(RunSpec)


def main() -> None:
    print(inspection.sheet(CONFIG.spec, WORKDIR.value))


if __name__ == "__main__":
    cli.main(main, CONFIG)
