"""Pools against NumPy, and as part of a model: padding has no say, wherever it stands."""

import common
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer.layers.base import Tokens
from transformer.layers.pool import POOLS
from transformer.model import FAMILIES
from transformer.spec import SpecError

REAL = np.array(
    [
        [1, 1, 1, 1, 1, 1],
        [1, 1, 1, 0, 0, 0],
        [0, 0, 1, 1, 1, 1],
        [0, 0, 0, 1, 0, 0],
        [0, 1, 1, 0, 1, 0],
    ],
    bool,
)
EXPECTED = {
    "mean": lambda own: own.mean(0),
    "max": lambda own: own.max(0),
    "first": lambda own: own[0],
    "last": lambda own: own[-1],
}


@pytest.mark.parametrize("name", POOLS)
def test_against_the_definition(name):
    x = np.float32(np.random.default_rng(0).normal(-3.0, 1.0, (5, 6, 4)))
    got = common.pick(POOLS, name)()(jnp.asarray(x), jnp.asarray(REAL))
    assert got.shape == (5, 4) and got.dtype == jnp.float32
    for row in range(5):
        np.testing.assert_allclose(got[row], EXPECTED[name](x[row][REAL[row]]), rtol=1e-6)


@pytest.mark.parametrize("name", POOLS)
def test_what_stands_in_padding_changes_nothing(name):
    x = np.float32(np.random.default_rng(0).normal(size=(5, 6, 4)))
    other = np.where(REAL[..., None], x, 1e9).astype(np.float32)
    a, b = (common.pick(POOLS, name)()(jnp.asarray(v), jnp.asarray(REAL)) for v in (x, other))
    np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", POOLS)
def test_a_text_without_a_token_is_finite_and_moves_nothing(name, dtype):
    """Its gradient is finite too, and the rows beside it keep their own."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 6, 4)), dtype)
    real = jnp.asarray([[True] * 6, [False] * 6, [False] * 3 + [True] * 3])
    pool = common.pick(POOLS, name)()
    assert pool(x, real).dtype == dtype

    def loss(x, weights):
        return (jnp.square(pool(x, real).astype(jnp.float32)).sum(1) * weights).sum()

    counted = jnp.asarray([1.0, 0.0, 1.0])
    value, gradient = jax.value_and_grad(loss)(x, counted)
    assert jnp.isfinite(value) and jnp.isfinite(gradient.astype(jnp.float32)).all()
    assert jnp.isfinite(loss(x, jnp.ones(3)))
    assert not gradient[1].any() and not gradient[2, :3].any()
    assert gradient[0].any() and gradient[2, 3:].any()


CASES = common.accepted(
    [{"family": family, "pool": name} for family in FAMILIES for name in POOLS],
    classes=3,
    depth=1,
)


@pytest.mark.parametrize("model", CASES)
def test_a_text_is_the_same_padded_left_or_right(model):
    params, text = common.params(model), common.text(2, 5)
    alone = common.logits(model, params, text, common.source_for(model))
    assert alone.shape == (2, 3)
    for left in (0, 2, 4):
        wide = ((0, 0), (left, 4 - left))
        ids = jnp.pad(text.ids_BT, wide, constant_values=9)
        padded = Tokens.of(ids, jnp.pad(text.segments_BT, wide))
        got = common.logits(model, params, padded, common.source_for(model))
        np.testing.assert_allclose(alone, got, atol=1e-5)


@pytest.mark.parametrize(
    ("family", "pool"), [("encoder", "mean"), ("decoder", "last"), ("encoder_decoder", "last")]
)
def test_the_pool_of_a_family_unless_another_is_given(family, pool):
    own, given = (common.spec(family=family, classes=3, depth=1, pool=p) for p in (None, pool))
    text, source = common.text(), common.source_for(own)
    a, b = (common.logits(m, common.params(own), text, source) for m in (own, given))
    np.testing.assert_array_equal(a, b)


def test_the_first_token_of_a_causal_decoder_is_refused():
    with pytest.raises(SpecError, match="pool=first: with mask=causal nothing is known"):
        common.spec(family="decoder", classes=3, pool="first")
    with pytest.raises(SpecError, match=r"mask=window\(size=3\) nothing is known"):
        common.spec(family="decoder", classes=3, pool="first", mask="window(size=3)")
    with pytest.raises(SpecError, match="pool=first: with mask=causal nothing is known"):
        common.spec(family="encoder", classes=3, pool="first", mask="causal")
    # Where it can look ahead, or at a source, it knows something.
    common.spec(family="decoder", classes=3, pool="first", mask="prefix(length=8)")
    common.spec(family="encoder", classes=3, pool="first")
    common.spec(family="encoder_decoder", classes=3, pool="first")
