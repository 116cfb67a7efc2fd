"""One update against updates computed by hand: clipping, accumulation, counting, empty batches."""

import dataclasses
from typing import Any

import common
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import struct

from transformer.mesh import Mesh, MeshSpec
from transformer.objective import OBJECTIVES
from transformer.state import Birth, State
from transformer.step import eval_step, train_step


@pytest.fixture(scope="module")
def mesh():
    return Mesh(MeshSpec(), jax.devices()[:1])


# ------------------------------------------------------- a linear model with a gradient by hand


@struct.dataclass
class Rows:
    x: Any
    segments_BT: Any


class Linear:
    """loss = sum over rows of weight * (x . w), so the gradient is the sum of weighted rows."""

    def build(self):
        return self

    def apply(self, variables, text, source, rngs=None):
        return text.x @ variables["params"]["w"]

    @dataclasses.dataclass
    class Example:
        text: Any
        weights: Any
        source: Any = None

    def example(self, batch, model, key, lexicon):
        return self.Example(Rows(batch["x"], (batch["x"] != 0).astype(jnp.int32)), batch["weight"])

    def sums(self, scores, example, lexicon):
        return {"loss": ((scores * example.weights).sum(), example.weights.sum())}


def descend(mesh, tx, x, weight=None, accumulate=1, updates=1):
    """Final weights and the sums of every update, from w = 0."""
    linear: Any = Linear()
    x = jnp.asarray(x, jnp.float32)
    weight = jnp.ones(len(x)) if weight is None else jnp.asarray(weight, jnp.float32)
    params = {"w": jnp.zeros(x.shape[1])}
    state = State(jnp.zeros((), jnp.int32), params, tx.init(params))
    step: Any = train_step(
        linear,
        linear,
        tx,
        mesh,
        mesh.replicated,
        common.LEXICON,
        0,
        accumulate,
    )
    seen = []
    for _ in range(updates):
        state, sums = step(state, {"x": x, "weight": weight})
        seen.append(jax.tree.map(float, sums))
    assert int(state.step) == updates
    return np.asarray(state.params["w"]), seen


SPANS = "span_corruption(rate=0.3, mean_span=1.0)"
CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0))


@pytest.mark.parametrize("accumulate", [1, 2])
def test_clipping_acts_once_on_the_whole_gradient(mesh, accumulate):
    """Micro-batches (2, 0) and (0, 2), one row each: the mean (1, 1) is clipped to norm 1."""
    w, (sums,) = descend(mesh, CLIPPED, [[2, 0], [0, 2]], accumulate=accumulate)
    np.testing.assert_allclose(w, [-0.707107, -0.707107], atol=1e-6)
    assert sums["grad_norm"] == pytest.approx((2**0.5, 1))  # before clipping
    assert sums["update_norm"] == pytest.approx((1, 1))


@pytest.mark.parametrize("accumulate", [1, 2, 4])
def test_the_gradient_is_a_mean_over_targets_not_over_micro_batches(mesh, accumulate):
    x, weight = [[1, 0], [0, 1], [2, 2], [5, 1]], [1, 10, 0, 3]
    w, (sums,) = descend(mesh, optax.sgd(1.0), x, weight, accumulate)
    np.testing.assert_allclose(w, [-16 / 14, -13 / 14], rtol=1e-6)
    assert sums["loss"] == (0.0, 14.0)


@pytest.mark.parametrize("accumulate", [1, 4])
def test_a_schedule_counts_updates(mesh, accumulate):
    tx = optax.sgd(lambda count: 0.5 * (1 + jnp.cos(jnp.pi * jnp.float32(count) / 10)))
    _, sums = descend(mesh, tx, [[1.0]] * 4, accumulate=accumulate, updates=10)
    rates = [0.5 * (1 + np.cos(np.pi * count / 10)) for count in range(10)]
    np.testing.assert_allclose([s["update_norm"][0] for s in sums], rates, atol=1e-6)


def test_a_batch_without_targets_changes_nothing(mesh):
    w, (sums,) = descend(mesh, CLIPPED, [[3, 4], [1, 1]], [0, 0])
    np.testing.assert_array_equal(w, 0)
    assert sums["loss"] == (0.0, 0.0)
    assert sums["grad_norm"] == (0.0, 1.0)


def test_an_empty_micro_batch_changes_nothing(mesh):
    half = descend(mesh, CLIPPED, [[3, 4]], [2])
    both = descend(mesh, CLIPPED, [[3, 4], [9, 9]], [2, 0], accumulate=2)
    np.testing.assert_allclose(half[0], both[0], rtol=1e-6)
    assert half[1][0]["grad_norm"] == pytest.approx(both[1][0]["grad_norm"])


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_share_of_padding(mesh, accumulate):
    """Here a zero is padding: three of eight."""
    _, (sums,) = descend(mesh, CLIPPED, [[3, 4], [0, 1], [0, 0], [2, 2]], accumulate=accumulate)
    assert sums["padding"] == (3.0, 8.0)


# ------------------------------------------------------------------------------- a real decoder


def batch(rows=4, length=9, lengths=None, seed=0):
    return common.everything([length] * rows if lengths is None else lengths, seed)


def trained(
    mesh, batches, accumulate=1, seed=0, objective="causal_lm", family=None, rate=0.1, **options
):
    """Parameters and sums after one update for each batch."""
    model = common.learner(objective, family, **{"depth": 1} | options)
    tx, chosen = optax.sgd(rate), common.pick(OBJECTIVES, objective)()
    birth = Birth(model, tx, mesh, seed)
    step = train_step(model, chosen, tx, mesh, birth.shardings, common.LEXICON, seed, accumulate)
    state, all_sums = birth.fresh(), []
    for given in batches:
        state, sums = step(state, given)
        all_sums.append(sums)
    return state.params, all_sums


def test_accumulation_is_a_matter_of_memory_only(mesh):
    batches = [batch(lengths=[9, 2, 1, 5]), batch(seed=1)]
    whole, split = (trained(mesh, batches, n) for n in (1, 4))
    common.assert_trees_close(whole, split, 1e-5)
    assert [float(s["loss"][1]) for s in whole[1]] == [8 + 1 + 0 + 4, 4 * 8]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("objective", "family"),
    [
        ("prefix_lm", "decoder"),
        ("masked_lm(rate=0.5)", "encoder"),
        ("span_corruption", "encoder_decoder"),
        ("seq2seq", "encoder_decoder"),
        ("classify", "encoder"),
    ],
)
def test_accumulation_changes_no_draw(mesh, objective, family):
    """What is hidden of a row depends on the step and the row, not on the micro-batch."""
    batches = [batch(lengths=[9, 2, 7, 5])] * 2
    whole, split = (trained(mesh, batches, n, objective=objective, family=family) for n in (1, 2))
    common.assert_trees_close(whole, split, 1e-5)
    assert float(whole[1][0]["loss"][1]) > 0


@pytest.mark.parametrize(
    ("objective", "family"),
    [("masked_lm(rate=0.5)", "encoder"), ("prefix_lm", "decoder"), (SPANS, "decoder")],
)
def test_each_step_draws_anew_and_each_evaluation_the_same(mesh, objective, family):
    """With a rate of zero nothing is learnt, so that only the draws differ."""
    given = batch(lengths=[9, 9, 9, 9])
    params, sums = trained(mesh, [given] * 3, objective=objective, family=family, rate=0.0)
    assert len({float(s["nll"][0]) for s in sums}) == 3
    model = common.learner(objective, family, depth=1)
    chosen = common.pick(OBJECTIVES, objective)()
    evaluate = eval_step(model, chosen, mesh, mesh.replicated, common.LEXICON)
    a, b = evaluate(params, given), evaluate(params, given)
    common.assert_trees_close(a, b, 0.0)
    rows = jnp.asarray([2, 0, 3, 1])
    moved = evaluate(params, {name: a[rows] for name, a in given.items()})
    common.assert_trees_close(a, moved, 1e-5)


def test_dropout_differs_by_step_seed_and_micro_batch(mesh):
    """The same rows twice in a batch, the same batch twice: no loss is seen again."""
    same = jax.tree.map(lambda a: jnp.concatenate([a, a]), batch(1))
    losses = {}
    for accumulate, seed in ((1, 0), (2, 0), (1, 1)):
        _, sums = trained(mesh, [same, same], accumulate, seed, dropout=0.5)
        losses |= {(accumulate, seed, i): float(s["loss"][0]) for i, s in enumerate(sums)}
    assert len(set(losses.values())) == len(losses)
    again = trained(mesh, [same, same], dropout=0.5)[1]
    assert [float(s["loss"][0]) for s in again] == [losses[1, 0, 0], losses[1, 0, 1]]


def test_evaluation_drops_nothing_and_adds_up(mesh):
    """The sums of a batch are those of its rows, with dropout in the spec or without."""
    objective, given = common.pick(OBJECTIVES, "causal_lm")(), batch(lengths=[9, 3, 6, 1])
    on, off = common.spec(dropout=0.5), common.spec()
    params = common.params(off)
    steps = [eval_step(m, objective, mesh, mesh.replicated, common.LEXICON) for m in (on, off)]
    dropped, whole = (step(params, given) for step in steps)
    common.assert_trees_close(whole, dropped, 0.0)
    rows = [steps[1](params, {k: a[i : i + 1] for k, a in given.items()}) for i in range(4)]
    common.assert_trees_close(whole, jax.tree.map(lambda *a: sum(a[1:], a[0]), *rows), 1e-5)


def test_one_compilation_for_all_batches_of_a_shape(mesh, caplog):
    batches = [batch(lengths=lengths) for lengths in ([9, 9, 9, 9], [1, 2, 3, 9], [0, 0, 0, 9])]
    with jax.log_compiles(), caplog.at_level("WARNING", "jax"):
        trained(mesh, batches)
    compiled = [r for r in caplog.messages if "Finished XLA compilation of jit(update)" in r]
    assert len(compiled) == 1
