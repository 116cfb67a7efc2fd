import itertools
import json
import multiprocessing
import subprocess
import sys
import time
from typing import Any

import numpy as np
import pytest

from transformer.data import feed, store
from transformer.data.corpus import LABELLED, PAIR, Mixture, Rows
from transformer.data.source import Source
from transformer.data.store import Data, Stream, Training
from transformer.data.tokens import ByteTokenizer, Vocabulary
from transformer.spec import SpecError, parse, pick

BOS, EOS = 1, 2
LENGTHS = [3, 0, 11, 1, 30, 7, 2]
MANY = [int(n) for n in np.random.default_rng(0).integers(0, 40, 90)]


def stream_of(lengths: list[int], **more: Any) -> Stream:
    """Documents of the given numbers of tokens, every token but the specials different."""
    flat, starts, token = [], [0], 4
    for n in lengths:
        flat += [BOS, *range(token, token + n), EOS]
        starts.append(len(flat))
        token += n
    return Stream(np.array(flat, np.uint16), np.array(starts), **more)


def data_with(stream: Stream, split: str = "train") -> Data:
    return Data(Vocabulary(ByteTokenizer()), "", {split: stream})


def data_of(lengths: list[int], split: str = "train") -> Data:
    return data_with(stream_of(lengths), split)


def spec_of(**options) -> feed.DataSpec:
    return parse(feed.DataSpec, {"batch_size": 3, "seq_len": 5} | options)


def pairs(batches) -> list[tuple[int, int]]:
    """(input, target) of every counting target, by the rule that the objective uses."""
    out = []
    for b in batches:
        for t, s in zip(b["tokens"], b["segments"], strict=True):
            out += [(int(t[i]), int(t[i + 1])) for i in range(len(t) - 1) if s[i] == s[i + 1] > 0]
    return out


def true_pairs(lengths: list[int]) -> list[tuple[int, int]]:
    out, token = [], 4
    for n in lengths:
        document = [BOS, *range(token, token + n), EOS]
        out += zip(document, document[1:])  # noqa: B905
        token += n
    return out


FIELDS = ("tokens", "segments", "positions")


def check_layout(batch, shape):
    """Segments and positions follow from the tokens, said in plain Python."""
    for name in FIELDS:
        assert batch[name].dtype == np.int32 and batch[name].shape == shape
        assert batch[name].flags.c_contiguous
    assert batch["rows"].dtype == np.int32 and batch["rows"].shape == shape[:1]
    np.testing.assert_array_equal(batch["rows"] < 0, ~batch["segments"].any(1))
    for tokens, segments, positions in zip(*(batch[k].tolist() for k in FIELDS), strict=True):
        segment, position = 0, 0
        for i, token in enumerate(tokens):
            if segments[i] == 0:
                assert not any(tokens[i:] + segments[i:] + positions[i:])
                break
            new = i == 0 or token == BOS
            segment, position = segment + new, 0 if new else position + 1
            assert (segments[i], positions[i]) == (segment, position)


def shapes_of(data, spec, batch_size, multiple=1):
    """Rows and columns that batches may have."""
    packing = spec.pack(data.stream("train"))
    sizes = spec.batch_rows(packing, batch_size, multiple)
    return {(rows, T + 1) for rows, (T, _) in zip(sizes, packing.shapes, strict=True)}


@pytest.mark.parametrize("packing", feed.PACKINGS)
@pytest.mark.parametrize("batch_size", [1, 3, 7, 100])
@pytest.mark.parametrize("seq_len", [1, 2, 5, 64, 200])
def test_evaluation_counts_every_target_once(packing, batch_size, seq_len):
    data, spec = data_of(LENGTHS), spec_of(packing=packing, seq_len=seq_len)
    batches = list(feed.eval_batches(data, spec, "train", batch_size))
    for batch in batches:
        if packing == "buckets":
            assert batch["tokens"].shape in shapes_of(data, spec, batch_size)
        check_layout(
            batch, batch["tokens"].shape if packing == "buckets" else (batch_size, seq_len + 1)
        )
    assert sorted(pairs(batches)) == sorted(true_pairs(LENGTHS))
    # n tokens and the end of each document.
    assert len(pairs(batches)) == sum(n + 1 for n in LENGTHS)
    assert data.stream("train").targets == sum(n + 1 for n in LENGTHS)
    rows = np.concatenate([batch["rows"] for batch in batches])
    assert sorted(rows[rows >= 0]) == list(range(spec.pack(data.stream("train")).rows))


def test_windows_by_hand():
    data = data_of([2, 3])  # 1 4 5 2 1 6 7 8 2
    (batch,) = feed.eval_batches(data, spec_of(seq_len=3), "train", 4)
    assert batch["tokens"].tolist() == [[1, 4, 5, 2], [2, 1, 6, 7], [7, 8, 2, 1], [0, 0, 0, 0]]
    assert batch["segments"].tolist() == [[1, 1, 1, 1], [1, 2, 2, 2], [1, 1, 1, 2], [0, 0, 0, 0]]
    assert batch["positions"].tolist() == [[0, 1, 2, 3], [0, 0, 1, 2], [0, 1, 2, 0], [0, 0, 0, 0]]


def test_documents_by_hand():
    data = data_of([1, 4, 0])  # 1 4 2 | 1 5 6 7 8 2 | 1 2
    spec = spec_of(seq_len=3, packing="documents")
    (batch,) = feed.eval_batches(data, spec, "train", 5)
    rows = [[1, 4, 2, 0], [1, 5, 6, 7], [7, 8, 2, 0], [1, 2, 0, 0], [0, 0, 0, 0]]
    assert batch["tokens"].tolist() == rows
    assert batch["segments"].tolist() == [[int(t > 0) for t in row] for row in rows]
    assert batch["positions"][2].tolist() == [0, 1, 2, 0]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("packing", ["windows", "documents"])
def test_every_epoch_trains_on_every_target_once(packing, shuffle):
    data, spec = data_of(LENGTHS), spec_of(packing=packing, shuffle=shuffle, seq_len=4)
    rows = spec.pack(data.stream("train")).rows
    make = feed.train_batches(data, spec, seed=1)
    # `rows` batches of 3 rows are exactly three epochs, which begin inside of batches.
    batches = [make(i) for i in range(rows)]
    for batch in batches:
        check_layout(batch, (3, 5))
    stacked = {k: np.concatenate([b[k] for b in batches]) for k in batches[0]}
    epochs = [{k: v[e * rows : (e + 1) * rows] for k, v in stacked.items()} for e in range(3)]
    for epoch in epochs:
        assert sorted(pairs([epoch])) == sorted(true_pairs(LENGTHS))
        assert sorted(epoch["rows"]) == list(range(rows))
    orders = {epoch["tokens"].tobytes() for epoch in epochs}
    assert len(orders) == (3 if shuffle else 1)


@pytest.mark.parametrize("shuffle", [True, False])
def test_every_epoch_of_buckets_trains_on_every_target_once(shuffle):
    data, spec = data_of(MANY), spec_of(packing="buckets", shuffle=shuffle, seq_len=30)
    count = int(
        feed.train_order(data.stream("train"), spec.pack(data.stream("train")), spec, 1).batches
    )
    make = feed.train_batches(data, spec, seed=1)
    epochs = [[make(i) for i in range(e * count, (e + 1) * count)] for e in range(3)]
    for batch in itertools.chain(*epochs):
        assert batch["tokens"].shape in shapes_of(data, spec, 3, 8)
        check_layout(batch, batch["tokens"].shape)
    for epoch in epochs:
        assert sorted(pairs(epoch)) == sorted(true_pairs(MANY))
    orders = {b"".join(batch["rows"].tobytes() for batch in epoch) for epoch in epochs}
    assert len(orders) == (3 if shuffle else 1)


def test_windows_begin_at_other_places_in_each_epoch():
    data = data_of([500])
    rows = -(-502 // 5)
    make = feed.train_batches(data, spec_of(), seed=0)
    first = np.concatenate([make(i)["tokens"][:, 0] for i in range(rows)])
    assert len({frozenset(epoch) for epoch in first.reshape(3, rows).tolist()}) == 3


def test_order_is_kept_without_shuffling():
    data, spec = data_of([60]), spec_of(shuffle=False, seq_len=10, batch_size=2)
    make = feed.train_batches(data, spec, seed=0)
    assert make(0)["tokens"].tolist() == [[1, *range(4, 14)], [*range(13, 24)]]


def test_a_part_of_a_batch():
    make = feed.train_batches(data_of(LENGTHS), spec_of(), seed=0)
    for index in range(8):
        whole, half = make(index), make(index, slice(1, 3))
        assert all(np.array_equal(whole[k][1:3], half[k]) for k in whole)


def same(a, b) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize("packing", feed.PACKINGS)
@pytest.mark.parametrize("prefetch", [0, 1, 4])
def test_the_state_counts_returned_batches_and_restores_exactly(packing, prefetch):
    data, spec = data_of(LENGTHS), spec_of(packing=packing, prefetch=prefetch)
    it = feed.train_feed(data, spec, seed=3)
    assert it.get_state() == {"next_index": 0}
    batches, states = [], []
    for i in range(25):
        batches.append(next(it))
        if i == 3:
            time.sleep(0.05)  # lets the thread run ahead
        states.append(json.loads(json.dumps(it.get_state())))
    it.close()
    assert states == [{"next_index": i + 1} for i in range(25)]
    other = feed.train_feed(data, spec_of(packing=packing, prefetch=2 - prefetch // 2), seed=3)
    for at in (20, 0, 7):
        other.set_state(states[at])
        assert other.get_state() == states[at]
        assert all(same(next(other), batches[i]) for i in range(at + 1, at + 5))
    other.close()
    make = feed.train_batches(data, spec, seed=3)
    assert all(same(make(i), batch) for i, batch in enumerate(batches))


def test_restoring_does_not_repeat_earlier_batches(monkeypatch):
    data, spec = data_of(LENGTHS), spec_of(prefetch=0)
    built = []
    build = feed.Windows.build
    monkeypatch.setattr(feed.Windows, "build", lambda *a: built.append(1) or build(*a))
    it = feed.train_feed(data, spec, seed=0)
    it.set_state({"next_index": 10**12})
    next(it)
    assert len(built) == 1


@pytest.mark.parametrize(
    ("packing", "numbers"),
    [
        ("windows", "6 tokens, which make 2 rows"),
        ("documents", "6 tokens, which make 1 rows"),
        ("buckets", "6 tokens, which make 1 rows"),
    ],
)
def test_too_little_for_one_batch_is_refused_with_the_numbers(packing, numbers):
    data = data_of([4])  # 6 tokens: 2 windows of 5, 1 piece of a document
    with pytest.raises(SpecError, match=f"{numbers} of seq_len=5.*batch_size=3"):
        feed.train_feed(data, spec_of(packing=packing), seed=0)


# -------------------------------------------------------------------------- pairs, labels, mixtures


def pairs_of(texts: list[int], sources: list[int], **more: Any) -> Stream:
    return stream_of(texts, source=stream_of(sources), **more)


def test_pairs_by_hand():
    """Text 1 4 5 2 of 1 4 2, text 1 6 2 of 1 5 6 7 2; the longest text, and the longest source."""
    stream = pairs_of([2, 1], [1, 3])
    spec = spec_of(packing="documents", seq_len=4, source_len=5)
    (batch,) = feed.eval_batches(data_with(stream), spec, "train", 3)
    assert batch["tokens"].tolist() == [[1, 4, 5, 2, 0], [1, 6, 2, 0, 0], [0] * 5]
    assert batch["source_tokens"].tolist() == [[1, 4, 2, 0, 0], [1, 5, 6, 7, 2], [0] * 5]
    for side in ("", "source_"):
        real = (batch[f"{side}tokens"] > 0).astype(int)
        np.testing.assert_array_equal(batch[f"{side}segments"], real)
        np.testing.assert_array_equal(batch[f"{side}positions"], np.arange(5) * real)
    assert batch["rows"].tolist() == [0, 1, -1]
    assert {a.dtype for a in batch.values()} == {np.dtype("int32")}


def test_a_pair_or_a_labelled_text_is_cut_and_never_continued():
    """Rows of 3 + 1 tokens, sources of 4: texts of 5 and 4 tokens, and a source of 5."""
    spec = spec_of(packing="documents", seq_len=3, source_len=4)
    stream = pairs_of([3, 2, 2, 0], [0, 0, 3, 2])
    (batch,) = feed.eval_batches(data_with(stream), spec, "train", 4)
    assert batch["tokens"].tolist() == [[1, 4, 5, 6], [1, 7, 8, 2], [1, 9, 10, 2], [1, 2, 0, 0]]
    assert batch["source_tokens"].tolist() == [
        [1, 2, 0, 0],
        [1, 2, 0, 0],
        [1, 4, 5, 6],
        [1, 7, 8, 2],
    ]
    assert spec.pack(stream).cut == 2
    labelled = stream_of([3, 2, 9], labels=np.array([2, 0, 1], np.int32))
    (batch,) = feed.eval_batches(data_with(labelled), spec, "train", 3)
    assert batch["tokens"].tolist() == [[1, 4, 5, 6], [1, 7, 8, 2], [1, 9, 10, 11]]
    assert spec.pack(labelled).cut == 2
    assert spec.pack(stream_of([3, 2, 9])).cut == 0, "text without either goes on in another row"


def test_the_source_is_as_long_as_the_text_unless_said_otherwise():
    assert spec_of(seq_len=7).longest == (7, 7)
    assert spec_of(seq_len=7, source_len=3).longest == (7, 3)


DOCUMENTS = 60
TEXTS, SOURCES_ = (
    [int(n) for n in np.random.default_rng(i).integers(0, 12, DOCUMENTS)] for i in (1, 2)
)


def everything() -> Stream:
    """Pairs with labels, whose label is the number of their document modulo 5."""
    return pairs_of(TEXTS, SOURCES_, labels=np.arange(DOCUMENTS, dtype=np.int32) % 5)


def documents(stream: Stream) -> list[list[int]]:
    return [stream.tokens[a:b].tolist() for a, b in itertools.pairwise(stream.starts.tolist())]


@pytest.mark.parametrize("packing", ["documents", "buckets", "buckets(buckets=2, multiple=4)"])
@pytest.mark.parametrize("batch_size", [1, 7, 16])
def test_sources_and_labels_stay_with_their_texts(packing, batch_size):
    """In evaluation, each once, whatever the batch size; and in training."""
    stream, spec = everything(), spec_of(packing=packing, seq_len=16, batch_size=batch_size)
    assert stream.source is not None
    texts, sources = documents(stream), documents(stream.source)
    data = data_with(stream)
    evaluated = [*feed.eval_batches(data, spec, "train", batch_size)]
    make = feed.train_batches(data, spec, seed=0)
    for batch in evaluated + [make(i) for i in range(20)]:
        for i, row in enumerate(batch["rows"]):
            own, source = (batch[f"{side}tokens"][i] for side in ("", "source_"))
            real, reads = (batch[f"{side}segments"][i] > 0 for side in ("", "source_"))
            if row < 0:
                assert not (real.any() or reads.any() or batch["labels"][i])
                continue
            assert own[real].tolist() == texts[row]
            assert source[reads].tolist() == sources[row]
            assert batch["labels"][i] == row % 5
    rows = np.concatenate([batch["rows"] for batch in evaluated])
    assert sorted(rows[rows >= 0]) == list(range(DOCUMENTS))


@pytest.mark.parametrize("packing", feed.PACKINGS)
def test_a_mixture_has_its_shares_of_rows(packing):
    """Two parts of which the first ten documents are one; it has a quarter of the rows."""
    stream = stream_of([9] * 40, parts=(0, 10), weights=(1.0, 3.0))
    spec = spec_of(packing=packing, seq_len=10, batch_size=8)
    make = feed.train_batches(data_with(stream), spec, seed=0)
    batches = [make(i) for i in range(512)]
    # The tokens of the first part are 4 to 93; each row of any packing has some of its own.
    tokens = np.concatenate([batch["tokens"][:, 1:] for batch in batches])
    first = np.where(tokens > 3, tokens, 10**6).min(1) < 94
    shared = np.where(tokens > 3, tokens, 10**6).min(1) < 10**6
    assert shared.all() and len(first) == 4096
    # Of windows, the one on the joint belongs to the second part.
    low, high = (1024, 1024) if packing != "windows" else (1024, 1024 + 3 * 4096 // 31)
    assert low <= first.sum() <= high
    evaluated = [*feed.eval_batches(data_with(stream), spec, "train", 8)]
    assert len(pairs(evaluated)) == 40 * 10, "in evaluation each once, whatever the weights"


# ----------------------------------------------------------------------------------------- buckets


def padding(batches) -> int:
    return sum(int((batch["segments"] == 0).sum()) for batch in batches)


def least(lengths: list[int], count: int) -> int:
    """Positions of all rows if each is as long as the end of its bucket, over all choices of at
    most `count` ends."""
    known = sorted(set(lengths))
    return min(
        sum(min(end for end in ends if end >= n) for n in lengths)
        for k in range(1, count + 1)
        for inner in itertools.combinations(known[:-1], min(k, len(known)) - 1)
        for ends in [(*inner, known[-1])]
    )


@pytest.mark.parametrize("count", [1, 2, 3, 8, 100])
@pytest.mark.parametrize("seed", range(4))
def test_buckets_leave_the_least_padding_there_is(count, seed):
    lengths = np.random.default_rng(seed).geometric(0.1, 40).clip(1, 25).tolist()
    packing = spec_of(packing=f"buckets(buckets={count})", seq_len=40).pack(
        stream_of([n - 1 for n in lengths])  # n targets with the end
    )
    ends = [T for T, _ in packing.shapes]
    assert ends == sorted(set(ends)) and len(ends) == min(count, len(set(lengths)))
    given = [ends[i] for i in packing.shape]
    assert all(n <= end for n, end in zip(lengths, given, strict=True))
    if len(ends) <= 3 or len(ends) == len(set(lengths)):
        expected = least(lengths, count) if count < len(set(lengths)) else sum(lengths)
        assert sum(given) == expected
    assert all(end in lengths for end in ends)


def test_the_side_that_is_longer_says_which_bucket():
    """Pairs of 3, 3, 9 and 9 positions at most, on either side."""
    stream = pairs_of([2, 1, 8, 0], [1, 1, 0, 7])
    packing = spec_of(packing="buckets(buckets=2)", seq_len=20).pack(stream)
    assert packing.shape.tolist() == [0, 0, 1, 1]
    assert packing.shapes == [(3, 3), (9, 9)]


@pytest.mark.parametrize(("batch_size", "multiple"), [(4, 1), (4, 8), (16, 8), (3, 2)])
def test_batches_of_all_buckets_have_about_the_same_number_of_tokens(batch_size, multiple):
    spec = spec_of(packing=f"buckets(multiple={multiple})", seq_len=39, batch_size=batch_size)
    stream = stream_of(MANY)
    packing, make = spec.pack(stream), feed.train_batches(data_with(stream), spec, seed=0)
    assert len(packing.shapes) == 8 and packing.multiple == multiple
    seen = {make(i)["tokens"].shape for i in range(60)}
    for rows, width in seen:
        assert rows % multiple == 0
        # One multiple more would be too many, unless there is only one.
        assert (rows + multiple) * (width - 1) > batch_size * 39
        assert rows * (width - 1) <= batch_size * 39 or rows == multiple
    assert len(seen) == 8


def test_buckets_pad_less_than_documents():
    data = data_of(MANY)
    positions, empty = {}, {}
    for packing in ("documents", "buckets"):
        spec = spec_of(packing=packing, seq_len=40)
        batches = [*feed.eval_batches(data, spec, "train", 1)]
        positions[packing] = sum(batch["tokens"].size for batch in batches)
        empty[packing] = padding(batches) / positions[packing]
    assert empty["documents"] > 0.4
    assert empty["buckets"] < 0.15


def test_evaluation_in_rows_that_devices_divide():
    for packing in feed.PACKINGS:
        batches = feed.eval_batches(data_of(MANY), spec_of(packing=packing), "train", 6, multiple=4)
        assert {len(batch["rows"]) % 4 for batch in batches} == {0}
    spec = spec_of(packing="buckets", seq_len=40)
    found = [*feed.eval_batches(data_of(MANY), spec, "train", 6, multiple=4)]
    assert sorted(pairs(found)) == sorted(true_pairs(MANY))


# ------------------------------------------------------------------------------------------- store


class Texts(Source):
    def __init__(self, **splits):
        self.texts, self.splits = splits, tuple(splits)

    def documents(self, split):
        yield from self.texts[split]

    def fingerprint(self):
        return repr(self.texts)


BYTES = Training(pick(feed.TOKENIZERS, "bytes"))
CHARS = Training(pick(feed.TOKENIZERS, "chars"))


def test_the_flat_stream(tmp_path):
    source = Texts(train=["ab", "", "c"], validation=["d"])
    data = store.tokenise(source, BYTES, tmp_path)
    stream = data.stream("train")
    a = 4 + ord("a")
    assert stream.tokens.tolist() == [1, a, a + 1, 2, 1, 2, 1, a + 2, 2]
    assert stream.starts.tolist() == [0, 4, 6, 9]
    assert stream.tokens.dtype == np.uint16
    assert data.splits == ("train", "validation")
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        ".lock",
        "meta.json",
        "tokenizer.json",
        "train.npy",
        "train.starts.npy",
        "validation.npy",
        "validation.starts.npy",
    ]
    assert np.array_equal(np.load(tmp_path / "train.npy"), stream.tokens)
    with pytest.raises(SpecError, match="no split 'test' .known: train, validation"):
        data.stream("test")


def test_a_large_vocabulary_needs_more_bits(tmp_path):
    text = "".join(map(chr, range(0x10000, 0x10000 + 65533)))
    stream = store.tokenise(Texts(train=[text], validation=["\U00010000"]), CHARS, tmp_path)
    assert stream.stream("train").tokens.dtype == np.uint32
    assert stream.stream("train").tokens[-2] == 4 + 65532


def test_prepared_once_and_again_when_anything_changes(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("hello world " * 10)
    written = []
    write = store._write_split
    monkeypatch.setattr(store, "_write_split", lambda *a: written.append(a[1]) or write(*a))

    def prepare(given: Vocabulary | None = None, **options):
        written.clear()
        spec = spec_of(source=f"text(path={str(tmp_path / 'a.txt')!r})", **options)
        data = feed.prepare(spec, tmp_path / "run", given)
        return data, bool(written)

    first, built = prepare(tokenizer="chars")
    assert built
    again, built = prepare(tokenizer="chars", batch_size=1, seq_len=7, packing="documents")
    assert not built and again.fingerprint == first.fingerprint
    assert again.tokenizer.fingerprint == first.tokenizer.fingerprint
    given, built = prepare(first.vocabulary, tokenizer="bytes")
    assert not built and given.fingerprint == first.fingerprint

    other, built = prepare(tokenizer="bytes")
    assert built and other.fingerprint != first.fingerprint
    (tmp_path / "a.txt").write_text("hello there " * 10)
    changed, built = prepare(tokenizer="bytes")
    assert built and changed.fingerprint != other.fingerprint
    # What was open keeps its contents.
    assert first.tokenizer.decode(first.stream("train").tokens).startswith("hello world")
    for name in ("meta.json", "train.npy", "validation.starts.npy", "tokenizer.json"):
        (tmp_path / "run" / "data" / name).write_bytes(b"")
        mended, built = prepare(tokenizer="bytes")
        assert built and mended.fingerprint == changed.fingerprint


def test_an_interruption_between_the_files_is_noticed(tmp_path, monkeypatch):
    old, new = (Texts(train=[c], validation=[c]) for c in "ab")
    before = store.tokenise(old, BYTES, tmp_path).stream("train").tokens.tolist()
    replace = store.Path.replace

    def interrupted(path, target):
        if target.name == "validation.npy":
            raise KeyboardInterrupt
        return replace(path, target)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(store.Path, "replace", interrupted)
        store.tokenise(new, BYTES, tmp_path)
    assert np.load(tmp_path / "train.npy").tolist() != before
    assert store.tokenise(old, BYTES, tmp_path).stream("train").tokens.tolist() == before


def test_an_empty_split_is_refused(tmp_path):
    with pytest.raises(SpecError, match="the validation split is empty: it has 0 documents"):
        store.tokenise(Texts(train=["a"], validation=[]), BYTES, tmp_path)
    with pytest.raises(SpecError, match="training split holds no text"):
        store.tokenise(Texts(train=[""], validation=["a"]), CHARS, tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == [".lock"]


def test_what_the_tokenizer_cannot_encode_is_named(tmp_path):
    with pytest.raises(SpecError, match="validation split, document 2: tokenizer 'chars' .* 'x'"):
        store.tokenise(Texts(train=["abc"], validation=["a", "bx"]), CHARS, tmp_path)

    class Broken(ByteTokenizer):
        def encode(self, text):
            return super().encode(text) + 200

    with pytest.raises(SpecError, match=r"train split, document 1: .* from 301 to 301; .*\[4, 260"):
        store.tokenise(Texts(train=["a"], validation=["a"]), BYTES, tmp_path, Vocabulary(Broken()))


def rows_of(fields, train, validation, name="") -> Rows:
    made = {"train": lambda: iter(train), "validation": lambda: iter(validation)}
    return Rows(made, lambda: repr((train, validation, name)), fields)


PAIRS = rows_of(PAIR, [("ab", "xyz"), ("", "y"), ("b", "")], [("a", "zz")])
LABELS = rows_of(LABELLED, [("ab", "no"), ("b", "yes"), ("", "no")], [("a", "yes")])
TWO = Training(pick(feed.TOKENIZERS, "chars"), pick(feed.TOKENIZERS, "chars"))


def test_pairs_with_one_tokenizer_for_both_sides(tmp_path):
    data = store.tokenise(PAIRS, CHARS, tmp_path)
    assert data.vocabulary.source_tokenizer is None and data.tokenizer.size == 4 + len("abxyz")
    stream = data.stream("train")
    assert stream.source is not None and stream.labels is None
    assert stream.tokens.tolist() == [1, 6, 7, 8, 2, 1, 7, 2, 1, 2]
    assert stream.starts.tolist() == [0, 5, 8, 10]
    assert stream.source.tokens.tolist() == [1, 4, 5, 2, 1, 2, 1, 5, 2]
    assert stream.source.starts.tolist() == [0, 4, 6, 9]
    assert data.stream("validation").tokens.tolist() == [1, 8, 8, 2]
    assert sorted(p.name for p in tmp_path.glob("train*")) == [
        "train.npy",
        "train.source.npy",
        "train.source.starts.npy",
        "train.starts.npy",
    ]


def test_pairs_with_a_tokenizer_for_each_side(tmp_path):
    data = store.tokenise(PAIRS, TWO, tmp_path)
    source = data.vocabulary.source_tokenizer
    assert source is not None and (source.size, data.tokenizer.size) == (4 + 2, 4 + 3)
    stream = data.stream("train")
    assert stream.source is not None
    assert stream.tokens.tolist() == [1, 4, 5, 6, 2, 1, 5, 2, 1, 2]
    assert stream.source.tokens.tolist() == [1, 4, 5, 2, 1, 2, 1, 5, 2]
    assert data.vocabulary.of("source") is source
    assert data.vocabulary.of("text") is data.tokenizer


def test_labels_are_numbered_in_the_order_of_their_names(tmp_path):
    data = store.tokenise(LABELS, CHARS, tmp_path)
    assert data.vocabulary.labels == ("no", "yes")
    assert data.tokenizer.size == 4 + len("ab"), "the names of labels are no text"
    stream = data.stream("train")
    assert stream.labels is not None and stream.labels.dtype == np.int32
    assert stream.labels.tolist() == [0, 1, 0]
    assert stream.tokens.tolist() == [1, 4, 5, 2, 1, 5, 2, 1, 2]
    validation = data.stream("validation")
    assert validation.labels is not None and validation.labels.tolist() == [1]


@pytest.mark.parametrize(
    ("source", "training"),
    [(PAIRS, CHARS), (PAIRS, TWO), (LABELS, CHARS)],
    ids=["pairs", "two tokenizers", "labels"],
)
def test_all_fields_are_found_again(tmp_path, monkeypatch, source, training):
    first = store.tokenise(source, training, tmp_path)
    with monkeypatch.context() as patched:
        patched.delattr(store, "_write_split")
        again = store.tokenise(source, training, tmp_path)
        given = store.tokenise(source, BYTES, tmp_path, first.vocabulary)
    for data in (again, given):
        assert data.fingerprint == first.fingerprint
        assert data.vocabulary.fingerprint == first.vocabulary.fingerprint
        for split in first.splits:
            for a, b in zip(arrays(first.stream(split)), arrays(data.stream(split)), strict=True):
                np.testing.assert_array_equal(a, b)


def arrays(stream: Stream) -> list[np.ndarray]:
    own = [stream.tokens, stream.starts]
    own += [] if stream.labels is None else [stream.labels]
    return own + (arrays(stream.source) if stream.source else [])


def test_a_damaged_field_is_made_again(tmp_path):
    names = {
        (PAIRS, TWO): ("train.source.npy", "validation.source.starts.npy", "source_tokenizer.json"),
        (LABELS, CHARS): ("train.label.npy", "labels.json"),
    }
    for (source, training), files in names.items():
        whole = store.tokenise(source, training, tmp_path)
        contents = [a.tolist() for a in arrays(whole.stream("train"))]
        for name in files:
            (tmp_path / name).write_bytes(b"")
            mended = store.tokenise(source, training, tmp_path)
            assert mended.fingerprint == whole.fingerprint
            assert [a.tolist() for a in arrays(mended.stream("train"))] == contents


def test_nothing_of_another_kind_of_data_stays(tmp_path, monkeypatch):
    """Where there were labels, or a second tokenizer, there are none of them later."""
    text = Texts(train=["a"], validation=["a"])
    kinds = [(PAIRS, TWO), (LABELS, CHARS), (PAIRS, CHARS), (text, CHARS)]
    for i in (0, 1, 0, 2, 0, 3, 1, 2, 1, 3, 2, 3, 0):  # from each to each
        source, training = kinds[i]
        data = store.tokenise(source, training, tmp_path)
        assert bool(data.vocabulary.labels) == (source is LABELS)
        assert bool(data.vocabulary.source_tokenizer) == (training is TWO)
        with monkeypatch.context() as patched:  # and it is found again
            patched.delattr(store, "_write_split")
            store.tokenise(source, training, tmp_path)
    assert not list(tmp_path.glob("*label*"))


def test_a_label_that_training_does_not_have_is_refused_by_name(tmp_path):
    source = rows_of(LABELLED, [("a", "no"), ("b", "yes")], [("a", "no"), ("b", "yess")])
    with pytest.raises(SpecError) as caught:
        store.tokenise(source, CHARS, tmp_path)
    assert str(caught.value) == (
        "validation split, document 2: unknown label 'yess'; did you mean 'yes'? (known: no, yes)"
    )
    assert not list(tmp_path.glob("*.npy"))


def test_one_side_needs_no_second_tokenizer(tmp_path):
    with pytest.raises(SpecError, match="source_tokenizer=chars: the data has one side only"):
        store.tokenise(LABELS, TWO, tmp_path)


def test_what_a_side_cannot_encode_is_named(tmp_path):
    source = rows_of(PAIR, [("ab", "x")], [("a", "x"), ("x", "x")])
    with pytest.raises(SpecError, match="validation split, document 2: tokenizer 'chars' .* 'x'"):
        store.tokenise(source, TWO, tmp_path)


def test_the_parts_of_a_mixture_are_kept_apart(tmp_path):
    other = rows_of(PAIR, [("b", "x"), ("a", "z")], [("b", "x"), ("b", "y")], "other")
    mixed = Mixture([PAIRS, other], [1.0, 3.0])
    data = store.tokenise(mixed, CHARS, tmp_path)
    train, validation = (data.stream(split) for split in ("train", "validation"))
    assert (train.parts, train.documents, train.weights) == ((0, 3), 5, (0.25, 0.75))
    assert (validation.parts, validation.documents) == ((0, 1), 3)
    again = store.tokenise(Mixture([PAIRS, other], [1.0, 1.0]), CHARS, tmp_path)
    assert again.stream("train").weights == (0.5, 0.5), "weights are no content"
    assert again.fingerprint == data.fingerprint
    assert store.tokenise(Mixture([other, PAIRS], [1.0, 1.0]), CHARS, tmp_path).stream(
        "train"
    ).parts == (0, 2)


class Endless(Source):
    def documents(self, split):
        while True:
            yield "x" * 10000

    def fingerprint(self):
        return "endless"


def _tokenise_endless(directory):
    store.tokenise(Endless(), BYTES, directory)


def test_a_kill_leaves_nothing_that_is_used(tmp_path):
    child = multiprocessing.get_context("spawn").Process(target=_tokenise_endless, args=(tmp_path,))
    child.start()
    try:
        deadline = time.monotonic() + 60
        while not any(p.stat().st_size for p in tmp_path.glob(".partial-*/train.npy")):
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        child.kill()
        child.join()
    assert not list(tmp_path.glob("*.npy")) and not (tmp_path / "meta.json").exists()
    data = store.tokenise(Texts(train=["a"], validation=["b"]), BYTES, tmp_path)
    assert data.stream("train").targets == 2
    assert not list(tmp_path.glob(".partial-*"))


def test_long_work_says_so(tmp_path, monkeypatch, capsys):
    ticks = iter(range(0, 1000, 3))
    monkeypatch.setattr(store.time, "monotonic", lambda: next(ticks))
    store.tokenise(Texts(train=["abc"] * 4, validation=["b"]), BYTES, tmp_path)
    assert capsys.readouterr().err.splitlines() == [
        "data: tokenising train: 10 tokens, 2 documents",
        "data: tokenising train: 20 tokens, 4 documents",
    ]


def test_shakespeare_end_to_end_leaves_no_word_at_exit(tmp_path):
    program = f"""
import sys
from pathlib import Path
from transformer.data import feed
spec = feed.DataSpec()
data = feed.prepare(spec, Path({str(tmp_path)!r}))
assert data.stream("train").targets == round(0.9 * 5057198) + 39, data.stream("train").targets
it = feed.train_feed(data, spec, seed=0)
assert next(it)["tokens"].shape == (12, 257)
"""
    done = subprocess.run(
        [sys.executable, "-W", "default", "-c", program], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
