"""From token streams to batches: which tokens stand in which row, and which rows in which batch.

PACKINGS lay a stream out in rows of `seq_len` + 1 tokens; `train_feed` draws rows in an order that
is a function of the seed and the batch's number alone (order.py), so that going on after a stop
costs nothing; `eval_batches` goes once through a split. To add a packing, write a class with the
members of `Packing`.
"""

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Protocol

import numpy as np

from transformer.data.order import Order, Plan
from transformer.data.source import SOURCES
from transformer.data.store import Data, Stream, Training, tokenise
from transformer.data.tokens import BOS, PAD, TOKENIZERS, Vocabulary
from transformer.spec import Choice, Count, Must, Natural, Spec, SpecError, choice

Ahead = Annotated[Natural, Must("be at most 1000", lambda n: n <= 1000)]
Batch = dict[str, np.ndarray]
"""`tokens`, `segments` and `positions`, each int32 [B, T + 1], and `rows` [B], the row's number in
its split, -1 for one of padding. Of pairs also `source_tokens`, `source_segments` and
`source_positions` [B, S]; of labelled texts `labels` [B]."""

Shape = tuple[int, int]
"""Targets of a row and tokens of its source: T and S."""


class Packing(Protocol):
    """Lays a stream out in rows. Each token but the BOS is the target of exactly one row.

    Attributes:
      rows: how many there are.
      bounds: the first row of each part of a mixture, and the number of rows.
      shapes: those that batches may have; `shape` [rows] says which one a row is made for.
      multiple: rows of a batch are a multiple of it, where shapes differ.
      turns: whether rows can begin anywhere in the stream.
      cut: how many documents are longer than a row and lose their end.
    """

    rows: int
    bounds: tuple[int, ...]
    shapes: list[Shape]
    shape: np.ndarray
    multiple: int
    turns: bool
    cut: int

    def build(self, rows: np.ndarray, shifts: np.ndarray, shape: int = 0) -> Batch:
        """The given rows, int [B], below zero for a row of padding, in one of the shapes. `shifts`
        int [B] says by how many tokens the stream is turned, if it can be."""
        ...


class Windows:
    """Row w is tokens wT to wT + T of the stream, closed to a circle and turned by the shift.

    A document that crosses the border of two rows goes on in the second, whose first token is the
    last of the first. Segments number the documents of a row, positions restart with each. The
    other side of a pair, and labels, are left out.
    """

    turns, multiple, cut = True, 1, 0

    def __init__(self, stream: Stream, longest: Shape):
        self._flat, self._seq_len = stream.tokens, longest[0]
        self.rows = -(-len(stream.tokens) // self._seq_len)
        firsts = [int(stream.starts[document]) // self._seq_len for document in stream.parts]
        self.bounds = (*firsts, self.rows)
        self.shapes, self.shape = [longest], np.zeros(self.rows, np.int32)

    def build(self, rows: np.ndarray, shifts: np.ndarray, shape: int = 0) -> Batch:
        place = rows[:, None] * self._seq_len + np.arange(self._seq_len + 1)
        tokens = self._flat[(place + shifts[:, None]) % len(self._flat)].astype(np.int32)
        segments = (tokens == BOS).astype(np.int32)  # text never encodes to a special id
        segments[:, 0] = 1
        column = np.arange(self._seq_len + 1, dtype=np.int32)
        positions = column - np.maximum.accumulate(segments * column, axis=1)
        segments = np.cumsum(segments, axis=1, dtype=np.int32)
        # The last row ends where the first began.
        real = (place <= len(self._flat)) & (rows >= 0)[:, None]
        batch = {"tokens": tokens, "segments": segments, "positions": positions}
        return _blank(batch, real) | {"rows": rows.astype(np.int32)}


class Documents:
    """One document a row, padded; one of more than T + 1 tokens in pieces that share one token,
    the last of a piece being the first of the next, so that every target keeps its input. A pair
    or a labelled text has one row, and loses what is beyond it."""

    turns, multiple = False, 1

    def __init__(self, stream: Stream, longest: Shape):
        self._stream, self._stride = stream, longest[0]
        lengths = np.diff(stream.starts) - 1
        pieces, over = -(-lengths // longest[0]), np.zeros(len(lengths), bool)
        if stream.source is not None or stream.labels is not None:
            pieces, over = np.ones_like(lengths), lengths > longest[0]
        if stream.source is not None:
            over |= np.diff(stream.source.starts) > longest[1]
        self.cut = int(over.sum())
        self._first_row = np.concatenate([[0], np.cumsum(pieces)])
        self.rows = int(self._first_row[-1])
        self.bounds = (*(int(self._first_row[document]) for document in stream.parts), self.rows)
        self.shapes, self.shape = [longest], np.zeros(self.rows, np.int32)

    def build(self, rows: np.ndarray, shifts: np.ndarray, shape: int = 0) -> Batch:
        del shifts
        (T, S), exists = self.shapes[shape], rows >= 0
        document, skipped = self._place(np.maximum(rows, 0))
        batch = _laid(self._stream, document, skipped, T + 1, exists)
        batch["rows"] = rows.astype(np.int32)
        if self._stream.source is not None:
            other = _laid(self._stream.source, document, np.zeros_like(rows), S, exists)
            batch |= {f"source_{name}": a for name, a in other.items()}
        if self._stream.labels is not None:
            batch["labels"] = (self._stream.labels[document] * exists).astype(np.int32)
        return batch

    def _place(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The document of each row, and how many of its tokens stand in rows before."""
        document = np.searchsorted(self._first_row, rows, side="right") - 1
        return document, (rows - self._first_row[document]) * self._stride


class Buckets(Documents):
    """As `documents`, rows of about the same length in one batch, with about the same number of
    tokens in every batch: batch_size * seq_len, rounded down to a multiple of rows. One program is
    compiled for each bucket; the lengths are those that leave the least padding."""

    def __init__(self, stream: Stream, longest: Shape, buckets: Count = 8, multiple: Count = 8):
        super().__init__(stream, longest)
        self.multiple = multiple
        document, skipped = self._place(np.arange(self.rows))
        targets = np.minimum(np.diff(stream.starts)[document] - 1 - skipped, longest[0])
        others = np.zeros_like(targets)
        if stream.source is not None:
            others = np.minimum(np.diff(stream.source.starts)[document], longest[1])
        length = np.maximum(targets, others)
        self.shape = np.searchsorted(_edges(length, buckets), length)
        self.shapes = [
            (int(targets[self.shape == i].max()), int(others[self.shape == i].max()))
            for i in range(self.shape.max() + 1)
        ]


PACKINGS = {"windows": Windows, "documents": Documents, "buckets": Buckets}


@dataclasses.dataclass(frozen=True)
class DataSpec(Spec):
    """What to train and evaluate on, and how it is cut into batches."""

    source: Choice = choice(SOURCES, "shakespeare")
    tokenizer: Choice = choice(TOKENIZERS, "bytes")
    source_tokenizer: Choice | None = choice(TOKENIZERS, None)  # of the source of pairs; None: one
    # tokenizer for both sides, made from both
    batch_size: Count = 12  # rows of a training batch
    seq_len: Count = 256  # tokens a row predicts
    source_len: Count | None = None  # tokens of the source of a pair; None: seq_len
    packing: Choice = choice(PACKINGS, "windows")
    shuffle: bool = True
    prefetch: Ahead = 2  # batches made ahead of their use by a thread; 0: made when asked for

    @property
    def longest(self) -> Shape:
        return self.seq_len, self.source_len or self.seq_len

    def pack(self, stream: Stream) -> Packing:
        packing: Any = self.packing(stream, self.longest)
        return packing

    def batch_rows(self, packing: Packing, batch_size: int, multiple: int) -> list[int]:
        """Rows of a batch of each shape; of shapes that differ, so many that the tokens are about
        the same."""
        if len(packing.shapes) == 1:
            return [-(-batch_size // multiple) * multiple]
        tokens = batch_size * max(self.longest)
        return [max(1, tokens // max(shape) // multiple) * multiple for shape in packing.shapes]


def prepare(spec: DataSpec, workdir: Path, given: Vocabulary | None = None) -> Data:
    """The tokenised data of `spec` under `workdir`/data; made once, used again while the source's
    content and the vocabulary stay the same. SpecError for a source that cannot be read."""
    training = Training(spec.tokenizer, spec.source_tokenizer)
    return tokenise(spec.source(), training, Path(workdir).absolute() / "data", given)


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
    packing = spec.pack(stream)
    if len(packing.shapes) == 1 and packing.rows < spec.batch_size:
        raise SpecError(
            f"the training split has {len(stream.tokens)} tokens, which make {packing.rows} rows "
            f"of seq_len={spec.seq_len} ({spec.packing}); one batch needs "
            f"batch_size={spec.batch_size}: give more text, or make seq_len or batch_size smaller"
        )
    order = train_order(stream, packing, spec, seed)

    def make(index: int, part: slice = slice(None)) -> Batch:
        rows, shifts, shape = order(int(index))
        return packing.build(rows[part], shifts[part], shape)

    return make


def train_order(stream: Stream, packing: Packing, spec: DataSpec, seed: int) -> Order:
    """Which rows make up which training batch."""
    plan = Plan(packing.shape, spec.batch_rows(packing, spec.batch_size, packing.multiple))
    length = len(stream.tokens) if packing.turns else 1
    return Order(packing.bounds, stream.weights, plan, length, seed, spec.shuffle)


def eval_batches(
    data: Data, spec: DataSpec, split: str, batch_size: int, multiple: int = 1
) -> Iterator[Batch]:
    """The whole split once: each token but the BOS of the documents is a target exactly once,
    whatever the batch size, but for what a packing cuts. The rows of a batch are a multiple of
    `multiple`; rows of segment 0 fill it up."""
    packing = spec.pack(data.stream(split))
    plan = Plan(packing.shape, spec.batch_rows(packing, batch_size, multiple))
    return _in_order(packing, plan)


def _in_order(packing: Packing, plan: Plan) -> Iterator[Batch]:
    for rows, shape in plan(np.arange(packing.rows)):
        yield packing.build(rows, np.zeros_like(rows), shape)


def _laid(
    stream: Stream, document: np.ndarray, skipped: np.ndarray, width: int, exists: np.ndarray
) -> Batch:
    """A document a row from its token `skipped` on, padded or cut to `width`."""
    begin = stream.starts[document] + skipped
    place = begin[:, None] + np.arange(width)
    real = (place < stream.starts[document + 1][:, None]) & exists[:, None]
    tokens = stream.tokens[np.where(real, place, 0)].astype(np.int32)
    positions = np.broadcast_to(np.arange(width, dtype=np.int32), tokens.shape)
    batch = {"tokens": tokens, "segments": np.ones_like(tokens), "positions": positions}
    return _blank(batch, real)


def _blank(batch: Batch, real: np.ndarray) -> Batch:
    """`batch` with padding wherever `real` [B, T + 1] is false."""
    assert PAD == 0
    if not real.all():
        batch = {name: values * real for name, values in batch.items()}
    return {name: np.ascontiguousarray(values, np.int32) for name, values in batch.items()}


def _edges(lengths: np.ndarray, count: int) -> np.ndarray:
    """The longest lengths of at most `count` buckets that leave the least padding, found by dynamic
    programming over the lengths that occur."""
    known, rows = np.unique(lengths, return_counts=True)
    before = np.concatenate([[0], np.cumsum(rows)])
    longest = np.concatenate([[0], known]).astype(float)
    # cost[i, j]: positions in a bucket of the lengths i to j - 1, all as long as the longest.
    cost = np.triu((before[None, :] - before[:, None]) * longest[None])
    cost[np.tril_indices(len(before), -1)] = np.inf
    best, chosen = cost[0], []
    for _ in range(min(count, len(known)) - 1):
        total = best[:, None] + cost
        chosen.append(total.argmin(0))
        best = total.min(0)
    ends = [len(known)]
    for start in reversed(chosen):
        ends.append(int(start[ends[-1]]))
    return known[np.unique([end for end in ends if end]) - 1]
