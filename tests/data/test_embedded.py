"""The texts that ship with the package: how many there are, and that no split knows another's."""

import functools
import hashlib
import importlib.resources
import lzma

import pytest

from transformer.data import embedded

CORPORA = importlib.resources.files("transformer.data") / "corpora"


@functools.cache
def raw(name: str) -> list[list[str]]:
    data = lzma.decompress((CORPORA / name).read_bytes())
    assert data.endswith(b"\n")
    return [line.decode().split("\t") for line in data[:-1].split(b"\n")]


def letters(text: str) -> str:
    """What two texts share that differ in case, punctuation and white space alone."""
    return "".join(c for c in text.casefold() if c.isalnum())


def disjoint(splits: dict[str, list[str]]) -> bool:
    """Whether no two splits share a text, up to `letters`."""
    sets = [set(map(letters, texts)) for texts in splits.values()]
    return len(set().union(*sets)) == sum(map(len, sets))


def column(source, field: str) -> dict[str, list[str]]:
    return {split: list(source.documents(split, field)) for split in source.splits}


def test_shakespeare_is_42_works_and_the_tail_is_held_out(make, contents):
    parts = contents(make("shakespeare"))
    text = {split: "".join(documents) for split, documents in parts.items()}
    assert len(text["train"]) + len(text["validation"]) == 5_057_198
    assert len(text["validation"]) == round(505_719.8)
    assert set(text["train"] + text["validation"]) <= set(map(chr, range(128)))
    # One work is cut by the joint.
    assert len(parts["train"]) + len(parts["validation"]) == 42 + 1
    assert parts["train"][0].startswith("ALL'S WELL THAT ENDS WELL\n\nby William Shakespeare")
    assert parts["train"][1].startswith("ANTONY AND CLEOPATRA\n")
    assert parts["train"][0].endswith("THE END")
    assert parts["train"][18].startswith("LOVE'S LABOUR'S LOST\n")
    assert parts["validation"][-1].startswith("THE WINTER'S TALE\n")
    titled = [d for d in parts["train"] + parts["validation"] if "by William" in d[:100]]
    assert len(titled) == 42


def test_the_files_are_the_credited_ones():
    assert {len(row) for row in raw("bible.tsv.xz")} == {2}
    assert {len(row) for row in raw("wordnet.tsv.xz")} == {3}
    assert (len(raw("bible.tsv.xz")), len(raw("wordnet.tsv.xz"))) == (31_043, 117_659)
    credits = (CORPORA / "CREDITS.md").read_text()
    for file in CORPORA.iterdir():
        assert file.name == "CREDITS.md" or f"| `{file.name}` |" in credits
    assert "WordNet 3.0 Copyright 2006 by Princeton University.  All rights reserved." in credits


def test_bible(make, contents):
    source = make("bible")
    parts = contents(source)
    assert (source.fields, source.languages) == (("source", "text"), ("en", "es"))
    assert {s: len(rows) for s, rows in parts.items()} == {
        "train": 28_000,
        "validation": 1_578,
        "test": 1_465,
    }
    assert sorted(sum(parts.values(), [])) == sorted(map(tuple, raw("bible.tsv.xz")))
    assert parts["train"][2] == (
        "God said, “Let there be light,” and there was light.",
        "Y dijo Dios: Sea la luz: y fué la luz.",
    )


def test_verses_are_held_out_in_blocks():
    verses = [tuple(row) for row in raw("bible.tsv.xz")]
    for split, turn in [("validation", 9), ("test", 19)]:
        blocks = [v for i, v in enumerate(verses) if i // 100 % 20 == turn]
        held_out = list(zip(*column_pair(split), strict=True))
        own = iter(blocks)
        assert all(verse in own for verse in held_out), "in the order of the text"
        assert len(held_out) > 0.94 * len(blocks)


def column_pair(split: str) -> list[list[str]]:
    source = embedded.bible()
    return [list(source.documents(split, field)) for field in source.fields]


def test_no_verse_stands_in_two_splits(make):
    source = make("bible")
    assert disjoint(column(source, "source"))
    assert disjoint(column(source, "text"))
    assert not disjoint({"a": ["Yes. It is!"], "b": ["no", "yes; it  is"]})


@pytest.mark.parametrize(
    ("keys", "splits", "expected"),
    [
        # "c" comes to training with the third, and fetches the fourth.
        (
            "a b ac c d",
            "train validation test validation test",
            "train validation train train test",
        ),
        ("a a b b", "validation test test test", "validation validation test test"),
        ("ab bc cd de", "test test test train", "train train train train"),
        ("a b", "test validation", "test validation"),
    ],
)
def test_what_shares_a_key_goes_to_the_earlier_split(keys, splits, expected):
    found = embedded._apart([set(k) for k in keys.split()], iter(splits.split() + ["train"]))
    assert found == expected.split()


def test_bible_reversed(make, contents):
    plain, turned = make("bible"), make("bible(reverse=True)")
    assert turned.languages == ("es", "en")
    assert contents(turned)["test"] == [(b, a) for a, b in contents(plain)["test"]]
    assert plain.fingerprint() == make("bible").fingerprint() != turned.fingerprint()


def test_wordnet(make, contents):
    source = make("wordnet")
    parts = contents(source)
    assert (source.fields, source.languages) == (("text", "label"), None)
    assert {s: len(rows) for s, rows in parts.items()} == {
        "train": 93_618,
        "validation": 11_557,
        "test": 11_607,
    }
    rows = sum(parts.values(), [])
    assert len(set(rows)) == len(rows)
    assert set(rows) == {(gloss, label) for label, _, gloss in raw("wordnet.tsv.xz")}
    for split in source.splits:
        assert len({label for _, label in parts[split]}) == 45
    assert ("a woman aviator", "noun.person") in rows


def test_no_gloss_stands_in_two_splits(make):
    texts = column(make("wordnet"), "text")
    assert disjoint(texts)
    # Drawn by the hash of the words: 0 to 7 for training, 8 for validation, 9 for test.
    for gloss, split in [("a woman aviator", 8), ("no longer frozen solid", 6)]:
        assert int(hashlib.sha256(gloss.encode()).hexdigest()[:16], 16) % 10 == split
        assert gloss in texts["validation" if split == 8 else "train"]


def test_wordnet_with_lemma(make, contents):
    plain, named = make("wordnet"), make("wordnet(lemma=True)")
    texts, longer = contents(plain), contents(named)
    for split in plain.splits:
        for (gloss, label), (text, same) in zip(texts[split], longer[split], strict=True):
            assert text.endswith(f": {gloss}") and label == same
    assert longer["train"][0] == (
        "able: (usually followed by `to') having the necessary means or skill or know-how or "
        "authority to do something",
        "adj.all",
    )
    assert plain.fingerprint() == make("wordnet").fingerprint() != named.fingerprint()
