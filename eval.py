"""Evaluates a run: python eval.py --workdir=DIR [--step=N|latest|best] [--split=NAME]
[--config.data.…]

Goes once through the whole split, each target counted once, and prints one JSON object last: loss
and nll in nats per target, perplexity = exp(nll), accuracy, bits_per_byte, tokens (targets).
"""

import json
from typing import Any

from absl import flags

from transformer import cli
from transformer.experiment import RunSpec
from transformer.workdir import evaluate_run, stored

WORKDIR = flags.DEFINE_string("workdir", None, "the run to evaluate", required=True)
STEP = flags.DEFINE_string("step", "latest", "a step, or latest, or best")
SPLIT = flags.DEFINE_string("split", "validation", "a split of the data")


def _base() -> dict[str, Any]:
    config = stored(WORKDIR.value)
    config["train"]["accumulate"] = 1  # else batch_size would have to be a multiple
    return config


CONFIG = cli.define_config(RunSpec, base=_base)


def main() -> None:
    print(json.dumps(evaluate_run(WORKDIR.value, STEP.value, SPLIT.value, CONFIG.spec)))


if __name__ == "__main__":
    cli.main(main, CONFIG)
