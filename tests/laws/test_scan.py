"""The scan over layers is only a layout and remat only a matter of memory: values and gradients
stay the same."""

import functools
from typing import Any

import common
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer.layers.ffn import FFNS
from transformer.layers.norm import NORMS
from transformer.layers.position import POSITIONS
from transformer.layers.residual import ORDERS, PLACEMENTS
from transformer.model import FAMILIES, REMATS, stack, unstack
from transformer.state import abstract_params

pytestmark = pytest.mark.slow

CYCLES = {"position": "2*rope | none", "mask": "window(size=2) | causal"}  # a period of six
TABLES = {
    "position": POSITIONS,
    "placement": PLACEMENTS,
    "norm": NORMS,
    "ffn": FFNS,
    "order": ORDERS,
}
CASES = [
    *common.covering(TABLES),
    {"depth": 1},
    {"depth": 4, "position": "2*rope | none"},  # one period and a layer that remains
    {"depth": 5, "position": "rope | none", "mask": "window(size=2) | causal"},
    {"depth": 1, "position": "rope | none"},  # less than a period: nothing to scan
]


@functools.partial(jax.jit, static_argnums=0)
def value_and_gradient(model, params, key=None):
    text, source = common.text(), common.source_for(model)

    def loss(params):
        return jnp.square(common.logits(model, params, text, source, None, key)).mean()

    return jax.value_and_grad(loss)(params)


def label(options):
    return "-".join(map(str, options.values()))


@pytest.mark.parametrize("options", CASES, ids=label)
def test_scan_equals_loop(options):
    loop, scanned = (common.spec(**options, scan=scan) for scan in (False, True))
    params = common.params(loop)
    value, gradient = value_and_gradient(loop, params)
    got, of_stacked = value_and_gradient(scanned, stack(params, scanned))
    common.assert_trees_close(value, got, 1e-5)
    common.assert_trees_close(gradient, unstack(of_stacked), 1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_scan_equals_loop_in_every_family(family):
    deeper = {"encoder_depth": 3} if family == "encoder_decoder" else {}
    test_scan_equals_loop({"family": family, "position": "t5"} | deeper)


@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize("remat", [name for name in REMATS if name != "none"])
def test_remat_changes_nothing(remat, scan):
    """With dropout on: the recomputed masks are those of the first time."""
    options = {"depth": 3, "position": "rope | none", "scan": scan, "dropout": 0.3}
    plain, saving = (common.spec(**options, remat=name) for name in ("none", remat))
    params, key = common.params(plain), jax.random.key(5)
    a, b = (value_and_gradient(model, params, key) for model in (plain, saving))
    common.assert_trees_close(a, b, 1e-5)
    assert abs(a[0] - value_and_gradient(plain, params)[0]) > 1e-4, "dropout must be on"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("options", [{"depth": 3}, {"depth": 7, **CYCLES}], ids=label)
def test_a_layer_keeps_its_values_through_both_layouts(options, family):
    """Layer i is filled with i: it is stacked as row i // period and comes back bit for bit."""
    loop, scanned = (common.spec(family=family, **options, scan=scan) for scan in (False, True))

    def filled(path, leaf):
        layer = next((p.key for p in path if p.key.startswith("block_")), "block_-1")
        return np.full(leaf.shape, int(layer.removeprefix("block_")), np.float32)

    params = jax.tree.map_with_path(filled, abstract_params(loop))
    stacked = stack(params, scanned)
    shapes = jax.tree.map(lambda a: a.shape, abstract_params(scanned))
    assert jax.tree.map(np.shape, stacked) == shapes
    sides: Any = {"encoder", "decoder"} & set(stacked)
    for side in sides:
        period, whole = scanned.of(side).period, scanned.of(side).scanned
        for slot, block in stacked[side]["blocks"].items():
            rows = int(slot.removeprefix("block_")) + period * np.arange(whole)
            for leaf in jax.tree.leaves(block):
                np.testing.assert_array_equal(leaf.reshape(whole, -1)[:, 0], rows)
    common.assert_trees_close(params, unstack(stacked), 0.0)
    common.assert_trees_close(stacked, stack(unstack(stacked), scanned), 0.0)


def test_a_scanned_program_does_not_grow_with_depth():
    def lines(depth):
        model = common.spec(depth=depth, scan=True)
        params, text = abstract_params(model), common.text()
        traced = jax.make_jaxpr(lambda p: model.build().apply({"params": p}, text))(params)
        return len(str(traced).splitlines())

    assert lines(12) == lines(48)
