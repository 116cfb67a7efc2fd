"""Objectives: which targets count, and the values of the sums, computed by hand or with NumPy."""

from typing import Any

import common
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer.objective import OBJECTIVES, Example
from transformer.spec import SpecError

KEY = jax.random.key(0)
BYTES = jnp.ones(common.VOCAB, jnp.int32)


def batch(*rows, segments=None):
    """Rows of ids, padded on the right with zeros, one segment each unless given."""
    width = max(map(len, rows))
    segments = segments or [[1] * len(row) for row in rows]
    ids, segments = ([[*r, *[0] * (width - len(r))] for r in a] for a in (rows, segments))
    place = [[segment[:i].count(s) for i, s in enumerate(segment)] for segment in segments]
    names = ("tokens", "segments", "positions")
    return {
        n: jnp.asarray(a, jnp.int32) for n, a in zip(names, (ids, segments, place), strict=True)
    }


def example(batch, **options) -> Example:
    return common.pick(OBJECTIVES, "causal_lm")().example(batch, common.spec(**options), KEY)


def sums(logits, targets, weights=None, objective="causal_lm", bytes_=BYTES):
    """The sums of one row of logits [T, V]."""
    logits, targets = jnp.asarray(logits)[None], jnp.asarray(targets, jnp.int32)[None]
    weights = jnp.ones(targets.shape) if weights is None else jnp.asarray(weights)[None]
    no_text: Any = None
    shown = Example(no_text, None, targets, weights)
    return common.pick(OBJECTIVES, objective)().sums(logits, shown, bytes_)


# --------------------------------------------------------------------------- inputs and targets


@pytest.mark.parametrize(
    ("rows", "segments", "weights"),
    [
        # BOS 11 12 13 EOS, padded: the end of the text is a target, padding is none.
        ([[1, 11, 12, 13, 2, 0, 0]], [[1, 1, 1, 1, 1, 0, 0]], [1, 1, 1, 1, 0, 0]),
        # A real token with the id of padding counts; padding is told by its segment.
        ([[5, 0, 6, 0, 0, 0]], [[1, 1, 1, 1, 0, 0]], [1, 1, 1, 0, 0]),
        # The first token of a document is no target of the last one before it.
        ([[1, 7, 2, 1, 8, 2]], [[1, 1, 1, 2, 2, 2]], [1, 1, 0, 1, 1]),
        ([[0, 0, 0, 0]], [[0, 0, 0, 0]], [0, 0, 0]),
    ],
)
def test_targets_are_the_next_tokens_of_the_same_document(rows, segments, weights):
    shown = example(batch(*rows, segments=segments))
    np.testing.assert_array_equal(shown.text.ids_BT[0], rows[0][:-1])
    np.testing.assert_array_equal(shown.targets_BT[0], rows[0][1:])
    np.testing.assert_array_equal(shown.weights_BT[0], weights)


def test_targets_that_can_be_seen_do_not_count():
    """With a prefix of 3, the inputs at positions 0 and 1 see the next token."""
    shown = example(batch([4, 5, 6, 7, 8]), mask="prefix(length=3)")
    np.testing.assert_array_equal(shown.weights_BT[0], [0, 0, 1, 1])


def test_a_short_window_makes_no_target_of_the_next_document():
    """The window does not reach from position 3 to position 0, the segment alone tells."""
    segments = [[1, 1, 1, 1, 2, 2]]
    shown = example(batch([1, 7, 9, 2, 1, 8], segments=segments), mask="window(size=2)")
    np.testing.assert_array_equal(shown.weights_BT[0], [1, 1, 1, 0, 1])


def test_only_decoders_are_trained():
    class Run:
        model = common.spec(family="encoder")

    assert list(OBJECTIVES["causal_lm"].rules(Run)) == ["trains model.family=decoder, not encoder"]


# -------------------------------------------------------------------------------------- values


P = np.log([[0.1, 0.2, 0.4, 0.2, 0.1]])


@pytest.mark.parametrize(
    ("smoothing", "probabilities", "expected"),
    [
        (0.0, P, 0.916291),
        (0.1, P, 0.999468),  # spread over all five classes
        (0.0, np.zeros((1, 5)), 1.609438),  # ln 5, whatever the smoothing
        (0.1, np.zeros((1, 5)), 1.609438),
        (0.7, np.zeros((1, 5)), 1.609438),
    ],
)
def test_label_smoothing(smoothing, probabilities, expected):
    logits = jnp.asarray(probabilities, jnp.float32) + 3.0  # a constant changes nothing
    got = sums(logits, [2], objective=f"causal_lm(label_smoothing={smoothing})", bytes_=BYTES[:5])
    assert float(got["loss"][0]) == pytest.approx(expected, abs=1e-5)
    plain = sums(logits, [2], bytes_=BYTES[:5])
    assert float(got["nll"][0]) == pytest.approx(float(plain["loss"][0]), abs=1e-6)


def test_z_loss_is_the_squared_log_of_the_normaliser():
    got = sums(jnp.full((1, 5), 2.0), [0], objective="causal_lm(z_loss=0.01)", bytes_=BYTES[:5])
    assert float(got["loss"][0]) == pytest.approx(np.log(5) + 0.01 * (2 + np.log(5)) ** 2, abs=1e-5)
    assert float(got["nll"][0]) == pytest.approx(np.log(5), abs=1e-6)


def test_accuracy_and_bits_per_byte():
    """Two of three counted targets are the most probable; they stand for 1 + 2 + 3 bytes."""
    logits = jnp.log(jnp.asarray([[0.5, 0.25, 0.25], [0.2, 0.6, 0.2], [0.3, 0.4, 0.3], [1, 1, 1]]))
    bytes_ = jnp.asarray([1, 2, 3], jnp.int32)
    got = sums(logits, [0, 1, 2, 2], [1.0, 1.0, 1.0, 0.0], bytes_=bytes_)
    assert [float(x) for x in got["accuracy"]] == [2.0, 3.0]
    bits, weight = (float(x) for x in got["bits_per_byte"])
    assert bits == pytest.approx(-np.log2([0.5, 0.6, 0.3]).sum(), abs=1e-5)
    assert weight == 6.0


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_positions_without_weight_change_nothing(objective):
    rng = np.random.default_rng(0)
    logits, targets = rng.normal(size=(10, 7)), rng.integers(0, 7, 10)
    alone = sums(jnp.float32(logits[:3]), targets[:3], objective=objective, bytes_=BYTES[:7])
    logits[3:] *= 1e4
    padded = sums(jnp.float32(logits), targets, np.float32(np.arange(10) < 3), objective, BYTES[:7])
    common.assert_trees_close(alone, padded, 1e-6)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_no_target_at_all_is_zero_and_has_a_gradient_of_zero(objective):
    def loss(logits):
        return sums(logits, [0, 0], jnp.zeros(2), objective, BYTES[:5])["loss"][0]

    value, gradient = jax.value_and_grad(loss)(jnp.ones((2, 5)))
    assert value == 0
    np.testing.assert_array_equal(gradient, 0)


def test_texts_together_sum_to_the_texts_alone():
    model = common.spec()
    params, objective = (
        common.params(model),
        common.pick(OBJECTIVES, "causal_lm(label_smoothing=0.1)")(),
    )
    texts = [4, 5, 6], [7, 8, 9, 10, 11, 12, 13, 14, 15]

    def total(*rows):
        shown = objective.example(batch(*rows), model, KEY)
        return objective.sums(common.logits(model, params, shown.text), shown, BYTES)

    apart = jax.tree.map(jnp.add, *(total(text) for text in texts))
    together = total(*texts)
    assert together["loss"][1] == 2 + 8
    common.assert_trees_close(apart, together, 1e-5)


# ----------------------------------------------------------------------------------- precision


def test_cross_entropy_of_low_precision_logits_is_float32():
    logits = jnp.zeros((1, 50257), jnp.bfloat16)
    loss, _ = sums(logits, [17], bytes_=jnp.ones(50257, jnp.int32))["loss"]
    assert loss.dtype == jnp.float32
    assert float(loss) == pytest.approx(10.824905, abs=5e-4)


def test_a_sum_over_many_tokens_is_exact():
    """100,000 tokens of ln 3 each."""
    loss, count = sums(jnp.zeros((100_000, 3)), np.zeros(100_000), bytes_=BYTES[:3])["loss"]
    assert count == 100_000
    assert float(loss / count) == pytest.approx(np.log(3), rel=1e-4)


def test_the_gradient_is_softmax_minus_one_hot():
    logits = np.random.default_rng(0).normal(40.0, 3.0, (4, 9))
    targets = np.array([0, 3, 8, 1])
    gradient = jax.grad(lambda x: sums(x, targets, bytes_=BYTES[:9])["loss"][0])
    p = np.exp(logits - logits.max(-1, keepdims=True))
    expected = p / p.sum(-1, keepdims=True) - np.eye(9)[targets]
    np.testing.assert_allclose(gradient(jnp.float32(logits)), expected, atol=1e-5)


def test_options_out_of_range_are_refused():
    with pytest.raises(SpecError, match=r"label_smoothing: must lie in \[0, 1\)"):
        common.pick(OBJECTIVES, "causal_lm(label_smoothing=1.0)")
