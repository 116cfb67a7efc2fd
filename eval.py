"""Evaluates a run: python eval.py --workdir=DIR [--step=N|latest|best] [--split=NAME]
[--average=1] [--output=FILE] [--config.data.…]

Goes once through the whole split, each target counted once, and prints one JSON object last: loss
and nll in nats per target, perplexity = exp(nll), accuracy, bits_per_byte, tokens (targets). With
`eval.decode` the model also writes the whole split, by beam search for translations, and the object
says how good that is (BLEU and chrF with their signatures, or exact matches); --output=FILE gets
one JSON object for each text: source, reference, text.
"""

import json
from typing import Any

from absl import flags

from transformer import cli
from transformer.experiment import RunSpec
from transformer.spec import SpecError
from transformer.workdir import evaluate_run, stored

WORKDIR = flags.DEFINE_string("workdir", None, "the run to evaluate", required=True)
STEP = flags.DEFINE_string("step", "latest", "a step, or latest, or best")
AVERAGE = flags.DEFINE_integer("average", 1, "checkpoints up to the step to average", 1)
SPLIT = flags.DEFINE_string("split", None, "a split of the data; else the run's eval.split")
OUTPUT = flags.DEFINE_string("output", None, "a JSON-lines file for what the model writes")


def _base() -> dict[str, Any]:
    config = stored(WORKDIR.value)
    config["train"]["accumulate"] = 1  # else batch_size would have to be a multiple
    return config


CONFIG = cli.define_config(RunSpec, base=_base)


def main() -> None:
    split = SPLIT.value or CONFIG.spec.eval.split
    given = WORKDIR.value, STEP.value, split, CONFIG.spec, AVERAGE.value
    if OUTPUT.value is None:
        metrics, _ = evaluate_run(*given)
    else:
        if CONFIG.spec.eval.decode is None:
            raise SpecError("--output: the run writes nothing; set --config.eval.decode")
        with cli.open_output(OUTPUT.value) as f:
            metrics, texts = evaluate_run(*given)
            f.writelines(json.dumps(text, ensure_ascii=False) + "\n" for text in texts)
    print(json.dumps(metrics))


if __name__ == "__main__":
    cli.main(main, CONFIG)
