"""Counting updates and averaging their sums."""

import math

import jax.numpy as jnp
import pytest

from transformer import meter
from transformer.meter import Meter, NumericalFailure


def sums(loss, weight, **more):
    """Sums of an update with `weight` targets and a mean loss."""
    one = jnp.float32(1)
    pair = (jnp.float32(loss * weight), jnp.float32(weight))
    norms = {"grad_norm": (one, one), "update_norm": (one, one)}
    return (
        {"loss": pair, "nll": pair, "bits_per_byte": pair}
        | norms
        | {n: (jnp.float32(v), one) for n, v in more.items()}
    )


@pytest.fixture
def clock(monkeypatch):
    """A clock that only moves when told to."""
    now = [0.0]
    monkeypatch.setattr(meter.time, "perf_counter", lambda: now[0])
    return now


def test_means_are_weighted_by_targets():
    m = Meter(every=2)
    m.add(1, sums(2.0, 10))
    m.add(2, sums(5.0, 30, grad_norm=3.0))
    ((step, metrics),) = m.due()
    assert step == 2
    assert metrics["loss"] == pytest.approx((2 * 10 + 5 * 30) / 40)
    assert metrics["grad_norm"] == pytest.approx(2.0)
    assert metrics["perplexity"] == pytest.approx(math.exp(4.25))
    assert (metrics["tokens"], m.tokens, m.step, m.last) == (40, 40, 2, metrics)


def test_nothing_is_read_before_it_is_due():
    m = Meter(every=3)
    for step in range(1, 4):
        m.add(step, sums(1.0, 10))
        assert list(m.due(before=step)) == [] and m.tokens == 0
    m.add(4, sums(9.0, 10))
    ((step, metrics),) = m.due(before=4)
    assert (step, metrics["loss"], m.tokens) == (3, 1.0, 30)
    assert list(m.due()) == [], "the group of step 4 is not complete"
    assert (m.tokens, m.step) == (40, 4), "but it has been counted"
    m.add(5, sums(1.0, 10))
    m.add(6, sums(2.0, 10))
    ((step, metrics),) = m.due()
    assert (step, metrics["loss"]) == (6, pytest.approx(4.0))


def test_several_groups_at_once():
    m = Meter(every=2)
    for step in range(1, 6):
        m.add(step, sums(float(step), 1))
    assert [(n, x["loss"]) for n, x in m.due()] == [(2, 1.5), (4, 3.5)]


def test_time(clock):
    m = Meter(every=1, tokens=100, seconds=50.0, step=9)
    m.add(10, sums(1.0, 30))
    clock[0] = 10.0
    with m.paused():
        clock[0] = 1000.0
    clock[0] = 1005.0
    ((_, metrics),) = m.due()
    assert (metrics["seconds"], metrics["tokens"]) == (65.0, 130)
    assert metrics["tokens_per_second"] == pytest.approx(30 / 15)


@pytest.mark.parametrize("name", ["loss", "grad_norm", "update_norm"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_is_named(name, value):
    m = Meter(every=10)
    m.add(1, sums(1.0, 2))
    m.add(2, sums(1.0, 2) | {name: (jnp.float32(value), jnp.float32(1))})
    with pytest.raises(NumericalFailure, match=f"^{name} at step 2$"):
        list(m.due())
    assert (m.step, m.tokens) == (1, 2)
