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
BYTES = np.ones(24, np.int32)


def label(grid):
    return "-".join(map(str, grid.values()))


def batches(count=3):
    """Rows of very different lengths: a mean of means would be far off."""
    real = np.arange(129)[None] < np.asarray(LENGTHS)[:, None]
    for seed in range(count):
        ids = np.random.default_rng(seed).integers(4, 24, real.shape)
        place = np.broadcast_to(np.arange(129), real.shape)
        given = {"tokens": ids * real, "segments": real, "positions": place * real}
        yield {name: a.astype(np.int32) for name, a in given.items()}


def trained(mesh: Mesh, position: str):
    """Sums of three updates with dropout and accumulation, the parameters, and an evaluation."""
    model = common.spec(**WIDE, position=position, dropout=0.1, tie=False, init="lecun")
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.3, momentum=0.9))
    birth, objective = Birth(model, tx, mesh, 0), common.pick(OBJECTIVES, "causal_lm")()
    step = train_step(model, objective, tx, mesh, birth.shardings, BYTES, 0, accumulate=2)
    state, seen = birth.fresh(), []
    for batch in batches():
        state, sums = step(state, mesh.put_rows(batch))
        seen.append(jax.device_get(sums))
    evaluate = eval_step(model, objective, mesh, birth.shardings.params, BYTES)
    seen.append(jax.device_get(evaluate(state.params, mesh.put_rows(next(batches(1))))))
    return seen, jax.device_get(state.params)


@functools.cache
def on_one_device(position: str):
    return trained(Mesh(MeshSpec(), jax.devices()[:1]), position)


@pytest.mark.parametrize("grid", GRIDS, ids=label)
def test_training_does_not_depend_on_the_mesh(grid):
    position = "t5" if grid["layout"] == "tensor" else "rope"
    sums, params = on_one_device(position)
    got, got_params = trained(Mesh(parse(MeshSpec, grid)), position)
    assert float(sums[0]["loss"][1]) == sum(LENGTHS) - len(LENGTHS)
    for here, there in zip(sums, got, strict=True):
        for name, value in here.items():
            np.testing.assert_allclose(there[name], value, rtol=1e-5, err_msg=name)
    common.assert_trees_close(params, got_params, 1e-5)


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
