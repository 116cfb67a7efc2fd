"""The config core on a toy table: what is read, what is refused, and in which words."""

import dataclasses
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import pytest
from flax import linen as nn
from hypothesis import example, given
from hypothesis import strategies as st

from transformer import spec
from transformer.spec import (
    Among,
    Choice,
    Count,
    Cycle,
    Fraction,
    Must,
    Natural,
    NonNegative,
    Positive,
    Rate,
    Spec,
    SpecError,
)


def plain(context):
    """An entry without options."""
    return "plain", context


class Rope:
    """An entry that is a class, with options and with rules across them."""

    def __init__(self, context, theta: Positive = 1e4, interleaved: bool = False):
        self.got = context, theta, interleaved

    @staticmethod
    def rules(context, theta, interleaved) -> Iterator[str]:
        if interleaved and context.dim % 4:
            yield f"interleaved needs a dim that 4 divides, got {context.dim}"


def window(context, size: Annotated[int, Must("be even", lambda v: v % 2 == 0)] = 4):
    return "window", context, size


def mixed(
    context,
    text: str = "a",
    sizes: tuple[int, ...] = (1, 2),
    betas: tuple[float, float] = (0.9, 0.999),
    maybe: int | None = None,
    anything: Any = 0,
    kind: Literal["up", "down"] = "up",
    other: str | tuple[str, ...] = "x",
):
    return text, sizes, betas, maybe, anything, kind, other


TABLE = {"none": plain, "rope": Rope, "window": window, "mixed": mixed}


@dataclasses.dataclass(frozen=True)
class Part(Spec):
    dim: Count = 8
    dropout: Rate = 0.0
    position: Choice = spec.choice(TABLE, "rope")
    mask: Choice | Cycle = spec.choice(TABLE, "window", per_layer=True)
    norm: Annotated[str, Among({"layer": 1, "rms": 2})] = "rms"
    head: Choice | None = spec.choice(TABLE, None)
    layers: int = spec.context(0)

    def rules(self):
        if self.dropout and self.dim == 1:
            yield f"dropout={self.dropout} with dim=1 drops everything"


@dataclasses.dataclass(frozen=True)
class Whole(Spec):
    part: Part = dataclasses.field(default_factory=Part)
    steps: Natural = 10
    clip: Positive | None = None
    name: str = ""
    fast: bool = False
    sizes: tuple[int, ...] = ()


def refused(function, *args) -> list[str]:
    with pytest.raises(SpecError) as e:
        function(*args)
    return str(e.value).splitlines()


def picked(text: Any, per_layer: bool = False) -> Any:
    return spec.pick(TABLE, text, per_layer)


# --- fit: one value and its type


@pytest.mark.parametrize(
    ("value", "want", "expected"),
    [
        (3, int, 3),
        (1e3, int, 1000),
        (3, float, 3.0),
        (2**53, float, 9007199254740992.0),
        (True, bool, True),
        ("no", bool, False),
        ("Off", bool, False),
        ("TRUE", bool, True),
        ("no", str, "no"),
        ("None", str, "None"),
        ("None", str | None, None),
        ("none", int | None, None),
        (None, int | None, None),
        (3, int | None, 3),
        (None, Count | None, None),
        (None, Annotated[int | None, Must("be odd", lambda v: v % 2 == 1)], None),
        ([1, 2], tuple[int, ...], (1, 2)),
        ((1, 2.0), tuple[int, ...], (1, 2)),
        ((), tuple[int, ...], ()),
        ((1, 2), tuple[float, float], (1.0, 2.0)),
        ("a, b", tuple[str, ...], ("a", "b")),
        ("a,b", str | tuple[str, ...], "a,b"),
        (["a", "b"], str | tuple[str, ...], ("a", "b")),
        ("up", Literal["up", "down"], "up"),
        (0, Natural, 0),
        (0, NonNegative, 0.0),
        (1, Fraction, 1.0),
        (0, Rate, 0.0),
    ],
)
def test_fit_takes_a_value_that_loses_nothing(value, want, expected):
    got = spec.fit(value, want, "x")
    assert got == expected
    assert type(got) is type(expected)


@pytest.mark.parametrize(
    ("value", "want", "message"),
    [
        (1e-4, int, "x: expected a whole number, got 0.0001"),
        (1.5, int, "x: expected a whole number, got 1.5"),
        (True, int, "x: expected a whole number, got True"),
        (False, float, "x: expected a number, got False"),
        ("3", int, "x: expected a whole number, got '3'"),
        (None, int, "x: expected a whole number, got None"),
        (float("inf"), int, "x: expected a whole number, got inf"),
        (float("nan"), int, "x: expected a whole number, got nan"),
        (float("inf"), float, "x: expected a number, got inf"),
        (float("nan"), float, "x: expected a number, got nan"),
        (2**53 + 1, float, "x: expected a number, got 9007199254740993"),
        (1, bool, "x: expected true or false, got 1"),
        ("perhaps", bool, "x: expected true or false, got 'perhaps'"),
        (3, str, "x: expected text, got 3"),
        ([], str, "x: expected text, got []"),
        (3, tuple[int, ...], "x: expected values such as (1, 2), got 3"),
        ({}, tuple[int, ...], "x: expected values such as (1, 2), got {}"),
        ((1, "b"), tuple[int, ...], "x[1]: expected a whole number, got 'b'"),
        ((1,), tuple[float, float], "x: expected 2 values, got (1,)"),
        ((1, 2, 3), tuple[float, float], "x: expected 2 values, got (1, 2, 3)"),
        (
            "upp",
            Literal["up", "down"],
            "x: unknown name 'upp'; did you mean 'up'? (known",
        ),
        ([1], Any, "x: expected text, a number or a tuple, got [1]"),
        (([],), Any, "x: expected text, a number or a tuple, got ([],)"),
        (3, str | tuple[str, ...], "x: expected text or values such as (1, 2), got 3"),
        ("b", Count | float | None, "x: expected a whole number or a number, got 'b'"),
        (0, Count | None, "x: must be at least 1, got 0"),
        (0, Count, "x: must be at least 1, got 0"),
        (-1, Natural, "x: must be at least 0, got -1"),
        (0.0, Positive, "x: must be above 0, got 0.0"),
        (-1.0, NonNegative, "x: must be at least 0, got -1.0"),
        (1.0, Rate, "x: must lie in [0, 1), got 1.0"),
        (0, Fraction, "x: must lie in (0, 1], got 0.0"),
        (1.1, Fraction, "x: must lie in (0, 1], got 1.1"),
    ],
)
def test_fit_refuses_what_loses_something(value, want, message):
    (line,) = refused(spec.fit, value, want, "x")
    assert line.startswith(message)


def test_fit_refuses_a_number_beyond_floats():
    assert refused(spec.fit, 10**400, float, "x") == [f"x: expected a number, got {10**400}"]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e3", 1000.0),
        ("0x10", 16),
        ("(1, 2)", (1, 2)),
        ("None", None),
        ("rope(theta=3)", "rope(theta=3)"),
        ("2*rope", "2*rope"),
        ("", ""),
        ("no", "no"),
        ("{[]: 1}", "{[]: 1}"),
        ("(" * 10_000, "(" * 10_000),
        ("\0", "\0"),
        (3, 3),
    ],
)
def test_literal(text, value):
    assert spec.literal(text) == value


# --- pick: one choice


def test_a_choice_calls_its_entry_with_context_and_options():
    assert picked("none")("c") == ("plain", "c")
    assert picked("rope(theta=5e5)")("c").got == ("c", 5e5, False)
    assert picked("window")("c", size=8) == ("window", "c", 8)


@pytest.mark.parametrize(
    ("text", "short", "full"),
    [
        (" none ", "none", "none"),
        ("None", "none", "none"),
        ("rope", "rope", "rope(theta=10000.0, interleaved=False)"),
        ("rope()", "rope", "rope(theta=10000.0, interleaved=False)"),
        ("rope(theta=1e4)", "rope", "rope(theta=10000.0, interleaved=False)"),
        (
            "rope(interleaved='yes', theta=3)",
            "rope(interleaved=True, theta=3.0)",
            "rope(theta=3.0, interleaved=True)",
        ),
        (
            "mixed(sizes=[3], maybe='None', text='it\\'s', other=('a', 'b'))",
            "mixed(other=('a', 'b'), sizes=(3,), text=\"it's\")",
            'mixed(text="it\'s", sizes=(3,), betas=(0.9, 0.999), maybe=None, anything=0, '
            "kind='up', other=('a', 'b'))",
        ),
    ],
)
def test_a_choice_is_written_short_or_in_full_and_read_back(text, short, full):
    choice = picked(text)
    assert (str(choice), choice.text) == (short, full)
    assert picked(short) == picked(full) == choice
    assert hash(picked(full)) == hash(choice)


def test_a_cycle_repeats_over_depth():
    cycle = picked("2*window(size=8) | none | 2*(none | rope)", per_layer=True)
    assert [str(cycle.at(i)) for i in range(9)] == [
        "window(size=8)",
        "window(size=8)",
        "none",
        "none",
        "rope",
        "none",
        "rope",
        "window(size=8)",
        "window(size=8)",
    ]
    assert str(cycle) == "2*window(size=8) | 2*none | rope | none | rope"
    assert picked(str(cycle), per_layer=True) == picked(cycle.text, per_layer=True) == cycle
    assert hash(picked(cycle.text, per_layer=True)) == hash(cycle)


def test_equal_entries_are_no_cycle():
    assert picked("3*rope | rope", per_layer=True) == picked("rope")
    assert picked("rope").at(5) == picked("rope")


CANNOT = "choice: cannot read {!r}; write name, name(option=value)"


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "3",
        "rope theta",
        "rope(1)",
        "rope(**{'theta': 3})",
        "rope(theta=3, theta=4)",
        "rope(theta=theta)",
        "rope(theta=",
        "rope.theta",
        "rope['theta']",
        "rope, none",
        "'rope'",
        "rope + none",
        "__import__('os')",
        "rope(theta=__import__('os').getpid())",
        "(lambda: 1)()",
        "[x for x in ()]",
        "rope(theta={[]: 1})",
        "0*rope",
        "-1*rope",
        "2.0*rope",
        "True*rope",
        "rope*2",
        "(1000*1000)*rope",
        "\0",
        "\ud800",
        "(" * 10_000 + "rope" + ")" * 10_000,
        "|".join(["rope"] * 20_000),
        "rope; import os",
    ],
    ids=lambda text: text[:30].encode("ascii", "replace").decode(),
)
def test_what_is_no_choice_is_refused(text):
    assert refused(picked, text) == [CANNOT.format(text)]
    assert refused(picked, text, True) == [CANNOT.format(text) + " or a cycle such as 2*a | b"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("__import__", "choice: unknown name '__import__' (known: mixed, none, rope, window)"),
        (
            "ropee",
            "choice: unknown name 'ropee'; did you mean 'rope'? (known: mixed, none, rope, window)",
        ),
        (
            "rope(tehta=3)",
            "choice.tehta: unknown option of rope: 'tehta'; did you mean 'theta'? "
            "(known: interleaved, theta)",
        ),
        ("none(x=1)", "choice.x: unknown option of none: 'x' (known: none)"),
        ("rope(context=1)", "choice.context: unknown option of rope: 'context' (known: interleav"),
        ("rope(theta=0)", "choice.theta: must be above 0, got 0.0"),
        ("rope(theta=1e999)", "choice.theta: expected a number, got inf"),
        ("window(size=3)", "choice.size: must be even, got 3"),
        ("mixed(anything=[1])", "choice.anything: expected text, a number or a tuple, got [1]"),
        ("2*rope", "choice: '2*rope' is a cycle, and this choice cannot vary by layer"),
        ("rope | none", "choice: 'rope | none' is a cycle, and this choice cannot vary by layer"),
        (3, "choice: expected a name such as 'none', got 3"),
        (None, "choice: expected a name such as 'none', got None"),
    ],
)
def test_a_wrong_choice_is_refused_in_these_words(text, message):
    (line,) = refused(picked, text)
    assert line.startswith(message)


@pytest.mark.parametrize(
    "text", ["1000000000*rope", "1000*(1000*(1000*rope))", "1001*rope", "1000*rope | rope"]
)
def test_a_cycle_has_an_end(text):
    assert refused(picked, text, True) == [f"choice: {text!r} has more than 1000 entries"]


def test_all_problems_of_a_choice_are_listed_once():
    assert refused(picked, "2*rope(a=1, theta='x') | no", True) == [
        "choice.a: unknown option of rope: 'a' (known: interleaved, theta)",
        "choice.theta: expected a number, got 'x'",
        "choice: unknown name 'no'; did you mean 'none'? (known: mixed, none, rope, window)",
    ]


GRAMMAR = st.text(alphabet="rope nwidow()=,|*0123456789'\"[]{}.e-_\\#\n:", max_size=40)


@given(st.one_of(st.text(max_size=40), GRAMMAR), st.booleans())
@example("rope(theta='\\d')", False)
@example("1_0*rope", True)
def test_any_text_is_picked_or_refused(text, per_layer):
    try:
        choice = picked(text, per_layer)
    except SpecError:
        return
    assert {c.name for c in choice.entries} <= set(TABLE)
    assert picked(choice.text, per_layer) == choice


VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), GRAMMAR),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.dictionaries(st.sampled_from(["dim", "mask", "steps", "what"]), inner, max_size=3),
    ),
    max_leaves=5,
)
NAMES = st.sampled_from(["part", "steps", "clip", "name", "fast", "sizes", "stesp"])


@given(st.dictionaries(NAMES, VALUES, max_size=4))
def test_any_config_is_parsed_or_refused(config):
    try:
        whole = spec.parse(Whole, config)
    except SpecError as e:
        assert str(e).startswith("config")
        return
    assert spec.parse(Whole, spec.as_dict(whole)) == whole
    assert hash(whole) == hash(spec.parse(Whole, config))


@given(VALUES, st.sampled_from([int, float, bool, str, int | None, tuple[int, ...], Count, Any]))
def test_any_value_fits_or_is_refused(value, want):
    try:
        got = spec.fit(value, want, "x")
    except SpecError:
        return
    assert spec.fit(got, want, "x") == got


# --- parse: a whole config


def test_defaults_parse_to_the_default_spec():
    assert spec.parse(Whole, {}) == spec.parse(Whole, spec.defaults(Whole)) == Whole()
    assert spec.defaults(Whole) == {
        "part": {
            "dim": 8,
            "dropout": 0.0,
            "position": "rope",
            "mask": "window",
            "norm": "rms",
            "head": None,
        },
        "steps": 10,
        "clip": None,
        "name": "",
        "fast": False,
        "sizes": (),
    }


def test_a_section_starts_from_the_default_of_its_field():
    @dataclasses.dataclass(frozen=True)
    class Other(Spec):
        part: Part = dataclasses.field(default_factory=lambda: Part(dim=32))

    assert spec.defaults(Other)["part"]["dim"] == 32
    assert spec.parse(Other, {}) == spec.parse(Other, {"part": {}}) == Other()
    assert spec.parse(Other, {"part": {"dropout": 0.5}}).part == Part(dim=32, dropout=0.5)


def test_a_spec_is_written_as_plain_values_and_read_back():
    config = {
        "part": {"dim": 4, "mask": "none | 2*window(size=2)", "head": "rope", "norm": "layer"},
        "clip": 1,
        "sizes": [1, 2],
    }
    whole = spec.parse(Whole, config)
    plain = spec.as_dict(whole)
    assert plain == {
        "part": {
            "dim": 4,
            "dropout": 0.0,
            "position": "rope(theta=10000.0, interleaved=False)",
            "mask": "none | 2*window(size=2)",
            "norm": "layer",
            "head": "rope(theta=10000.0, interleaved=False)",
        },
        "steps": 10,
        "clip": 1.0,
        "name": "",
        "fast": False,
        "sizes": (1, 2),
    }
    assert spec.parse(Whole, plain) == whole
    assert hash(spec.parse(Whole, plain)) == hash(whole)


def test_specs_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Whole().steps = 3  # type: ignore[misc]


def test_every_problem_is_listed_with_its_path():
    config = {
        "part": {
            "dim": "six",
            "dropot": 0.1,
            "position": "ropee",
            "mask": "window(size=3) | no",
            "norm": "lajer",
            "head": "rope(theta=-1)",
            "layers": 3,
        },
        "steps": -1,
        "fast": 2,
        "Name": "x",
    }
    known = "(known: mixed, none, rope, window)"
    options = "(known: dim, dropout, head, mask, norm, position)"
    assert refused(spec.parse, Whole, config) == [
        "config.part.dim: expected a whole number, got 'six'",
        f"config.part.dropot: unknown option 'dropot'; did you mean 'dropout'? {options}",
        f"config.part.position: unknown name 'ropee'; did you mean 'rope'? {known}",
        "config.part.mask.size: must be even, got 3",
        f"config.part.mask: unknown name 'no'; did you mean 'none'? {known}",
        "config.part.norm: unknown name 'lajer'; did you mean 'layer'? (known: layer, rms)",
        "config.part.head.theta: must be above 0, got -1.0",
        f"config.part.layers: unknown option 'layers' {options}",
        "config.steps: must be at least 0, got -1",
        "config.fast: expected true or false, got 2",
        "config.Name: unknown option 'Name'; did you mean 'name'? "
        "(known: clip, fast, name, part, sizes, steps)",
    ]


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (
            {"dim": 1, "dropout": 0.5},
            "config.part: dropout=0.5 with dim=1 drops everything",
        ),
        (
            {"dim": 6, "position": "rope(interleaved=True)"},
            "config.part: position=rope(interleaved=True): interleaved needs a dim that 4 divides, "
            "got 6",
        ),
        (
            {"dim": 6, "mask": "none | rope(interleaved=True)"},
            "config.part: mask=none | rope(interleaved=True): interleaved needs a dim that 4 "
            "divides, got 6",
        ),
    ],
)
def test_rules_are_reported_with_their_section(part, message):
    assert refused(spec.parse, Whole, {"part": part}) == [message]


def test_rules_hold_without_a_config_too():
    assert refused(lambda: Part(dim=1, dropout=0.5)) == ["dropout=0.5 with dim=1 drops everything"]


@pytest.mark.parametrize("section", [3, None, "small", (1, 2), []])
def test_a_section_is_no_value(section):
    message = f"expected a section with options, got {section!r}"
    assert refused(spec.parse, Whole, {"part": section}) == [f"config.part: {message}"]
    assert refused(spec.parse, Whole, section) == [f"config: {message}"]


@pytest.mark.parametrize("none", [None, "None", "none"])
def test_none_where_a_choice_permits_it(none):
    assert spec.parse(Part, {"head": none}).head is None


def test_the_context_of_a_spec_is_not_written():
    assert "layers" not in spec.as_dict(dataclasses.replace(Part(), layers=3))


def test_the_options_of_an_entry_are_its_parameters_with_a_default():
    assert list(spec.options(Rope)) == ["theta", "interleaved"]
    assert list(spec.options(plain)) == []
    assert spec.options(Rope)["theta"] == spec.Option(Positive, 1e4)


def test_what_every_linen_module_declares_is_no_option():
    class Norm(nn.Module):
        dim: int
        eps: Positive = 1e-6

    assert list(spec.options(Norm)) == ["eps"]
