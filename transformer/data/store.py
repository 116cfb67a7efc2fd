"""Tokenises a source once into memory-mapped arrays, and finds them again.

A directory holds `tokenizer.json`, for each split `SPLIT.npy` (the flat stream: every document as
BOS, its tokens, EOS) and `SPLIT.starts.npy` (where the documents begin), and `meta.json`, which is
written last: without it, or with another fingerprint in it, everything is made again.
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
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO

import numpy as np

from transformer.data import tokens
from transformer.data.source import Source
from transformer.data.tokens import BOS, EOS, SPECIALS, Texts, Tokenizer
from transformer.spec import Choice, SpecError

_FORMAT = 1  # raise it when the layout of the files changes


@dataclasses.dataclass(frozen=True)
class Stream:
    """A split: `tokens` [N] (uint16 or uint32) and `starts` int64 [documents + 1], ending in N."""

    tokens: np.ndarray
    starts: np.ndarray

    @property
    def targets(self) -> int:
        """How many tokens one pass predicts: all but the BOS of each document."""
        return len(self.tokens) - (len(self.starts) - 1)


@dataclasses.dataclass(frozen=True)
class Data:
    """Tokenised splits; `fingerprint` changes with the text and with the tokenizer."""

    tokenizer: Tokenizer
    fingerprint: str
    streams: Mapping[str, Stream]

    @property
    def splits(self) -> tuple[str, ...]:
        return tuple(self.streams)

    def stream(self, split: str) -> Stream:
        if split not in self.streams:
            raise SpecError(f"no split {split!r} (known: {', '.join(self.streams)})")
        return self.streams[split]


def tokenise(
    source: Source, choice: Choice, directory: Path, tokenizer: Tokenizer | None = None
) -> Data:
    """The tokenised splits of `source`, made in `directory` unless they are there already.

    `choice` trains the tokenizer on the training split, where none is given. A process that finds
    another one at work waits for it; one that is killed leaves nothing that would be used later.
    """
    directory.mkdir(parents=True, exist_ok=True)
    wanted = {
        "format": _FORMAT,
        "source": source.fingerprint(),
        "tokenizer": tokenizer.fingerprint if tokenizer else choice.text,
    }
    with _lock(directory):
        # An existing result serves whether its tokenizer was trained here or given.
        if (found := _read_meta(directory, wanted)) is None:
            found = _build(source, choice, directory, tokenizer, wanted)
        # Opened under the lock: a mapped file stays what it is when another one takes its name.
        streams = {split: Stream(*_open(directory, split)) for split in found["splits"]}
        tokenizer = tokenizer or tokens.load(directory / "tokenizer.json")
    return Data(tokenizer, found["fingerprint"], streams)


def _build(
    source: Source, choice: Choice, directory: Path, tokenizer: Tokenizer | None, wanted: dict
) -> dict:
    (directory / "meta.json").unlink(missing_ok=True)
    made: Tokenizer = tokenizer or choice(_training_texts(source))
    sizes = {}
    with tempfile.TemporaryDirectory(dir=directory, prefix=".partial-") as partial:
        for split in source.splits:
            sizes[split] = _write_split(source, split, made, Path(partial))
        tokens.save(made, Path(partial) / "tokenizer.json")
        meta = {
            "format": _FORMAT,
            "source": wanted["source"],
            "tokenizer": made.fingerprint,
            "choice": wanted["tokenizer"],
            "fingerprint": _join(str(_FORMAT), wanted["source"], made.fingerprint),
            "splits": sizes,
        }
        (Path(partial) / "meta.json").write_text(json.dumps(meta, indent=1))
        names = [name for split in sizes for name in _names(split)]
        for name in [*names, "tokenizer.json", "meta.json"]:  # meta.json last: it vouches for all
            (Path(partial) / name).replace(directory / name)
    return meta


def _read_meta(directory: Path, wanted: dict) -> dict | None:
    """What `meta.json` says, if it describes what is wanted and the files it speaks of."""
    try:
        meta = json.loads((directory / "meta.json").read_text())
        same = (
            meta["format"] == wanted["format"]
            and meta["source"] == wanted["source"]
            and wanted["tokenizer"] in (meta["tokenizer"], meta["choice"])
            and tokens.load(directory / "tokenizer.json").fingerprint == meta["tokenizer"]
        )
        lengths = {split: [len(a) for a in _open(directory, split)] for split in meta["splits"]}
    except (OSError, ValueError, KeyError, TypeError, EOFError):
        return None
    return meta if same and lengths == meta["splits"] else None


def _training_texts(source: Source) -> Texts:
    def texts() -> Iterator[str]:
        return (text for text, _ in source.pieces("train"))

    if not any(texts()):
        raise SpecError("the training split holds no text to train a tokenizer on")
    return texts


def _write_split(source: Source, split: str, tokenizer: Tokenizer, folder: Path) -> list[int]:
    dtype = np.dtype(np.uint16 if tokenizer.size <= 1 << 16 else np.uint32)
    starts, total, inside = [0], 0, False
    progress = _Progress(split)
    flat_name, starts_name = _names(split)
    with (folder / flat_name).open("wb+") as f:
        begin = _npy_header(f, dtype, 0)
        for text, ends in source.pieces(split):
            ids = _encode(tokenizer, text, split, len(starts))
            frame = [[BOS]] * (not inside) + [ids] + [[EOS]] * ends
            total += _append(f, np.concatenate(frame).astype(dtype))
            inside = not ends
            if ends:
                starts.append(total)
            progress(total, len(starts) - 1)
        # The header keeps its length: NumPy pads it for an axis that grows.
        f.seek(0)
        assert _npy_header(f, dtype, total) == begin
    assert not inside, "a source must end its last document"
    if total == 0:
        raise SpecError(
            f"the {split} split is empty: it has 0 documents and so 0 tokens to predict; "
            "give more text or a larger share"
        )
    np.save(folder / starts_name, np.array(starts, np.int64))
    return [total, len(starts)]


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


def _names(split: str) -> tuple[str, str]:
    return f"{split}.npy", f"{split}.starts.npy"


def _open(directory: Path, split: str) -> list[np.ndarray]:
    return [np.load(directory / n, mmap_mode="r").view(np.ndarray) for n in _names(split)]


def _join(*parts: str) -> str:
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()
