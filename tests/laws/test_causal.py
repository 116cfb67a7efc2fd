"""No output depends on what it must not see: later tokens, padding, other segments, batch mates."""

import dataclasses

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
