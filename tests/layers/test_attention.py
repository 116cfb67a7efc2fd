"""Attention against NumPy written from the definition; every kernel is under these tests."""

import common
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer.layers.attention import KERNELS, Attention, Where
from transformer.spec import SpecError

kernels = pytest.mark.parametrize("kernel", KERNELS)
B, H, G, T, S, K, W = 2, 6, 3, 4, 5, 4, 7


def keep(weights):
    return weights


def heads(seed=0, dtype=jnp.float32):
    """Random queries, keys and values."""
    rng = np.random.default_rng(seed)
    shapes = ((B, H, T, K), (B, G, S, K), (B, G, S, W))
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


def by_definition(q, k, v, visible, bias, scale):
    """One query at a time in float64; a query that may look nowhere gives zero."""
    q, k, v, bias = (np.asarray(a, np.float64) for a in (q, k, v, bias))
    out = np.zeros((*q.shape[:3], v.shape[-1]))
    for b, h, t in np.ndindex(*q.shape[:3]):
        seen, g = np.flatnonzero(visible[b, t]), h // (q.shape[1] // k.shape[1])
        if not len(seen):
            continue
        score = scale * k[b, g, seen] @ q[b, h, t] + bias[b, h, t, seen]
        weight = np.exp(score - score.max())
        out[b, h, t] = weight @ v[b, g, seen] / weight.sum()
    return out


@pytest.fixture(scope="module")
def place():
    """Who sees whom, and a bias; the last query of the first text sees nobody."""
    rng = np.random.default_rng(1)
    visible = rng.random((B, T, S)) < 0.6
    visible[0, -1] = False
    return visible, rng.normal(size=(B, H, T, S))


@kernels
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 4e-2), ("float16", 4e-3)]
)
def test_values(kernel, dtype, tolerance, place):
    visible, bias = place
    where = Where(jnp.asarray(visible), bias_BHTS=jnp.asarray(bias, jnp.float32))
    q, k, v = heads(dtype=dtype)
    out = common.pick(KERNELS, kernel)(q, k, v, where, 0.7, keep)
    assert out.dtype == dtype
    np.testing.assert_allclose(
        out.astype(jnp.float32), by_definition(q, k, v, visible, bias, 0.7), atol=tolerance
    )


@kernels
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_a_query_that_sees_nobody(kernel, biased, dtype):
    """Its output is exactly zero, all gradients are finite, its neighbour notices nothing."""
    q, k, v = (a[:2, :, :3] for a in heads(dtype=dtype))
    bias = jnp.full((2, H, 3, 3), -3.0) if biased else None
    alone = jnp.asarray([[1, 1, 0]], bool)
    visible = jnp.stack([jnp.broadcast_to(alone, (3, 3)), jnp.zeros((3, 3), bool)])

    def run(q, k, v, visible=visible, bias=bias):
        return common.pick(KERNELS, kernel)(q, k, v, Where(visible, bias_BHTS=bias), 1.0, keep)

    def loss(q, k, v):
        return jnp.square(run(q, k, v).astype(jnp.float32)).sum()

    for out in (run(q, k, v), jax.jit(run)(q, k, v)):
        np.testing.assert_array_equal(out[1], 0)
        assert jnp.isfinite(out).all()
    gradients = jax.grad(loss, (0, 1, 2))(q, k, v)
    for g in gradients:
        assert jnp.isfinite(g).all()
        np.testing.assert_array_equal(g[1], 0)
    first = run(q[:1], k[:1], v[:1], visible[:1], bias if bias is None else bias[:1])
    np.testing.assert_array_equal(first[0], run(q, k, v)[0])


@kernels
@pytest.mark.parametrize(("values", "expected"), [([10, 20], [10, 10, 20, 20]), ([10], [10] * 4)])
def test_query_heads_share_key_heads_in_order(kernel, values, expected):
    q, k = jnp.zeros((1, 4, 1, 2)), jnp.ones((1, len(values), 3, 2))
    v = jnp.broadcast_to(jnp.asarray(values, jnp.float32)[None, :, None, None], (*k.shape[:3], 1))
    out = common.pick(KERNELS, kernel)(q, k, v, Where(jnp.ones((1, 1, 3), bool)), 1.0, keep)
    np.testing.assert_allclose(out[0, :, 0, 0], expected)


@kernels
def test_dropout_acts_on_the_weights(kernel, place):
    """Dropping everything but key 2, without rescaling, leaves that key's weight and value."""
    q, k, v = heads()
    everyone = np.ones((B, T, S), bool)
    only = jnp.arange(S) == 2

    def drop(weights):
        return jnp.where(only.reshape((1,) * (weights.ndim - 1) + (S,)), weights, 0.0)

    out = common.pick(KERNELS, kernel)(q, k, v, Where(jnp.asarray(everyone)), 1.0, drop)
    no_bias, alone = np.zeros((B, H, T, S)), np.asarray(v).copy()
    alone[:, :, [0, 1, 3, 4]] = 0
    np.testing.assert_allclose(out, by_definition(q, k, alone, everyone, no_bias, 1.0), atol=1e-5)


@pytest.mark.parametrize("cross", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {"value_dim": 6},  # heads * value_dim is neither dim nor heads * head_dim
        {"heads": 6, "kv_heads": 3, "head_dim": 10},
        {"kv_heads": 1, "score_scale": 0.3},
        {"kv_heads": None, "bias": False},
    ],
)
def test_the_whole_layer(options, cross):
    """Projections, heads, scale and output; cross-attention takes keys and values from memory."""
    model, rng = common.spec(**options), np.random.default_rng(0)
    x, memory = rng.normal(size=(B, T, model.D)), rng.normal(size=(B, S, model.D))
    memory = memory if cross else x
    visible = np.broadcast_to(np.tri(T, memory.shape[1], dtype=bool), (B, T, memory.shape[1]))
    layer, inputs = Attention(model, cross), (jnp.float32(x), jnp.float32(memory))
    where = Where(jnp.asarray(visible))
    shapes = nn.unbox(jax.eval_shape(layer.init, jax.random.key(0), *inputs, where))
    params = jax.tree.map(lambda a: rng.normal(size=a.shape) / 2, shapes["params"])

    def project(name, x):
        return x @ params[name]["kernel"] + params[name].get("bias", 0.0)

    def by_head(name, x, n):
        return project(name, x).reshape(*x.shape[:2], n, -1).swapaxes(1, 2)

    q = by_head("query", x, model.H)
    k, v = (by_head(name, memory, model.G) for name in ("key", "value"))
    scale, no_bias = options.get("score_scale", q.shape[-1] ** -0.5), np.zeros((B, model.H, T, S))
    out = by_definition(q, k, v, visible, no_bias, scale).swapaxes(1, 2).reshape(B, T, -1)
    got = layer.apply({"params": jax.tree.map(jnp.float32, params)}, *inputs, where)
    np.testing.assert_allclose(got, project("out", out), atol=1e-4)


def attention(params, name):
    return params["decoder"]["block_0"]["attention"][name]["kernel"]


def test_grouped_heads_equal_repeated_ones():
    """A model with 2 key heads is one with 4 whose key heads are pairwise the same."""
    grouped, full = (common.spec(kv_heads=n, depth=1) for n in (2, 4))
    params = common.params(grouped)

    def repeated(path, leaf):
        if not {"key", "value"} & {getattr(p, "key", None) for p in path}:
            return leaf
        by_head = leaf.reshape(*leaf.shape[:-1], 2, -1)
        return jnp.repeat(by_head, 2, axis=-2).reshape(*leaf.shape[:-1], -1)

    wide = jax.tree.map_with_path(repeated, params)
    assert attention(wide, "key").shape == (16, 16)
    a, b = common.logits(grouped, params, common.text()), common.logits(full, wide, common.text())
    np.testing.assert_allclose(a, b, atol=1e-6)


def test_the_default_scale_is_that_of_the_head():
    """1 / sqrt(K), whatever the width of the values."""
    plain, named = common.spec(value_dim=6), common.spec(value_dim=6, score_scale=4**-0.5)
    params = common.params(plain)
    a, b = (common.logits(model, params, common.text()) for model in (plain, named))
    np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heads": 4, "kv_heads": 3}, "kv_heads=3: must divide heads=4"),
        ({"dim": 18}, "dim=18: not a multiple of heads=4; set head_dim to decouple"),
    ],
)
def test_heads_that_do_not_go_together_are_refused(options, message):
    with pytest.raises(SpecError, match=message):
        common.spec(**options)


@pytest.mark.parametrize("position", ["alibi", "t5"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_all_masks_at_once_in_low_precision(dtype, position):
    """Causal, padding on the left, segments and a bias: no infinity, and close to float32."""
    text = common.text(2, 8)
    segments = jnp.asarray([[0, 0, 1, 1, 1, 2, 2, 2], [1, 1, 1, 1, 1, 1, 0, 0]])
    text = type(text)(text.ids_BT, segments, text.positions_BT)
    exact, rough = (
        common.spec(position=position, dtype=d, norm="layer") for d in ("float32", dtype)
    )
    params = common.params(exact)
    a, b = (common.logits(model, params, text) for model in (exact, rough))
    assert jnp.isfinite(b).all()
    np.testing.assert_allclose(a, b, atol=0.1 if dtype == "bfloat16" else 1e-2)
