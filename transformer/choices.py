"""The table of choices, as Markdown, read off the tables themselves: README.md carries it between
two marks, and a test holds the two together."""

import dataclasses
import inspect
import re
import typing
from collections import defaultdict
from collections.abc import Callable, Iterator

from transformer import spec
from transformer.experiment import RunSpec

BEGIN, END = "<!-- choices: begin -->", "<!-- choices: end -->"


def table() -> str:
    """One section for each table that options pick from."""
    users: dict[int, list[tuple[str, dataclasses.Field]]] = defaultdict(list)
    for path, field in _choices(RunSpec):
        users[id(field.metadata["table"])].append((path, field))
    lines = []
    for fields in users.values():
        lines += ["", "; ".join(_heading(*f) for f in fields), "", "| name | options | |"]
        lines += ["| --- | --- | --- |"]
        for name, factory in fields[0][1].metadata["table"].items():
            lines.append(f"| `{name}` | {_options(factory)} | {_sentence(factory)} |")
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


def _heading(path: str, field: dataclasses.Field) -> str:
    assert callable(field.default_factory)
    varies = ", may vary by layer" if field.metadata["per_layer"] else ""
    return f"**`{path}`** (default `{field.default_factory()}`{varies})"


def _options(factory: Callable) -> str:
    parts = []
    for name, option in spec.options(factory).items():
        among = [a for a in typing.get_args(option.type) if isinstance(a, spec.Among)]
        names = list(among[0].table) if among else []
        others = f" ({', '.join(names)})" if names else ""
        parts.append(f"`{name}={option.default!r}`{others}")
    return ", ".join(parts)


def _sentence(factory: Callable) -> str:
    """The first sentence of the docstring; a full stop in brackets or after "al" ends none."""
    text = " ".join((inspect.getdoc(factory) or "").split()).replace("|", "\\|")
    for stop in re.finditer(r"(?<!et al)[.:;](?= |$)", text):
        sentence = text[: stop.start()]
        if sentence.count("(") == sentence.count(")"):
            return sentence
    return text
