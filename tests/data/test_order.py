"""Which rows make up which batch: permutations, shares, and any batch without those before it."""

import itertools

import numpy as np
import pytest

from transformer.data.order import Deck, Order, Plan
from transformer.spec import SpecError

BLOCK = 4096


def one_shape(rows, size):
    return Plan(np.zeros(rows, int), [size])


def order_of(bounds, size=4, weights=(1.0,), length=1, seed=0, shuffle=True) -> Order:
    return Order(bounds, weights, one_shape(bounds[-1], size), length, seed, shuffle)


def drawn(order, batches):
    """Rows, shifts and shapes of the given batches."""
    rows, shifts, shapes = zip(*(order(i) for i in batches), strict=True)
    return np.concatenate(rows), np.concatenate(shifts), shapes


# ------------------------------------------------------------------------------ one part, one shape


def test_permutations_of_epochs_and_seeds():
    def epochs(seed):
        rows, shifts, _ = drawn(order_of((0, 20), length=1000, seed=seed), range(15))
        return rows.reshape(3, 20).tolist(), shifts[::20].tolist()

    rows, shifts = epochs(0)
    assert all(sorted(r) == list(range(20)) for r in rows)
    assert len({*map(tuple, rows)}) == 3 and len(set(shifts)) == 3
    assert (rows, shifts) == epochs(0)
    assert not {*map(tuple, rows)} & {*map(tuple, epochs(1)[0])}


def test_every_order_of_three_rows_comes_up():
    """In 1200 epochs each of the six about 200 times."""
    rows, _, _ = drawn(order_of((0, 3), 3), range(1200))
    found, counts = np.unique(rows.reshape(1200, 3), axis=0, return_counts=True)
    assert len(found) == 6
    assert np.square(counts - 200).sum() / 200 < 5 + 4 * 10**0.5


@pytest.mark.parametrize("weights", [(1.0,), (3.0, 1.0)])
def test_the_size_of_a_batch_cuts_the_same_sequence_elsewhere(weights):
    bounds = (0, 7) if len(weights) == 1 else (0, 3, 7)
    whole, _, _ = drawn(order_of(bounds, 1, weights), range(420))
    for size in (2, 3, 7, 20):
        rows, _, _ = drawn(order_of(bounds, size, weights), range(420 // size))
        np.testing.assert_array_equal(rows, whole[: len(rows)])


def test_a_batch_on_the_border_of_two_epochs_is_turned_by_both():
    rows, shifts, _ = drawn(order_of((0, 10), 4, length=1000), range(5))
    first, second = shifts[:10], shifts[10:]
    assert len(set(first)) == len(set(second)) == 1 and first[0] != second[0]
    assert sorted(rows[:10]) == sorted(rows[10:]) == list(range(10))
    shifts = drawn(order_of((0, 10), 4, length=7), range(500))[1]
    assert set(shifts) == set(range(7)), "every turn of the stream comes up"


def test_without_shuffling_rows_come_as_they_are():
    rows, shifts, _ = drawn(order_of((0, 10), 4, length=1000, shuffle=False), range(5))
    assert rows.tolist() == [*range(10), *range(10)] and not shifts.any()


# ------------------------------------------------------------------------------------- mixtures

BOUNDS, WEIGHTS = (0, 10, 13, 113), (5.0, 3.0, 2.0)
QUOTA = (2048, 1229, 819)  # 4096 times 0.5; to 0.8 of it, 3276.8; and the rest


@pytest.mark.parametrize("shuffle", [True, False])
def test_every_block_of_a_mixture_has_the_shares_it_should(shuffle):
    order = order_of(BOUNDS, 64, WEIGHTS, shuffle=shuffle)
    rows, _, _ = drawn(order, range(3 * BLOCK // 64))
    part = np.searchsorted(BOUNDS, rows, side="right") - 1
    for block in part.reshape(3, BLOCK):
        assert tuple(np.bincount(block)) == QUOTA
    # No more in a row than chance gives: the parts are mixed, not laid one after the other.
    longest = max(len([*group]) for _, group in itertools.groupby(part.tolist()))
    assert longest < 30
    assert (part[:BLOCK] != part[BLOCK : 2 * BLOCK]).any(), "each block is mixed anew"


@pytest.mark.parametrize("shuffle", [True, False])
def test_each_part_of_a_mixture_has_epochs_of_its_own(shuffle):
    rows, _, _ = drawn(order_of(BOUNDS, 64, WEIGHTS, shuffle=shuffle), range(3 * BLOCK // 64))
    for low, high in itertools.pairwise(BOUNDS):
        own, size = rows[(rows >= low) & (rows < high)], high - low
        epochs = own[: len(own) // size * size].reshape(-1, size)
        np.testing.assert_array_equal(
            np.sort(epochs, 1), np.tile(np.arange(low, high), (len(epochs), 1))
        )
        different = len(np.unique(epochs, axis=0))
        assert different == (1 if not shuffle else 6 if size == 3 else len(epochs))


def test_a_share_that_is_no_multiple_of_a_row_is_rounded():
    rows, _, _ = drawn(order_of((0, 5, 9), 4096, (2.0, 1.0)), range(1))
    assert (rows < 5).sum() == 2731  # 2730.67


def test_a_part_that_would_never_come_is_refused():
    with pytest.raises(SpecError, match="part 2 of the mixture has weight 1e-06 of 2; must be at"):
        order_of((0, 5, 9, 11), 4096, (1.0, 1e-6, 1.0))
    with pytest.raises(SpecError, match="part 1 of the mixture makes no row; give more text"):
        order_of((0, 0, 4), 4096, (1.0, 1.0))


def test_the_parts_of_a_mixture_stay_where_they_are_in_the_stream():
    _, shifts, _ = drawn(order_of((0, 5, 9), 4, (2.0, 1.0), length=1000), range(20))
    assert not shifts.any()


def test_a_seed_is_another_mixture():
    one, two, again = (
        drawn(order_of(BOUNDS, 64, WEIGHTS, seed=seed), range(10))[0] for seed in (0, 1, 0)
    )
    np.testing.assert_array_equal(one, again)
    assert (one != two).mean() > 0.5


# ------------------------------------------------------------------------------- shapes of batches

SHAPE = np.array([0, 1, 2, 1, 0, 1, 1, 0, 1, 1, 2, 1])  # 3 rows, 7 and 2
SIZES = (2, 3, 4)  # so 2 batches of the first shape, 3 of the second, one of the third


def test_a_plan_by_hand():
    batches = Plan(SHAPE, SIZES)(np.array([11, 2, 0, 4, 9, 1, 7, 3, 10, 8, 6, 5]))
    assert [(rows.tolist(), shape) for rows, shape in batches] == [
        ([0, 4], 0),
        ([7, -1], 0),
        ([11, 9, 1], 1),
        ([3, 8, 6], 1),
        ([5, -1, -1], 1),
        ([2, 10, -1, -1], 2),
    ]


def test_a_plan_of_rows_that_lack_a_shape():
    assert [shape for _, shape in Plan(SHAPE, SIZES)(np.array([1, 3]))] == [1]


def buckets(seed=0, shuffle=True, bounds=(0, 12), weights=(1.0,)) -> Order:
    return Order(bounds, weights, Plan(SHAPE, SIZES), 1, seed, shuffle)


@pytest.mark.parametrize("shuffle", [True, False])
def test_every_row_of_every_shape_comes_once_an_epoch(shuffle):
    order, orders = buckets(shuffle=shuffle), []
    assert order.batches == 6
    for epoch in range(8):
        made = [order(i) for i in range(6 * epoch, 6 * epoch + 6)]
        rows = np.concatenate([rows for rows, _, _ in made])
        assert sorted(rows[rows >= 0]) == list(range(12))
        for own, shifts, shape in made:
            assert len(own) == SIZES[shape] and not shifts.any()
            assert (SHAPE[own[own >= 0]] == shape).all()
        orders.append(tuple(shape for *_, shape in made))
        assert sorted(orders[-1]) == [0, 0, 1, 1, 1, 2]
    together = {frozenset(order(i)[0].tolist()) for i in range(48) if order(i)[2] == 1}
    if shuffle:
        assert len(set(orders)) > 4, "batches come in random order"
        assert len(together) > 6, "and rows in random company"
    else:
        assert set(orders) == {(0, 0, 1, 1, 1, 2)} and len(together) == 3


@pytest.mark.parametrize(
    "make",
    [
        lambda: order_of((0, 20), 4, length=100),
        lambda: order_of(BOUNDS, 64, WEIGHTS),
        buckets,
        lambda: buckets(bounds=(0, 5, 12), weights=(1.0, 2.0)),
    ],
    ids=["one", "mixture", "buckets", "mixed buckets"],
)
def test_any_batch_without_those_before_it(make):
    """As after a stop: a new order, asked for in any sequence, gives what the old one gave."""
    order = make()
    whole = [order(i) for i in range(150)]
    for start in (149, 3, 64, 0):
        late = make()
        for i in (start, max(start - 3, 0), start):
            for a, b in zip(whole[i], late(i), strict=True):
                np.testing.assert_array_equal(a, b)


def test_buckets_of_a_mixture_keep_its_shares():
    """As many rows as there are, twelve, are drawn at a time from the mixture."""
    order = buckets(bounds=(0, 5, 12), weights=(1.0, 3.0))
    rows, i = [], 0
    while len(rows) < BLOCK:
        rows += [row for row in order(i)[0].tolist() if row >= 0]
        i += 1
    deck, _ = Deck((0, 5, 12), (1.0, 3.0), 0, True)(0, BLOCK // 12 * 12)
    assert sorted(rows[: len(deck)]) == sorted(deck.tolist())
    assert np.mean(np.array(rows) < 5) == pytest.approx(0.25, abs=0.01)


def test_how_many_batches_make_a_pass():
    assert order_of((0, 10), 4).batches == 2.5
    assert buckets().batches == 6
