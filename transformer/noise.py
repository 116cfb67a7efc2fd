"""Which tokens of a text are hidden: the draws behind masked language modelling and span
corruption, for one row [T] at a time; `jax.vmap` makes them rows of a batch.

Every draw is a function of the row's own key, so that a row is hidden in the same way whatever
batch it stands in.
"""

from typing import Any

import jax
import jax.numpy as jnp

from transformer.layers.base import Array


def tokens(key: Array, eligible_T: Array, rate: float) -> Array:
    """Each eligible token with probability `rate`, on its own (Devlin et al. 2019)."""
    return eligible_T & (jax.random.uniform(key, eligible_T.shape) < rate)


def words(key: Array, eligible_T: Array, begins_T: Array, rate: float) -> Array:
    """Each word with probability `rate`, with all its tokens; `begins_T` is true at the first token
    of a word."""
    word_T = jnp.cumsum(begins_T) % begins_T.size
    return eligible_T & (jax.random.uniform(key, eligible_T.shape)[word_T] < rate)


def spans(key: Array, eligible_T: Array, rate: float, mean_span: float) -> Array:
    """0 where a token stays, i at the tokens of the i-th hidden span (Raffel et al. 2020, §3.1.4).

    A share `rate` of the n real tokens is hidden in round(share / mean_span) spans, at least one;
    hidden and kept tokens are divided among the spans at random, each composition as likely as any
    other, and the text begins with a kept token. A span ends before a token that is not eligible.
    Nothing is hidden in a text of fewer than two tokens. Eligible tokens stand without a gap but
    for special ones.
    """
    T = eligible_T.size
    place_T = jnp.cumsum(eligible_T) - 1  # among the eligible
    n = eligible_T.sum()
    hidden, count = span_sizes(n, rate, mean_span)
    kept_key, hidden_key = jax.random.split(key)
    kept_lengths = _composition(kept_key, n - hidden, count, T)
    hidden_lengths = _composition(hidden_key, hidden, count, T)
    # Span i begins after its kept tokens and all before them.
    begin_S = jnp.cumsum(kept_lengths) + jnp.cumsum(hidden_lengths) - hidden_lengths
    end_S = begin_S + hidden_lengths
    span_T = jnp.searchsorted(begin_S, place_T, side="right")  # the last that has begun, from 1 on
    inside_T = (span_T > 0) & (place_T < end_S[jnp.maximum(span_T - 1, 0)])
    span_T = jnp.where(inside_T & eligible_T & (n >= 2), span_T, 0)
    # Of a span that is cut in two by a special token, the first part remains.
    gaps_T = jnp.cumsum(~eligible_T)
    first_T = jnp.full(T + 1, T).at[span_T].min(jnp.arange(T))[span_T]
    return jnp.where(gaps_T == gaps_T[first_T], span_T, 0)


def span_sizes(n: Any, rate: float, mean_span: float, xp: Any = jnp) -> tuple[Any, Any]:
    """Of n tokens, int32: how many are hidden, and in how many spans. With `xp=numpy` the same
    numbers, outside of a traced program."""
    hidden = xp.round(n.astype(xp.float32) * xp.float32(rate)).astype(xp.int32)
    hidden = xp.clip(hidden, 1, xp.maximum(n - 1, 1))
    count = xp.round(hidden.astype(xp.float32) / xp.float32(mean_span)).astype(xp.int32)
    return hidden, xp.clip(count, 1, xp.maximum(xp.minimum(hidden, n - hidden), 1))


def compacted(values_T: Array, keep_T: Array, width: int) -> tuple[Array, Array]:
    """The kept values moved to the front of a row of `width`, and which places they fill."""
    target_T = jnp.where(keep_T, jnp.cumsum(keep_T) - 1, width)
    out = jnp.zeros(width, values_T.dtype).at[target_T].set(values_T, mode="drop")
    return out, jnp.arange(width) < keep_T.sum()


def _composition(key: Array, total: Array, parts: Array, size: int) -> Array:
    """`total` items in `parts` groups of at least one, every way as likely: int [size], zeros
    after the groups."""
    gap = jnp.arange(size)
    # Of the total - 1 gaps between items, parts - 1 with the smallest draws end a group.
    draw = jnp.where(gap < total - 1, jax.random.uniform(key, (size,)), 2.0)
    ends = (jnp.argsort(jnp.argsort(draw)) < parts - 1) & (gap < total - 1)
    group = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(ends)[:-1].astype(jnp.int32)])
    return jnp.zeros(size, jnp.int32).at[group].add((gap < total).astype(jnp.int32))
