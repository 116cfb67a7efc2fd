"""On eight devices, however they are arranged, training is that of one device."""

import functools
from typing import Any

import common
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from transformer.mesh import LAYOUTS, Mesh, MeshSpec
from transformer.model import FAMILIES
from transformer.objective import OBJECTIVES
from transformer.spec import parse
from transformer.state import Birth
from transformer.step import eval_step, train_step

WIDE = {"vocab": 24, "heads": 8, "kv_heads": 8, "head_dim": 2, "depth": 1, "max_len": 128}
# Eight heads let every layout give all its devices to its own axis.
GRIDS = [
    *({"layout": name} for name in LAYOUTS),
    *({"layout": name, "data": 2} for name in LAYOUTS if name != "data"),
    {"layout": "tensor", "data": 2, "fsdp": 2, "tensor": 2},
]
LENGTHS = [1, 2, 4, 8, 16, 32, 64, 128] * 2
LEXICON = common.lexicon(np.ones(24))
FEW = [3, 17, 1, 9, 2, 12, 17, 5] * 2


def label(grid):
    return "-".join(map(str, grid.values()))


def batches(count=3):
    """Rows of very different lengths: a mean of means would be far off."""
    real = np.arange(129)[None] < np.asarray(LENGTHS)[:, None]
    for seed in range(count):
        ids = np.random.default_rng(seed).integers(4, 24, real.shape)
        place = np.broadcast_to(np.arange(129), real.shape)
        given = {"tokens": ids * real, "segments": real, "positions": place * real}
        given["rows"] = np.arange(len(real))
        yield {name: a.astype(np.int32) for name, a in given.items()}


def everything(count=3):
    """As every objective can read it, shorter."""
    for seed in range(count):
        yield jax.device_get(common.everything(FEW, seed))


def trained(mesh: Mesh, objective: str, family: str, given, **options):
    """Sums of three updates with dropout and accumulation, the parameters, and an evaluation."""
    wide = WIDE | options | {"classes": 3 if objective == "classify" else None}
    model = common.spec(**wide, family=family, dropout=0.1, tie=False, init="lecun")
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.3, momentum=0.9))
    birth, chosen = Birth(model, tx, mesh, 0), common.pick(OBJECTIVES, objective)()
    step = train_step(model, chosen, tx, mesh, birth.shardings, LEXICON, 0, accumulate=2)
    state, seen = birth.fresh(), []
    for batch in given():
        state, sums = step(state, mesh.put_rows(batch))
        seen.append(jax.device_get(sums))
    evaluate = eval_step(model, chosen, mesh, birth.shardings.params, LEXICON)
    seen.append(jax.device_get(evaluate(state.params, mesh.put_rows(next(given(1))))))
    return seen, jax.device_get(state.params)


def assert_same(one, other):
    """Sums and parameters."""
    for here, there in zip(one[0], other[0], strict=True):
        for name, value in here.items():
            np.testing.assert_allclose(there[name], value, rtol=1e-5, err_msg=name)
    common.assert_trees_close(one[1], other[1], 1e-5)


ONE = MeshSpec(), jax.devices()[:1]


@functools.cache
def on_one_device(position: str):
    return trained(Mesh(*ONE), "causal_lm", "decoder", batches, position=position)


@pytest.mark.slow
@pytest.mark.parametrize("grid", GRIDS, ids=label)
def test_training_does_not_depend_on_the_mesh(grid):
    position = "t5" if grid["layout"] == "tensor" else "rope"
    alone = on_one_device(position)
    assert float(alone[0][0]["loss"][1]) == sum(LENGTHS) - len(LENGTHS)
    mesh = Mesh(parse(MeshSpec, grid))
    assert_same(alone, trained(mesh, "causal_lm", "decoder", batches, position=position))


# One family each, so that all three come up.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("objective", "family"),
    [(name, table.families[-1]) for name, table in OBJECTIVES.items() if name != "causal_lm"],
)
def test_no_objective_depends_on_the_mesh(objective, family):
    """Its draws neither: they belong to rows, wherever those are."""
    alone = trained(Mesh(*ONE), objective, family, everything, vocab=32)
    assert all(float(sums["loss"][1]) > 0 for sums in alone[0])
    for grid in ({"layout": "fsdp"}, {"layout": "tensor", "data": 2, "fsdp": 2}):
        mesh = Mesh(parse(MeshSpec, grid))
        assert_same(alone, trained(mesh, objective, family, everything, vocab=32))


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_the_same_split_and_whole(family):
    """Grouped keys, a scan and a gradient, over all three axes."""
    model = common.spec(family=family, vocab=24, scan=True, depth=3, position="rope | none")
    params, text = common.params(model), common.text(8)
    source = common.source_for(model, 8)
    mesh = Mesh(parse(MeshSpec, {"layout": "tensor", "data": 2, "fsdp": 2}))
    where = Birth(model, optax.sgd(1.0), mesh, 0).shardings.params

    def loss(params, text, source):
        logits: Any = model.build().apply({"params": params}, text, source)
        return jnp.square(logits).mean()

    alone = jax.jit(jax.value_and_grad(loss))(params, text, source)
    with mesh.on():
        split = jax.jit(jax.value_and_grad(loss), in_shardings=(where, mesh.rows, mesh.rows))
        got = jax.device_get(
            split(*jax.device_put((params, text, source), (where, mesh.rows, mesh.rows)))
        )
    common.assert_trees_close(alone, got, 1e-5)
