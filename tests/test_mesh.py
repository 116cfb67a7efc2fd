"""Meshes and layouts: sizes, refusals with their numbers, and where everything lives."""

import common
import flax.linen as nn
import jax
import numpy as np
import optax
import pytest

from transformer.mesh import AXES, LAYOUTS, Mesh, MeshSpec
from transformer.model import FAMILIES
from transformer.spec import SpecError, parse
from transformer.state import Birth


def mesh(**options) -> Mesh:
    return Mesh(parse(MeshSpec, options))


def birth(on: Mesh, **options) -> Birth:
    return Birth(common.spec(**{"vocab": 24} | options), optax.adam(1e-3), on, 0)


@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        ({}, (8, 1, 1)),
        ({"layout": "fsdp"}, (1, 8, 1)),
        ({"layout": "fsdp", "data": 2}, (2, 4, 1)),
        ({"layout": "tensor"}, (1, 1, 8)),
        ({"layout": "tensor", "data": 2, "fsdp": 2}, (2, 2, 2)),
        ({"layout": "tensor", "data": 4, "fsdp": 1, "tensor": 2}, (4, 1, 2)),
    ],
)
def test_the_layouts_own_axis_takes_the_devices_that_are_left(options, sizes):
    assert mesh(**options).sizes == dict(zip(AXES, sizes, strict=True))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"data": 6}, r"data=6 \* fsdp=1 \* tensor=1 is not the number of devices, 8"),
        ({"data": 16}, r"data=16 \* fsdp=1 \* tensor=1 is not the number of devices, 8"),
        (
            {"layout": "fsdp", "data": 3, "fsdp": 2},
            r"data=3 \* fsdp=2 \* tensor=1 is not the number of devices, 8",
        ),
        ({"layout": "fsdp", "data": 3}, r"data=3 \* fsdp=2 \* tensor=1 is not the number"),
        ({"tensor": 2}, r"tensor=2: layout=data has no such axis"),
        ({"layout": "fsdp", "tensor": 2}, r"tensor=2: layout=fsdp has no such axis"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(options, message):
    with pytest.raises(SpecError, match=message):
        mesh(**options)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"vocab": 250}, "embed/embedding has 250 along vocab, which cannot be split over 4"),
        ({"heads": 6, "kv_heads": 2, "head_dim": 4}, "config.mesh: heads=6 cannot be split over 4"),
        ({"kv_heads": 2}, "config.mesh: kv_heads=2 cannot be split over 4 devices"),
        ({"ffn_dim": 26}, "ffn/up/kernel has 26 along ffn, which cannot be split over 4 devices"),
        ({"dim": 17, "head_dim": 4}, "has 17 along embed, which cannot be split over 2 devices"),
    ],
)
def test_what_the_mesh_does_not_divide_is_refused(model, message):
    grid = mesh(layout="tensor", fsdp=2, tensor=4)
    with pytest.raises(SpecError, match=message):
        birth(grid, **{"kv_heads": 4} | model)
    assert birth(grid, kv_heads=4).parameters > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"position": "t5", "norm": "layer"},
        {"position": "learned", "placement": "sandwich", "tie": False, "ffn": "gated"},
        {"scan": True, "depth": 3, "position": "rope | none"},
    ],
    ids=lambda o: o["position"],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_parameter_has_a_logical_name_for_each_axis(family, options):
    on = mesh()
    boxed = birth(on, family=family, **options).boxed
    leaves = jax.tree.leaves(boxed, is_leaf=lambda x: isinstance(x, nn.LogicallyPartitioned))
    assert leaves
    for leaf in leaves:
        assert isinstance(leaf, nn.LogicallyPartitioned)
        assert len(leaf.names) == leaf.value.ndim
        assert set(leaf.names) <= set(dict(on.rules))


def test_an_axis_without_a_rule_is_an_error():
    leaf = nn.LogicallyPartitioned(jax.ShapeDtypeStruct((4,), np.float32), ("nowhere",))
    with pytest.raises(SpecError, match="parameter w: unknown axis 'nowhere'"):
        mesh().refuse_indivisible({"w": leaf}, {})
    with pytest.raises(SpecError, match="parameter w has no logical axes"):
        mesh().refuse_indivisible({"w": jax.ShapeDtypeStruct((4,), np.float32)}, {})


GRIDS = [
    {},
    {"layout": "fsdp", "data": 2},
    {"layout": "tensor", "data": 2, "fsdp": 2},
]


@pytest.mark.parametrize("options", GRIDS, ids=lambda o: o.get("layout", "data"))
def test_a_fresh_state_lives_where_it_should_with_the_values_of_one_device(options):
    alone = Birth(common.spec(vocab=24), optax.adam(1e-3), Mesh(MeshSpec(), jax.devices()[:1]), 0)
    spread = birth(mesh(**options))
    state = spread.fresh()
    common.assert_trees_close(alone.fresh().params, jax.device_get(state.params), 1e-6)
    for leaf, sharding in zip(
        jax.tree.leaves(state), jax.tree.leaves(spread.shardings), strict=True
    ):
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
    moments = jax.tree.leaves(state.opt_state[0].mu)
    for leaf, moment in zip(jax.tree.leaves(state.params), moments, strict=True):
        assert moment.sharding.is_equivalent_to(leaf.sharding, leaf.ndim)


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({}, {"query": (1, 1), "up": (1, 1), "embedding": (1, 1)}),
        ({"layout": "fsdp", "data": 2}, {"query": (4, 1), "up": (4, 1), "embedding": (1, 4)}),
        (
            {"layout": "tensor", "data": 2, "fsdp": 2},
            {"query": (2, 2), "up": (2, 2), "out": (2, 2), "down": (2, 2), "embedding": (2, 2)},
        ),
    ],
    ids=LAYOUTS,
)
def test_parameters_are_split_as_the_layout_says(options, parts):
    params = birth(mesh(**options)).abstract.params
    block = params["decoder"]["block_0"]
    leaves = {name: part["kernel"] for name, part in (block["attention"] | block["ffn"]).items()}
    leaves["embedding"] = params["embed"]["embedding"]
    for name, expected in parts.items():
        shard = leaves[name].sharding.shard_shape(leaves[name].shape)
        assert tuple(n // m for n, m in zip(leaves[name].shape, shard, strict=True)) == expected


@pytest.mark.parametrize("options", GRIDS, ids=lambda o: o.get("layout", "data"))
def test_a_batch_is_split_by_rows(options):
    on = mesh(**options)
    rows = on.put_rows({"tokens": np.arange(16).reshape(8, 2)})["tokens"]
    assert on.batch_shards == {"data": 8, "fsdp": 8, "tensor": 4}[options.get("layout", "data")]
    assert {s.data.shape for s in rows.addressable_shards} == {(8 // on.batch_shards, 2)}
