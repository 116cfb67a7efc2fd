"""Compares finished runs: python scripts/compare.py DIR... [--metrics=accuracy,loss]

Runs that differ in nothing but the seed are one variant. Prints the options in which the variants
differ, each metric's mean over seeds with its 95 % interval, and the difference of every variant
to the first, paired by seed, with interval and p-value.
"""

import sys

sys.path[0] += "/.."  # the repository: here, inspect.py would shadow the standard library's


from absl import flags

from transformer import cli, compare
from transformer.spec import SpecError

METRICS = flags.DEFINE_list("metrics", [], "which metrics of the evaluation; none: all")


def main(*workdirs: str) -> None:
    if not workdirs:
        raise SpecError("give the working directories of the runs to compare")
    print(compare.sheet(workdirs, METRICS.value))


if __name__ == "__main__":
    cli.main(main)
