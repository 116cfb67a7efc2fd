"""What a source of documents is: `Source`, and the kinds that most of them are made of.

A source knows its splits and their fields, yields the documents of each, and has a fingerprint of
their content. `Divided` cuts one text in two, `Separate` has a text for each split, `Rows` has
several fields a document: the two sides of a translation, or a text and its label.
"""

import functools
import hashlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from transformer.data.textfile import Piece, opened
from transformer.spec import Must

Share = Annotated[float, Must("lie in (0, 1)", lambda v: 0 < v < 1)]
Row = tuple[str, ...]
"""The fields of a document, in the order of `Source.fields`."""

TEXT = ("text",)
PAIR = ("source", "text")
LABELLED = ("text", "label")


class Source:
    """The documents of each split. A subclass defines `documents`, or `pieces` if a document may
    be too large to be held whole; where there is only text, `documents` need not have `field`.
    Splits other than "train" are for evaluation.

    Attributes:
      splits: "train", "validation", and "test" where there is one.
      fields: ("text",); or ("source", "text") for translations, of which the text is predicted; or
        ("text", "label"), the label being its name. All fields of a split have the same number of
        documents, in the same order.
      languages: those of source and text, for translations.
      weights: the shares of `parts` in training.
    """

    splits: tuple[str, ...] = ("train", "validation")
    fields: tuple[str, ...] = TEXT
    languages: tuple[str, str] | None = None
    weights: tuple[float, ...] = (1.0,)

    @property
    def parts(self) -> tuple["Source", ...]:
        """The sources this one is mixed from, itself if it is no mixture."""
        return (self,)

    def documents(self, split: str, field: str = "text") -> Iterator[str]:
        parts: list[str] = []
        for text, ends in self.pieces(split, field):
            parts.append(text)
            if ends:
                yield "".join(parts)
                parts.clear()

    def pieces(self, split: str, field: str = "text") -> Iterator[Piece]:
        given = (split,) if self.fields == TEXT else (split, field)
        return ((document, True) for document in self.documents(*given))

    def length_of(self, question: str, answer: str) -> int:
        """By what accuracy is reported: words of the question."""
        return len(question.split())

    def fingerprint(self) -> str:
        """A hash of what the splits contain, whatever the files are called."""
        raise NotImplementedError


class Divided(Source):
    """One text whose last `fraction` of characters is the validation split; a document that
    crosses the joint is cut there."""

    def __init__(self, whole: Callable[[], Iterator[Piece]], fraction: float, hashed: Any):
        self._whole, self._fraction, self._hashed = whole, fraction, hashed

    @functools.cached_property
    def _joint(self) -> int:
        total = sum(len(text) for text, _ in self._whole())
        return total - round(total * self._fraction)

    def pieces(self, split: str, field: str = "text") -> Iterator[Piece]:
        assert field in self.fields
        return {"train": _before, "validation": _after}[split](self._whole(), self._joint)

    def fingerprint(self) -> str:
        return digest(self._hashed(), self._fraction)


class Separate(Source):
    """One text for each split."""

    def __init__(self, texts: Mapping[str, Callable[[], Iterator[Piece]]], hashed: Any):
        self._texts, self._hashed, self.splits = texts, hashed, tuple(texts)

    def pieces(self, split: str, field: str = "text") -> Iterator[Piece]:
        assert field in self.fields
        return self._texts[split]()

    def fingerprint(self) -> str:
        return digest(self._hashed())


class Rows(Source):
    """Documents of several fields, a row each; `rows` gives those of each split."""

    def __init__(
        self,
        rows: Mapping[str, Callable[[], Iterator[Row]]],
        hashed: Any,
        fields: tuple[str, ...],
        languages: tuple[str, str] | None = None,
    ):
        self._rows, self._hashed, self.splits = rows, hashed, tuple(rows)
        self.fields, self.languages = fields, languages

    def documents(self, split: str, field: str = "text") -> Iterator[str]:
        place = self.fields.index(field)
        return (row[place] for row in self._rows[split]())

    def fingerprint(self) -> str:
        return digest(self._hashed(), self.fields, self.languages)


class Mixture(Source):
    """Sources of the same fields, one after the other; a mixture among them counts as its parts."""

    def __init__(self, sources: Sequence[Source], weights: Sequence[float]):
        self._parts = tuple(part for source in sources for part in source.parts)
        self.weights = tuple(
            weight / sum(weights) * share
            for source, weight in zip(sources, weights, strict=True)
            for share in source.weights
        )
        first, *others = self._parts
        self.fields = first.fields
        self.splits = tuple(s for s in first.splits if all(s in part.splits for part in others))
        spoken = {part.languages for part in self._parts}
        self.languages = first.languages if len(spoken) == 1 else None
        if len({type(part) for part in self._parts}) == 1:
            self.length_of = first.length_of

    @property
    def parts(self) -> tuple[Source, ...]:
        return self._parts

    def pieces(self, split: str, field: str = "text") -> Iterator[Piece]:
        return itertools.chain.from_iterable(part.pieces(split, field) for part in self._parts)

    def fingerprint(self) -> str:
        """Of the content, which the weights do not change."""
        return digest("mixture", [part.fingerprint() for part in self._parts])


def held_out(
    rows: Callable[[], Iterator[Row]], count: Callable[[], int], share: float
) -> dict[str, Callable[[], Iterator[Row]]]:
    """Training and validation rows: the last `share` of them is the validation split."""

    def joint() -> int:
        return count() - round(count() * share)

    return {
        "train": lambda: itertools.islice(rows(), joint()),
        "validation": lambda: itertools.islice(rows(), joint(), None),
    }


def digest(*parts: Any) -> str:
    """SHA-256 of values and of the contents of files."""
    total = hashlib.sha256()
    for part in parts:
        if isinstance(part, Path):
            with opened(part) as f:
                total.update(hashlib.file_digest(f, "sha256").digest())
        else:
            total.update(hashlib.sha256(repr(part).encode()).digest())
    return total.hexdigest()


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
