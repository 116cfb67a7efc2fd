"""Trains an experiment: python train.py --config=configs/lm.py --workdir=runs/lm [--config.a.b=v]

The same command goes on with a run that was stopped. Exit codes: 0 done, 2 refused before the first
step, 3 a numerical failure, 75 stopped by a signal with a checkpoint saved.
"""

import sys

from absl import flags

from transformer import cli, launch
from transformer.experiment import RunSpec, train

WORKDIR = flags.DEFINE_string("workdir", None, "where the run lives", required=True)
CONFIG = cli.define_config(RunSpec)

EXIT_CODES, FAILED = {"done": 0, "signal": 75}, 3


def main() -> int:
    result = train(CONFIG.spec, WORKDIR.value)
    code = EXIT_CODES.get(result["exit_reason"], FAILED)
    print(
        f"{result['exit_reason']} after {result['steps']} steps; see {WORKDIR.value}/result.json",
        file=sys.stderr if code == FAILED else sys.stdout,
    )
    return code


if __name__ == "__main__":
    launch.on_huge_pages()
    cli.main(main, CONFIG)
