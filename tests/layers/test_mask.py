"""Masks against tables written by hand, and the one place where padding and segments join."""

import common
import jax.numpy as jnp
import numpy as np
import pytest

from transformer.layers.attention import visible
from transformer.layers.base import Tokens
from transformer.layers.mask import MASKS, always_looks_ahead, horizon


def looked(text: str, queries, keys):
    q, k = jnp.asarray(queries)[:, None], jnp.asarray(keys)[None]
    return np.asarray(common.pick(MASKS, text)(q, k)).astype(int)


@pytest.mark.parametrize(
    ("mask", "queries", "expected"),
    [
        ("full", [3, 4], [[1, 1, 1, 1, 1], [1, 1, 1, 1, 1]]),
        ("causal", [3, 4], [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]),
        ("causal", [0], [[1, 0, 0, 0, 0]]),
        ("prefix(length=3)", [0, 3], [[1, 1, 1, 0, 0], [1, 1, 1, 1, 0]]),
        ("window(size=2)", [0, 3], [[1, 0, 0, 0, 0], [0, 0, 1, 1, 0]]),
        ("window(size=2, ahead=1)", [0, 3], [[1, 1, 0, 0, 0], [0, 0, 1, 1, 1]]),
    ],
)
def test_who_may_look_at_whom(mask, queries, expected):
    """With fewer queries than keys it is the positions that count, not the corners."""
    np.testing.assert_array_equal(looked(mask, queries, range(5)), expected)


@pytest.mark.parametrize("mask", MASKS)
def test_a_mask_is_the_same_for_numbers_and_arrays(mask):
    numbers = [[int(common.pick(MASKS, mask)(q, k)) for k in range(40)] for q in range(40)]
    np.testing.assert_array_equal(looked(mask, range(40), range(40)), numbers)


@pytest.mark.parametrize("mask", MASKS)
def test_every_query_sees_itself(mask):
    assert all(common.pick(MASKS, mask)(p, p) for p in (0, 1, 100, 10_000))


@pytest.mark.parametrize(
    ("mask", "expected"),
    [("causal", 1), ("window(size=4)", 1), ("prefix(length=3)", 3), ("prefix(length=1)", 1)],
)
def test_the_horizon_of_decoding(mask, expected):
    assert horizon(common.pick(MASKS, mask)) == expected
    assert not always_looks_ahead(common.pick(MASKS, mask))


@pytest.mark.parametrize("mask", ["full", "window(size=4, ahead=1)"])
def test_masks_that_no_decoder_can_have(mask):
    assert always_looks_ahead(common.pick(MASKS, mask))


def tokens(segments, positions) -> Tokens:
    segments, positions = (jnp.asarray([a], jnp.int32) for a in (segments, positions))
    return Tokens(segments, segments, positions)


@pytest.mark.parametrize(
    ("query", "key", "expected"),
    [
        # One query, five slots of a cache of which four are written.
        (([1], [3]), ([1, 1, 1, 1, 0], [0, 1, 2, 3, 0]), [[1, 1, 1, 1, 0]]),
        # Two documents in a row, then padding: a query of padding looks nowhere.
        (
            ([1, 1, 2, 2, 0], [0, 1, 0, 1, 2]),
            ([1, 1, 2, 2, 0], [0, 1, 0, 1, 2]),
            [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 1, 1, 0], [0] * 5],
        ),
    ],
)
def test_padding_and_segments_join_the_mask(query, key, expected):
    got = visible(common.pick(MASKS, "causal"), tokens(*query), tokens(*key))
    np.testing.assert_array_equal(got[0].astype(int), expected)


@pytest.mark.parametrize(
    ("real", "positions"),
    [([1, 1, 1], [0, 1, 2]), ([0, 0, 1, 1], [0, 0, 0, 1]), ([1, 1, 0], [0, 1, 1])],
)
def test_positions_of_a_padded_text(real, positions):
    text = Tokens.of(jnp.zeros((1, len(real)), jnp.int32), jnp.asarray([real]))
    np.testing.assert_array_equal(text.positions_BT[0], positions)
    np.testing.assert_array_equal(text.segments_BT[0], real)


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        # Of the first text two are shown, of the second one that stands last; then padding.
        (
            "causal",
            [
                [1, 1, 0, 0, 0, 0],
                [1, 1, 0, 0, 0, 0],
                [1, 1, 1, 0, 0, 0],
                [0, 0, 0, 1, 1, 0],
                [0, 0, 0, 1, 1, 0],
                [0, 0, 0, 0, 0, 0],
            ],
        ),
        (
            "window(size=1)",
            [
                [1, 1, 0, 0, 0, 0],
                [1, 1, 0, 0, 0, 0],
                [1, 1, 1, 0, 0, 0],
                [0, 0, 0, 1, 1, 0],
                [0, 0, 0, 0, 1, 0],
                [0, 0, 0, 0, 0, 0],
            ],
        ),
    ],
)
def test_what_is_shown_is_seen_by_its_own_segment(mask, expected):
    """Whatever the mask says; padding is seen by nobody, also where it is said to be shown."""
    segments = jnp.asarray([[1, 1, 1, 2, 2, 0]])
    place = jnp.asarray([[0, 1, 2, 0, 1, 0]])
    shown = jnp.asarray([[True, True, False, False, True, True]])
    text = Tokens(segments, segments, place, shown)
    got = visible(common.pick(MASKS, mask), text, text)
    np.testing.assert_array_equal(got[0].astype(int), expected)
    nobody = Tokens(segments, segments, place, jnp.zeros_like(shown))
    plain = Tokens(segments, segments, place)
    a, b = (visible(common.pick(MASKS, mask), t, t) for t in (nobody, plain))
    np.testing.assert_array_equal(a, b)
