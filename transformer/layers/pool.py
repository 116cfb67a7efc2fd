"""A text as one vector, for what is said of it as a whole: [B, T, D] -> [B, D].

To add a pool, write a frozen dataclass (its fields are its options) with `__call__` and give it a
line in POOLS. Padding has no say in any of them; a text without a token gives a finite vector.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp

from transformer.layers.base import Array
from transformer.layers.mask import MASKS, looks_ahead
from transformer.spec import pick


@dataclasses.dataclass(frozen=True)
class Mean:
    """The mean over all tokens."""

    def __call__(self, x_BTD: Array, real_BT: Array) -> Array:
        weights = real_BT.astype(x_BTD.dtype)[..., None]
        return (x_BTD * weights).sum(1) / jnp.maximum(weights.sum(1), 1)


@dataclasses.dataclass(frozen=True)
class Max:
    """The largest value of each channel."""

    def __call__(self, x_BTD: Array, real_BT: Array) -> Array:
        real = real_BT[..., None] | ~real_BT.any(1)[:, None, None]
        return jnp.where(real, x_BTD, -jnp.inf).max(1)


@dataclasses.dataclass(frozen=True)
class First:
    """The first token, as [CLS] in BERT (Devlin et al. 2019)."""

    def __call__(self, x_BTD: Array, real_BT: Array) -> Array:
        return _at(x_BTD, real_BT.argmax(1))

    @staticmethod
    def rules(spec: Any) -> Iterator[str]:
        if all(spec.depths):  # the text is one token
            return
        mask = spec.mask or pick(MASKS, "full" if spec.depths[0] else "causal")
        if not any(looks_ahead(m) for m in mask.entries):
            yield f"with mask={mask} nothing is known there but the first token"


@dataclasses.dataclass(frozen=True)
class Last:
    """The last token, which in a decoder has seen all (Radford et al. 2018)."""

    def __call__(self, x_BTD: Array, real_BT: Array) -> Array:
        return _at(x_BTD, real_BT.shape[1] - 1 - real_BT[:, ::-1].argmax(1))


def _at(x_BTD: Array, column_B: Array) -> Array:
    return jnp.take_along_axis(x_BTD, column_B[:, None, None], axis=1)[:, 0]


POOLS = {"mean": Mean, "max": Max, "first": First, "last": Last}
