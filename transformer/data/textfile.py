"""Text files in pieces: a file of any size, even on one line, is read a megabyte at a time."""

import codecs
import glob
import re
from collections.abc import Iterator
from pathlib import Path

from transformer.data.tokens import last_break
from transformer.spec import SpecError

Piece = tuple[str, bool]
"""A part of a document, and whether the document ends with it."""

_BLOCK = 1 << 20  # bytes of a file read at once
_SEPARATORS = {
    "line": re.compile(r"[^\S\n]*\n"),
    "paragraph": re.compile(r"[^\S\n]*\n(?:[^\S\n]*\n)+"),
}


def find(patterns: str | tuple[str, ...], option: str) -> list[Path]:
    """The files that paths or patterns name, absolute, in order, each checked to be readable."""
    files: list[Path] = []
    for pattern in (patterns,) if isinstance(patterns, str) else patterns:
        path = Path(pattern).expanduser().absolute()
        if pattern and (path.exists() or not glob.has_magic(pattern)):
            files.append(path)
        elif found := sorted(p for p in glob.glob(str(path), recursive=True) if Path(p).is_file()):
            files += map(Path, found)
        elif pattern:
            raise SpecError(f"text: no file matches {option} {str(path)!r}")
    if not files:
        raise SpecError(f"text: {option} must name a file, such as text({option}='a.txt')")
    for file in (files := list(dict.fromkeys(files))):
        _check(file, option)
    return files


def _check(file: Path, option: str) -> None:
    if not file.exists():
        raise SpecError(f"text: {option} {file} does not exist")
    if file.is_dir():
        raise SpecError(f"text: {option} {file} is a directory; write '{file}/*.txt' for its files")
    try:
        with file.open("rb") as f:
            empty = f.read(4) in (b"", codecs.BOM_UTF8)
    except OSError as e:
        raise SpecError(f"text: {option} {file} cannot be read: {e.strerror}") from None
    if empty:
        raise SpecError(f"text: {option} {file} is empty")


def pieces(files: list[Path], unit: str) -> Iterator[Piece]:
    """The documents of `files`, a document being a "file", a "paragraph" or a "line"."""
    for file in files:
        found = False
        for found_piece in _units(_read(file), _SEPARATORS.get(unit)):
            found = True
            yield found_piece
        if not found:
            raise SpecError(f"text: {file} holds nothing but white space")


def _read(file: Path) -> Iterator[str]:
    """The text of a file in pieces of about a megabyte that end between words where they can."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    position, begun, held, carriage = 0, False, "", ""
    with file.open("rb") as f:
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
        raise SpecError(
            f"text: {file} is not UTF-8: byte {e.object[e.start]:#04x} at offset "
            f"{position - pending + e.start} ({e.reason})"
        ) from None


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
