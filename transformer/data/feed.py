"""From token streams to batches: which tokens stand in which row, and which rows in which batch.

PACKINGS lay a stream out in rows of `seq_len` + 1 tokens; `train_feed` draws rows in an order that
is a function of the seed and the batch's number alone, so that going on after a stop costs nothing;
`eval_batches` goes once through a split. To add a packing, write a class with `rows` and `build`.
"""

import dataclasses
import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Protocol

import numpy as np

from transformer.data.source import SOURCES
from transformer.data.store import Data, Stream, tokenise
from transformer.data.tokens import BOS, PAD, TOKENIZERS, Tokenizer
from transformer.spec import Choice, Count, Must, Natural, Spec, SpecError, choice

Ahead = Annotated[Natural, Must("be at most 1000", lambda n: n <= 1000)]
Batch = dict[str, np.ndarray]
"""`tokens`, `segments` and `positions`, each int32 [B, T + 1]."""


class Packing(Protocol):
    """Lays a stream out in rows. Each token but the BOS is the target of exactly one row."""

    rows: int

    def build(self, rows: np.ndarray, shifts: np.ndarray) -> Batch:
        """The given rows, int [B], below zero for a row of padding; `shifts` int [B] says by how
        many tokens the stream is turned, for a packing whose rows can begin anywhere."""
        ...


class Windows:
    """Row w is tokens wT to wT + T of the stream, closed to a circle and turned by the shift.

    A document that crosses the border of two rows goes on in the second, whose first token is the
    last of the first. Segments number the documents of a row, positions restart with each.
    """

    def __init__(self, stream: Stream, seq_len: int):
        self._flat, self._seq_len = stream.tokens, seq_len
        self.rows = -(-len(stream.tokens) // seq_len)

    def build(self, rows: np.ndarray, shifts: np.ndarray) -> Batch:
        place = rows[:, None] * self._seq_len + np.arange(self._seq_len + 1)
        tokens = self._flat[(place + shifts[:, None]) % len(self._flat)].astype(np.int32)
        segments = (tokens == BOS).astype(np.int32)  # text never encodes to a special id
        segments[:, 0] = 1
        column = np.arange(self._seq_len + 1, dtype=np.int32)
        positions = column - np.maximum.accumulate(segments * column, axis=1)
        segments = np.cumsum(segments, axis=1, dtype=np.int32)
        # The last row ends where the first began.
        return _blank(
            {"tokens": tokens, "segments": segments, "positions": positions},
            (place <= len(self._flat)) & (rows >= 0)[:, None],
        )


class Documents:
    """One document a row, padded; one of more than T + 1 tokens in pieces that share one token,
    the last of a piece being the first of the next, so that every target keeps its input."""

    def __init__(self, stream: Stream, seq_len: int):
        self._stream, self._seq_len = stream, seq_len
        lengths = np.diff(stream.starts)
        self._first_row = np.concatenate([[0], np.cumsum(-(-(lengths - 1) // seq_len))])
        self.rows = int(self._first_row[-1])

    def build(self, rows: np.ndarray, shifts: np.ndarray) -> Batch:
        del shifts
        flat, starts = self._stream.tokens, self._stream.starts
        document = np.searchsorted(self._first_row, np.maximum(rows, 0), side="right") - 1
        begin = starts[document] + (rows - self._first_row[document]) * self._seq_len
        place = begin[:, None] + np.arange(self._seq_len + 1)
        real = (place < starts[document + 1][:, None]) & (rows >= 0)[:, None]
        tokens = flat[np.where(real, place, 0)].astype(np.int32)
        column = np.arange(self._seq_len + 1, dtype=np.int32)
        positions = np.broadcast_to(column, tokens.shape)
        segments = np.ones_like(tokens)
        return _blank({"tokens": tokens, "segments": segments, "positions": positions}, real)


PACKINGS = {"windows": Windows, "documents": Documents}


@dataclasses.dataclass(frozen=True)
class DataSpec(Spec):
    """What to train and evaluate on, and how it is cut into batches."""

    source: Choice = choice(SOURCES, "shakespeare")
    tokenizer: Choice = choice(TOKENIZERS, "bytes")
    batch_size: Count = 12  # rows of a training batch
    seq_len: Count = 256  # tokens a row predicts
    packing: Choice = choice(PACKINGS, "windows")
    shuffle: bool = True
    prefetch: Ahead = 2  # batches made ahead of their use by a thread; 0: made when asked for


def prepare(spec: DataSpec, workdir: Path, tokenizer: Tokenizer | None = None) -> Data:
    """The tokenised data of `spec` under `workdir`/data; made once, used again while the source's
    content and the tokenizer stay the same. SpecError for a source that cannot be read."""
    return tokenise(spec.source(), spec.tokenizer, Path(workdir).absolute() / "data", tokenizer)


class Order:
    """Which rows make up training batch i: a function of (seed, i) alone.

    Epochs follow each other without a gap: batch i holds places iB to iB + B - 1 of the endless
    sequence of epochs, and a batch on the border takes rows of two. Each epoch has its own
    permutation of the rows and its own shift of the stream, or neither where `shuffle` is off.
    """

    def __init__(self, rows: int, length: int, batch_size: int, seed: int, shuffle: bool):
        self._rows, self._length, self._batch_size = rows, length, batch_size
        self._seed, self._shuffle = seed, shuffle
        # Two, for the batch on the border of two epochs.
        self._epoch = functools.lru_cache(maxsize=2)(self._draw)

    def __call__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Rows and shifts of batch `index`, both int64 [B]."""
        epoch, at = divmod(index * self._batch_size, self._rows)
        rows, shifts, missing = [], [], self._batch_size
        while missing:
            permutation, shift = self._epoch(epoch)
            rows.append(permutation[at : at + missing])
            shifts.append(np.full(len(rows[-1]), shift))
            missing -= len(rows[-1])
            epoch, at = epoch + 1, 0
        return np.concatenate(rows), np.concatenate(shifts)

    def _draw(self, epoch: int) -> tuple[np.ndarray, int]:
        if not self._shuffle:
            return np.arange(self._rows), 0
        # Raw bits, sorted: NumPy promises these for all its versions, unlike `permutation`.
        bits = np.random.Philox(np.random.SeedSequence([self._seed, epoch]))
        shift, *_ = bits.random_raw(1)
        order = np.argsort(bits.random_raw(self._rows), kind="stable")
        return order, int(shift) % self._length


def train_feed(data: Data, spec: DataSpec, seed: int):
    """Endless training batches: a grain iterator with `get_state`, `set_state` and `close`.

    The state is {"next_index": n}, n being the batch that `next` returns next: batches made ahead
    do not count, and `prefetch` may change. `set_state` does not make earlier batches again.
    SpecError when the training split does not fill one batch.
    """
    import grain  # half a second to import, which only training needs

    make = train_batches(data, spec, seed)
    batches = grain.MapDataset.range(sys.maxsize).map(make)
    options = grain.ReadOptions(
        num_threads=min(1, spec.prefetch), prefetch_buffer_size=spec.prefetch
    )
    return iter(batches.to_iter_dataset(options))


def train_batches(data: Data, spec: DataSpec, seed: int):
    """The function from a batch's number to the batch, which `train_feed` reads in order.

    `part` of it builds only those rows of the batch.
    """
    stream = data.stream("train")
    packing = spec.packing(stream, spec.seq_len)
    if packing.rows < spec.batch_size:
        raise SpecError(
            f"the training split has {len(stream.tokens)} tokens, which make {packing.rows} rows "
            f"of seq_len={spec.seq_len} ({spec.packing}); one batch needs "
            f"batch_size={spec.batch_size}: give more text, or make seq_len or batch_size smaller"
        )
    order = Order(packing.rows, len(stream.tokens), spec.batch_size, seed, spec.shuffle)

    def make(index: int, part: slice = slice(None)) -> Batch:
        rows, shifts = order(int(index))
        return packing.build(rows[part], shifts[part])

    return make


def eval_batches(data: Data, spec: DataSpec, split: str, batch_size: int) -> Iterator[Batch]:
    """The whole split once, in order: each token but the BOS of the documents is a target exactly
    once, whatever the batch size. The last batch is filled up with rows of segment 0."""
    packing = spec.packing(data.stream(split), spec.seq_len)
    return _in_order(packing, batch_size)


def _in_order(packing: Packing, batch_size: int) -> Iterator[Batch]:
    for start in range(0, packing.rows, batch_size):
        rows = np.arange(start, start + batch_size)
        rows = np.where(rows < packing.rows, rows, -1)
        yield packing.build(rows, np.zeros_like(rows))


def _blank(batch: Batch, real: np.ndarray) -> Batch:
    """`batch` with padding wherever `real` [B, T + 1] is false."""
    assert PAD == 0
    if not real.all():
        batch = {name: values * real for name, values in batch.items()}
    return {name: np.ascontiguousarray(values, np.int32) for name, values in batch.items()}
