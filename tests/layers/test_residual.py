"""How sublayers join the residual stream: the wiring of every placement and order, the number of
norms, and DeepNorm's constants."""

from typing import Any

import common
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer.layers.base import INITS
from transformer.layers.norm import NORMS
from transformer.layers.residual import ORDERS, PLACEMENTS, deepnorm_constants
from transformer.model import FAMILIES
from transformer.state import abstract_params, init_params

X = np.random.default_rng(0).normal(size=(2, 3, 16))


def f(x):
    return 3 * x + 1


def norm(x):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6)


WIRING = {
    "none": X + f(X),
    "pre": X + f(norm(X)),
    "post": norm(X + f(X)),
    "sandwich": X + norm(f(norm(X))),
    "post_sublayer": X + norm(f(X)),
    "deepnorm": norm(4**0.25 * X + f(X)),  # a decoder of two layers: (2 * 2)^(1/4)
}


@pytest.mark.parametrize("name", WIRING)
def test_wiring(name):
    norm_of = common.pick(NORMS, "rms")
    placement = common.pick(PLACEMENTS, name)(common.spec(placement=name), norm_of)
    y, _ = placement.init_with_output(jax.random.key(0), jnp.asarray(X, jnp.float32), f)
    np.testing.assert_allclose(y, WIRING[name], atol=1e-5)


def test_orders():
    """Sublayers +1 and *2, in residuals of their own or in one."""
    sublayers = {"a": lambda x: x + 1, "b": lambda x: 2 * x}

    def around(name) -> Any:
        return lambda x, f: x + f(x)

    got = {name: order(jnp.float32(1), around, sublayers) for name, order in ORDERS.items()}
    assert got["sequential"] == 3.0 + 2 * 3.0
    assert got["parallel"] == 1.0 + (2.0 + 2.0)


N = 2
NORMS_IN = {  # norms of a layer with n sublayers, norms at the end of the stack
    "none": lambda n: (0, 0),
    "pre": lambda n: (n, 1),
    "post": lambda n: (n, 0),
    "sandwich": lambda n: (2 * n, 1),
    "post_sublayer": lambda n: (n, 1),
    "deepnorm": lambda n: (n, 0),
}


def norms(side) -> int:
    return sum("scale" in str(path) for path, _ in jax.tree.leaves_with_path(side))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("placement", NORMS_IN)
@pytest.mark.parametrize("family", FAMILIES)
def test_number_of_norms(family, placement, order):
    params = abstract_params(common.spec(family=family, placement=placement, order=order, depth=N))
    for side in {"encoder", "decoder"} & set(params):
        sublayers = 3 if family == "encoder_decoder" and side == "decoder" else 2
        layer, end = NORMS_IN[placement](1 if order == "parallel" else sublayers)
        assert norms(params[side]) == N * layer + end


@pytest.mark.parametrize(
    ("placement", "depends"),
    [("pre", False), ("post_sublayer", False), ("post", True), ("deepnorm", True)],
)
def test_silent_sublayers_leave_the_stream_to_the_placement(placement, depends):
    """With every output projection zero, only norms on the stream itself can change it."""
    model = common.spec(placement=placement, norm="rms", position="none")
    text = common.text()

    def silent(path, leaf):
        last = jax.tree_util.keystr(path, simple=True, separator="/")
        return leaf * 0 if "/out/" in last or "/down/" in last else leaf

    def other_norms(path, leaf):
        return leaf * 1.7 + 0.3 if "block" in str(path) and "scale" in str(path) else leaf

    params = jax.tree.map_with_path(silent, common.params(model))
    logits = common.logits(model, params, text)
    changed = common.logits(model, jax.tree.map_with_path(other_norms, params), text)
    assert bool(jnp.abs(logits - changed).max() > 1e-3) == depends
    if not depends:
        embedding = np.asarray(params["embed"]["embedding"], np.float64)
        stream = norm(embedding[text.ids_BT]) * np.asarray(params["decoder"]["final_norm"]["scale"])
        np.testing.assert_allclose(logits, stream @ embedding.T, atol=1e-4)


@pytest.mark.parametrize(
    ("options", "alpha", "beta"),
    [
        # Wang et al. 2022, table 1 with 24 layers: (2 * 24)^(1/4), (8 * 24)^(-1/4).
        ({"depth": 24}, 2.632148, 0.268642),
        ({"depth": 24, "family": "encoder"}, 2.632148, 0.268642),
    ],
)
def test_deepnorm_constants_of_one_stack(options, alpha, beta):
    model = common.spec(placement="deepnorm", **options)
    np.testing.assert_allclose(deepnorm_constants(model), (alpha, beta), rtol=1e-5)


def test_deepnorm_constants_of_two_stacks():
    """18 encoder and 6 decoder layers: 0.81 (18^4 * 6)^(1/16), 0.87 / that root; (3 * 6)^(1/4),
    (12 * 6)^(-1/4)."""
    model = common.spec(placement="deepnorm", family="encoder_decoder", depth=6, encoder_depth=18)
    encoder, decoder = (deepnorm_constants(model.of(side)) for side in ("encoder", "decoder"))
    np.testing.assert_allclose(encoder, (1.866112, 0.377630), rtol=1e-5)
    np.testing.assert_allclose(decoder, (2.059767, 0.343295), rtol=1e-5)


@pytest.mark.parametrize("init", INITS)
def test_deepnorm_starts_with_smaller_projections(init):
    """By beta = (8 * 4)^(-1/4) on values, outputs and the FFN, not on queries and keys."""
    options = {"dim": 64, "ffn_dim": 256, "kv_heads": None, "depth": 4, "init": init}

    def spreads(placement):
        block = init_params(common.spec(placement=placement, **options), 0)["decoder"]["block_0"]
        projections = block["attention"] | block["ffn"]
        return {role: float(jnp.std(p["kernel"].value)) for role, p in projections.items()}

    plain, deep = spreads("post"), spreads("deepnorm")
    gains = {role: deep[role] / plain[role] for role in plain}
    beta = 32**-0.25
    expected = {"query": 1, "key": 1, "value": beta, "out": beta, "up": beta, "down": beta}
    assert gains == pytest.approx(expected, rel=1e-4)


def test_deepnorm_scales_each_side_by_its_own_beta():
    """With 3 encoder and 2 decoder layers; cross-attention and gates are scaled as well."""

    def spreads(placement):
        model = common.spec(
            family="encoder_decoder", encoder_depth=3, ffn="gated", placement=placement
        )
        leaves = jax.tree.leaves_with_path(nn.unbox(init_params(model, 0)))
        named = {jax.tree_util.keystr(path, simple=True, separator="/"): a for path, a in leaves}
        return {name: float(a.std()) for name, a in named.items() if "kernel" in name}

    plain, deep = spreads("post"), spreads("deepnorm")
    betas = {"encoder": 0.87 * (3**4 * 2) ** (-1 / 16), "decoder": (12 * 2) ** -0.25}
    assert len(plain) == 3 * 7 + 2 * 11
    for name in plain:
        unscaled = "query" in name or "key" in name
        beta = 1.0 if unscaled else betas[name.split("/")[0]]
        assert deep[name] / plain[name] == pytest.approx(beta, rel=1e-4), name
