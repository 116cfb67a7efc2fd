"""Tiny models and texts that many tests share."""

import contextlib
import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer.layers.base import Tokens
from transformer.model import FAMILIES, ModelSpec
from transformer.objective import OBJECTIVES, Lexicon
from transformer.spec import SpecError, parse
from transformer.spec import pick as _pick
from transformer.state import abstract_params

VOCAB = 23
TINY = {
    "vocab": VOCAB,
    "dim": 16,
    "depth": 2,
    "heads": 4,
    "kv_heads": 2,
    "ffn_dim": 24,
    "max_len": 48,
    "bias": True,
}
DECODING = [name for name in FAMILIES if name != "encoder"]  # families with a decoder
LEARNERS = [(name, family) for name, table in OBJECTIVES.items() for family in table.families]
CLASSES = 3


def spec(**options: Any) -> ModelSpec:
    """A tiny model; SpecError if the options do not go together."""
    return parse(ModelSpec, TINY | options)


def pick(table: Mapping[str, Any], text: str) -> Any:
    """An entry of a table, without a static type: what it is called with is the entry's own."""
    return _pick(table, text)


def accepted(cases: list[dict[str, Any]], **base: Any) -> list:
    """pytest parameters: the tiny model of each case, those that are refused left out, and
    those that say the same in other words."""
    out: dict[ModelSpec, Any] = {}
    for options in cases:
        with contextlib.suppress(SpecError):
            model = spec(**base | options)
            out.setdefault(model, pytest.param(model, id="-".join(map(str, options.values()))))
    return list(out.values())


def covering(tables: Mapping[str, Iterable[str]]) -> list[dict[str, str]]:
    """The fewest choices among which every entry of every table is found."""
    names = {field: list(table) for field, table in tables.items()}
    longest = max(map(len, names.values()))
    return [{field: n[i % len(n)] for field, n in names.items()} for i in range(longest)]


@functools.cache
def params(model: ModelSpec, seed: int = 0) -> Any:
    """Random parameters, scales about one. NumPy draws them, since it compiles nothing."""
    rng = np.random.default_rng(seed)

    def draw(path, leaf):
        middle = 1.0 if path[-1].key == "scale" else 0.0
        return jnp.asarray(rng.normal(middle, 0.1, leaf.shape), jnp.float32)

    return jax.tree.map_with_path(draw, abstract_params(model))


def text(rows: int = 2, length: int = 8, seed: int = 0) -> Tokens:
    """Random ids, one segment a row."""
    ids = np.random.default_rng(seed).integers(0, VOCAB, (rows, length))
    return Tokens.of(jnp.asarray(ids, jnp.int32))


def lexicon(bytes_V: Any = None, inside_2V: Any = None) -> Lexicon:
    """What objectives know of the tiny vocabulary: unless given, each token is a word of its own,
    of one byte. The first four ids are special."""
    bytes_V = jnp.ones(VOCAB, jnp.int32) if bytes_V is None else jnp.asarray(bytes_V, jnp.int32)
    inside_2V = jnp.zeros((2, bytes_V.size)) if inside_2V is None else jnp.asarray(inside_2V)
    return Lexicon(bytes_V, inside_2V.astype(bool), bos=1, eos=2, mask=3, specials=4)


LEXICON = lexicon()


def batch(
    rows: Sequence[Sequence[int]], segments: Sequence[Sequence[int]] | None = None, side: str = ""
) -> dict[str, Any]:
    """Rows of ids as they stand in a batch: padded on the right, one segment each unless given."""
    width = max(map(len, rows))
    segments = segments or [[1] * len(row) for row in rows]
    ids, segments = ([[*r, *[0] * (width - len(r))] for r in a] for a in (rows, segments))
    place = [[row[:i].count(s) if s else 0 for i, s in enumerate(row)] for row in segments]
    named = {"tokens": ids, "segments": segments, "positions": place}
    out = {f"{side}{name}": jnp.asarray(a, jnp.int32) for name, a in named.items()}
    return out if side else out | {"rows": jnp.arange(len(rows), dtype=jnp.int32)}


def everything(lengths: Sequence[int] = (9, 9, 9, 9), seed: int = 0) -> dict[str, Any]:
    """A batch that every objective can read: texts of these lengths, padded to the longest, with
    sources of up to five tokens and labels."""
    rng = np.random.default_rng(seed)
    texts, sources = (
        [rng.integers(4, VOCAB, min(n, most)).tolist() for n in lengths] for most in (2**20, 5)
    )
    labels = jnp.asarray(rng.integers(0, CLASSES, len(lengths)), jnp.int32)
    return batch(texts) | batch(sources, side="source_") | {"labels": labels}


def learner(objective: str, family: str | None = None, seq_len: int = 8, **options: Any):
    """A tiny model with all that the objective asks for, of the first of its families unless
    given; `seq_len` is what the texts of `everything` have, less one."""
    chosen = pick(OBJECTIVES, objective)
    more: dict[str, Any] = {"vocab": options.pop("vocab", VOCAB) + chosen().sentinels(seq_len)}
    if chosen.factory.needs == "label":
        more["classes"] = CLASSES
    return spec(family=family or chosen.factory.families[0], **more | options)


def source_for(model: ModelSpec, rows: int = 2, length: int = 5) -> Tokens | None:
    return text(rows, length, seed=7) if all(model.depths) else None


@functools.partial(jax.jit, static_argnums=(0, 4))
def logits(model: ModelSpec, params, text: Tokens, source=None, capacity=None, key=None):
    """Logits [B, T, V]; with a key, dropout is on."""
    rngs = None if key is None else {"dropout": key}
    return model.build().apply({"params": params}, text, source, capacity, rngs=rngs)


def columns(text: Tokens, start: int, stop: int) -> Tokens:
    return jax.tree.map(lambda a: a[:, start:stop], text)


def replaced(text: Tokens, column: int) -> Tokens:
    """The text with other ids from a column on."""
    ids = text.ids_BT.at[:, column:].add(1) % VOCAB
    return dataclasses.replace(text, ids_BT=ids)


def assert_trees_close(a: Any, b: Any, tolerance: float) -> None:
    """Same structure, and every leaf equal up to `tolerance` of its largest value."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for (path, x), y in zip(jax.tree.leaves_with_path(a), jax.tree.leaves(b), strict=True):
        scale = max(float(jnp.abs(x).max()), 1e-3)
        np.testing.assert_allclose(x, y, atol=tolerance * scale, rtol=0, err_msg=str(path))
