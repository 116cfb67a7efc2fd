"""Tokenises a source once into memory-mapped arrays, and finds them again.

A directory holds the vocabulary, for each split `SPLIT.npy` (the flat stream: every document as
BOS, its tokens, EOS) and `SPLIT.starts.npy` (where the documents begin), for pairs the same of the
other side (`SPLIT.source.npy`), for labelled texts the numbers of the labels (`SPLIT.label.npy`),
and `meta.json`, which is written last: without it, or with another fingerprint in it, everything is
made again.
"""

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from transformer.data.corpus import TEXT, Source
from transformer.data.tokens import BOS, EOS, SPECIALS, Texts, Tokenizer, Vocabulary
from transformer.spec import Choice, SpecError, unknown

_FORMAT = 2  # raise it when the layout of the files changes


@dataclasses.dataclass(frozen=True)
class Stream:
    """A split: `tokens` [N] (uint16 or uint32) and `starts` int64 [documents + 1], ending in N.

    Attributes:
      source: the stream of the other side of each document, for pairs.
      labels: int32 [documents], for labelled texts.
      parts: the first document of each part of a mixture.
      weights: the share of each part in training.
    """

    tokens: np.ndarray
    starts: np.ndarray
    source: "Stream | None" = None
    labels: np.ndarray | None = None
    parts: tuple[int, ...] = (0,)
    weights: tuple[float, ...] = (1.0,)

    @property
    def documents(self) -> int:
        return len(self.starts) - 1

    @property
    def targets(self) -> int:
        """How many tokens one pass predicts: all but the BOS of each document."""
        return len(self.tokens) - self.documents


@dataclasses.dataclass(frozen=True)
class Data:
    """Tokenised splits; `fingerprint` changes with the text and with the vocabulary."""

    vocabulary: Vocabulary
    fingerprint: str
    streams: Mapping[str, Stream]

    @property
    def tokenizer(self) -> Tokenizer:
        return self.vocabulary.tokenizer

    @property
    def splits(self) -> tuple[str, ...]:
        return tuple(self.streams)

    def stream(self, split: str) -> Stream:
        if split not in self.streams:
            raise SpecError(f"no split {split!r} (known: {', '.join(self.streams)})")
        return self.streams[split]


@dataclasses.dataclass(frozen=True)
class Training:
    """How a vocabulary is made: a tokenizer for all texts, or one for the source and one for the
    text of each pair."""

    tokenizer: Choice
    source_tokenizer: Choice | None = None

    def __call__(self, source: Source) -> Vocabulary:
        labels: set[str] = set()
        if "label" in source.fields:
            labels.update(source.documents("train", "label"))
        if self.source_tokenizer is None:
            fields = [field for field in source.fields if field != "label"]
            return Vocabulary(self.tokenizer(_texts(source, *fields)), None, tuple(sorted(labels)))
        if "source" not in source.fields:
            raise SpecError(f"source_tokenizer={self.source_tokenizer}: the data has one side only")
        of_source = self.source_tokenizer(_texts(source, "source"))
        return Vocabulary(self.tokenizer(_texts(source, "text")), of_source, tuple(sorted(labels)))

    @property
    def text(self) -> str:
        return " ".join(c.text for c in (self.tokenizer, self.source_tokenizer) if c)


def tokenise(
    source: Source, training: Training, directory: Path, given: Vocabulary | None = None
) -> Data:
    """The tokenised splits of `source`, made in `directory` unless they are there already.

    `training` makes the vocabulary from the training split, where none is given. A process that
    finds another one at work waits for it; one that is killed leaves nothing that would be used
    later.
    """
    directory.mkdir(parents=True, exist_ok=True)
    wanted = {
        "format": _FORMAT,
        "source": source.fingerprint(),
        "vocabulary": given.fingerprint if given else training.text,
    }
    with _lock(directory):
        # An existing result serves whether its vocabulary was made here or given.
        if (found := _read_meta(directory, wanted)) is None:
            found = _build(source, training, directory, given, wanted)
        # Opened under the lock: a mapped file stays what it is when another one takes its name.
        streams = {
            split: _open(directory, split, found["fields"], sizes["parts"], source.weights)
            for split, sizes in found["splits"].items()
        }
        vocabulary = given or Vocabulary.load(directory)
    return Data(vocabulary, found["fingerprint"], streams)


def _build(
    source: Source, training: Training, directory: Path, given: Vocabulary | None, wanted: dict
) -> dict:
    (directory / "meta.json").unlink(missing_ok=True)
    made = given or training(source)
    splits = {}
    with tempfile.TemporaryDirectory(dir=directory, prefix=".partial-") as partial:
        for split in source.splits:
            splits[split] = _write_split(source, split, made, Path(partial))
        made.save(Path(partial))
        meta = {
            "format": _FORMAT,
            "source": wanted["source"],
            "vocabulary": made.fingerprint,
            "training": wanted["vocabulary"],
            "fingerprint": _join(str(_FORMAT), wanted["source"], made.fingerprint),
            "fields": source.fields,
            "splits": splits,
        }
        (Path(partial) / "meta.json").write_text(json.dumps(meta, indent=1))
        names = sorted(p.name for p in Path(partial).iterdir() if p.name != "meta.json")
        for old in {*directory.glob("*.npy"), *directory.glob("*.json")}:
            if old.name not in names:  # of data of another kind
                old.unlink()
        for name in [*names, "meta.json"]:  # meta.json last: it vouches for all
            (Path(partial) / name).replace(directory / name)
    return meta


def _read_meta(directory: Path, wanted: dict) -> dict | None:
    """What `meta.json` says, if it describes what is wanted and the files it speaks of."""
    try:
        meta = json.loads((directory / "meta.json").read_text())
        same = (
            meta["format"] == wanted["format"]
            and meta["source"] == wanted["source"]
            and wanted["vocabulary"] in (meta["vocabulary"], meta["training"])
            and Vocabulary.load(directory).fingerprint == meta["vocabulary"]
        )
        for split, sizes in meta["splits"].items():
            same &= _sizes(_open(directory, split, meta["fields"], sizes["parts"])) == sizes
    except (OSError, ValueError, KeyError, TypeError, EOFError, AttributeError):
        return None
    return meta if same else None


def _texts(source: Source, *fields: str) -> Texts:
    def texts() -> Iterator[str]:
        return (text for field in fields for text, _ in source.pieces("train", field))

    if not any(texts()):
        raise SpecError("the training split holds no text to train a tokenizer on")
    return texts


def _write_split(source: Source, split: str, vocabulary: Vocabulary, folder: Path) -> dict:
    """Writes the files of a split and returns their sizes."""
    bounds = None
    for field in source.fields:
        if field == "label":
            numbers = _numbers(source, split, vocabulary.labels)
            np.save(folder / f"{_stem(split, field)}.npy", numbers)
            ends = None
        else:
            ends = _write_field(source, split, field, vocabulary.of(field), folder)
        bounds = bounds or ends
        assert ends in (None, bounds), "the fields of a split have the same documents"
    assert bounds is not None
    return _sizes(_open(folder, split, source.fields, bounds[:-1]))


def _write_field(
    source: Source, split: str, field: str, tokenizer: Tokenizer, folder: Path
) -> list[int]:
    """The flat stream of a field; returns the first document of each part and their number."""
    dtype = np.dtype(np.uint16 if tokenizer.size <= 1 << 16 else np.uint32)
    starts, bounds, total, inside = [0], [0], 0, False
    stem = _stem(split, field)
    progress = _Progress(stem)
    with (folder / f"{stem}.npy").open("wb+") as f:
        begin = _npy_header(f, dtype, 0)
        for part in source.parts:
            for text, ends in part.pieces(split, field):
                ids = _encode(tokenizer, text, split, len(starts))
                frame = [[BOS]] * (not inside) + [ids] + [[EOS]] * ends
                total += _append(f, np.concatenate(frame).astype(dtype))
                inside = not ends
                if ends:
                    starts.append(total)
                progress(total, len(starts) - 1)
            bounds.append(len(starts) - 1)
        # The header keeps its length: NumPy pads it for an axis that grows.
        f.seek(0)
        assert _npy_header(f, dtype, total) == begin
    assert not inside, "a source must end its last document"
    if total == 0:
        raise SpecError(
            f"the {split} split is empty: it has 0 documents and so 0 tokens to predict; "
            "give more text or a larger share"
        )
    np.save(folder / f"{stem}.starts.npy", np.array(starts, np.int64))
    return bounds


def _numbers(source: Source, split: str, labels: tuple[str, ...]) -> np.ndarray:
    known = {label: i for i, label in enumerate(labels)}
    numbers = []
    for i, label in enumerate(source.documents(split, "label"), 1):
        if label not in known:
            raise SpecError(f"{split} split, document {i}: {unknown(label, labels, 'label')}")
        numbers.append(known[label])
    return np.array(numbers, np.int32)


def _encode(tokenizer: Tokenizer, text: str, split: str, document: int) -> np.ndarray:
    try:
        ids = tokenizer.encode(text)
    except SpecError as e:
        raise SpecError(f"{split} split, document {document}: {e}") from None
    if ids.size and not len(SPECIALS) <= ids.min() <= ids.max() < tokenizer.size:
        raise SpecError(
            f"{split} split, document {document}: the tokenizer gave ids from {ids.min()} to "
            f"{ids.max()}; those of text must lie in [{len(SPECIALS)}, {tokenizer.size})"
        )
    return ids


def _append(f: IO[bytes], ids: np.ndarray) -> int:
    f.write(ids.data)
    return len(ids)


def _npy_header(f: IO[bytes], dtype: np.dtype, length: int) -> int:
    description = np.lib.format.dtype_to_descr(dtype)
    np.lib.format.write_array_header_1_0(
        f, {"descr": description, "fortran_order": False, "shape": (length,)}
    )
    return f.tell()


class _Progress:
    """A line on stderr every five seconds; nothing for what takes less."""

    def __init__(self, split: str):
        self._split, self._last = split, time.monotonic()

    def __call__(self, total: int, documents: int) -> None:
        if (now := time.monotonic()) - self._last >= 5:
            self._last = now
            line = f"data: tokenising {self._split}: {total:,} tokens, {documents:,} documents"
            print(line, file=sys.stderr, flush=True)


@contextlib.contextmanager
def _lock(directory: Path) -> Iterator[None]:
    """Held by one process at a time; the system releases it when its holder dies."""
    with (directory / ".lock").open("w") as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        for leftover in directory.glob(".partial-*"):  # of a process that was killed
            shutil.rmtree(leftover)
        yield


def _stem(split: str, field: str) -> str:
    return split if field in TEXT else f"{split}.{field}"


def _open(
    directory: Path,
    split: str,
    fields: Sequence[str],
    parts: Sequence[int],
    weights: tuple[float, ...] = (1.0,),
) -> Stream:
    """The stream of a split, its arrays mapped."""

    def mapped(name: str) -> np.ndarray:
        return np.load(directory / f"{name}.npy", mmap_mode="r").view(np.ndarray)

    def stream(field: str, **more) -> Stream:
        stem = _stem(split, field)
        return Stream(mapped(stem), mapped(f"{stem}.starts"), **more)

    source = stream("source") if "source" in fields else None
    labels = mapped(_stem(split, "label")) if "label" in fields else None
    return stream("text", source=source, labels=labels, parts=tuple(parts), weights=weights)


def _sizes(stream: Stream) -> dict[str, Any]:
    """What must agree between the files of a split and what was written of them."""
    return {
        "documents": stream.documents,
        "tokens": len(stream.tokens),
        "source_tokens": stream.source and len(stream.source.tokens),
        "parts": list(stream.parts),
    }


def _join(*parts: str) -> str:
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()
