"""No option is dead: a change of any changes the program of a training step or the parameters."""

import dataclasses
import functools
import types
import typing
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import common
import jax
import jax.numpy as jnp
import pytest

from transformer.layers.base import Tokens
from transformer.model import ModelSpec
from transformer.objective import OBJECTIVES, CausalLM
from transformer.spec import Among, Choice, SpecError, options
from transformer.state import abstract_params, init_params

BASE = {"dropout": 0.1, "depth": 2, "max_len": 16}
# An option need not be visible in every model, but in one of these.
CONTEXTS = [
    {},
    {"position": "learned"},
    {"family": "encoder"},
    {"family": "encoder_decoder"},
    {"family": "encoder_decoder", "position": "t5"},
    {"family": "encoder", "classes": 3},
]


def others(type_: Any, value: Any) -> Iterator[Any]:
    """Values of this type that differ from the one given, the likely ones first."""
    origin, args = typing.get_origin(type_), typing.get_args(type_)
    if origin is Annotated:
        among = next((a.table for a in args if isinstance(a, Among)), None)
        yield from others(args[0], value) if among is None else (k for k in among if k != value)
    elif origin in (typing.Union, types.UnionType):
        for arm in args:
            if arm is not type(None):
                yield from others(arm, value)
    elif origin is Literal:
        yield from (a for a in args if a != value)
    elif type_ is bool:
        yield not value
    elif type_ in (int, float):
        start = value or 1
        yield from (type_(n) for n in (start + 1, start + 2, start * 2, start * 0.5) if n != value)
    else:
        raise TypeError(f"no other value is known for {type_}")


@functools.cache
def program(model: ModelSpec) -> str:
    """The lowered text of initialisation and of a forward and backward pass with dropout."""
    ids: Any = jax.ShapeDtypeStruct((2, 5), jnp.int32)
    text = Tokens(ids, ids, ids)
    source = text if all(model.depths) else None

    def loss(params, key, text, source):
        logits: Any = model.build().apply({"params": params}, text, source, rngs={"dropout": key})
        return jnp.square(logits).mean()

    key = jax.eval_shape(lambda: jax.random.key(0))
    step = jax.jit(jax.grad(loss)).lower(abstract_params(model), key, text, source)
    return step.as_text() + str(jax.make_jaxpr(lambda: init_params(model, 0))())


def is_live(changed: Iterator[dict[str, Any]], base: dict[str, Any]) -> bool:
    """Whether one of these settings makes another program than the base, in one context."""
    settings = list(changed)
    for context in CONTEXTS:
        for setting in settings:
            try:
                a, b = (common.spec(**BASE | context | c) for c in (base, base | setting))
            except SpecError:
                continue
            if program(a) != program(b):
                return True
    return False


def of_fields() -> Iterator[tuple[str, Any]]:
    """Every option of a model with its type, or its table."""
    hints = typing.get_type_hints(ModelSpec, include_extras=True)
    for name, field in ModelSpec.__dataclass_fields__.items():
        if "context" not in field.metadata:
            yield name, field.metadata.get("table", hints[name])


FIELDS = dict(of_fields())
TABLES = {name: table for name, table in FIELDS.items() if isinstance(table, dict)}
OPTIONS = [
    (field, entry, option)
    for field, table in TABLES.items()
    for entry in table
    for option in options(table[entry])
    if field != "encoder_mask"  # the table of masks is under `mask` already
]


@pytest.mark.slow
@pytest.mark.parametrize("name", FIELDS)
def test_every_option_of_a_model(name):
    kind = FIELDS[name]
    if isinstance(kind, dict):
        entries = [entry for entry in kind if entry != "full"] + ["full"] * ("full" in kind)
        if len(entries) == 1:
            pytest.skip("a table with one entry")
        changed = ({name: entry} for entry in entries)
    else:
        value = getattr(common.spec(**BASE), name)
        changed = ({name: other} for other in others(kind, value))
    assert is_live(changed, {}), f"model.{name} changes nothing"


@pytest.mark.slow
@pytest.mark.parametrize(("field", "entry", "option"), OPTIONS, ids=map(".".join, OPTIONS))
def test_every_option_of_an_entry(field, entry, option):
    declared = options(TABLES[field][entry])[option]
    changed = (
        {field: f"{entry}({option}={value!r})"} for value in others(declared.type, declared.default)
    )
    assert is_live(changed, {field: entry}), f"{field}={entry}({option}=...) changes nothing"


def objective_program(objective: Choice, family: str) -> str:
    """The text of examples and sums, and the model that is trained."""
    batch = common.everything((9, 9))

    def run(batch, key, row_V):
        shown = objective().example(batch, model, key, common.LEXICON)
        logits = jnp.broadcast_to(row_V, (*shown.targets_BT.shape, row_V.size))
        return shown, objective().sums(logits, shown, common.LEXICON)

    model = common.learner(str(objective), family)
    return f"{model} {jax.make_jaxpr(run)(batch, jax.random.key(0), jnp.ones(model.V))}"


def objective_is_live(name: str, option: str) -> bool:
    table = OBJECTIVES[name]
    declared = options(table)[option]
    for value in others(declared.type, declared.default):
        try:
            changed = common.pick(OBJECTIVES, f"{name}({option}={value!r})")
        except SpecError:
            continue
        for family in table.families:
            before, after = (
                objective_program(choice, family)
                for choice in (common.pick(OBJECTIVES, name), changed)
            )
            if before != after:
                return True
    return False


@pytest.mark.parametrize(
    ("name", "option"),
    [(name, option) for name, table in OBJECTIVES.items() for option in options(table)],
)
def test_every_option_of_an_objective(name, option):
    assert objective_is_live(name, option), f"objective={name}({option}=...) changes nothing"


def test_a_dead_option_of_an_objective_is_found(monkeypatch):
    @dataclasses.dataclass(frozen=True)
    class Dead(CausalLM):
        unread: float = 0.5

    monkeypatch.setitem(OBJECTIVES, "dead", Dead)
    assert not objective_is_live("dead", "unread")
    assert objective_is_live("dead", "z_loss")


def test_a_dead_option_is_found():
    assert not is_live(iter([{"encoder_depth": None}, {"bias": True}]), {})
