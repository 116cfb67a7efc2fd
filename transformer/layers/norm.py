"""Normalisations: x [..., D] -> x, computed in float32. To add one, write a linen module whose
fields with defaults are its options, and give it a line in NORMS."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from transformer.layers.base import Array, Dims, last, parameter
from transformer.spec import Positive


class Layer(nn.Module):
    """Layer normalisation (Ba et al. 2016): (x - mean) / sqrt(variance + eps) * scale + bias."""

    spec: Dims
    eps: Positive = 1e-5
    scale: bool = True
    bias: bool = True

    @nn.compact
    def __call__(self, x: Array) -> Array:
        x32 = x.astype(jnp.float32)
        centred = x32 - x32.mean(-1, keepdims=True)
        y = centred * jax.lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + self.eps)
        return _affine(self, y).astype(x.dtype)


class RMS(nn.Module):
    """Root-mean-square normalisation (Zhang & Sennrich 2019): x / sqrt(mean(x²) + eps) * scale."""

    spec: Dims
    eps: Positive = 1e-6
    scale: bool = True
    bias: bool = False

    @nn.compact
    def __call__(self, x: Array) -> Array:
        x32 = x.astype(jnp.float32)
        y = x32 * jax.lax.rsqrt(jnp.square(x32).mean(-1, keepdims=True) + self.eps)
        return _affine(self, y).astype(x.dtype)


def _affine(norm: Layer | RMS, y: Array) -> Array:
    shape = y.shape[-1:]
    if norm.scale:
        y = y * last(parameter(norm, "scale", nn.initializers.ones, ("norm",), shape), y)
    if norm.bias:
        y = y + last(parameter(norm, "bias", nn.initializers.zeros, ("norm",), shape), y)
    return y


NORMS = {"layer": Layer, "rms": RMS}
