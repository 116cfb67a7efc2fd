"""Where text comes from: SOURCES, each a function of its options that gives a `Source`.

A source knows its splits, yields their documents, and has a fingerprint of their content. To add
one, subclass `Source` and put a function that makes it into the table.
"""

import functools
import hashlib
import importlib.resources
import lzma
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from transformer.data import textfile
from transformer.data.textfile import Piece
from transformer.spec import Must, SpecError

Share = Annotated[float, Must("lie in (0, 1)", lambda v: 0 < v < 1)]
_TITLE = re.compile(r"(?:THE END)?([A-Z][A-Z ',;]+)\n{1,2}by William Shakespeare\n")


class Source:
    """The documents of each split. A subclass defines `documents`, or `pieces` if a document may
    be too large to be held whole."""

    splits: tuple[str, ...] = ("train", "validation")

    def documents(self, split: str) -> Iterator[str]:
        parts: list[str] = []
        for text, ends in self.pieces(split):
            parts.append(text)
            if ends:
                yield "".join(parts)
                parts.clear()

    def pieces(self, split: str) -> Iterator[Piece]:
        return ((document, True) for document in self.documents(split))

    def fingerprint(self) -> str:
        """A hash of what the splits contain, whatever the files are called."""
        raise NotImplementedError


class Divided(Source):
    """One text whose last `fraction` of characters is the validation split; a document that
    crosses the joint is cut there."""

    def __init__(self, whole: Callable[[], Iterator[Piece]], fraction: float, digest: Any):
        self._whole, self._fraction, self._digest = whole, fraction, digest

    @functools.cached_property
    def _joint(self) -> int:
        total = sum(len(text) for text, _ in self._whole())
        return total - round(total * self._fraction)

    def pieces(self, split: str) -> Iterator[Piece]:
        return {"train": _before, "validation": _after}[split](self._whole(), self._joint)

    def fingerprint(self) -> str:
        return _digest(self._digest(), self._fraction)


class Separate(Source):
    """One text for each split."""

    def __init__(self, texts: dict[str, Callable[[], Iterator[Piece]]], digest: Any):
        self._texts, self._digest, self.splits = texts, digest, tuple(texts)

    def pieces(self, split: str) -> Iterator[Piece]:
        return self._texts[split]()

    def fingerprint(self) -> str:
        return _digest(self._digest())


def shakespeare() -> Source:
    """42 plays and poems that come with the package (see corpora/CREDITS.md), one document each.

    The works stand one after the other without a mark between them; each begins with its title in
    capitals followed by "by William Shakespeare", which is nowhere else, and that is where the
    text is divided. The last 10 % of the characters are the validation split.
    """
    return Divided(
        lambda: ((work, True) for work in _works()), 0.1, lambda: _digest("works", *_works())
    )


def text(
    path: str | tuple[str, ...] = "",  # a file, a pattern such as 'books/*.txt', or several
    validation: str | tuple[str, ...] | Share = 0.1,  # files of its own, or the last share
    documents: Literal["file", "paragraph", "line"] = "file",  # what a document is
) -> Source:
    """UTF-8 text files, in the order given (a pattern's files sorted by name).

    A byte-order mark is removed and CRLF read as LF. Paragraphs are separated by blank lines;
    paragraphs and lines lose trailing white space, empty ones are no documents. SpecError names a
    file that is missing, empty, unreadable or not UTF-8.
    """
    train = textfile.find(path, "path")
    if isinstance(validation, int | float):
        return Divided(
            lambda: textfile.pieces(train, documents),
            validation,
            lambda: _digest(documents, *train),
        )
    held_out = textfile.find(validation, "validation")
    if both := set(train) & set(held_out):
        raise SpecError(f"text: {min(both)} is in path and in validation; name it in one of them")
    return Separate(
        {
            "train": lambda: textfile.pieces(train, documents),
            "validation": lambda: textfile.pieces(held_out, documents),
        },
        lambda: _digest(documents, *train, "validation", *held_out),
    )


def tfds(
    name: str = "",  # as in the catalogue: 'ag_news_subset', 'wiki40b/en:1.3.0'
    split: str = "train",  # the training split, or a slice such as 'train[:10%]'
    validation: str | Share | None = None,  # a split, the last share of `split`, or see below
    text_key: str = "text",  # the feature that holds the text
    data_dir: str | None = None,  # where it was prepared; None is the usual place
) -> Source:
    """A prepared TFDS dataset, one document an example, read by random access.

    Without `validation`, the dataset's own validation split, or else the last tenth of `split`.
    A test split, if there is one, is offered for evaluation. Nothing is ever downloaded: SpecError
    says how to prepare a dataset that is not there.
    """
    stored = _Prepared(name, text_key, data_dir)
    if validation is None:
        validation = "validation" if "validation" in stored.splits else 0.1
    if isinstance(validation, int | float):
        return Divided(lambda: stored.pieces(split), validation, lambda: stored.digest(split))
    if validation == split:
        raise SpecError(f"tfds: split and validation are both {split!r}")
    names = {"train": split, "validation": validation}
    if "test" in stored.splits and "test" not in names.values():
        names["test"] = "test"
    return Separate(
        {key: functools.partial(stored.pieces, value) for key, value in names.items()},
        lambda: _digest(*(stored.digest(value) for value in names.values())),
    )


class _Prepared:
    """A TFDS dataset on disk."""

    def __init__(self, name: str, key: str, data_dir: str | None):
        # tensorflow_datasets takes 0.3 to 2 s to import, for this source only.
        import tensorflow_datasets
        from tensorflow_datasets.core import constants

        self.name, self.key = name, key
        # A name with a namespace ("huggingface:…") would send tfds to the network, with retries.
        if not re.fullmatch(r"\w+(/[\w.\-]+)*(:\d+\.\d+\.\d+)?", name):
            raise SpecError(
                f"tfds: name must be one of the catalogue, such as 'lm1b', got {name!r}"
            )
        directory = str(Path(data_dir).expanduser().absolute()) if data_dir else None
        place = directory or str(constants.DATA_DIR)
        try:
            self._builder: Any = tensorflow_datasets.builder(
                name, data_dir=directory, try_gcs=False
            )
            prepared = self._builder.is_prepared()
        except (ValueError, AssertionError, ImportError):
            prepared = False
        if not prepared:
            raise SpecError(_how_to_prepare(name, f"is not prepared in {place}", directory))
        if self._builder.info.file_format.value != "array_record":
            kind = f"is stored as {self._builder.info.file_format.value}, which needs TensorFlow"
            raise SpecError(_how_to_prepare(name, kind, directory))
        features: Any = self._builder.info.features
        if key not in features:
            known = ", ".join(sorted(features))
            raise SpecError(f"tfds: {name} has no feature {key!r} (known: {known})")

    @property
    def splits(self) -> tuple[str, ...]:
        return tuple(self._builder.info.splits)

    def pieces(self, split: str) -> Iterator[Piece]:
        examples = self._examples(split)
        # One call for many examples: single reads of ArrayRecord are fifty times slower.
        for start in range(0, len(examples), 1000):
            chunk = examples.__getitems__(range(start, min(start + 1000, len(examples))))
            yield from ((self._text(e, split, start + i), True) for i, e in enumerate(chunk))

    def digest(self, split: str) -> str:
        """The split's sizes and 64 of its texts: the stored bytes differ from one preparation of
        the same data to the next, and reading everything would take as long as tokenising."""
        info = self._builder.info
        examples = self._examples(split)
        chosen = sorted({i * len(examples) // 64 for i in range(64)} if len(examples) else ())
        read = zip(chosen, examples.__getitems__(chosen), strict=True)
        texts = [self._text(example, split, i) for i, example in read]
        sizes = [(s.name, s.num_examples, s.num_bytes) for s in info.splits.values()]
        return _digest(info.full_name, sorted(sizes), split, self.key, len(examples), *texts)

    def _examples(self, split: str) -> Any:
        try:
            return self._builder.as_data_source(split)
        except (ValueError, KeyError, AssertionError):
            known = ", ".join(self.splits)
            raise SpecError(f"tfds: {self.name} has no split {split!r} (known: {known})") from None

    def _text(self, example: dict[str, Any], split: str, index: int) -> str:
        value = example[self.key]
        try:
            return value if isinstance(value, str) else value.decode("utf-8")
        except (AttributeError, UnicodeDecodeError) as e:
            raise SpecError(
                f"tfds: {self.key!r} of example {index} in {self.name} {split} is not "
                f"UTF-8 text: {e}"
            ) from None


def _how_to_prepare(name: str, what: str, directory: str | None) -> str:
    place = f", data_dir={directory!r}" if directory else ""
    return (
        f'tfds: {name} {what}; prepare it once, where there is a network, with python -c "import '
        f"tensorflow_datasets as t; t.builder({name!r}{place}).download_and_prepare("
        "file_format='array_record')\" (older datasets need an import of their module before, such "
        "as tensorflow_datasets.text.glue)"
    )


@functools.cache
def _works() -> tuple[str, ...]:
    file = importlib.resources.files("transformer.data") / "corpora" / "shakespeare.txt.xz"
    whole = lzma.decompress(file.read_bytes()).decode("ascii")
    starts = [found.start(1) for found in _TITLE.finditer(whole)]
    assert len(starts) == 42 and starts[0] == 0
    return tuple(whole[a:b] for a, b in zip(starts, [*starts[1:], len(whole)], strict=True))


def _before(pieces: Iterator[Piece], joint: int) -> Iterator[Piece]:
    """The first `joint` characters."""
    for text, ends in pieces:
        if joint <= len(text):
            if joint:
                yield text[:joint], True
            return
        joint -= len(text)
        yield text, ends


def _after(pieces: Iterator[Piece], joint: int) -> Iterator[Piece]:
    """All but the first `joint` characters."""
    inside = False
    for text, ends in pieces:
        rest = text[joint:]
        joint = max(0, joint - len(text))
        if rest or inside:
            yield rest, ends
            inside = not ends


def _digest(*parts: Any) -> str:
    """SHA-256 of values and of the contents of files."""
    total = hashlib.sha256()
    for part in parts:
        if isinstance(part, Path):
            with part.open("rb") as f:
                total.update(hashlib.file_digest(f, "sha256").digest())
        else:
            total.update(hashlib.sha256(repr(part).encode()).digest())
    return total.hexdigest()


SOURCES = {"shakespeare": shakespeare, "text": text, "tfds": tfds}
