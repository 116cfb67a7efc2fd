"""Scores text: python scripts/score.py --workdir=DIR --input=FILE --output=FILE.jsonl

For each line of the input (source, a tab, text where a model of pairs is asked) one JSON object:
`logprob`, the sum of the teacher-forced
log-probabilities in nats of its tokens and of the end of the text; `tokens`, how many those are;
`eos_logprob`, the part of the end alone. A line's score depends on no other line.
"""

import sys

sys.path[0] += "/.."  # the repository: here, inspect.py would shadow the standard library's


import json

from absl import flags

import transformer
from transformer import cli

WORKDIR = flags.DEFINE_string("workdir", None, "the run to use", required=True)
STEP = flags.DEFINE_string("step", "latest", "a step, or latest, or best")
INPUT = flags.DEFINE_string("input", None, "a file with one text a line", required=True)
OUTPUT = flags.DEFINE_string("output", None, "the JSON-lines file to write", required=True)
BATCH = flags.DEFINE_integer("batch_size", 32, "lines at a time; changes no score", lower_bound=1)


def main() -> None:
    lines = cli.read_lines(INPUT.value)
    with cli.open_output(OUTPUT.value) as f:
        run = transformer.load(WORKDIR.value, STEP.value)
        scores = list(run.score(map(_parts, lines) if run.objective.needs else lines, BATCH.value))
        f.writelines(json.dumps(score) + "\n" for score in scores)
    total = sum(s["logprob"] for s in scores)
    tokens = sum(s["tokens"] for s in scores)
    print(
        f"{len(scores)} lines, {tokens} tokens, {-total / max(tokens, 1):.4f} nats per token",
        file=sys.stderr,
    )


def _parts(line: str) -> tuple[str, ...]:
    return tuple(line.split("\t"))


if __name__ == "__main__":
    cli.main(main)
