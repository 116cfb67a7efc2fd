"""Decoding with a cache, in one jitted loop: greedy, or sampled with temperature, top-k and top-p.

Prompts of different lengths stand right-aligned in one batch, so that all rows write the same cache
slot; their positions differ. A row never depends on its batch mates.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from transformer.layers.base import Array, Tokens
from transformer.layers.mask import horizon
from transformer.model import ModelSpec
from transformer.spec import Fraction, Natural, NonNegative, Spec, SpecError
from transformer.state import stream

BUCKET = 32  # few lengths are compiled: powers of two up to it, and its multiples


@dataclasses.dataclass(frozen=True)
class Sampling(Spec):
    """How the next token is drawn. A temperature of 0 takes the most probable token."""

    temperature: NonNegative = 1.0
    top_k: Natural = 0  # keep the k most probable tokens; 0: all
    top_p: Fraction = 1.0  # keep the smallest set with at least this probability


def generate(
    spec: ModelSpec,
    params: Any,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    sampling: Sampling,
    *,
    allowed_V: np.ndarray | None = None,
    end: int,
    pad: int,
    seed: int = 0,
    source: Tokens | None = None,
    shown: Sequence[int] | None = None,
    rows: Sequence[int] | None = None,
) -> list[list[int]]:
    """Continues each prompt (ids, at least one) by up to `max_new_tokens` ids.

    A row stops after `end`, which is kept. `allowed_V` marks the ids that may be drawn; `shown`
    says how many tokens of each prompt all of it may look at; `rows` which draws a row takes from
    the seed's stream, by default those of its number. Raises SpecError where a prompt and its
    continuation exceed model.max_len.
    """
    refuse_lengths(spec, [len(p) for p in prompts], max_new_tokens)
    if not max_new_tokens or not prompts:
        return [[] for _ in prompts]
    out, lengths = _decode(
        spec,
        params,
        aligned(prompts, pad, shown),
        source,
        drawable(spec, allowed_V),
        jnp.float32(sampling.temperature),
        jnp.int32(sampling.top_k),
        jnp.float32(sampling.top_p),
        stream(seed, "sampling"),
        jnp.asarray(range(len(prompts)) if rows is None else rows, jnp.int32),
        limit=max_new_tokens,
        end=end,
        pad=pad,
        greedy=sampling.temperature == 0 or sampling.top_k == 1,
        cut=(0 < sampling.top_k < spec.V, sampling.top_p < 1),
    )
    return [row[:n].tolist() for row, n in zip(np.asarray(out), np.asarray(lengths), strict=True)]


def bucket(length: int) -> int:
    """The length that texts of `length` are padded to."""
    return 1 << (length - 1).bit_length() if length <= BUCKET else -(-length // BUCKET) * BUCKET


def aligned(
    prompts: Sequence[Sequence[int]], pad: int, shown: Sequence[int] | None = None
) -> Tokens:
    """The prompts right-aligned in one batch, the first `shown` tokens of each shown to all."""
    width = bucket(max(map(len, prompts)))
    ids = np.full((len(prompts), width), pad, np.int32)
    real = np.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = prompt
        real[row, width - len(prompt) :] = 1
    text = Tokens.of(jnp.asarray(ids), jnp.asarray(real))
    if shown is None or not any(shown):
        return text
    first_BT = text.positions_BT < jnp.asarray(shown, jnp.int32)[:, None]
    return dataclasses.replace(text, shown_BT=first_BT & (text.segments_BT > 0))


def drawable(spec: ModelSpec, allowed_V: np.ndarray | None) -> Array:
    """Which ids of the model's vocabulary may be drawn; those beyond `allowed_V` may not."""
    if allowed_V is None:
        return jnp.ones(spec.V, bool)
    allowed = np.zeros(spec.V, bool)
    allowed[: len(allowed_V)] = allowed_V
    return jnp.asarray(allowed)


def refuse_lengths(spec: ModelSpec, prompts: Sequence[int], new: int) -> None:
    """SpecError where a prompt is empty, too short for the mask, or too long with what follows."""
    least = max(horizon(mask) for mask in spec.masks.entries)
    for row, length in enumerate(prompts):
        if length < least:
            raise SpecError(
                f"prompt {row} has {length} tokens; mask={spec.masks} needs at least {least}"
            )
        if spec.max_len is not None and length + new > spec.max_len:
            raise SpecError(
                f"prompt {row} has {length} tokens and {new} new ones are asked for: "
                f"{length + new} exceed model.max_len={spec.max_len}"
            )


@functools.partial(
    jax.jit, static_argnums=0, static_argnames=("limit", "end", "pad", "greedy", "cut")
)
def _decode(
    spec, params, text, source, allowed_V, temperature, top_k, top_p, key, rows_B,
    *, limit, end, pad, greedy, cut,
):  # fmt: skip
    model, (B, width) = spec.build(), text.ids_BT.shape
    capacity = width + limit
    rows = jax.vmap(lambda row: jax.random.fold_in(key, row))(rows_B)

    def forward(variables, text, source=None):
        logits_BTV, new = model.apply(variables, text, source, capacity, mutable=["cache"])
        return jnp.where(allowed_V[None], logits_BTV[:, -1], -jnp.inf), new["cache"]

    def draw(logits_BV, step):
        if greedy:
            return logits_BV.argmax(-1).astype(jnp.int32)
        kept_BV = _cut(logits_BV / jnp.maximum(temperature, 1e-6), top_k, top_p, *cut)
        keys = jax.vmap(jax.random.fold_in, (0, None))(rows, step)
        return jax.vmap(jax.random.categorical)(keys, kept_BV).astype(jnp.int32)

    def more(carry):
        step, done_B = carry[0], carry[3]
        return (step < limit) & ~done_B.all()

    def extend(carry):
        step, cache, logits_BV, done_B, position_B, out_BN = carry
        token_B = jnp.where(done_B, pad, draw(logits_BV, step))
        out_BN = jax.lax.dynamic_update_slice_in_dim(out_BN, token_B[:, None], step, axis=1)
        done_B = done_B | (token_B == end)
        next = Tokens(token_B[:, None], jnp.ones((B, 1), jnp.int32), position_B[:, None])
        logits_BV, cache = forward({"params": params, "cache": cache}, next)
        return step + 1, cache, logits_BV, done_B, position_B + 1, out_BN

    logits_BV, cache = forward({"params": params}, text, source)
    out_BN = jnp.full((B, limit), pad, jnp.int32)
    start = (jnp.int32(0), cache, logits_BV, jnp.zeros(B, bool), text.positions_BT[:, -1] + 1)
    _, _, _, _, position_B, out_BN = jax.lax.while_loop(more, extend, (*start, out_BN))
    ended_BN = out_BN == end
    lengths_B = jnp.where(ended_BN.any(1), ended_BN.argmax(1) + 1, limit)
    return out_BN, lengths_B


def _cut(logits_BV: Array, top_k: Array, top_p: Array, by_k: bool, by_p: bool) -> Array:
    """-inf outside of the top k and of the smallest set with probability top_p (Holtzman et al.
    2020); the most probable token always stays."""
    if not (by_k or by_p):
        return logits_BV
    sorted_BV = jnp.sort(logits_BV, axis=-1, descending=True)
    least_B = jnp.full(logits_BV.shape[:1], -jnp.inf)
    if by_k:
        least_B = jax.lax.dynamic_index_in_dim(sorted_BV, top_k - 1, axis=1, keepdims=False)
    if by_p:
        kept_BV = jnp.where(sorted_BV >= least_B[:, None], sorted_BV, -jnp.inf)
        p_BV = jax.nn.softmax(kept_BV, -1)
        before_BV = jnp.cumsum(p_BV, -1) - p_BV
        top_p = jnp.maximum(top_p, jnp.finfo(jnp.float32).tiny)  # less would be 0, and keep nothing
        least_B = jnp.where(before_BV < top_p, kept_BV, jnp.inf).min(-1)
    return jnp.where(logits_BV >= least_B[:, None], logits_BV, -jnp.inf)
