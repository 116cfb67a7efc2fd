"""Normalisations against NumPy in float64."""

import common
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer.layers.norm import NORMS

X = np.random.default_rng(0).normal(3.0, 2.0, (2, 3, 16))
SCALE, BIAS = np.random.default_rng(1).normal(size=(2, 16))


def layer(x, eps):
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + eps)


def rms(x, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps)


def run(text, x, dtype=jnp.float32):
    """The norm with the scale and bias above, as far as it has them."""
    norm = common.pick(NORMS, text)(common.spec())
    x = jnp.asarray(x, dtype)
    declared = norm.init(jax.random.key(0), x).get("params", {})
    known = {"scale": jnp.asarray(SCALE, jnp.float32), "bias": jnp.asarray(BIAS, jnp.float32)}
    return norm.apply({"params": {name: known[name] for name in declared}}, x)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("layer", layer(X, 1e-5) * SCALE + BIAS),
        ("layer(eps=0.5)", layer(X, 0.5) * SCALE + BIAS),
        ("layer(bias=False)", layer(X, 1e-5) * SCALE),
        ("layer(scale=False, bias=False)", layer(X, 1e-5)),
        ("rms", rms(X, 1e-6) * SCALE),
        ("rms(eps=0.5)", rms(X, 0.5) * SCALE),
        ("rms(bias=True)", rms(X, 1e-6) * SCALE + BIAS),
        ("rms(scale=False)", rms(X, 1e-6)),
    ],
)
def test_values(text, expected):
    np.testing.assert_allclose(run(text, X), expected, atol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("text", NORMS)
def test_low_precision_is_computed_in_float32(text, dtype):
    """1000 squared overflows float16, and its spacing there hides the variance in bfloat16."""
    x = jnp.asarray(1000 + 8 * np.arange(16.0)[None, None], dtype)
    y, exact = run(text, x, dtype), run(text, x.astype(jnp.float32))
    assert y.dtype == dtype
    np.testing.assert_allclose(y.astype(jnp.float32), exact, rtol=1e-2, atol=2e-2)


@pytest.mark.parametrize("text", NORMS)
def test_a_vector_of_zeros_has_finite_values_and_gradients(text):
    value, gradient = jax.value_and_grad(lambda x: run(text, x).sum())(jnp.zeros((1, 1, 16)))
    assert jnp.isfinite(value)
    assert jnp.isfinite(gradient).all()
