"""Optimizers and schedules against NumPy written from the papers' equations."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer import spec
from transformer.optim import OPTIMIZERS, SCHEDULES, build, decayed
from transformer.spec import SpecError

RNG = np.random.default_rng(0)
LAYERS = 3


def pick(table, text) -> Any:
    return spec.pick(table, text)


def layer():
    """Parameters or gradients of one layer: no two sizes alike, and a bias that begins at zero."""
    draw = lambda *shape: RNG.normal(size=shape).astype(np.float32)  # noqa: E731
    return {
        "attention": {"kernel": draw(6, 4), "bias": draw(4)},
        "norm": {"scale": 1 + draw(5)},
        "moe": {"kernel": draw(2, 5, 3), "bias": draw(2, 3)},  # of two experts
    }


def tree():
    rest = {
        "embed": {"embedding": RNG.normal(size=(7, 6)).astype(np.float32)},
        "head": {"kernel": RNG.normal(size=(6, 7)).astype(np.float32)},
        "classifier": {"kernel": RNG.normal(size=(6, 3)).astype(np.float32)},
    }
    return {f"layer_{i}": layer() for i in range(LAYERS)} | rest


def stacked(unscanned):
    """The same leaves as under a scan: one stack of layers."""
    layers = [unscanned[f"layer_{i}"] for i in range(LAYERS)]
    rest = {k: v for k, v in unscanned.items() if not k.startswith("layer_")}
    return rest | {"layers": jax.tree.map(lambda *a: np.stack(a), *layers)}


def optimizer(text, peak=0.1, clip=None):
    choice = pick(OPTIMIZERS, text)
    schedule = pick(SCHEDULES, f"constant(peak={peak})")
    return build(choice, schedule, steps=100, dim=16, clip=clip)[0]


def descend(tx, params, gradients):
    """The updates for a sequence of gradients, and the parameters after them."""
    params = jax.tree.map(jnp.asarray, params)
    state, updates = tx.init(params), []
    for g in gradients:
        u, state = jax.jit(tx.update)(jax.tree.map(jnp.asarray, g), state, params)
        params = jax.tree.map(jnp.add, params, u)
        updates.append(jax.tree.map(np.asarray, u))
    return updates, params


def matrix(seed=1, shape=(4, 3)):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


# ---------------------------------------------------------------------------------- schedules


@pytest.mark.parametrize(
    ("text", "values"),
    [  # count -> learning rate, by hand, for runs of 10 updates of a model of width 64
        ("constant(peak=2.0, warmup=4)", {0: 0.5, 1: 1.0, 3: 2.0, 4: 2.0, 9: 2.0}),
        ("constant(peak=2.0, warmup=0)", {0: 2.0, 9: 2.0}),
        (
            "linear(peak=1.0, warmup=2, end=0.0)",
            {0: 0.5, 1: 1.0, 2: 1.0, 6: 0.5, 9: 0.125, 10: 0.0},
        ),
        ("linear(peak=1.0, warmup=2, end=0.5)", {1: 1.0, 6: 0.75, 9: 0.5625, 20: 0.5}),
        ("cosine(peak=1.0, warmup=2, end=0.0)", {0: 0.5, 1: 1.0, 6: 0.5, 10: 0.0}),
        (  # a quarter of the way down: (1 + cos(pi/4)) / 2 = 0.853553
            "cosine(peak=2.0, warmup=2, end=0.1)",
            {1: 2.0, 4: 2 * (0.1 + 0.9 * 0.853553), 10: 0.2, 30: 0.2},
        ),
        # 64^-0.5 * min(n^-0.5, n * 4^-1.5) = min(n^-0.5, n / 8) / 8
        ("inverse_sqrt(warmup=4)", {0: 1 / 64, 1: 1 / 32, 3: 1 / 16, 8: 1 / 24, 15: 1 / 32}),
        ("inverse_sqrt(peak=0.5, warmup=4)", {0: 0.125, 3: 0.5, 8: 1 / 3, 15: 0.25}),
        (
            "wsd(peak=1.0, warmup=2, decay=0.4)",
            {0: 0.5, 1: 1.0, 6: 1.0, 7: 0.75, 8: 0.5, 9: 0.25, 10: 0.0},
        ),
        (
            "wsd(peak=1.0, warmup=2, decay=0.4, shape='sqrt', end=0.2)",
            {6: 1.0, 7: 0.6, 8: 1 - 0.8 * 0.5**0.5, 10: 0.2},
        ),
    ],
)
def test_schedule_values(text, values):
    schedule = pick(SCHEDULES, text)(10, 64)
    found = {count: float(schedule(count)) for count in values}
    assert found == pytest.approx(values, abs=1e-6)
    assert {count: float(schedule(np.int32(count))) for count in values} == found
    traced = jax.jit(schedule)(jnp.asarray(list(values), jnp.int32))
    np.testing.assert_allclose(traced, list(values.values()), atol=1e-6)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("warmup", [0, 1, 7, 50])
def test_a_schedule_warms_up_and_stays_finite(name, warmup):
    decay = ", decay=0.01" if name == "wsd" and warmup == 50 else ""
    steps = 51 if decay else 50
    rates = pick(SCHEDULES, f"{name}(peak=3.0, warmup={warmup}{decay})")(steps, 64)(jnp.arange(50))
    assert np.isfinite(rates).all() and (rates >= 0).all()
    if warmup:
        np.testing.assert_allclose(
            rates[:warmup], 3.0 * np.arange(1, warmup + 1) / warmup, rtol=1e-6
        )


def test_the_count_of_a_schedule_is_that_of_updates():
    """Four updates of 1, at learning rates 1/2, 1, 1 and then 3/4 on a straight line down to 0."""
    schedule = pick(SCHEDULES, "linear(peak=1.0, warmup=2)")
    tx, _ = build(pick(OPTIMIZERS, "sgd"), schedule, steps=6, dim=1, clip=None)
    one = {"bias": np.ones(1, np.float32)}
    updates, _ = descend(tx, one, [one] * 4)
    np.testing.assert_allclose([u["bias"][0] for u in updates], [-0.5, -1.0, -1.0, -0.75])


# --------------------------------------------------------------------------------- optimizers


def test_clipping_is_by_the_global_norm():
    gradient = {
        "a": {"bias": np.full(1, 2.0, np.float32)},
        "b": {"scale": np.full(1, 2.0, np.float32)},
    }
    (update,), _ = descend(optimizer("sgd", peak=1.0, clip=1.0), gradient, [gradient])
    np.testing.assert_allclose(jax.tree.leaves(update), -(0.5**0.5), rtol=1e-6)
    (small,), _ = descend(optimizer("sgd", peak=1.0, clip=9.0), gradient, [gradient])
    np.testing.assert_allclose(jax.tree.leaves(small), -2.0)


def test_sgd():
    """Momentum m <- mu m + g; Nesterov's step is mu m + g (Sutskever et al. 2013)."""
    p, g1, g2 = matrix(1), matrix(2), matrix(3)
    for nesterov in (False, True):
        m1 = g1
        m2 = 0.9 * m1 + g2
        steps = (g1 + 0.9 * m1, g2 + 0.9 * m2) if nesterov else (m1, m2)
        text = f"sgd(momentum=0.9, nesterov={nesterov})"
        updates, _ = descend(optimizer(text), {"kernel": p}, [{"kernel": g1}, {"kernel": g2}])
        for update, step in zip(updates, steps, strict=True):
            np.testing.assert_allclose(update["kernel"], -0.1 * step, rtol=1e-5, atol=1e-7)


def test_adamw():
    """Loshchilov & Hutter 2019, algorithm 2, with the schedule's rate in front of the decay."""
    p, gradients = matrix(1), [matrix(2), matrix(3)]
    expected, m, v = p.astype(np.float64), np.zeros_like(p), np.zeros_like(p)
    for t, g in enumerate(gradients, 1):
        m, v = 0.8 * m + 0.2 * g, 0.95 * v + 0.05 * g.astype(np.float64) ** 2
        adam = (m / (1 - 0.8**t)) / (np.sqrt(v / (1 - 0.95**t)) + 1e-3)
        expected = expected - 0.1 * (adam + 0.5 * expected)
    tx = optimizer("adamw(b1=0.8, b2=0.95, eps=1e-3, weight_decay=0.5)")
    _, after = descend(tx, {"kernel": p}, [{"kernel": g} for g in gradients])
    np.testing.assert_allclose(after["kernel"], expected, rtol=1e-5, atol=1e-6)


def test_lion():
    """Chen et al. 2023, algorithm 2: the step interpolates by b1, the momentum by b2."""
    p, gradients = matrix(1), [matrix(2), matrix(3)]
    expected, m = p.astype(np.float64), np.zeros_like(p, np.float64)
    for g in gradients:
        expected = expected - 0.1 * (np.sign(0.6 * m + 0.4 * g) + 0.5 * expected)
        m = 0.7 * m + 0.3 * g
    tx = optimizer("lion(b1=0.6, b2=0.7, weight_decay=0.5)")
    _, after = descend(tx, {"kernel": p}, [{"kernel": g} for g in gradients])
    np.testing.assert_allclose(after["kernel"], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("factored", [True, False])
def test_adafactor(factored):
    """Shazeer & Stern 2018, algorithm 4 (a matrix) and 5 (whatever is not factored): second moments
    decay by 1 - t^-0.8, the update is clipped to RMS 1 and scaled by max(RMS(parameter), 1e-3)."""
    p, gradients = matrix(1), [matrix(2), 5 * matrix(3)]
    rms = lambda a: np.sqrt(np.mean(np.square(a)))  # noqa: E731
    expected, row, column, full = p.astype(np.float64), 0.0, 0.0, 0.0
    for t, g in enumerate(gradients, 1):
        beta, square = 1 - t**-0.8, g.astype(np.float64) ** 2 + 1e-30
        row = beta * row + (1 - beta) * square.sum(1, keepdims=True)
        column = beta * column + (1 - beta) * square.sum(0, keepdims=True)
        full = beta * full + (1 - beta) * square
        second = row @ column / np.sum(row) if factored else full
        step = g / np.sqrt(second)
        step = step / max(1, rms(step))
        expected = expected - 0.1 * (max(rms(expected), 1e-3) * step + 0.5 * expected)
    tx = optimizer(f"adafactor(min_dim={1 if factored else 128}, weight_decay=0.5)")
    _, after = descend(tx, {"kernel": p}, [{"kernel": g} for g in gradients])
    np.testing.assert_allclose(after["kernel"], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shape", [(6, 4), (4, 6)])
def test_muon_orthogonalises(shape):
    """The step shares its singular vectors with the gradient, and its singular values, unlike the
    gradient's, lie in what five of Jordan's Newton-Schulz steps leave: 0.7 to 1.2, times
    sqrt(max(1, out / in))."""
    g = matrix(5, shape)
    (update,), _ = descend(optimizer("muon(weight_decay=0)"), {"kernel": g}, [{"kernel": g}])
    step = -update["kernel"] / 0.1 / np.sqrt(max(1, shape[1] / shape[0]))
    values = np.linalg.svd(step, compute_uv=False)
    assert values.min() > 0.6 and values.max() < 1.25
    u, s, vt = np.linalg.svd(g, full_matrices=False)
    assert s.max() / s.min() > 2, "a gradient that is far from orthogonal"
    off = u.T @ step @ vt.T
    np.testing.assert_allclose(off, np.diag(np.diag(off)), atol=1e-4)


def test_muon_routes_by_name():
    """The first step of Adam has entries of equal size, near its learning rate; Muon's has not."""
    params, gradient = tree(), tree()
    (update,), _ = descend(optimizer("muon(adam_ratio=0.5, weight_decay=0)"), params, [gradient])
    for path, u in jax.tree.leaves_with_path(update):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        by_adam = bool(np.allclose(np.abs(u), np.abs(u).max(), rtol=1e-3))
        assert by_adam == (
            not name.endswith("kernel") or name.startswith(("head", "classifier"))
        ), name


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("layout", [lambda t: t, stacked], ids=["unscanned", "scanned"])
def test_weight_decay_by_name(name, layout):
    """What decay adds, against the same step without it: -rate * decay * parameter."""
    params, gradient = layout(tree()), layout(tree())
    (plain,), _ = descend(optimizer(f"{name}(weight_decay=0)"), params, [gradient])
    (decaying,), _ = descend(optimizer(f"{name}(weight_decay=0.5)"), params, [gradient])
    for (path, p), a, b in zip(
        jax.tree.leaves_with_path(params),
        jax.tree.leaves(plain),
        jax.tree.leaves(decaying),
        strict=True,
    ):
        share = 0.05 if path[-1].key in ("kernel", "embedding") else 0.0
        np.testing.assert_allclose(b - a, -share * p, atol=1e-6, err_msg=f"{name} {path}")


def test_decayed_names():
    assert decayed(tree())["layer_1"] == {
        "attention": {"kernel": True, "bias": False},
        "norm": {"scale": False},
        "moe": {"kernel": True, "bias": False},
    }


@pytest.mark.parametrize(
    "text", [*OPTIMIZERS, "adafactor(min_dim=2)", "adafactor(min_dim=2, clip=None)", "sgd(0.9)"]
)
def test_layer_stacking_is_only_a_layout(text):
    text = "sgd(momentum=0.9)" if text == "sgd(0.9)" else text
    params, gradients = tree(), [tree(), tree(), tree()]
    alone, _ = descend(optimizer(text, clip=1.0), params, gradients)
    scanned, _ = descend(
        optimizer(text, clip=1.0), stacked(params), [stacked(g) for g in gradients]
    )
    for a, b in zip(alone, scanned, strict=True):
        jax.tree.map(
            lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-5, atol=1e-6), stacked(a), b
        )


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_goes_downhill_and_state_is_float32(name):
    """On a quadratic bowl, with every optimizer's defaults; the state holds no other floats."""
    params = jax.tree.map(jnp.asarray, tree())
    tx = optimizer(name, peak=1e-3, clip=1.0)
    state = tx.init(params)
    floats = {x.dtype for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.floating)}
    assert floats <= {jnp.dtype("float32")}
    height = lambda t: sum(jnp.sum(x**2) for x in jax.tree.leaves(t))  # noqa: E731
    after = descend(tx, params, [jax.tree.map(lambda x: 2 * x, params)])[1]
    assert height(after) < height(params)


def test_a_new_parameter_name_is_refused():
    with pytest.raises(SpecError, match="layer/gate: .*bias, embedding, kernel, scale"):
        decayed({"layer": {"gate": np.ones(3)}})


def test_nesterov_without_momentum_is_refused():
    choice = pick(OPTIMIZERS, "sgd(nesterov=True)")
    assert list(choice.rules(None)) == ["nesterov needs momentum above 0"]


@pytest.mark.parametrize("text", ["cosine(warmup=11)", "wsd(warmup=7, decay=0.4)"])
def test_a_run_too_short_for_its_schedule_is_refused(text):
    with pytest.raises(SpecError, match="take 11 updates, the run has 10"):
        build(pick(OPTIMIZERS, "sgd"), pick(SCHEDULES, text), 10, 64, None)
