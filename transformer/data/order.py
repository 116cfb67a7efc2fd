"""Which rows make up training batch i: a function of (seed, i) alone.

`Deck` is the endless sequence of rows, epoch after epoch or a mixture by weights, in which any
place can be looked up. `Plan` divides rows among batches of one shape each. `Order` joins the two.
"""

import bisect
import functools
from collections.abc import Sequence

import numpy as np

from transformer.spec import SpecError

Rows = np.ndarray  # int64, -1 for a row of padding

_BLOCK = 4096  # places in which each part of a mixture has its share, to the nearest row


class Plan:
    """Divides rows among batches: `shape` [rows] says for which shape each is made, `sizes` how
    many rows a batch of each shape has. The last batch of a shape is filled up with padding."""

    def __init__(self, shape: np.ndarray, sizes: Sequence[int]):
        self.shape, self.sizes = shape, sizes

    def __call__(self, rows: Rows) -> list[tuple[Rows, int]]:
        batches = []
        for shape, size in enumerate(self.sizes):
            own = rows[self.shape[rows] == shape]
            filled = np.full(-(-len(own) // size) * size, -1, np.int64)
            filled[: len(own)] = own
            batches += [(part, shape) for part in filled.reshape(-1, size)]
        return batches


class Deck:
    """The endless sequence of rows.

    Each part (rows bounds[p] to bounds[p + 1]) has epochs of its own, each a new permutation. Of
    several parts, every block of 4096 places gives each its share of `weights`, in random order.
    """

    def __init__(self, bounds: Sequence[int], weights: Sequence[float], seed: int, shuffle: bool):
        self._first, self._sizes = bounds[:-1], np.diff(bounds)
        self._seed, self._shuffle = seed, shuffle
        share = np.asarray(weights) / sum(weights)
        self._quota = np.diff(np.round(np.cumsum([0.0, *share]) * _BLOCK).astype(int))
        for part in range(len(weights)):
            where = f"data.source: part {part + 1} of the mixture"
            if not self._sizes[part]:
                raise SpecError(f"{where} makes no row; give more text, or shorter rows")
            if not self._quota[part]:
                raise SpecError(
                    f"{where} has weight {weights[part]:g} of {sum(weights):g}; "
                    f"must be at least one row in {_BLOCK}"
                )
        # Two of each, for the batch on the border of two epochs or blocks.
        self._epoch = functools.lru_cache(maxsize=2 * len(weights))(self._draw)
        self._block = functools.lru_cache(maxsize=2)(self._mix)

    def __call__(self, start: int, count: int) -> tuple[Rows, np.ndarray]:
        """The rows at places start to start + count - 1, and the epoch of each, both [count]."""
        if len(self._first) == 1:
            return self._of(0, np.arange(start, start + count))
        rows, epochs = np.empty(count, np.int64), np.empty(count, np.int64)
        part, turn = self._parts(start, count)
        for p in range(len(self._first)):
            own = part == p
            rows[own], epochs[own] = self._of(p, turn[own])
        return rows, epochs

    def bits(self, epoch: int, *more: int):
        # Raw bits: NumPy promises these for all its versions, unlike `permutation`.
        return np.random.Philox(np.random.SeedSequence([self._seed, epoch, *more]))

    def _parts(self, start: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Of each place: whose turn it is, and which of its own it is."""
        found = []
        for block in range(start // _BLOCK, -(-(start + count) // _BLOCK)):
            part, turn = self._block(block)
            low, high = max(start - block * _BLOCK, 0), start + count - block * _BLOCK
            found.append((part[low:high], turn[low:high]))
        parts, turns = zip(*found, strict=True)
        return np.concatenate(parts), np.concatenate(turns)

    def _mix(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        part = np.repeat(np.arange(len(self._quota)), self._quota)
        turn = np.concatenate([np.arange(q) + block * q for q in self._quota])
        draws = self.bits(block, 2**32 - 1).random_raw(_BLOCK)
        order = np.argsort(draws, kind="stable")
        mixed = part[order]
        for p in range(len(self._quota)):  # a part's own rows keep their order
            order[mixed == p] = np.sort(order[mixed == p])
        return mixed, turn[order]

    def _of(self, part: int, turn: np.ndarray) -> tuple[Rows, np.ndarray]:
        epoch, at = np.divmod(turn, self._sizes[part])
        rows = np.empty(len(turn), np.int64)
        for e in np.unique(epoch):
            own = epoch == e
            rows[own] = self._epoch(part, int(e))[at[own]]
        return rows + self._first[part], epoch

    def _draw(self, part: int, epoch: int) -> np.ndarray:
        size = int(self._sizes[part])
        if not self._shuffle:
            return np.arange(size)
        bits = self.bits(epoch, *([part] if len(self._first) > 1 else []))
        bits.random_raw(1)  # the shift of the epoch
        return np.argsort(bits.random_raw(size), kind="stable")


class Order:
    """Batch i as its rows [B], by how many tokens the stream is turned for each, and its shape.

    With one shape, batch i holds places iB to iB + B - 1 of the deck, so that epochs follow each
    other without a gap. With several, as many rows as there are in all are drawn at a time and
    divided among batches, which come in random order.
    """

    def __init__(
        self,
        bounds: Sequence[int],
        weights: Sequence[float],
        plan: Plan,
        length: int,
        seed: int,
        shuffle: bool,
    ):
        self._deck, self._plan = Deck(bounds, weights, seed, shuffle), plan
        self._rows, self._shuffle = bounds[-1], shuffle
        self._length = length if len(weights) == 1 else 1  # the parts of a mixture stay in place
        self._starts = [0]  # the first batch of each draw
        self._draw = functools.lru_cache(maxsize=2)(self._divide)

    def __call__(self, index: int) -> tuple[Rows, np.ndarray, int]:
        if len(self._plan.sizes) == 1:
            (size,) = self._plan.sizes
            rows, epochs = self._deck(index * size, size)
            return rows, self._shifts(epochs), 0
        while self._starts[-1] <= index:
            self._starts.append(self._starts[-1] + len(self._draw(len(self._starts) - 1)))
        draw = bisect.bisect_right(self._starts, index) - 1
        rows, shape = self._draw(draw)[index - self._starts[draw]]
        return rows, np.zeros_like(rows), shape

    @property
    def batches(self) -> float:
        """How many make a pass over the rows."""
        if len(self._plan.sizes) == 1:
            return self._rows / self._plan.sizes[0]
        return len(self._draw(0))

    def _divide(self, draw: int) -> list[tuple[Rows, int]]:
        rows, _ = self._deck(draw * self._rows, self._rows)
        batches = self._plan(rows)
        if not self._shuffle:
            return batches
        bits = self._deck.bits(draw, 2**32 - 2).random_raw(len(batches))
        return [batches[i] for i in np.argsort(bits, kind="stable")]

    def _shifts(self, epochs: np.ndarray) -> np.ndarray:
        """By how much the stream, of so many tokens, is turned in each epoch."""
        if self._length == 1 or not self._shuffle:
            return np.zeros_like(epochs)
        found, place = np.unique(epochs, return_inverse=True)
        return np.array([int(self._deck.bits(e).random_raw()) % self._length for e in found])[place]
