"""Positional schemes against the numbers of their papers and against NumPy in float64."""

import common
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer.layers.attention import Where, einsum
from transformer.layers.base import Tokens
from transformer.layers.position import POSITIONS, alibi_slopes
from transformer.spec import SpecError
from transformer.state import abstract_params


def scheme(text: str, bidirectional: bool = False, **sizes) -> nn.Module:
    return common.pick(POSITIONS, text)(common.spec(**sizes), bidirectional)


def places(*positions: int) -> jax.Array:
    return jnp.asarray([positions], jnp.int32)


# ------------------------------------------------------------------------------------- rotary


def turned(text: str, x, *positions: int):
    """Vectors x [T, K] turned as one head at these positions."""
    x = jnp.asarray(x, jnp.float32)
    rotation = scheme(text, heads=1, kv_heads=1, head_dim=x.shape[-1]).rotation(places(*positions))
    return np.asarray(rotation(x[None, None])[0, 0])


@pytest.mark.parametrize(
    ("pairing", "expected"),
    [
        ("rope", [-1.984111, 1.959901, 2.462378, 4.019800]),
        ("rope(interleaved=True)", [-1.142640, 1.922076, 2.959851, 4.029800]),
    ],
)
def test_rope_turns_pairs_of_channels(pairing, expected):
    x = [[1.0, 2.0, 3.0, 4.0]] * 2
    at_0, at_1 = turned(pairing, x, 0, 1)
    np.testing.assert_array_equal(at_0, x[0])
    np.testing.assert_allclose(at_1, expected, atol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(at_1), 30**0.5, rtol=1e-6)


@pytest.mark.parametrize("text", ["rope", "rope(interleaved=True)", "rope(theta=100.0)"])
def test_rope_scores_depend_on_the_distance_only(text):
    q, k = np.random.default_rng(0).normal(size=(2, 8))
    near, *far = (np.dot(*turned(text, [q, k], p, p + 3)) for p in (0, 1, 17, 200))
    np.testing.assert_allclose(far, near, atol=1e-4)
    assert abs(np.dot(*turned(text, [q, k], 0, 4)) - near) > 1e-3


def test_rope_turns_only_a_fraction():
    x = np.arange(1.0, 9.0)[None]
    y = turned("rope(fraction=0.5)", x, 3)
    np.testing.assert_array_equal(y[:, 4:], x[:, 4:])
    np.testing.assert_array_equal(y[:, :4], turned("rope", x[:, :4], 3))


def test_rope_phases_stay_exact_far_out():
    """Positions times frequencies in bfloat16 would be off by whole radians."""
    rope = scheme("rope", heads=1, kv_heads=1, head_dim=64, dtype="bfloat16")
    rotation = rope.rotation(jnp.arange(8192)[None])
    angle = np.arange(8192)[:, None] * 10_000.0 ** (-np.arange(32) / 32)
    np.testing.assert_allclose(rotation.cos_BTR[0], np.cos(angle), atol=1e-3)
    np.testing.assert_allclose(rotation.sin_BTR[0], np.sin(angle), atol=1e-3)


def test_rope_in_low_precision_is_no_worse_far_out():
    text, exact = common.text(2, 12), common.spec(position="rope", head_dim=16)
    rough = common.spec(position="rope", head_dim=16, dtype="bfloat16")

    def gap(offset):
        moved = Tokens(text.ids_BT, text.segments_BT, text.positions_BT + offset)
        a, b = (common.logits(m, common.params(exact), moved) for m in (exact, rough))
        return jnp.abs(a - b).max()

    assert gap(4000) < 2 * gap(0)


@pytest.mark.parametrize("options", [{"head_dim": 65}, {"position": "rope(fraction=0.25)"}])
def test_rope_refuses_odd_sizes(options):
    with pytest.raises(SpecError, match=r"position=rope.*pairs; head_dim=\d+ .* not even"):
        common.spec(**{"position": "rope"} | options)


# ---------------------------------------------------------------------- added to the embeddings


@pytest.mark.parametrize(
    ("dim", "expected"),
    [
        (5, [0.841471, 0.540302, 0.025116, 0.999685, 0.000631]),
        (4, [0.841471, 0.540302, 0.01, 0.99995]),
    ],
)
def test_sinusoidal_values(dim, expected):
    sinusoidal = scheme("sinusoidal", dim=dim, heads=1, kv_heads=1, head_dim=4)
    at_0, at_1 = sinusoidal.embed(jnp.ones((1, 2, dim)), places(0, 1))[0]
    np.testing.assert_allclose(at_0, 1 + np.arange(dim) % 2, atol=1e-6)
    np.testing.assert_allclose(at_1 - 1, expected, atol=1e-6)


def test_sinusoidal_base():
    sinusoidal = scheme("sinusoidal(base=100.0)", dim=4, head_dim=4)
    one = sinusoidal.embed(jnp.zeros((1, 1, 4)), places(1))[0, 0]
    np.testing.assert_allclose(one, [np.sin(1), np.cos(1), np.sin(0.1), np.cos(0.1)], rtol=1e-6)


def test_learned_adds_the_row_of_the_position():
    learned = scheme("learned", max_len=16)
    table = np.random.default_rng(0).normal(size=(16, 16))
    params = {"table": {"embedding": jnp.asarray(table, jnp.float32)}}
    x = jnp.ones((1, 3, 16))
    y = learned.apply({"params": params}, x, places(15, 0, 4), method="embed")
    np.testing.assert_allclose(y[0], 1 + table[[15, 0, 4]], rtol=1e-6)


# -------------------------------------------------------------------------- added to the scores


@pytest.mark.parametrize(
    ("heads", "expected"),
    [
        (1, [0.00390625]),
        (2, [0.0625, 0.00390625]),
        (4, [0.25, 0.0625, 0.015625, 0.00390625]),
        (6, [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125]),
        (8, [0.5, 0.25, 0.125, 0.0625, 0.03125, 0.015625, 0.0078125, 0.00390625]),
        (
            12,
            [
                *(0.5, 0.25, 0.125, 0.0625, 0.03125, 0.015625, 0.0078125, 0.00390625),
                *(0.70710678, 0.35355339, 0.1767767, 0.08838835),
            ],
        ),
    ],
)
def test_alibi_slopes(heads, expected):
    np.testing.assert_allclose(alibi_slopes(heads), expected, rtol=1e-7)


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        (3, [0.101536, 0.167405, 0.276004, 0.455054]),
        (1, [0.235004, 0.387456, 0.235004, 0.142537]),  # an encoder looks ahead as well
    ],
)
def test_alibi_weights_of_equal_scores(query, expected):
    """Head 0 of 8 has slope 0.5; values are unit vectors, so the output is the weights."""
    alibi = scheme("alibi", dim=32, heads=8, kv_heads=8)
    bias = alibi.bias(places(query), places(0, 1, 2, 3))
    np.testing.assert_array_equal(bias, alibi.bias(places(query + 9), places(9, 10, 11, 12)))
    q, k, v = jnp.zeros((1, 8, 1, 4)), jnp.ones((1, 8, 4, 4)), jnp.eye(4)[None, None]
    where = Where(jnp.ones((1, 1, 4), bool), bias_BHTS=bias)
    weights = einsum(q, k, jnp.broadcast_to(v, k.shape), where, 1.0, lambda p: p)
    np.testing.assert_allclose(weights[0, 0, 0], expected, atol=1e-6)


DISTANCES = [-128, -64, -16, -8, -1, 0, 1, 8, 16, 64, 128]  # key - query


@pytest.mark.parametrize(
    ("bidirectional", "expected"),
    [
        (True, [15, 14, 10, 8, 1, 0, 17, 24, 26, 30, 31]),
        (False, [31, 26, 16, 8, 1, 0, 0, 0, 0, 0, 0]),
    ],
)
def test_t5_buckets(bidirectional, expected):
    t5 = scheme("t5", bidirectional)
    np.testing.assert_array_equal(t5.bucket(places(*DISTANCES))[0], expected)
    far = t5.bucket(places(-129, -5000))[0]
    np.testing.assert_array_equal(far, [expected[0]] * 2)


def test_t5_buckets_where_the_logarithm_is_whole():
    """5 exact ones, then one for each doubling: 5 + log2(distance / 5)."""
    t5 = scheme("t5(buckets=10, max_distance=160)")
    got = t5.bucket(places(0, -4, -5, -9, -10, -20, -39, -40, -80, -160))[0]
    np.testing.assert_array_equal(got, [0, 4, 5, 5, 6, 7, 7, 8, 9, 9])


def test_t5_bias_is_the_entry_of_head_and_bucket():
    t5, table = scheme("t5(buckets=8, max_distance=16)"), np.arange(32.0).reshape(8, 4)
    variables = {"params": {"embedding": jnp.asarray(table, jnp.float32)}}
    bias = t5.apply(variables, places(5), places(5, 4, 3, 1), method="bias")
    np.testing.assert_array_equal(jnp.asarray(bias)[0, :, 0], table[[0, 1, 2, 4]].T)


def test_t5_refuses_options_that_do_not_go_together():
    with pytest.raises(SpecError, match="max_distance=8 must exceed half of buckets=16"):
        common.spec(position="t5(buckets=16, max_distance=8)")


def test_t5_has_one_table_for_each_side():
    params = abstract_params(common.spec(family="encoder_decoder", position="t5"))
    tables = [p for p, _ in jax.tree.leaves_with_path(params) if "position" in str(p)]
    names = [jax.tree_util.keystr(p, simple=True, separator="/") for p in tables]
    assert names == ["decoder/position/embedding", "encoder/position/embedding"]


@pytest.mark.parametrize("position", ["rope", "alibi", "t5"])
def test_cross_attention_knows_no_positions(position):
    """Moving the whole source changes nothing: not its encoding, nor how it is looked at."""
    model = common.spec(family="encoder_decoder", position=position)
    params, text, source = common.params(model), common.text(), common.source_for(model)
    assert source
    moved = Tokens(source.ids_BT, source.segments_BT, source.positions_BT + 6)
    a, b = (common.logits(model, params, text, s) for s in (source, moved))
    np.testing.assert_allclose(a, b, atol=1e-5)
