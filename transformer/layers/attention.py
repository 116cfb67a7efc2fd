"""Multi-head attention with grouped keys and a cache. MIXERS is what can stand in attention's slot
of a block; KERNELS are ways to compute the same attention from projected heads.

Everything that depends on place (who may look at whom, rotation, bias, cache slot) arrives in one
`Where`, made once per forward pass by the stack.
"""

import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct

from transformer.layers.base import Array, Dense, Tokens, constrain, dropout
from transformer.layers.position import Rotation


@struct.dataclass
class Where:
    """All that attention knows of place.

    visible_BTS: whether query t may look at key s. rotation: turns queries and keys, or None.
    bias_BHTS: added to the scores, or None. slot: cache slot of the first query, or None without
    a cache; capacity: the number of slots.
    """

    visible_BTS: Array
    rotation: Rotation | None = None
    bias_BHTS: Array | None = None
    slot: Array | None = None
    capacity: int | None = struct.field(pytree_node=False, default=None)


def visible(mask: Callable[..., Array], query: Tokens, key: Tokens) -> Array:
    """[B, T, S]: the mask allows it OR the key is shown to all, AND the key is no padding, AND both
    are of the same segment."""
    same = query.segments_BT[:, :, None] == key.segments_BT[:, None, :]
    real = key.segments_BT[:, None, :] > 0
    may = mask(query.positions_BT[:, :, None], key.positions_BT[:, None, :])
    if key.shown_BT is not None:
        may |= key.shown_BT[:, None, :]
    return may & same & real


def einsum(
    q_BHTK: Array,
    k_BGSK: Array,
    v_BGSW: Array,
    where: Where,
    scale: float,
    drop: Callable[[Array], Array],
) -> Array:
    """softmax(scale * q k + bias) v with scores and softmax in float32 -> [B, H, T, W].

    Query head h uses key head h // (H / G). A query that may look nowhere gives exactly zero.
    """
    B, H, T, K = q_BHTK.shape
    G, S, W = v_BGSW.shape[1:]
    q_BGNK = q_BHTK.reshape(B, G, H // G * T, K)  # the queries of a group share its keys
    scores = jnp.einsum("bgnk,bgsk->bgns", q_BGNK, k_BGSK, preferred_element_type=jnp.float32)
    scores_BHTS = scores.reshape(B, H, T, S) * scale
    if where.bias_BHTS is not None:
        scores_BHTS = scores_BHTS + where.bias_BHTS
    visible_B1TS = where.visible_BTS[:, None]
    weights_BHTS = jax.nn.softmax(jnp.where(visible_B1TS, scores_BHTS, -1e30), -1)
    weights_BHTS = jnp.where(visible_B1TS, weights_BHTS, 0.0)
    weights = drop(weights_BHTS).astype(v_BGSW.dtype).reshape(B, G, H // G * T, S)
    return jnp.einsum("bgns,bgsw->bgnw", weights, v_BGSW).reshape(B, H, T, W)


KERNELS = {"einsum": einsum}


class Attention(nn.Module):
    """Multi-head attention (Vaswani et al. 2017, §3.2) with H query heads on G key/value heads
    (Shazeer 2019; Ainslie et al. 2023): x [B, T, D], memory [B, S, D] -> [B, T, D].

    Self-attention where `memory` is x. With a cache, keys and values of self-attention are
    written at `where.slot`; those of cross-attention are written when a memory is given and read
    when it is None.
    """

    spec: Any  # the ModelSpec of the layer
    cross: bool

    @nn.compact
    def __call__(self, x_BTD: Array, memory_BSD: Array | None, where: Where) -> Array:
        s = self.spec
        q_BHTK = self._heads("query", s.H, s.K, x_BTD)
        keys = None
        if memory_BSD is not None:
            keys = (
                self._heads("key", s.G, s.K, memory_BSD),
                self._heads("value", s.G, s.W, memory_BSD),
            )
        if where.rotation is not None:
            assert keys is not None
            q_BHTK, keys = where.rotation(q_BHTK), (where.rotation(keys[0]), keys[1])
        if where.capacity is not None:
            keys = self._cached(keys, where)
        assert keys is not None, "without a cache, attention needs something to look at"
        scale = s.score_scale or 1 / math.sqrt(s.K)
        rate = s.dropout if s.attention_dropout is None else s.attention_dropout
        out_BHTW = s.kernel(q_BHTK, *keys, where, scale, lambda p: dropout(self, p, rate))
        out = out_BHTW.swapaxes(1, 2).reshape(*x_BTD.shape[:2], s.H * s.W)
        return Dense(s, s.D, ("heads", "embed"), "out", name="out")(out)

    def _heads(self, role: str, heads: int, width: int, x_BTD: Array) -> Array:
        axis = "heads" if role == "query" else "kv_heads"
        y = Dense(self.spec, heads * width, ("embed", axis), role, name=role)(x_BTD)
        y = y.reshape(*x_BTD.shape[:2], heads, width).swapaxes(1, 2)
        return constrain(y, "batch", axis, "length", "head")

    def _cached(self, new: tuple[Array, Array] | None, where: Where) -> tuple[Array, Array]:
        """Self-attention writes at the slot; cross-attention keeps what it was given last."""
        names = ("cached_key", "cached_value")
        if new is None:
            return tuple(self.get_variable("cache", name) for name in names)
        for name, a in zip(names, new, strict=True):
            if not self.cross:
                assert where.slot is not None
                shape = (*a.shape[:2], where.capacity, a.shape[3])
                slots = self.variable("cache", name, jnp.zeros, shape, a.dtype).value
                a = jax.lax.dynamic_update_slice_in_dim(slots, a, where.slot, axis=2)
            self.put_variable("cache", name, a)
        return tuple(self.get_variable("cache", name) for name in names)


MIXERS = {"attention": Attention}
