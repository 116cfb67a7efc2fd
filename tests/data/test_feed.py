import json
import multiprocessing
import subprocess
import sys
import time
from typing import Any

import numpy as np
import pytest

from transformer.data import feed, store
from transformer.data.source import Source
from transformer.data.store import Data, Stream
from transformer.data.tokens import ByteTokenizer, Tokenizer
from transformer.spec import SpecError, parse, pick

BOS, EOS = 1, 2
LENGTHS = [3, 0, 11, 1, 30, 7, 2]


def data_of(lengths: list[int], split: str = "train") -> Data:
    """Documents of the given numbers of tokens, every token but the specials different."""
    flat, starts, token = [], [0], 4
    for n in lengths:
        flat += [BOS, *range(token, token + n), EOS]
        starts.append(len(flat))
        token += n
    stream = Stream(np.array(flat, np.uint16), np.array(starts))
    return Data(ByteTokenizer(), "", {split: stream})


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


def check_layout(batch, shape):
    """Segments and positions follow from the tokens, said in plain Python."""
    for name in ("tokens", "segments", "positions"):
        assert batch[name].dtype == np.int32 and batch[name].shape == shape
        assert batch[name].flags.c_contiguous
    for tokens, segments, positions in zip(*(batch[k].tolist() for k in batch), strict=True):
        segment, position = 0, 0
        for i, token in enumerate(tokens):
            if segments[i] == 0:
                assert not any(tokens[i:] + segments[i:] + positions[i:])
                break
            new = i == 0 or token == BOS
            segment, position = segment + new, 0 if new else position + 1
            assert (segments[i], positions[i]) == (segment, position)


@pytest.mark.parametrize("packing", feed.PACKINGS)
@pytest.mark.parametrize("batch_size", [1, 3, 7, 100])
@pytest.mark.parametrize("seq_len", [1, 2, 5, 64, 200])
def test_evaluation_counts_every_target_once(packing, batch_size, seq_len):
    spec = spec_of(packing=packing, seq_len=seq_len)
    batches = list(feed.eval_batches(data_of(LENGTHS), spec, "train", batch_size))
    for batch in batches:
        check_layout(batch, (batch_size, seq_len + 1))
    assert sorted(pairs(batches)) == sorted(true_pairs(LENGTHS))
    # n tokens and the end of each document.
    assert len(pairs(batches)) == sum(n + 1 for n in LENGTHS)
    assert data_of(LENGTHS).stream("train").targets == sum(n + 1 for n in LENGTHS)


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
@pytest.mark.parametrize("packing", feed.PACKINGS)
def test_every_epoch_trains_on_every_target_once(packing, shuffle):
    data, spec = data_of(LENGTHS), spec_of(packing=packing, shuffle=shuffle, seq_len=4)
    rows = spec.packing(data.stream("train"), 4).rows
    make = feed.train_batches(data, spec, seed=1)
    # `rows` batches of 3 rows are exactly three epochs, which begin inside of batches.
    batches = [make(i) for i in range(rows)]
    for batch in batches:
        check_layout(batch, (3, 5))
    stacked = {k: np.concatenate([b[k] for b in batches]) for k in batches[0]}
    epochs = [{k: v[e * rows : (e + 1) * rows] for k, v in stacked.items()} for e in range(3)]
    for epoch in epochs:
        assert sorted(pairs([epoch])) == sorted(true_pairs(LENGTHS))
    orders = {epoch["tokens"].tobytes() for epoch in epochs}
    assert len(orders) == (3 if shuffle else 1)


def test_permutations_of_epochs_and_seeds():
    def epochs(seed):
        order = feed.Order(rows=20, length=1000, batch_size=4, seed=seed, shuffle=True)
        drawn = [order(i) for i in range(15)]
        rows = np.concatenate([rows for rows, _ in drawn]).reshape(3, 20)
        return rows.tolist(), [int(shifts[0]) for _, shifts in drawn[::5]]

    rows, shifts = epochs(0)
    assert all(sorted(r) == list(range(20)) for r in rows)
    assert len({*map(tuple, rows)}) == 3 and len(set(shifts)) == 3
    assert (rows, shifts) == epochs(0)
    assert not {*map(tuple, rows)} & {*map(tuple, epochs(1)[0])}


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
    return all(np.array_equal(a[k], b[k]) for k in ("tokens", "segments", "positions"))


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


@pytest.mark.parametrize("packing", feed.PACKINGS)
def test_too_little_for_one_batch_is_refused_with_the_numbers(packing):
    data = data_of([4])  # 6 tokens: 2 windows of 5, 1 piece of a document
    numbers = {"windows": "6 tokens, which make 2 rows", "documents": "6 tokens, which make 1 rows"}
    with pytest.raises(SpecError, match=f"{numbers[packing]} of seq_len=5.*batch_size=3"):
        feed.train_feed(data, spec_of(packing=packing), seed=0)


class Texts(Source):
    def __init__(self, **splits):
        self.texts, self.splits = splits, tuple(splits)

    def documents(self, split):
        yield from self.texts[split]

    def fingerprint(self):
        return repr(self.texts)


BYTES: Any = pick(feed.TOKENIZERS, "bytes")
CHARS: Any = pick(feed.TOKENIZERS, "chars")


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

    def prepare(given: Tokenizer | None = None, **options):
        written.clear()
        spec = spec_of(source=f"text(path={str(tmp_path / 'a.txt')!r})", **options)
        data = feed.prepare(spec, tmp_path / "run", given)
        return data, bool(written)

    first, built = prepare(tokenizer="chars")
    assert built
    again, built = prepare(tokenizer="chars", batch_size=1, seq_len=7, packing="documents")
    assert not built and again.fingerprint == first.fingerprint
    assert again.tokenizer.fingerprint == first.tokenizer.fingerprint
    given, built = prepare(first.tokenizer, tokenizer="bytes")
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
        store.tokenise(Texts(train=["a"], validation=["a"]), BYTES, tmp_path, Broken())


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
