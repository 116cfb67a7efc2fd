"""Feed-forward networks: x [B, T, D] -> x. To add one, write a linen module with a `width`, whose
fields with defaults are its options, and give it a line in FFNS."""

from typing import Annotated

import flax.linen as nn
import jax
import jax.numpy as jnp

from transformer.layers.base import Array, Dense, Dims, constrain
from transformer.spec import Among


def gelu(x: Array) -> Array:
    """x * Phi(x), exact (Hendrycks & Gimpel 2016)."""
    return jax.nn.gelu(x, approximate=False)


def gelu_tanh(x: Array) -> Array:
    """The tanh approximation of GELU, as in GPT-2."""
    return jax.nn.gelu(x, approximate=True)


def relu2(x: Array) -> Array:
    """max(x, 0)² (So et al. 2021, Primer)."""
    return jnp.square(jax.nn.relu(x))


ACTIVATIONS = {
    "relu": jax.nn.relu,
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "silu": jax.nn.silu,
    "relu2": relu2,
}
Activation = Annotated[str, Among(ACTIVATIONS)]


class MLP(nn.Module):
    """down(act(up(x))) (Vaswani et al. 2017, §3.3)."""

    spec: Dims
    act: Activation = "gelu"

    @staticmethod
    def width(dim: int) -> int:
        """The hidden width where the config names none."""
        return 4 * dim

    @nn.compact
    def __call__(self, x_BTD: Array) -> Array:
        h_BTF = ACTIVATIONS[self.act](_up(self.spec, "up", x_BTD))
        return _down(self.spec, h_BTF)


class Gated(nn.Module):
    """down(act(gate(x)) * up(x)) (Shazeer 2020): SwiGLU with silu, GEGLU with gelu."""

    spec: Dims
    act: Activation = "silu"

    @staticmethod
    def width(dim: int) -> int:
        """8/3 of the model width, up to a multiple of 8: three matrices cost as much as the MLP's
        two."""
        return -(-dim // 3) * 8

    @nn.compact
    def __call__(self, x_BTD: Array) -> Array:
        gate_BTF = ACTIVATIONS[self.act](_up(self.spec, "gate", x_BTD))
        return _down(self.spec, gate_BTF * _up(self.spec, "up", x_BTD))


def _up(spec: Dims, name: str, x_BTD: Array) -> Array:
    h_BTF = Dense(spec, spec.F, ("embed", "ffn"), "up", name=name)(x_BTD)
    return constrain(h_BTF, "batch", "length", "ffn")


def _down(spec: Dims, h_BTF: Array) -> Array:
    return Dense(spec, spec.D, ("ffn", "embed"), "down", name="down")(h_BTF)


FFNS = {"mlp": MLP, "gated": Gated}
