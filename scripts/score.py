"""Scores text: python scripts/score.py --workdir=DIR --input=FILE --output=FILE.jsonl

For each line of the input (of a model of pairs: source, a tab, target) one JSON object: `logprob`,
the sum of the teacher-forced log-probabilities in nats of the text's tokens and of its end, given
the source; `tokens`, how many those are; `eos_logprob`, the part of the end alone. A line's score
depends on no other line.
"""

import sys

sys.path[0] += "/.."  # the repository: here, inspect.py would shadow the standard library's


import json
from collections.abc import Iterator

from absl import flags

import transformer
from transformer import cli
from transformer.spec import SpecError

WORKDIR = flags.DEFINE_string("workdir", None, "the run to use", required=True)
STEP = flags.DEFINE_string("step", "latest", "a step, or latest, or best")
AVERAGE = flags.DEFINE_integer("average", 1, "checkpoints up to the step to average", 1)
INPUT = flags.DEFINE_string("input", None, "a file with one text a line", required=True)
OUTPUT = flags.DEFINE_string("output", None, "the JSON-lines file to write", required=True)
BATCH = flags.DEFINE_integer("batch_size", 32, "lines at a time; changes no score", lower_bound=1)


def main() -> None:
    lines = cli.read_lines(INPUT.value)
    with cli.open_output(OUTPUT.value) as f:
        run = transformer.load(WORKDIR.value, STEP.value, AVERAGE.value)
        texts = _pairs(lines) if run.objective.needs == "source" else lines
        scores = list(run.score(texts, BATCH.value))
        f.writelines(json.dumps(score) + "\n" for score in scores)
    total = sum(s["logprob"] for s in scores)
    tokens = sum(s["tokens"] for s in scores)
    print(
        f"{len(scores)} lines, {tokens} tokens, {-total / max(tokens, 1):.4f} nats per token",
        file=sys.stderr,
    )


def _pairs(lines: list[str]) -> Iterator[tuple[str, str]]:
    for number, line in enumerate(lines, 1):
        if (tabs := line.count("\t")) != 1:
            what = f"expected source, one tab and target, found {tabs} tabs"
            raise SpecError(f"{INPUT.value} line {number}: {what}")
        source, _, text = line.partition("\t")
        yield source, text


if __name__ == "__main__":
    cli.main(main)
