"""Feed-forward networks against NumPy in float64."""

import math

import common
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer.layers.ffn import ACTIVATIONS, FFNS
from transformer.state import abstract_params

ACTS = {
    "relu": lambda x: np.maximum(x, 0),
    "gelu": lambda x: x * (1 + np.vectorize(math.erf)(x / 2**0.5)) / 2,
    "gelu_tanh": lambda x: x * (1 + np.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3))) / 2,
    "silu": lambda x: x / (1 + np.exp(-x)),
    "relu2": lambda x: np.maximum(x, 0) ** 2,
}
NETWORKS = {
    "mlp": lambda act, p, x: p("down", act(p("up", x))),
    "gated": lambda act, p, x: p("down", act(p("gate", x)) * p("up", x)),
}


def test_every_activation_has_a_value_below():
    assert set(ACTIVATIONS) == set(ACTS)


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("name", NETWORKS)
def test_values(name, act):
    x, key = np.random.default_rng(0).normal(size=(2, 3, 16)), jax.random.key(0)
    ffn = common.pick(FFNS, f"{name}(act={act!r})")(common.spec())
    shapes = nn.unbox(jax.eval_shape(ffn.init, key, jax.ShapeDtypeStruct(x.shape, jnp.float32)))
    rng = np.random.default_rng(1)
    params = jax.tree.map(lambda a: rng.normal(size=a.shape) / 4, shapes["params"])

    def project(part, h):
        return h @ params[part]["kernel"] + params[part]["bias"]

    as_float32 = jax.tree.map(jnp.float32, params)
    got = ffn.apply({"params": as_float32}, jnp.asarray(x, jnp.float32))
    np.testing.assert_allclose(got, NETWORKS[name](ACTS[act], project, x), atol=1e-4)


@pytest.mark.parametrize(
    ("name", "dim", "width"),
    [("mlp", 96, 4 * 96), ("gated", 96, 256), ("gated", 104, 280)],  # from 277.3
)
def test_default_width(name, dim, width):
    model = common.spec(dim=dim, ffn_dim=None, ffn=name)
    assert width == model.F
    assert common.spec(dim=96, ffn_dim=100, ffn=name).F == 100


def test_both_networks_cost_about_the_same_by_default():
    sizes = []
    for name in ("mlp", "gated"):
        model = common.spec(dim=96, ffn_dim=None, ffn=name, bias=False)
        ffn = abstract_params(model)["decoder"]["block_0"]["ffn"]
        sizes.append(sum(a.size for a in jax.tree.leaves(ffn)))
    assert sizes == [2 * 4 * 96 * 96, 3 * 256 * 96]
    assert sizes[0] == sizes[1]
