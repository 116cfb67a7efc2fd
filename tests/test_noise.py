"""Which tokens are hidden: shares, compositions and cuts, counted or in plain Python."""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer import noise

KEYS = jax.random.split(jax.random.key(0), 4000)


def all_true(n):
    return jnp.ones(n, bool)


@functools.partial(jax.jit, static_argnums=(1, 2))
def spans(eligible_T, rate, mean_span, keys=KEYS):
    """[keys, T]"""
    return jax.vmap(lambda k: noise.spans(k, eligible_T, rate, mean_span))(keys)


def runs(span_T):
    """Lengths of the hidden spans and of what is kept before each, and their numbers."""
    hidden, kept, numbers, free = [], [], [], 0
    for i, span in enumerate(span_T):
        if span == 0:
            free += 1
        elif i and span_T[i - 1] == span:
            hidden[-1] += 1
        else:
            hidden, kept, numbers, free = [*hidden, 1], [*kept, free], [*numbers, int(span)], 0
    return tuple(hidden), tuple(kept), numbers


# ------------------------------------------------------------------------------ tokens and words


def test_tokens_are_hidden_on_their_own_where_they_may_be():
    eligible = jnp.asarray([True, False, True, True, False, True])
    got = np.asarray(jax.vmap(lambda k: noise.tokens(k, eligible, 0.3))(KEYS))
    assert not got[:, [1, 4]].any()
    chosen = got[:, [0, 2, 3, 5]]
    np.testing.assert_allclose(chosen.mean(0), 0.3, atol=4 * (0.21 / 4000) ** 0.5)
    together = np.cov(chosen.T.astype(float)) - np.diag(chosen.var(0))
    assert np.abs(together).max() < 5 * 0.21 / 4000**0.5


@pytest.mark.parametrize(("rate", "share"), [(0.0, 0.0), (1.0, 1.0)])
def test_none_and_all(rate, share):
    eligible = jnp.arange(50) % 3 > 0
    for key in KEYS[:20]:
        for got in (
            noise.tokens(key, eligible, rate),
            noise.words(key, eligible, jnp.arange(50) % 2 == 0, rate),
        ):
            np.testing.assert_array_equal(got, eligible if share else np.zeros(50, bool))


def test_a_word_is_hidden_as_a_whole_however_long_it_is():
    """Words of 1, 3, 1, 2 and 5 tokens fill the row; one token of the last may not be hidden."""
    lengths = [1, 3, 1, 2, 5]
    begins = np.concatenate([[True] + [False] * (n - 1) for n in lengths])
    eligible = jnp.asarray([True] * 11 + [False])
    got = jax.vmap(lambda k: noise.words(k, eligible, jnp.asarray(begins), 0.4))(KEYS)
    got, first = np.asarray(got), np.flatnonzero(begins)
    of_word = got[:, first]
    np.testing.assert_array_equal(got[:, :11], np.repeat(of_word, lengths, 1)[:, :11])
    assert not got[:, 11].any()
    np.testing.assert_allclose(of_word.mean(0), 0.4, atol=4 * (0.24 / 4000) ** 0.5)


def test_as_many_words_as_tokens_have_draws_of_their_own():
    got = np.asarray(jax.vmap(lambda k: noise.words(k, all_true(6), all_true(6), 0.5))(KEYS))
    together = np.cov(got.T.astype(float)) - np.diag(got.var(0))
    assert np.abs(together).max() < 5 * 0.25 / 4000**0.5


# ----------------------------------------------------------------------------------------- spans


@pytest.mark.parametrize(
    ("n", "rate", "mean_span", "expected"),
    [
        (2, 0.15, 3.0, (1, 1)),  # at least one is hidden
        (3, 0.15, 3.0, (1, 1)),
        (16, 0.15, 3.0, (2, 1)),  # 2.4 -> 2, in 0.67 -> 1
        (512, 0.15, 3.0, (77, 26)),  # 76.8, in 25.67
        (568, 0.15, 3.0, (85, 28)),  # 85.2, in 28.33
        (10, 0.99, 3.0, (9, 1)),  # one is kept, so one span
        (4, 0.6, 1.0, (2, 2)),  # 2.4 hidden, one each
        (7, 0.6, 1.0, (4, 3)),  # 4.2 hidden; three are kept, so three spans
        (10, 0.5, 20.0, (5, 1)),  # at least one span
    ],
)
def test_sizes_by_hand(n, rate, mean_span, expected):
    for xp in (np, jnp):
        got = noise.span_sizes(xp.asarray(n, xp.int32), rate, mean_span, xp)
        assert tuple(map(int, got)) == expected


@pytest.mark.parametrize(("rate", "mean_span"), [(0.15, 3.0), (0.5, 1.0), (0.3, 7.5), (0.9, 2.0)])
def test_sizes_are_the_same_numbers_inside_a_program_and_outside(rate, mean_span):
    """There is room for what is drawn: never more than what was counted on."""
    n = np.arange(1, 5000, dtype=np.int32)
    outside = noise.span_sizes(n, rate, mean_span, np)
    inside = jax.jit(lambda n: noise.span_sizes(n, rate, mean_span))(jnp.asarray(n))
    for a, b in zip(outside, inside, strict=True):
        assert a.dtype == b.dtype == np.int32
        np.testing.assert_array_equal(a, b)
    hidden, count = (a[1:] for a in outside)  # of two tokens and more
    assert (np.abs(hidden - n[1:] * rate) <= 1).all()
    assert ((count >= 1) & (count <= hidden) & (count <= n[1:] - hidden)).all()


@pytest.mark.parametrize("n", [2, 3, 16, 40])
def test_spans_begin_after_a_kept_token_and_never_touch(n):
    hidden, count = {2: (1, 1), 3: (1, 1), 16: (5, 2), 40: (12, 6)}[n]  # 30 %, and half of that
    for span_T in np.asarray(spans(all_true(n), 0.3, 2.0, KEYS[:200])):
        lengths, kept, numbers = runs(span_T)
        assert numbers == [*range(1, count + 1)]
        assert sum(lengths) == hidden and sum(kept) == n - hidden, "the last span ends the text"
        assert min(kept) >= 1


def test_every_way_to_lay_spans_is_as_likely():
    """Eight tokens, four hidden in two spans: three ways to divide them, three for the others."""
    counts = collections.Counter(
        runs(span_T)[:2] for span_T in np.asarray(spans(all_true(8), 0.5, 2.0))
    )
    halves = [(1, 3), (2, 2), (3, 1)]
    assert set(counts) == {(a, b) for a in halves for b in halves}
    expected = len(KEYS) / 9
    assert sum((c - expected) ** 2 / expected for c in counts.values()) < 8 + 4 * 16**0.5


def test_nothing_is_hidden_of_a_single_token():
    for eligible in ([True, False], [False, False]):
        assert not spans(jnp.asarray(eligible), 0.5, 2.0, KEYS[:50]).any()


def test_a_span_ends_before_what_may_not_be_hidden():
    """The same draw over the tokens alone, put in their places; then each span is cut there."""
    eligible = np.ones(24, bool)
    eligible[[0, 6, 7, 15, 22, 23]] = False  # two begin and end the row
    whole = np.asarray(spans(all_true(18), 0.5, 3.0, KEYS[:100]))
    got = np.asarray(spans(jnp.asarray(eligible), 0.5, 3.0, KEYS[:100]))
    cut = 0
    for alone, span_T in zip(whole, got, strict=True):
        # `alone` was drawn for a row of another length, so only its kind can be compared.
        assert not span_T[~eligible].any()
        lengths, _, numbers = runs(span_T)
        planned = collections.Counter(alone[alone > 0].tolist())
        assert numbers == [*range(1, len(planned) + 1)], "each span keeps its first part"
        assert sum(lengths) <= 9
        cut += sum(lengths) < 9
        for number in numbers:
            columns = np.flatnonzero(span_T == number)
            assert (np.diff(columns) == 1).all(), "and nothing beyond the special token"
            end = columns[-1] + 1
            assert end == 24 or not eligible[end] or span_T[end] == 0
    assert 20 < cut < 100


def test_compacted_keeps_the_order():
    rng = np.random.default_rng(0)
    for width in (4, 9, 12):
        values, keep = rng.integers(0, 50, 9), rng.random(9) < 0.4
        kept = values[keep]
        got, filled = noise.compacted(jnp.asarray(values, jnp.int32), jnp.asarray(keep), width)
        n = min(len(kept), width)
        np.testing.assert_array_equal(got[:n], kept[:n])
        np.testing.assert_array_equal(filled, np.arange(width) < len(kept))
        assert not got[n:].any()
