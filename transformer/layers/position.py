"""Positional schemes. A scheme may act in three places, each a no-op in the base class: on the
embeddings (`embed`), on queries and keys (`rotation`), on the attention scores (`bias`).

The stack asks once per forward pass; attention knows no scheme. Positions come from the batch, so
padding, packing and cached decoding are the same code with other numbers. To add a scheme, write
a subclass of Position whose fields with defaults are its options, and give it a line in POSITIONS.
"""

from collections.abc import Iterator
from typing import Annotated

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from flax import struct

from transformer.layers.base import Array, Dims, Embedding, parameter
from transformer.spec import Count, Fraction, Must, Positive


@struct.dataclass
class Rotation:
    """Rotates pairs of channels of every head: x [B, heads, T, K] -> x."""

    sin_BTR: Array
    cos_BTR: Array
    interleaved: bool = struct.field(pytree_node=False)

    def __call__(self, x_BHTK: Array) -> Array:
        sin, cos = (a[:, None].astype(x_BHTK.dtype) for a in (self.sin_BTR, self.cos_BTR))
        turning, rest = jnp.split(x_BHTK, [2 * sin.shape[-1]], -1)
        if self.interleaved:
            a, b = turning[..., 0::2], turning[..., 1::2]
        else:
            a, b = jnp.split(turning, 2, -1)
        turned = (a * cos - b * sin, b * cos + a * sin)
        if self.interleaved:
            turned = (jnp.stack(turned, -1).reshape(turning.shape),)
        return jnp.concatenate([*turned, rest], -1)


class Position(nn.Module):
    """No positional information; the base of every scheme."""

    spec: Dims
    bidirectional: bool  # whether some layer lets a query look ahead

    acts_on_embeddings = False  # such a scheme acts once for the whole stack
    needs_max_len = False  # such a scheme knows no position from max_len on

    def embed(self, x_BTD: Array, positions_BT: Array) -> Array:
        """Adds to the embeddings."""
        return x_BTD

    def rotation(self, positions_BT: Array) -> Rotation | None:
        """What turns queries and keys at these positions."""
        return None

    def bias(self, positions_BT: Array, positions_BS: Array) -> Array | None:
        """What is added to the scores [B, H, T, S] of self-attention; cross-attention has none."""
        return None


class Learned(Position):
    """A vector for each of `max_len` positions (Gehring et al. 2017; BERT; GPT-2)."""

    acts_on_embeddings = True
    needs_max_len = True

    @nn.compact
    def embed(self, x_BTD, positions_BT):
        assert self.spec.max_len is not None, "max_len is filled in when the run is assembled"
        table = Embedding(self.spec, self.spec.max_len, "positions", name="table")
        return x_BTD + table(positions_BT)


class Sinusoidal(Position):
    """Vaswani et al. 2017, §3.5: channel 2i is sin(p / base^(2i/D)), channel 2i+1 its cosine.
    They are as large as embeddings times sqrt(dim): goes with embed_scale."""

    base: Positive = 10_000.0

    acts_on_embeddings = True

    def embed(self, x_BTD, positions_BT):
        channel = np.arange(self.spec.D)
        frequency = self.base ** (-2.0 * (channel // 2) / self.spec.D)
        angle = (
            positions_BT[..., None].astype(jnp.float32) * frequency.astype(np.float32)[None, None]
        )
        odd = np.broadcast_to(channel % 2 == 1, angle.shape)
        return x_BTD + jnp.where(odd, jnp.cos(angle), jnp.sin(angle)).astype(x_BTD.dtype)


class Rope(Position):
    """Rotary embedding (Su et al. 2021): pair i of the first `fraction` of a head turns by
    p * theta^(-i/R). Pairs are channels (i, i + R), as in LLaMA and GPT-NeoX, or (2i, 2i + 1) if
    `interleaved`, as in the paper and GPT-J. Angles are float32 whatever the compute dtype.
    """

    theta: Positive = 10_000.0
    fraction: Fraction = 1.0
    interleaved: bool = False

    @staticmethod
    def rules(spec: Dims, theta, fraction, interleaved) -> Iterator[str]:
        width = spec.K * fraction
        if abs(width / 2 - round(width / 2)) > 1e-6:  # 100 * 0.14 is not quite 14
            yield f"turns channels in pairs; head_dim={spec.K} * fraction={fraction} is not even"

    def rotation(self, positions_BT):
        pairs = round(self.spec.K * self.fraction / 2)
        frequency = (self.theta ** (-np.arange(pairs) / pairs)).astype(np.float32)
        angle = positions_BT[..., None].astype(jnp.float32) * frequency[None, None]
        return Rotation(jnp.sin(angle), jnp.cos(angle), self.interleaved)


class Alibi(Position):
    """Attention with linear biases (Press et al. 2022): -slope * distance, slopes by the paper's
    rule for any number of heads; symmetric where a query may look ahead."""

    def bias(self, positions_BT, positions_BS):
        slopes_H = np.array(alibi_slopes(self.spec.H), np.float32)
        distance = jnp.abs(positions_BT[:, None, :, None] - positions_BS[:, None, None, :])
        return -slopes_H[None, :, None, None] * distance.astype(jnp.float32)


def alibi_slopes(heads: int) -> list[float]:
    """2^(-8i/n) for a power of two n; otherwise those of the power of two below, then every
    other slope of the power above (the authors' rule)."""
    below = 2 ** (heads.bit_length() - 1)
    slopes = [2.0 ** (-8 * i / below) for i in range(1, below + 1)]
    between = [2.0 ** (-4 * i / below) for i in range(1, 2 * below + 1, 2)]
    return slopes + between[: heads - below]


class T5(Position):
    """A learned bias for each head and bucket of distances, shared by the layers of a stack
    (Raffel et al. 2020): half of the buckets for exact distances, the rest logarithmic up to
    `max_distance`; with look-ahead, half of the buckets are for keys after the query."""

    buckets: Annotated[int, Must("be even and at least 4", lambda n: n >= 4 and n % 2 == 0)] = 32
    max_distance: Count = 128

    @staticmethod
    def rules(spec: Dims, buckets, max_distance) -> Iterator[str]:
        if max_distance <= buckets // 2:
            yield f"max_distance={max_distance} must exceed half of buckets={buckets}"

    @nn.compact
    def bias(self, positions_BT, positions_BS):
        shape = (self.buckets, self.spec.H)
        init = self.spec.init(self.spec, "embedding")
        table = parameter(self, "embedding", init, ("buckets", "heads"), shape)
        relative_BTS = positions_BS[:, None, :] - positions_BT[:, :, None]
        return jnp.moveaxis(table[self.bucket(relative_BTS)], -1, 1)

    def bucket(self, relative: Array) -> Array:
        """The bucket of each relative position (key - query)."""
        per_side = self.buckets // 2 if self.bidirectional else self.buckets
        by_distance = jnp.asarray(_t5_buckets(per_side, self.max_distance))
        distance = jnp.abs(relative) if self.bidirectional else jnp.maximum(-relative, 0)
        bucket = by_distance[jnp.minimum(distance, self.max_distance)]
        return jnp.where(self.bidirectional & (relative > 0), bucket + per_side, bucket)


def _t5_buckets(buckets: int, max_distance: int) -> np.ndarray:
    """Bucket of every distance 0..max_distance; a table in float64, since the logarithm falls on
    whole numbers and must not be rounded down there."""
    exact = buckets // 2
    distance = np.arange(max_distance + 1)
    ratio = np.log(np.maximum(distance, exact) / exact) / np.log(max_distance / exact)
    coarse = exact + np.floor(ratio * (buckets - exact) + 1e-9).astype(np.int32)
    return np.where(distance < exact, distance, np.minimum(coarse, buckets - 1)).astype(np.int32)


POSITIONS = {
    "none": Position,
    "learned": Learned,
    "sinusoidal": Sinusoidal,
    "rope": Rope,
    "alibi": Alibi,
    "t5": T5,
}
