"""Continues text, or translates: python scripts/generate.py --workdir=DIR
(--prompt=TEXT | --input=FILE) [--output=FILE] [--max_new_tokens=128 --temperature=1 --top_k=0
--top_p=1 --seed=0 | --beams=4 --length_penalty=0.6 --n_best=2]

For a model of pairs a prompt is a source. --input holds one prompt a line; \\n in a line stands for
a line break. Prints prompt and continuation, or the translations, one a line; --output gets one
JSON object for each line of the input instead: prompt, text (the continuation, or the translation)
and, with --n_best, hypotheses, best first: text, score (logprob / ((5 + tokens) / 6) **
length_penalty), logprob (in nats, of its tokens and its end).
"""

import sys

sys.path[0] += "/.."  # the repository: here, inspect.py would shadow the standard library's


import json
from typing import Any

from absl import flags

import transformer
from transformer import cli
from transformer.spec import SpecError

WORKDIR = flags.DEFINE_string("workdir", None, "the run to use", required=True)
STEP = flags.DEFINE_string("step", "latest", "a step, or latest, or best")
AVERAGE = flags.DEFINE_integer("average", 1, "checkpoints up to the step to average", 1)
PROMPT = flags.DEFINE_string("prompt", None, "the text to continue, or the source; may be empty")
INPUT = flags.DEFINE_string("input", None, "a file with one prompt a line")
OUTPUT = flags.DEFINE_string("output", None, "a JSON-lines file to write")
LENGTH = flags.DEFINE_integer("max_new_tokens", 128, "tokens to add at most", 0, 10**6)
TEMPERATURE = flags.DEFINE_float("temperature", 1.0, "0: the most probable token")
TOP_K = flags.DEFINE_integer("top_k", 0, "draw from the k most probable tokens; 0: all")
TOP_P = flags.DEFINE_float("top_p", 1.0, "draw from the smallest set with this probability")
SEED = flags.DEFINE_integer("seed", 0, "of the draws", 0, 2**31 - 1)
BEAMS = flags.DEFINE_integer(
    "beams",
    None,
    "search with so many beams; 0: draw. If not given, 4 where a model of pairs answers and no "
    "temperature is given, else 0",
    lower_bound=0,
)
PENALTY = flags.DEFINE_float("length_penalty", 0.6, "0: shorter texts are preferred")
N_BEST = flags.DEFINE_integer("n_best", None, "how many of the beams to tell, best first")
BATCH = flags.DEFINE_integer("batch_size", 64, "prompts at a time; changes no text", lower_bound=1)


def main() -> None:
    prompts = _prompts()
    if OUTPUT.value is None:
        run = transformer.load(WORKDIR.value, STEP.value, AVERAGE.value)
        answers = run.objective.needs is not None
        shown = [_shown(answers, p, found) for p, found in _pairs(run, prompts)]
        print(("\n" if answers else "\n\n").join(shown))
        return
    with cli.open_output(OUTPUT.value) as f:
        run = transformer.load(WORKDIR.value, STEP.value, AVERAGE.value)
        f.writelines(_record(p, found) for p, found in _pairs(run, prompts))
    print(f"{len(prompts)} texts in {OUTPUT.value}", file=sys.stderr)


def _pairs(run: Any, prompts: list[str]) -> list[tuple[str, Any]]:
    beams = BEAMS.value
    if beams is None:
        asked = any(flags.FLAGS[name].present for name in ("temperature", "top_k", "top_p"))
        drawn = asked or not run.objective.needs
        beams = 0 if drawn else 4
    found = run.generate(
        prompts,
        max_new_tokens=LENGTH.value,
        temperature=TEMPERATURE.value,
        top_k=TOP_K.value,
        top_p=TOP_P.value,
        seed=SEED.value,
        beams=beams,
        length_penalty=PENALTY.value,
        n_best=N_BEST.value,
        batch_size=BATCH.value,
    )
    return list(zip(prompts, found, strict=True))


def _shown(answers: bool, prompt: str, found: Any) -> str:
    if isinstance(found, list):
        lines = [f"{h.score:.4f}\t{_shown(answers, prompt, h.text)}" for h in found]
        return "\n".join(lines)
    return found.replace("\n", "\\n") if answers else prompt + found


def _record(prompt: str, found: Any) -> str:
    if isinstance(found, list):
        best = [{"text": h.text, "score": h.score, "logprob": h.logprob} for h in found]
        out = {"prompt": prompt, "text": best[0]["text"], "hypotheses": best}
    else:
        out = {"prompt": prompt, "text": found}
    return json.dumps(out, ensure_ascii=False) + "\n"


def _prompts() -> list[str]:
    if (PROMPT.value is None) == (INPUT.value is None):
        raise SpecError("give --prompt=TEXT or --input=FILE, one of the two")
    lines = cli.read_lines(INPUT.value) if INPUT.value is not None else [PROMPT.value or ""]
    return [line.replace("\\n", "\n") for line in lines]


if __name__ == "__main__":
    cli.main(main)
