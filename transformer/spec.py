"""Turns a config mapping into a frozen, checked tree of dataclasses. Knows no JAX.

* A *spec* is a frozen dataclass; its fields are the options, with types and defaults.
* A *choice* is a name out of a table, optionally called with its options: ``"rope"`` or
  ``"rope(theta=5e5)"``. Its options are whatever the chosen class or function declares with a
  default; what has none is context. A choice that may vary by layer can be a cycle over depth:
  ``"5*window(size=1024) | causal"``.
* Everything wrong with a config is reported at once, each line with its path.
"""

import ast
import dataclasses
import difflib
import functools
import inspect
import itertools
import math
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Annotated, Any

_LINEN_FIELDS = {"parent", "name"}  # every linen module declares these; they are not options
_WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_LONGEST = 1000  # entries of a cycle
# What `ast` raises on text that is no literal: the last two when it is nested too deeply.
_UNREADABLE = (SyntaxError, ValueError, TypeError, RecursionError, MemoryError)


class SpecError(ValueError):
    """Something the user can get wrong; the message lists every problem, one a line."""


@dataclasses.dataclass(frozen=True)
class Must:
    """A condition on a value, written into its type: ``Annotated[int, Must("be odd", is_odd)]``."""

    text: str
    test: Callable[[Any], bool]


@dataclasses.dataclass(frozen=True, eq=False)
class Among:
    """Restricts a string to the names of a table."""

    table: Mapping[str, Any]


_COUNTABLE = Must("be below 2**31", lambda v: v < 2**31)  # devices count with 32 bits
Count = Annotated[int, Must("be at least 1", lambda v: v >= 1), _COUNTABLE]
Natural = Annotated[int, Must("be at least 0", lambda v: v >= 0), _COUNTABLE]
Positive = Annotated[float, Must("be above 0", lambda v: v > 0)]
NonNegative = Annotated[float, Must("be at least 0", lambda v: v >= 0)]
Rate = Annotated[float, Must("lie in [0, 1)", lambda v: 0 <= v < 1)]
Fraction = Annotated[float, Must("lie in (0, 1]", lambda v: 0 < v <= 1)]


@dataclasses.dataclass(frozen=True)
class Option:
    """One option of a table entry: its type as annotated, and its default."""

    type: Any
    default: Any


@functools.cache
def options(factory: Callable) -> Mapping[str, Option]:
    """The options a class or function declares: its parameters that have a default."""
    declares = factory
    if not inspect.isclass(factory):
        declares = inspect.unwrap(factory)
    elif not dataclasses.is_dataclass(factory):
        declares = factory.__init__
    hints = typing.get_type_hints(declares, include_extras=True)
    parameters = inspect.signature(factory).parameters
    hidden = _LINEN_FIELDS if set(parameters) >= _LINEN_FIELDS else ()
    return {
        name: Option(hints.get(name, Any), p.default)
        for name, p in parameters.items()
        if p.default is not p.empty and name not in hidden
    }


@dataclasses.dataclass(frozen=True)
class Choice:
    """One picked entry of a table with the options that differ from their defaults.

    Calling it calls the entry: context is positional, bound options are added.
    """

    name: str
    factory: Callable
    bound: tuple[tuple[str, Any], ...] = ()

    def __call__(self, *context, **more):
        return self.factory(*context, **dict(self.bound), **more)

    def __str__(self):
        return _call(self.name, dict(self.bound))

    @property
    def entries(self) -> tuple["Choice", ...]:
        return (self,)

    def at(self, layer: int) -> "Choice":
        return self

    @property
    def options(self) -> dict[str, Any]:
        """Every option with its value, defaults included."""
        return {k: o.default for k, o in options(self.factory).items()} | dict(self.bound)

    @property
    def text(self) -> str:
        """The choice with every option written out; `pick` reads it back."""
        return _call(self.name, self.options)

    def rules(self, context) -> Iterator[str]:
        """What the entry itself has against being used in `context`."""
        if rules := getattr(self.factory, "rules", None):
            yield from rules(context, **self.options)


@dataclasses.dataclass(frozen=True)
class Cycle:
    """Choices repeated over depth: layer i uses entry i modulo their number."""

    entries: tuple[Choice, ...]

    def at(self, layer: int) -> Choice:
        return self.entries[layer % len(self.entries)]

    def __str__(self):
        return self._join(str)

    @property
    def text(self) -> str:
        return self._join(lambda c: c.text)

    def rules(self, context) -> Iterator[str]:
        for entry in dict.fromkeys(self.entries):
            yield from entry.rules(context)

    def _join(self, show: Callable[[Choice], str]) -> str:
        runs: list[list] = []
        for entry in self.entries:
            if runs and runs[-1][1] == entry:
                runs[-1][0] += 1
            else:
                runs.append([1, entry])
        return " | ".join(f"{n}*{show(c)}" if n > 1 else show(c) for n, c in runs)


@dataclasses.dataclass(frozen=True)
class Spec:
    """Base of every section: checks its own rules and those of the entries it picked."""

    def __post_init__(self):
        problems = list(self.rules())
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if isinstance(value, (Choice, Cycle)):
                problems += [f"{f.name}={value}: {p}" for p in value.rules(self)]
        refuse(problems)

    def rules(self) -> Iterator[str]:
        """Yields one sentence for each broken rule across the fields."""
        yield from ()


def refuse(problems: list[str]) -> None:
    """Raises one SpecError that lists the problems, if there are any."""
    if problems:
        raise SpecError("\n".join(problems))


def choice(table: Mapping[str, Callable], default: str | None, per_layer: bool = False) -> Any:
    """Declares a field picked from `table`; `per_layer` permits cycles, a default of None permits
    None (the field's comment says what that means)."""
    return dataclasses.field(
        default_factory=lambda: None if default is None else pick(table, default, per_layer),
        metadata={"table": table, "per_layer": per_layer, "none": default is None},
    )


def context(default: Any) -> Any:
    """Declares a field that the program sets and no config may name."""
    return dataclasses.field(default=default, metadata={"context": True})


def pick(table: Mapping[str, Callable], text: Any, per_layer: bool = False, path: str = "choice"):
    """Reads ``name``, ``name(option=value)`` or, where allowed, a cycle ``2*a | b(x=1)``.

    Read with `ast`, never evaluated. Raises SpecError with every problem found.
    """
    if not isinstance(text, str):
        raise SpecError(f"{path}: expected a name such as {next(iter(table))!r}, got {text!r}")
    try:
        terms = _terms(ast.parse(text.strip(), mode="eval").body)
        terms = list(itertools.islice(terms, _LONGEST + 1))
    except _UNREADABLE:
        raise SpecError(
            f"{path}: cannot read {text!r}; write name, name(option=value)"
            + (" or a cycle such as 2*a | b" if per_layer else "")
        ) from None
    if len(terms) > _LONGEST:
        raise SpecError(f"{path}: {text!r} has more than {_LONGEST} entries")
    if len(terms) > 1 and not per_layer:
        raise SpecError(f"{path}: {text!r} is a cycle, and this choice cannot vary by layer")
    problems: list[str] = []
    read = [_entry(table, name, given, path, problems) for name, given in terms]
    refuse(list(dict.fromkeys(problems)))
    entries = tuple(entry for entry in read if entry)
    return entries[0] if len(set(entries)) == 1 else Cycle(entries)


def parse(cls: type, config: Mapping[str, Any], path: str = "config", base: Any = None):
    """Builds `cls` from a mapping, or raises one SpecError that lists every problem.

    Options that the mapping does not name have their defaults, or their values in `base`.
    """
    if not hasattr(config, "items"):
        raise SpecError(f"{path}: expected a section with options, got {config!r}")
    fields = {f.name: f for f in dataclasses.fields(cls) if "context" not in f.metadata}
    hints = typing.get_type_hints(cls, include_extras=True)
    values, problems = {}, []
    for key, value in config.items():
        try:
            if key not in fields:
                raise SpecError(f"{path}.{key}: {unknown(key, fields, 'option')}")
            values[key] = _value(fields[key], hints[key], value, f"{path}.{key}")
        except SpecError as e:
            problems.append(str(e))
    refuse(problems)
    try:
        return dataclasses.replace(base, **values) if base else cls(**values)
    except SpecError as e:
        raise SpecError("\n".join(f"{path}: {line}" for line in str(e).splitlines())) from None


def as_dict(spec: Spec) -> dict[str, Any]:
    """The spec as plain values, every choice written out in full; `parse` reads it back."""
    return _plain(spec, lambda picked: picked.text)


def defaults(cls: type) -> dict[str, Any]:
    """Every option of `cls` with its default, choices in their short form."""
    return _plain(cls(), str)


def flat(section: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """The options of a config by their dotted paths."""
    for name, value in section.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{path}{name}.")
        else:
            yield f"{path}{name}", value


def literal(text: Any) -> Any:
    """A command-line value as Python reads it (``1e3``, ``(1, 2)``, ``None``), else the text."""
    if not isinstance(text, str):
        return text
    try:
        return ast.literal_eval(text)
    except _UNREADABLE:
        return text


def _plain(spec: Spec, show: Callable[[Any], str]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for f in dataclasses.fields(spec):
        value = getattr(spec, f.name)
        if "context" in f.metadata:
            continue
        if isinstance(value, (Choice, Cycle)):
            value = show(value)
        out[f.name] = _plain(value, show) if isinstance(value, Spec) else value
    return out


def _default(field: dataclasses.Field) -> Any:
    made = field.default_factory
    return field.default if made is dataclasses.MISSING else made()


def _value(field: dataclasses.Field, hint: Any, value: Any, path: str) -> Any:
    if (table := field.metadata.get("table")) is not None:
        if field.metadata["none"] and _is_none(value):
            return None
        return pick(table, value, field.metadata["per_layer"], path)
    if isinstance(hint, type) and issubclass(hint, Spec):
        return parse(hint, value, path, base=_default(field))
    return fit(value, hint, path)


def _terms(node: ast.expr, times: int = 1) -> Iterator[tuple[str, dict[str, Any]]]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        yield from _terms(node.left)
        yield from _terms(node.right)
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        count = ast.literal_eval(node.left)
        if type(count) is not int or count < 1:
            raise ValueError
        for _ in range(count):
            yield from _terms(node.right)
    elif isinstance(node, ast.Name):
        yield node.id, {}
    elif isinstance(node, ast.Constant) and node.value is None:
        yield "none", {}
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.args:
        names = [k.arg for k in node.keywords]
        if None in names or len(set(names)) < len(names):  # **options, or one given twice
            raise ValueError
        yield node.func.id, {str(k.arg): ast.literal_eval(k.value) for k in node.keywords}
    else:
        raise ValueError


def _entry(table, name, given, path, problems: list[str]) -> Choice | None:
    if name not in table:
        problems.append(f"{path}: {unknown(name, table)}")
        return None
    known, bound = options(table[name]), {}
    for key, value in given.items():
        if key not in known:
            problems.append(f"{path}.{key}: {unknown(key, known, f'option of {name}:')}")
            continue
        try:
            bound[key] = fit(value, known[key].type, f"{path}.{key}")
        except SpecError as e:
            problems.append(str(e))
    changed = {k: v for k, v in sorted(bound.items()) if v != known[k].default}
    return Choice(name, table[name], tuple(changed.items()))


def fit(value: Any, want: Any, path: str) -> Any:
    """`value` as the type `want` where nothing is lost, else SpecError naming `path`."""
    origin, args = typing.get_origin(want), typing.get_args(want)
    if origin is Annotated:
        return _conform(fit(value, args[0], path), args[1:], path)
    if origin in (typing.Union, types.UnionType):
        return _fit_union(value, args, path)
    if origin is typing.Literal:
        if value not in args:
            raise SpecError(f"{path}: {unknown(value, [str(a) for a in args])}")
        return value
    if origin is tuple:
        return _fit_tuple(value, want, path)
    if want is Any:
        return _constant(value, path)
    if want is bool and isinstance(value, str) and value.lower() in _WORDS:
        return _WORDS[value.lower()]
    if want in (int, float):
        if (number := _number(value, want)) is not None:
            return number
    elif isinstance(want, type) and isinstance(value, want):
        return value
    raise SpecError(f"{path}: expected {_describe(want)}, got {value!r}")


def _constant(value: Any, path: str) -> Any:
    try:
        hash(value)  # a spec is hashable, so its options are
    except TypeError:
        raise SpecError(f"{path}: expected text, a number or a tuple, got {value!r}") from None
    return value


def _number(value: Any, want: type) -> int | float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        number = want(value)
    except (OverflowError, ValueError):  # not finite, or beyond what a float holds
        return None
    return number if number == value and abs(number) != math.inf else None


def _fit_union(value: Any, args: tuple, path: str) -> Any:
    if type(None) in args and _is_none(value):
        return None
    arms = [a for a in args if a is not type(None)]
    if len(arms) == 1:
        return fit(value, arms[0], path)
    for arm in arms:
        try:
            return fit(value, arm, path)
        except SpecError as e:
            if ": must " in str(e):  # of the right type, so this arm was meant
                raise
    raise SpecError(f"{path}: expected {' or '.join(map(_describe, arms))}, got {value!r}")


def _fit_tuple(value: Any, want: Any, path: str) -> tuple:
    args = typing.get_args(want)
    parts = [v.strip() for v in value.split(",")] if isinstance(value, str) else value
    if not isinstance(parts, (list, tuple)):
        raise SpecError(f"{path}: expected {_describe(want)}, got {value!r}")
    if args[-1] is Ellipsis:
        args = (args[0],) * len(parts)
    if len(parts) != len(args):
        raise SpecError(f"{path}: expected {len(args)} values, got {value!r}")
    each = enumerate(zip(parts, args, strict=True))
    return tuple(fit(value, arg, f"{path}[{i}]") for i, (value, arg) in each)


def _conform(value: Any, conditions: tuple, path: str) -> Any:
    for c in conditions if value is not None else ():
        if isinstance(c, Among) and value not in c.table:
            raise SpecError(f"{path}: {unknown(value, c.table)}")
        if isinstance(c, Must) and not c.test(value):
            raise SpecError(f"{path}: must {c.text}, got {value!r}")
    return value


def _describe(want: Any) -> str:
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    if typing.get_origin(want) is Annotated:
        return _describe(typing.get_args(want)[0])
    if typing.get_origin(want) is tuple:
        return "values such as (1, 2)"
    return names.get(want, getattr(want, "__name__", str(want)))


def _is_none(value: Any) -> bool:
    return value is None or (isinstance(value, str) and value.lower() == "none")


def unknown(name: Any, known: Iterable[str], noun: str = "name") -> str:
    """The sentence about a name that is not among the known ones, with the nearest of them."""
    known = sorted(known)
    near = difflib.get_close_matches(str(name), known, 1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"unknown {noun} {name!r}{hint} (known: {', '.join(known) or 'none'})"


def _call(name: str, bound: Mapping[str, Any]) -> str:
    args = ", ".join(f"{k}={v!r}" for k, v in bound.items())
    return f"{name}({args})" if args else name
