"""The texts that come with the package, in corpora/ (see CREDITS.md there): `shakespeare`, `bible`
and `wordnet`. What stands in which split is a function of the text alone, and none stands in two.
"""

import functools
import hashlib
import importlib.resources
import itertools
import lzma
import re
from collections.abc import Callable, Iterable, Iterator

from transformer.data.corpus import LABELLED, PAIR, Divided, Row, Rows, Source, digest

_TITLE = re.compile(r"(?:THE END)?([A-Z][A-Z ',;]+)\n{1,2}by William Shakespeare\n")
_SPLITS = ("train", "validation", "test")
_BLOCK = 100  # consecutive verses that stand together, some two chapters


def shakespeare() -> Source:
    """42 plays and poems that come with the package (see corpora/CREDITS.md), one document each.

    The works stand one after the other without a mark between them; each begins with its title in
    capitals followed by "by William Shakespeare", which is nowhere else, and that is where the
    text is divided. The last 10 % of the characters are the validation split.
    """
    return Divided(
        lambda: ((work, True) for work in _works()), 0.1, lambda: digest("works", *_works())
    )


def bible(
    reverse: bool = False,  # from Spanish to English
) -> Source:
    """31,043 verses in English and Spanish that come with the package (see corpora/CREDITS.md).

    Of each 20 blocks of 100 consecutive verses the 10th is for validation and the 20th for test:
    neighbours, which tell of the same people and places, stay together, and all kinds of books
    give to all splits. A verse that has the same words, on either side, as one in training is in
    training, too; then there are 1,578 for validation and 1,465 for test.
    """
    turn: Callable[[Row], Row] = (lambda row: row[::-1]) if reverse else (lambda row: row)
    return Rows(
        {split: functools.partial(lambda s: map(turn, _verses()[s]), split) for split in _SPLITS},
        lambda: digest("bible", _verses()),
        PAIR,
        ("es", "en") if reverse else ("en", "es"),
    )


def wordnet(
    lemma: bool = False,  # the word that is explained stands before the gloss: 'able: having ...'
) -> Source:
    """116,782 glosses of WordNet 3.0, each with one of 45 supersenses (see corpora/CREDITS.md).

    A tenth each is for validation and test, drawn by a hash of the gloss's words: synonyms that
    share a gloss share its split. Of several words that have the same gloss and supersense the
    first is there.
    """
    return Rows(
        {split: functools.partial(_glosses, split, lemma) for split in _SPLITS},
        lambda: digest("wordnet", lemma, _senses()),
        LABELLED,
    )


@functools.cache
def _works() -> tuple[str, ...]:
    whole = _unpacked("shakespeare.txt.xz", "ascii")
    starts = [found.start(1) for found in _TITLE.finditer(whole)]
    assert len(starts) == 42 and starts[0] == 0
    return tuple(whole[a:b] for a, b in zip(starts, [*starts[1:], len(whole)], strict=True))


@functools.cache
def _verses() -> dict[str, list[Row]]:
    """The verses of each split."""
    verses = _table("bible.tsv.xz")
    turns = itertools.cycle(["train"] * 9 + ["validation"] + ["train"] * 9 + ["test"])
    blocks = itertools.chain.from_iterable([split] * _BLOCK for split in turns)
    splits = _apart([set(map(_words, verse)) for verse in verses], blocks)
    return {s: [v for v, own in zip(verses, splits, strict=True) if own == s] for s in _SPLITS}


def _apart(keys: list[set[str]], splits: Iterable[str]) -> list[str]:
    """`splits`, but what shares a key with something of an earlier one is moved there."""
    moved = list(itertools.islice(splits, len(keys)))
    for i, split in enumerate(_SPLITS):
        seen = {key for own, name in zip(keys, moved, strict=True) if name == split for key in own}
        found = True
        while found:  # what has moved brings keys of its own
            found = [j for j, k in enumerate(keys) if moved[j] in _SPLITS[i + 1 :] and k & seen]
            for j in found:
                moved[j] = split
                seen |= keys[j]
    return moved


def _glosses(split: str, lemma: bool) -> Iterator[Row]:
    for supersense, word, gloss in _senses()[split]:
        yield f"{word}: {gloss}" if lemma else gloss, supersense


@functools.cache
def _senses() -> dict[str, list[Row]]:
    """Supersense, first lemma and gloss, of each split."""
    senses: dict[tuple[str, str], Row] = {}
    for supersense, word, gloss in _table("wordnet.tsv.xz"):
        senses.setdefault((gloss, supersense), (supersense, word, gloss))
    splits: dict[str, list[Row]] = {split: [] for split in _SPLITS}
    for sense in senses.values():
        drawn = int.from_bytes(hashlib.sha256(_words(sense[2]).encode()).digest()[:8]) % 10
        splits[{8: "validation", 9: "test"}.get(drawn, "train")].append(sense)
    return splits


def _words(text: str) -> str:
    """What is left when case, punctuation and white space do not count."""
    return " ".join(re.findall(r"\w+", text.casefold()))


def _table(name: str) -> list[Row]:
    return [tuple(line.split("\t")) for line in _unpacked(name).removesuffix("\n").split("\n")]


def _unpacked(name: str, encoding: str = "utf-8") -> str:
    file = importlib.resources.files("transformer.data") / "corpora" / name
    return lzma.decompress(file.read_bytes()).decode(encoding)
