"""No output depends on what it must not see: later tokens, padding, other segments, batch mates."""

import dataclasses
import functools

import common
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer.layers.base import Tokens
from transformer.layers.mask import MASKS, horizon
from transformer.layers.norm import NORMS
from transformer.layers.position import POSITIONS
from transformer.layers.residual import ORDERS, PLACEMENTS
from transformer.model import FAMILIES
from transformer.objective import OBJECTIVES

MASK_CASES = [*MASKS, "window(size=3)", "prefix(length=3)", "window(size=2) | causal"]
CASES = common.accepted(
    [{"family": family, "position": name} for family in common.DECODING for name in POSITIONS]
    + [{"mask": name} for name in MASK_CASES]
    + [{"placement": name} for name in PLACEMENTS]
    + [{"order": name} for name in ORDERS]
    + [{"norm": name} for name in NORMS]
)


@pytest.mark.parametrize("model", CASES)
def test_no_output_depends_on_a_later_token(model):
    first = max(horizon(mask) for mask in model.masks.entries)  # these see each other
    params, source = common.params(model), common.source_for(model)
    text = common.text(2, first + 6)
    whole = common.logits(model, params, text, source)
    for t in range(first, first + 6):
        changed = common.logits(model, params, common.replaced(text, t), source)
        np.testing.assert_allclose(whole[:, :t], changed[:, :t], atol=1e-6)
        assert jnp.abs(whole[:, t] - changed[:, t]).max() > 1e-3, "the test must see a change"


SHOWN = common.accepted(
    [{"position": name} for name in POSITIONS]
    + [{"mask": mask} for mask in ("window(size=3)", "prefix(length=2)", "window(size=2) | causal")]
)


@pytest.mark.parametrize("model", SHOWN)
def test_a_shown_prefix_is_seen_from_all_of_it_and_nothing_after(model):
    """Five tokens are shown in the first row, two in the second, in which a text stands before."""
    params, text = common.params(model), common.text(2, 9)
    segments = np.array([[1] * 9, [1] * 3 + [2] * 6])
    place = np.array([[*range(9)], [*range(3), *range(6)]])
    shown = np.array([[True] * 5 + [False] * 4, [False] * 3 + [True] * 2 + [False] * 4])
    ids, given = text.ids_BT, (jnp.asarray(segments), jnp.asarray(place), jnp.asarray(shown))
    text = Tokens(ids, *given)
    first = max(horizon(mask) for mask in model.masks.entries)
    whole = common.logits(model, params, text)
    for t in range(9):
        one = dataclasses.replace(text, ids_BT=ids.at[:, t].add(1) % common.VOCAB)
        reached = np.abs(common.logits(model, params, one) - whole).max(-1) > 1e-6
        for row, (begin, end) in enumerate([(0, 5), (3, 5)]):
            place_of_t = int(place[row, t])
            if begin <= t < end:
                seen = range(begin, 9)
            elif place_of_t < first:  # the mask's own prefix
                seen = range(t - place_of_t, 9)
            else:
                seen = range(t, 9)
            assert not reached[row, : seen[0]].any(), (row, t)
            assert not reached[row, segments[row] != segments[row, t]].any()
            assert reached[row, t]
            if begin <= t < end:
                assert reached[row, begin:end].all(), "from everywhere in the prefix"


@functools.partial(jax.jit, static_argnums=(0, 1))
def told(objective, model, params, batch, key):
    """What counts, and the logits for it."""
    example = objective().example(batch, model, key, common.LEXICON)
    logits = model.build().apply({"params": params}, example.text, example.source)
    return example.weights_BT, logits


def another(tokens, column):
    return tokens.at[:, column].set(4 + (tokens[:, column] + 5) % 19)  # never the same


ROWS = [[1, 4, 5, 6, 7, 8, 2, 1, 9, 10, 11, 2, 1, 12], [1, 13, 14, 15, 16, 17, 18, 19, 20, 2]]
SEGMENTS = [[1] * 7 + [2] * 5 + [3] * 2, [1] * 10]


@pytest.mark.parametrize("mask", ["causal", "window(size=3)", "prefix(length=3)"])
@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("causal_lm", "decoder"),
        ("prefix_lm", "decoder"),
        ("prefix_lm", "encoder_decoder"),
        ("seq2seq", "encoder_decoder"),
        ("seq2seq", "decoder"),
        ("seq2seq(show_source=True)", "decoder"),
    ],
)
def test_what_is_to_be_told_cannot_be_seen(name, family, mask):
    """Another token in its place changes nothing where it is predicted."""
    model, objective = common.learner(name, family, mask=mask), common.pick(OBJECTIVES, name)
    given = common.batch(ROWS, SEGMENTS) | common.batch([[1, 4, 5, 2], [1, 2]], side="source_")
    run = functools.partial(told, objective, model, common.params(model))
    changes = 0.0
    for key in jax.random.split(jax.random.key(0), 3):
        weights, whole = run(given, key)
        assert weights.sum() > 0
        offset = weights.shape[1] - (len(ROWS[0]) - 1)  # of a decoder's source
        for t in range(1, len(ROWS[0])):
            counted, other = run(given | {"tokens": another(given["tokens"], t)}, key)
            np.testing.assert_array_equal(counted, weights)
            at = offset + t - 1
            moved = jnp.abs(whole - other).max(-1)
            assert (moved[:, at] * weights[:, at]).max() < 1e-6, t
            changes = max(changes, float(moved.max()))
    assert changes > 1e-3, "the test must see a change"


def test_what_is_hidden_cannot_be_seen():
    name = "masked_lm(rate=0.4, mask=1.0, random=0.0)"
    model, objective = common.learner(name), common.pick(OBJECTIVES, name)
    given, key = common.batch(ROWS, SEGMENTS), jax.random.key(0)
    weights, whole = told(objective, model, common.params(model), given, key)
    for t in range(len(ROWS[0]) - 1):
        changed = given | {"tokens": another(given["tokens"], t)}
        _, other = told(objective, model, common.params(model), changed, key)
        moved = np.abs(whole - other).max((1, 2)) > 1e-6
        text = np.asarray(given["tokens"])[:, t] > 3
        np.testing.assert_array_equal(moved[text], np.asarray(weights)[text, t] == 0)


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("family", FAMILIES)
class TestStrangers:
    """One text alone, against the same text in company."""

    def setup(self, family, position):
        self.model = common.spec(family=family, position=position, depth=1)
        self.params = common.params(self.model)
        self.text, self.source = common.text(1, 5), common.source_for(self.model, 1)
        self.alone = self.run(self.text, self.source)

    def run(self, text, source):
        return common.logits(self.model, self.params, text, source)

    @pytest.mark.parametrize("left", [0, 3])
    def test_padding(self, family, position, left):
        self.setup(family, position)
        padded = _pad(self.text, left, 3 - left)
        source = self.source and _pad(self.source, left, 3 - left)
        got = self.run(padded, source)[:, left : left + 5]
        np.testing.assert_allclose(self.alone, got, atol=1e-5)

    def test_batch_mates(self, family, position):
        self.setup(family, position)
        both = _rows(self.text, common.text(1, 5, seed=3))
        source = self.source and _rows(self.source, common.text(1, 5, seed=4))
        np.testing.assert_allclose(self.alone[0], self.run(both, source)[0], atol=1e-5)

    def test_other_segments(self, family, position):
        self.setup(family, position)
        packed = _packed(common.text(1, 4, seed=3), self.text)
        source = self.source and _packed(common.text(1, 3, seed=4), self.source)
        np.testing.assert_allclose(self.alone, self.run(packed, source)[:, 4:], atol=1e-5)

    def test_a_row_of_padding_is_finite(self, family, position):
        self.setup(family, position)
        empty = Tokens.of(jnp.zeros((1, 5), jnp.int32), jnp.zeros((1, 5)))
        both = _rows(self.text, empty)
        source = self.source and _rows(self.source, empty)

        def loss(params):
            return jnp.square(common.logits(self.model, params, both, source)).sum()

        value, gradient = jax.value_and_grad(loss)(self.params)
        assert jnp.isfinite(value)
        assert all(jnp.isfinite(g).all() for g in jax.tree.leaves(gradient))


def test_shifting_all_positions_changes_nothing_for_relative_schemes():
    for position in ("rope", "alibi", "t5", "none"):
        model = common.spec(position=position)
        text = common.text()
        moved = dataclasses.replace(text, positions_BT=text.positions_BT + 5)
        a, b = (common.logits(model, common.params(model), t) for t in (text, moved))
        np.testing.assert_allclose(a, b, atol=1e-5)


def _pad(text: Tokens, left: int, right: int) -> Tokens:
    ids = jnp.pad(text.ids_BT, ((0, 0), (left, right)), constant_values=1)
    return Tokens.of(ids, jnp.pad(text.segments_BT, ((0, 0), (left, right))))


def _rows(*texts: Tokens) -> Tokens:
    return jax.tree.map(lambda *a: jnp.concatenate(a), *texts)


def _packed(first: Tokens, second: Tokens) -> Tokens:
    """Both in one row, as segments 1 and 2."""
    second = dataclasses.replace(second, segments_BT=second.segments_BT * 2)
    return jax.tree.map(lambda *a: jnp.concatenate(a, 1), first, second)
