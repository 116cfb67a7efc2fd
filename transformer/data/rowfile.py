"""Files with a row a line: `pairs`, translations line by line, and `labelled`, texts with labels.

Only LF and CR LF end a line (`textfile.lines`), so no character inside a sentence can shift what
belongs together; a line that does not fit is refused with its file and number.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

from transformer import spec
from transformer.data import textfile
from transformer.data.corpus import (
    LABELLED,
    PAIR,
    Row,
    Rows,
    Share,
    Source,
    digest,
    held_out,
)
from transformer.spec import Must, SpecError

_DIRECTION = re.compile(r"([^\s-]+-[^\s-]+)?")
Direction = Annotated[
    str, Must("be two languages such as 'en-de'", lambda v: bool(_DIRECTION.fullmatch(v)))
]
Separator = Annotated[
    str, Must("be some characters, but no line break", lambda v: v and not set(v) & {"\n", "\r"})
]
Files = str | tuple[str, ...]


def pairs(
    train: Files = "",  # ('a.en', 'a.de'), the source first, or 'a.tsv'
    validation: Files | Share = 0.1,  # files as for train, or the last share of its pairs
    test: Files | None = None,
    direction: Direction = "",  # 'en-de'; else it is what the names of the two files end in
) -> Source:
    """Translations, from two files aligned line by line or from one with a tab between the sides.

    Names that end in .gz or .xz are read as what they hold. Empty lines are kept. SpecError names
    a file that is missing, empty, a damaged archive or not UTF-8, two files that have not the same
    number of lines, and a line of a table that has not exactly one tab.
    """
    parts = _parts("pairs", {"train": train, "validation": validation, "test": test}, _sides)
    languages = _languages({split: part.files for split, part in parts.items()}, direction)
    splits, share = _splits(parts, validation)
    return Rows(splits, lambda: _digest(parts, share), PAIR, languages)


def labelled(
    train: str = "",  # a file whose lines are a label, the separator and a text
    validation: str | Share = 0.1,  # a file, or the last share of the training texts
    test: str | None = None,
    separator: Separator = "\t",  # what follows its first occurrence in a line is the text
) -> Source:
    """Texts to be classified, one a line, each behind its label.

    Names that end in .gz or .xz are read as what they hold. SpecError names a file that is missing,
    empty, a damaged archive or not UTF-8, a line that has no label, and a label that training
    lacks.
    """
    given = {"train": train, "validation": validation, "test": test}
    parts = _parts("labelled", given, functools.partial(_labelled, separator))
    splits, share = _splits(parts, validation)
    labels = functools.cache(lambda: frozenset(label for _, label in splits["train"]()))
    for split in splits.keys() - {"train"}:
        splits[split] = functools.partial(_known, split, splits[split], labels)
    return Rows(splits, lambda: _digest(parts, share, separator), LABELLED)


@dataclasses.dataclass(frozen=True)
class _Part:
    """Two files that are aligned, or one whose lines `cut` divides."""

    files: tuple[Path, ...]
    cut: Callable[[str], Row]

    @functools.cached_property
    def count(self) -> int:
        counts = [textfile.count(file) for file in self.files]
        if len(set(counts)) > 1:
            (a, b), (m, n) = self.files, counts
            raise SpecError(f"pairs: {a} has {m} lines and {b} has {n}; line must answer to line")
        return counts[0]

    def rows(self) -> Iterator[Row]:
        if len(self.files) == 2 and self.count:  # where they are not aligned it is refused
            yield from zip(*map(textfile.lines, self.files), strict=True)
            return
        for number, line in enumerate(textfile.lines(self.files[0]), 1):
            try:
                yield self.cut(line)
            except ValueError as e:
                raise SpecError(f"{self.files[0]} line {number}: {e}") from None


def _sides(line: str) -> Row:
    sides = tuple(line.split("\t"))
    if len(sides) != 2:
        raise ValueError(f"expected source, one tab and target, found {len(sides) - 1} tabs")
    return sides


def _labelled(separator: str, line: str) -> Row:
    label, found, text = line.partition(separator)
    if not found or not label:
        raise ValueError(f"expected a label, the separator {separator!r} and a text")
    return text, label


def _known(
    split: str, rows: Callable[[], Iterator[Row]], labels: Callable[[], frozenset[str]]
) -> Iterator[Row]:
    """The rows, their labels checked to be among those of training."""
    for number, (text, label) in enumerate(rows(), 1):
        if label not in labels():
            problem = spec.unknown(label, labels(), "label")
            raise SpecError(f"labelled: {problem} with text {number} of the {split} split")
        yield text, label


def _parts(entry: str, given: dict[str, Any], cut: Callable[[str], Row]) -> dict[str, _Part]:
    """What is given by files, each checked to be readable and to be named once."""
    parts, seen = {}, set()
    for split, names in given.items():
        if isinstance(names, int | float | None):
            continue
        names = (names,) if isinstance(names, str) else names
        if not names or not all(names):
            raise SpecError(f"{entry}: {split} must name a file, such as 'a.tsv'")
        if len(names) > 2:
            raise SpecError(f"{entry}: {split} must be one file or two, got {names!r}")
        files = tuple(Path(name).expanduser().absolute() for name in names)
        for file in files:
            textfile.check(file, f"{entry}: {split}")
            if file in seen:
                raise SpecError(f"{entry}: {file} is named twice; each needs a file of its own")
            seen.add(file)
        parts[split] = _Part(files, cut)
    return parts


def _splits(
    parts: dict[str, _Part], validation: Any
) -> tuple[dict[str, Callable[[], Iterator[Row]]], float | None]:
    """The rows of each split, and the share that validation takes of the training files."""
    splits = {split: part.rows for split, part in parts.items()}
    if "validation" in parts:
        return splits, None
    train = parts["train"]
    divided = held_out(train.rows, lambda: train.count, validation)
    return divided | {s: rows for s, rows in splits.items() if s not in divided}, validation


def _digest(parts: dict[str, _Part], *options: Any) -> str:
    # The counts are there to be checked before anything else is done with the files.
    contents = [(split, part.count, digest(*part.files)) for split, part in parts.items()]
    return digest(contents, options)


def _languages(files: dict[str, tuple[Path, ...]], direction: str) -> tuple[str, str]:
    """Those of `direction`, or else what the names of two files end in. SpecError if a split's
    files do not go with the others, as when they are given the wrong way round."""
    ends = {split: tuple(map(_end, names)) for split, names in files.items() if len(names) == 2}
    spoken = {split: pair for split, pair in ends.items() if all(pair) and len(set(pair)) == 2}
    told = tuple(direction.split("-")) if direction else None
    source, target = told or next(iter(spoken.values()), ("source", "target"))
    for split, (a, b) in spoken.items():
        wrong = target == a or source == b if told else (a, b) != (source, target)
        if wrong:
            shown = ", ".join(str(file) for file in files[split])
            raise SpecError(f"pairs: {split} ({shown}) does not go from {source} to {target}")
    return source, target


def _end(file: Path) -> str:
    name = file.with_suffix("") if file.suffix in textfile.ARCHIVES else file
    return name.suffix.removeprefix(".")
