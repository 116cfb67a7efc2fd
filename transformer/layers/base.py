"""Sizes, shapes and the makers of logically named parameters that every layer uses.

Suffix legend, for every tensor in the package:
  B batch   T query position   S key position   D model width   F feed-forward width   V vocabulary
  H query heads   G key/value heads   K query/key width of a head   W value width of a head
  L layers   R rotary pairs
so `x_BTD` is the residual stream and `q_BHTK` the queries of all heads.

Parameters are matrices [in, out], vectors or tables [rows, width], named `kernel`, `bias`, `scale`
and `embedding`; the optimizers rely on these names. A random draw happens where a random stream is
given: dropout is on exactly when `apply` gets `rngs={"dropout": key}`.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from flax.linen import spmd

from transformer.spec import Choice, Count, Positive, Rate, Spec, choice, context

Array = jax.Array
Initializer = Callable[..., Array]

# ------------------------------------------------------------------------------ initialisation
# An initialisation is a function (spec, role) -> initializer. Roles: query, key, value, out, up,
# down, head, embedding. A placement may ask for a gain on some roles (`Dims.gain`).


def normal(spec: "Dims", role: str, std: Positive = 0.02, depth_scaled: bool = True) -> Initializer:
    """GPT-2 (Radford et al. 2019): N(0, std²); projections back into the residual stream are
    divided by sqrt(2 * depth) if `depth_scaled`."""
    if depth_scaled and role in ("out", "down"):
        std /= math.sqrt(2 * spec.L)
    return nn.initializers.normal(std * spec.gain(role))


def lecun(spec: "Dims", role: str) -> Initializer:
    """LeCun et al. 1998: variance 1 / fan-in; embeddings N(0, 1 / dim)."""
    return _scaled(spec, role, "fan_in", "truncated_normal")


def xavier(
    spec: "Dims", role: str, distribution: Literal["uniform", "normal"] = "uniform"
) -> Initializer:
    """Glorot & Bengio 2010: variance 2 / (fan-in + fan-out), as in the original Transformer;
    embeddings N(0, 1 / dim)."""
    return _scaled(spec, role, "fan_avg", distribution)


def _scaled(spec: "Dims", role: str, mode: Any, distribution: Any) -> Initializer:
    if role == "embedding":
        return nn.initializers.normal(spec.dim**-0.5)
    return nn.initializers.variance_scaling(spec.gain(role) ** 2, mode, distribution)


INITS = {"normal": normal, "lecun": lecun, "xavier": xavier}

# --------------------------------------------------------------------------------------- sizes


@dataclasses.dataclass(frozen=True)
class Dims(Spec):
    """The sizes and numeric options of one stack. The one-letter properties follow the legend."""

    vocab: Count | None = None  # None: the size of the tokenizer
    dim: Count = 256
    depth: Count = 6
    heads: Count = 8
    kv_heads: Count | None = None  # None: as many as heads; 1: multi-query
    head_dim: Count | None = None  # None: dim / heads
    value_dim: Count | None = None  # None: the same as head_dim
    ffn_dim: Count | None = None  # None: what the FFN asks for (mlp 4 * dim, gated 8/3 * dim)
    max_len: Count | None = None  # None: data.seq_len; rows of a learned position table
    bias: bool = False  # on the projections of attention and FFN
    dropout: Rate = 0.0  # on embeddings and on the output of each sublayer
    attention_dropout: Rate | None = None  # on attention weights; None: the same as dropout
    score_scale: Positive | None = None  # None: 1 / sqrt(head_dim)
    init: Choice = choice(INITS, "normal")
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"  # compute; parameters: float32
    side: str = context("decoder")

    def rules(self) -> Iterator[str]:
        if self.H % self.G:
            yield f"kv_heads={self.kv_heads}: must divide heads={self.H}"
        if self.head_dim is None and self.dim % self.H:
            yield f"dim={self.dim}: not a multiple of heads={self.H}; set head_dim to decouple"

    def gain(self, role: str) -> float:
        """Factor on the initial standard deviation of projections with this role."""
        return 1.0

    @property
    def V(self) -> int:
        assert self.vocab is not None, "the vocabulary is filled in when the run is assembled"
        return self.vocab

    @property
    def L(self) -> int:
        return self.depth

    @property
    def depths(self) -> tuple[int, int]:
        """Layers of the encoder and of the decoder."""
        return 0, self.depth

    @property
    def F(self) -> int:
        """Width of the feed-forward network."""
        return self.ffn_dim or 4 * self.dim

    @property
    def D(self) -> int:
        return self.dim

    @property
    def H(self) -> int:
        return self.heads

    @property
    def G(self) -> int:
        return self.kv_heads or self.H

    @property
    def K(self) -> int:
        return self.head_dim or self.dim // self.H

    @property
    def W(self) -> int:
        return self.value_dim or self.K


# ----------------------------------------------------------------------------- model inputs


@struct.dataclass
class Tokens:
    """Token ids with their place: segment 0 is padding, positions count within a segment.

    `shown_BT` is true at tokens that all of their segment may look at whatever the mask says, as
    the prefix of a prefix language model; None: there are none.
    """

    ids_BT: Array
    segments_BT: Array
    positions_BT: Array
    shown_BT: Array | None = None

    @classmethod
    def of(cls, ids_BT: Array, mask_BT: Array | None = None) -> "Tokens":
        """One text a row; `mask_BT` is true at real tokens, which may stand left or right."""
        mask_BT = jnp.ones_like(ids_BT) if mask_BT is None else mask_BT.astype(ids_BT.dtype)
        return cls(ids_BT, mask_BT, jnp.maximum(jnp.cumsum(mask_BT, 1) - 1, 0))


# --------------------------------------------------------------------------------- parameters


def parameter(
    module: nn.Module, name: str, init: Initializer, axes: tuple[str, ...], shape: tuple[int, ...]
) -> Array:
    """A float32 parameter of `module` that carries its logical axis names."""
    if module.has_variable("params", name):  # flax's `param` would trace `init` to learn the shape
        value: Any = nn.unbox(module.get_variable("params", name))
        if value.shape != shape:
            raise ValueError(f"parameter {name!r} is {list(value.shape)}, not {list(shape)}")
        return value
    boxed: Any = nn.with_logical_partitioning(init, axes)
    return module.param(name, boxed, shape, jnp.float32)


class Dense(nn.Module):
    """x [..., in] -> [..., features], computed in the spec's dtype."""

    spec: Dims
    features: int
    axes: tuple[str, str]
    role: str
    use_bias: bool | None = None  # None: as the spec says

    @nn.compact
    def __call__(self, x: Array) -> Array:
        s = self.spec
        shape = (x.shape[-1], self.features)
        kernel = parameter(self, "kernel", s.init(s, self.role), self.axes, shape)
        y = x @ kernel.astype(s.dtype)
        if s.bias if self.use_bias is None else self.use_bias:
            bias = parameter(self, "bias", nn.initializers.zeros, self.axes[1:], shape[1:])
            y = y + last(bias.astype(s.dtype), y)
        return y


class Embedding(nn.Module):
    """A table of vectors [rows, D]: `embed(ids)` looks up, `embed.attend(x)` gives logits."""

    spec: Dims
    rows: int
    axis: str

    def setup(self):
        s = self.spec
        init = s.init(s, "embedding")
        self.embedding = parameter(self, "embedding", init, (self.axis, "embed"), (self.rows, s.D))

    def __call__(self, ids_BT: Array) -> Array:
        return self.embedding.astype(self.spec.dtype)[ids_BT]

    def attend(self, x_BTD: Array) -> Array:
        return x_BTD @ self.embedding.astype(self.spec.dtype).T


def last(v: Array, x: Array) -> Array:
    """The vector `v` shaped to broadcast along the last axis of `x`."""
    return v.reshape((1,) * (x.ndim - 1) + v.shape)


def constrain(x: Array, *axes: str | None) -> Array:
    """Names the axes of an activation; the layout in force says where they are split."""
    return spmd.with_logical_constraint(x, axes)


# ------------------------------------------------------------------------------------ dropout


def dropout(module: nn.Module, x: Array, rate: float) -> Array:
    """Zeroes each element with probability `rate` and scales the rest, if `module` has a stream.

    The mask is a hash of the element's index under a 64-bit key drawn from the stream: the same
    on every mesh, and recomputed in the backward pass instead of stored.
    """
    if rate == 0.0 or not module.has_rng("dropout"):
        return x
    return _drop(x, jax.random.bits(module.make_rng("dropout"), (2,), jnp.uint32), rate)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _drop(x: Array, key: Array, rate: float) -> Array:
    threshold = np.uint32(min((1 - rate) * 2**32, 2**32 - 1))  # 2**32 itself does not fit
    keep = _hash(jax.lax.iota(jnp.uint32, x.size), key) < threshold
    return jnp.where(keep.reshape(x.shape), x * np.asarray(1 / (1 - rate), x.dtype), 0)


_drop.defvjp(
    lambda x, key, rate: (_drop(x, key, rate), key),
    lambda rate, key, dy: (_drop(dy, key, rate), np.zeros(key.shape, jax.dtypes.float0)),
)


def _hash(x: Array, key: Array) -> Array:
    """The integer hash `lowbias32` (Wellons 2018) of x under two 32-bit keys."""
    x = (x * np.uint32(0x9E3779B9)) ^ key[0]
    x = (x ^ (x >> 16)) * np.uint32(0x7FEB352D)
    x = (x ^ key[1] ^ (x >> 15)) * np.uint32(0x846CA68B)
    return x ^ (x >> 16)
