"""The table of choices, as Markdown, read off the tables themselves: README.md carries it between
two marks, and a test holds the two together."""

import dataclasses
import inspect
import re
from collections.abc import Iterator

from transformer import spec
from transformer.experiment import RunSpec

BEGIN, END = "<!-- choices: begin -->", "<!-- choices: end -->"


def table() -> str:
    """One section for each option that is picked by name."""
    lines = []
    for path, field in _choices(RunSpec):
        varies = ", may vary by layer" if field.metadata["per_layer"] else ""
        default = field.default_factory()
        lines += ["", f"**`{path}`** (default `{default}`{varies})", "", "| name | options | |"]
        lines += ["| --- | --- | --- |"]
        for name, factory in field.metadata["table"].items():
            given = [f"{k}={o.default!r}" for k, o in spec.options(factory).items()]
            options = f"`{', '.join(given)}`" if given else ""
            lines.append(f"| `{name}` | {options} | {_sentence(factory)} |")
    return "\n".join(lines[1:])


def inserted(readme: str) -> str:
    """The text with its table replaced by the current one."""
    pattern = re.compile(f"{re.escape(BEGIN)}.*{re.escape(END)}", re.DOTALL)
    return pattern.sub(lambda _: f"{BEGIN}\n{table()}\n{END}", readme)


def _choices(cls: type, path: str = "") -> Iterator[tuple[str, dataclasses.Field]]:
    for f in dataclasses.fields(cls):
        if "table" in f.metadata:
            yield f"{path}{f.name}", f
        elif isinstance(f.type, type) and issubclass(f.type, spec.Spec):
            yield from _choices(f.type, f"{path}{f.name}.")


def _sentence(factory) -> str:
    """The first sentence of the docstring; a full stop inside of brackets does not end it."""
    text = " ".join((inspect.getdoc(factory) or "").split())
    depth = 0
    for i, c in enumerate(text):
        depth += (c == "(") - (c == ")")
        if c in ".:;" and depth == 0 and text[i + 1 : i + 2] in ("", " "):
            return text[:i].replace("|", "\\|")
    return text.replace("|", "\\|")
