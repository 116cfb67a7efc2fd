"""Continues text: python scripts/generate.py --workdir=DIR (--prompt=TEXT | --input=FILE)
[--output=FILE] [--max_new_tokens=128 --temperature=1 --top_k=0 --top_p=1 --seed=0]

--input holds one prompt a line; \\n in a line stands for a line break. Prints prompt and
continuation; --output gets one JSON object a line instead: prompt, text (the continuation).
"""

import sys

sys.path[0] += "/.."  # the repository: here, inspect.py would shadow the standard library's


import json

from absl import flags

import transformer
from transformer import cli
from transformer.spec import SpecError

WORKDIR = flags.DEFINE_string("workdir", None, "the run to use", required=True)
STEP = flags.DEFINE_string("step", "latest", "a step, or latest, or best")
PROMPT = flags.DEFINE_string("prompt", None, "the text to continue; may be empty")
INPUT = flags.DEFINE_string("input", None, "a file with one prompt a line")
OUTPUT = flags.DEFINE_string("output", None, "a JSON-lines file to write")
LENGTH = flags.DEFINE_integer("max_new_tokens", 128, "tokens to add at most", 0, 10**6)
TEMPERATURE = flags.DEFINE_float("temperature", 1.0, "0: the most probable token")
TOP_K = flags.DEFINE_integer("top_k", 0, "draw from the k most probable tokens; 0: all")
TOP_P = flags.DEFINE_float("top_p", 1.0, "draw from the smallest set with this probability")
SEED = flags.DEFINE_integer("seed", 0, "of the draws", 0, 2**31 - 1)


def main() -> None:
    prompts = _prompts()
    if OUTPUT.value is None:
        print("\n\n".join(p + t for p, t in zip(prompts, _texts(prompts), strict=True)))
        return
    with cli.open_output(OUTPUT.value) as f:
        for prompt, text in zip(prompts, _texts(prompts), strict=True):
            f.write(json.dumps({"prompt": prompt, "text": text}, ensure_ascii=False) + "\n")
    print(f"{len(prompts)} texts in {OUTPUT.value}", file=sys.stderr)


def _texts(prompts: list[str]) -> list[str]:
    return transformer.load(WORKDIR.value, STEP.value).generate(
        prompts,
        max_new_tokens=LENGTH.value,
        temperature=TEMPERATURE.value,
        top_k=TOP_K.value,
        top_p=TOP_P.value,
        seed=SEED.value,
    )


def _prompts() -> list[str]:
    if (PROMPT.value is None) == (INPUT.value is None):
        raise SpecError("give --prompt=TEXT or --input=FILE, one of the two")
    lines = cli.read_lines(INPUT.value) if INPUT.value is not None else [PROMPT.value or ""]
    return [line.replace("\\n", "\n") for line in lines]


if __name__ == "__main__":
    cli.main(main)
