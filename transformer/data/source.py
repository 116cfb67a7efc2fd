"""Where text comes from: SOURCES, each a function of its options that gives a `Source`.

To add one, subclass `Source` (`corpus.py`), or fill one of its kinds there, and put a function that
makes it into the table.
"""

from typing import Any, Literal

from transformer.data import textfile
from transformer.data.corpus import Divided, Mixture, Separate, Share, Source, digest
from transformer.data.embedded import bible, shakespeare, wordnet
from transformer.data.prepared import tfds
from transformer.data.probes import PROBES
from transformer.data.rowfile import labelled, pairs
from transformer.spec import Positive, SpecError, pick

__all__ = ["SOURCES", "Source"]


def text(
    path: str | tuple[str, ...] = "",  # a file, a pattern such as 'books/*.txt', or several
    validation: str | tuple[str, ...] | Share = 0.1,  # files of its own, or the last share
    documents: Literal["file", "paragraph", "line"] = "file",  # what a document is
) -> Source:
    """UTF-8 text files, in the order given (a pattern's files sorted by name).

    A name that ends in .gz or .xz is read as what it holds. A byte-order mark is
    removed and CRLF read as LF. Paragraphs are separated by blank lines; paragraphs and lines lose
    trailing white space, empty ones are no documents. SpecError names a file that is missing,
    empty, unreadable, a damaged archive or not UTF-8.
    """
    train = textfile.find(path, "path")
    if isinstance(validation, int | float):
        return Divided(
            lambda: textfile.pieces(train, documents),
            validation,
            lambda: digest(documents, *train),
        )
    held_out = textfile.find(validation, "validation")
    if both := set(train) & set(held_out):
        raise SpecError(f"text: {min(both)} is in path and in validation; name it in one of them")
    return Separate(
        {
            "train": lambda: textfile.pieces(train, documents),
            "validation": lambda: textfile.pieces(held_out, documents),
        },
        lambda: digest(documents, *train, "validation", *held_out),
    )


def mixture(
    sources: tuple[str, ...] = (),  # each as it would stand alone: ('bible', "pairs(train=...)")
    weights: tuple[Positive, ...] = (),  # shares of the training rows, whatever they add up to
) -> Source:
    """Several sources of the same kind, each with its share of the training data.

    The splits are those that all of them have; in evaluation the sources follow each other.
    SpecError names what has no weight, and sources whose fields differ.
    """
    if not sources or len(sources) != len(weights):
        raise SpecError(
            f"mixture: sources and weights must be as many, at least one, got {len(sources)} "
            f"and {len(weights)}"
        )
    read: Any = [
        pick(SOURCES, each, path=f"mixture: sources[{i}]") for i, each in enumerate(sources)
    ]
    parts: list[Source] = [choice() for choice in read]
    for each, part in zip(sources, parts, strict=True):
        if part.fields != parts[0].fields:
            raise SpecError(
                f"mixture: all sources must have the same fields, but {sources[0]} has "
                f"{' and '.join(parts[0].fields)}, {each} has {' and '.join(part.fields)}"
            )
    return Mixture(parts, weights)


SOURCES = {
    "shakespeare": shakespeare,
    "bible": bible,
    "wordnet": wordnet,
    "text": text,
    "pairs": pairs,
    "labelled": labelled,
    "tfds": tfds,
    "mixture": mixture,
    **PROBES,
}
