"""Text files in pieces, or line by line: a file of any size is read a megabyte at a time.

Names that end in .gz or .xz are archives, read as if they were what they hold.
"""

import codecs
import contextlib
import glob
import gzip
import io
import lzma
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformer.data.tokens import last_break
from transformer.spec import SpecError

Piece = tuple[str, bool]
"""A part of a document, and whether the document ends with it."""

_BLOCK = 1 << 20  # bytes of a file read at once
ARCHIVES = {".gz": gzip.open, ".xz": lzma.open}
_SEPARATORS = {
    "line": re.compile(r"[^\S\n]*\n"),
    "paragraph": re.compile(r"[^\S\n]*\n(?:[^\S\n]*\n)+"),
}


def find(patterns: str | tuple[str, ...], option: str, entry: str = "text") -> list[Path]:
    """The files that paths or patterns name, absolute, in order, each checked to be readable.

    SpecError says what is wrong with `option` of `entry`.
    """
    files: list[Path] = []
    for pattern in (patterns,) if isinstance(patterns, str) else patterns:
        path = Path(pattern).expanduser().absolute()
        if pattern and (path.exists() or not glob.has_magic(pattern)):
            files.append(path)
        elif found := sorted(p for p in glob.glob(str(path), recursive=True) if Path(p).is_file()):
            files += map(Path, found)
        elif pattern:
            raise SpecError(f"{entry}: no file matches {option} {str(path)!r}")
    if not files:
        raise SpecError(f"{entry}: {option} must name a file, such as {entry}({option}='a.txt')")
    for file in (files := list(dict.fromkeys(files))):
        check(file, f"{entry}: {option}", f"; write '{file}/*.txt' for its files")
    return files


def check(file: Path, what: str, instead: str = "") -> None:
    """Raises SpecError, beginning with `what`, for a file that is missing, unreadable or empty;
    `instead` is what to do where it is a directory."""
    if not file.exists():
        raise SpecError(f"{what} {file} does not exist")
    if file.is_dir():
        raise SpecError(f"{what} {file} is a directory{instead}")
    try:
        with opened(file) as f:
            empty = f.read(4) in (b"", codecs.BOM_UTF8)
    except OSError as e:
        raise SpecError(f"{what} {file} cannot be read: {e.strerror}") from None
    if empty:
        raise SpecError(f"{what} {file} is empty")


@contextlib.contextmanager
def opened(file: Path) -> Iterator[Any]:
    """The bytes of a file, or of what an archive holds. SpecError for a damaged archive."""
    archive = ARCHIVES.get(file.suffix)
    with file.open("rb") as f:
        if archive is None:
            yield f
            return
        try:
            with archive(f) as unpacked, io.BufferedReader(unpacked, _BLOCK) as buffered:
                yield buffered
        except (EOFError, gzip.BadGzipFile, lzma.LZMAError, zlib.error) as e:
            kind = file.suffix.removeprefix(".")
            raise SpecError(f"{file} is no {kind} archive, or a damaged one: {e}") from None


def count(file: Path) -> int:
    """How many lines `lines` gives."""
    total, last = 0, b"\n"
    with opened(file) as f:
        while block := f.read(_BLOCK):
            total, last = total + block.count(b"\n"), block[-1:]
    return total + (last != b"\n")


def lines(file: Path) -> Iterator[str]:
    """The lines of a file, ended by LF or CR LF; no other character ends a line.

    A byte-order mark is removed; an empty line counts, the one after a final LF does not.
    """
    position = 0
    with opened(file) as f:
        for raw in f:
            line = raw.removesuffix(b"\n").removesuffix(b"\r")
            mark = codecs.BOM_UTF8 if position == 0 else b""
            try:
                yield line.removeprefix(mark).decode("utf-8")
            except UnicodeDecodeError as e:
                start = position + e.start + len(mark) * line.startswith(mark)
                raise _not_utf8(file, e, start) from None
            position += len(raw)


def pieces(files: list[Path], unit: str) -> Iterator[Piece]:
    """The documents of `files`, a document being a "file", a "paragraph" or a "line"."""
    for file in files:
        found = False
        for found_piece in _units(_read(file), _SEPARATORS.get(unit)):
            found = True
            yield found_piece
        if not found:
            raise SpecError(f"{file} holds nothing but white space")


def _read(file: Path) -> Iterator[str]:
    """The text of a file in pieces of about a megabyte that end between words where they can."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    position, begun, held, carriage = 0, False, "", ""
    with opened(file) as f:
        while block := f.read(_BLOCK):
            new = _decode(decoder, block, position, file)
            if not begun:
                begun, new = bool(new), new.removeprefix("\ufeff")
            new = carriage + new
            position += len(block)
            carriage = "\r" if new.endswith("\r") else ""  # its LF may come with the next block
            text = held + new.removesuffix(carriage).replace("\r\n", "\n")
            cut = last_break(text)
            held = text[cut:]
            yield text[:cut]
    yield held + carriage + _decode(decoder, b"", position, file)


def _decode(decoder: codecs.IncrementalDecoder, block: bytes, position: int, file: Path) -> str:
    pending = len(decoder.getstate()[0])
    try:
        return decoder.decode(block, final=not block)
    except UnicodeDecodeError as e:
        raise _not_utf8(file, e, position - pending + e.start) from None


def _not_utf8(file: Path, error: UnicodeDecodeError, offset: int) -> SpecError:
    byte = error.object[error.start]
    return SpecError(f"{file} is not UTF-8: byte {byte:#04x} at offset {offset} ({error.reason})")


def _units(chunks: Iterator[str], separator: re.Pattern | None) -> Iterator[Piece]:
    """Divides a text that comes in chunks into documents; without separator it is one document."""
    inside, held = False, ""
    for chunk in chunks:
        # White space at the end may be the first half of a separator: it waits for the next chunk.
        body = held + chunk
        kept = body.rstrip() if separator else body
        held = body[len(kept) :]
        *closed, last = separator.split(kept) if separator else [kept]
        for part in closed:
            if inside or part.strip():
                yield part, True
            inside = False
        if last:
            yield last, False
            inside = True
    if inside:
        yield "", True
