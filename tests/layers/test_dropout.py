"""Dropout: its statistics, where it acts, and that nothing repeats which must not."""

import functools
import itertools
from typing import Any

import common
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import transformer.model
from transformer.layers.base import dropout
from transformer.state import stream

SIZE = 40_000


class Drop(nn.Module):
    rate: float

    def __call__(self, x):
        return dropout(self, x, self.rate)


def drop(x, rate, key) -> Any:
    return Drop(rate).apply({}, x, rngs={"dropout": key})


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_keep_rate_and_scale(rate):
    y = np.asarray(drop(jnp.ones(SIZE), rate, jax.random.key(0)))
    kept = y[y != 0]
    np.testing.assert_allclose(kept, 1 / (1 - rate), rtol=1e-6)
    deviation = (rate * (1 - rate) / SIZE) ** 0.5
    assert abs(len(kept) / SIZE - (1 - rate)) < 5 * deviation


def test_elements_and_keys_are_independent():
    """Any two masks, and a mask and itself shifted, agree in half of the places."""
    masks = [np.asarray(drop(jnp.ones(SIZE), 0.5, stream(0, "d", step))) != 0 for step in range(4)]
    shifted = [np.roll(masks[0], n) for n in (1, 2, 64, 200)]
    for a, b in itertools.combinations([*masks, *shifted], 2):
        assert abs((a == b).mean() - 0.5) < 5 * 0.5 / SIZE**0.5


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_gradient_uses_the_same_mask(dtype):
    x, key = jnp.full((50, 40), 2.0, dtype), jax.random.key(3)
    y, pull = jax.vjp(lambda x: drop(x, 0.3, key), x)
    (gradient,) = pull(jnp.full_like(x, 2.0))
    assert y.dtype == gradient.dtype == dtype
    np.testing.assert_array_equal(y, gradient)


def test_jit_draws_the_same():
    x = jnp.ones((8, 8))
    eager, jitted = drop(x, 0.5, jax.random.key(1)), jax.jit(drop, static_argnums=1)
    np.testing.assert_array_equal(eager, jitted(x, 0.5, jax.random.key(1)))


def test_without_a_stream_or_a_rate_nothing_is_dropped():
    x = jnp.ones(100)
    np.testing.assert_array_equal(Drop(0.9).apply({}, x), x)
    for rate in (0.0, 1e-17):  # the second one is lost beside 1
        np.testing.assert_array_equal(drop(x, rate, jax.random.key(0)), x)


def test_logits_without_a_stream_are_those_without_dropout():
    on, off = common.spec(dropout=0.5), common.spec()
    params, text = common.params(off), common.text()
    a, b = (common.logits(model, params, text) for model in (on, off))
    np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    "rates",
    [{"dropout": 0.5, "attention_dropout": 0.0}, {"dropout": 0.0, "attention_dropout": 0.5}],
    ids=lambda r: max(r, key=r.get),
)
def test_every_site_acts_alone(rates):
    model = common.spec(**rates)
    params, text = common.params(model), common.text()
    logits = functools.partial(common.logits, model, params, text, None, None)
    first, again, other = (logits(stream(0, "dropout", step)) for step in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert jnp.abs(first - logits()).max() > 1e-2
    assert jnp.abs(first - other).max() > 1e-2


@pytest.mark.parametrize("remat", ["none", "full"])
@pytest.mark.parametrize("scan", [False, True])
def test_no_two_sites_of_a_model_share_a_mask(scan, remat, monkeypatch):
    """The embeddings and the two sublayers of three layers: all masks differ."""
    seen = []

    def spied(module, x, rate):
        mask = dropout(module, jnp.ones_like(x), rate)
        jax.debug.callback(lambda m: seen.append(np.asarray(m) != 0), mask)
        return x * mask

    model = common.spec(depth=3, dropout=0.5, scan=scan, remat=remat, dim=64)
    rngs, text = {"dropout": jax.random.key(0)}, common.text(4, 16)
    params = common.params(model)
    monkeypatch.setattr(transformer.model, "dropout", spied)
    logits = jax.jit(lambda p: model.build().apply({"params": p}, text, rngs=rngs))(params)
    jax.block_until_ready(logits)
    jax.effects_barrier()
    assert len(seen) == 1 + 2 * 3
    for a, b in itertools.combinations(seen, 2):
        assert abs((a == b).mean() - 0.5) < 5 * 0.5 / a.size**0.5
