"""Pairs and labelled texts: what is where line by line, and what is refused."""

import gzip
import lzma
import tracemalloc

import pytest

from transformer.data import textfile
from transformer.spec import SpecError

# Everything that some reader somewhere takes for the end of a line, inside a line.
ENGLISH = (
    b"\xef\xbb\xbfone\r\n"  # a mark, CR LF
    b"two\xe2\x80\xa8still two\xe2\x80\xa9still\n"  # U+2028, U+2029
    b"\n"
    b"a\xc2\x85b\x0bc\x0cd\x1ce\x1df\x1eg\n"  # U+0085, VT, FF, FS, GS, RS
    b"lone\rcr\r\r\n"
    b" a\ttab \n"
    b"\xef\xbb\xbflast"  # a mark that is none; no line feed
)
GERMAN = "eins\nzwei\nlückenlos\nvier\n\nsechs\nsieben\n".encode()
PAIRS = [
    ("one", "eins"),
    ("two\u2028still two\u2029still", "zwei"),
    ("", "lückenlos"),
    ("a\x85b\x0bc\x0cd\x1ce\x1df\x1eg", "vier"),
    ("lone\rcr\r", ""),
    (" a\ttab ", "sechs"),
    ("\ufefflast", "sieben"),
]
PACK = {"": lambda data: data, ".gz": gzip.compress, ".xz": lzma.compress}


@pytest.fixture
def two(write):
    """Writes a file for each side and returns what names them in a call-string."""

    def two(source: bytes | str, target: bytes | str, name: str = "train", ending: str = ""):
        paths = []
        for side, data in (("en", source), ("de", target)):
            data = data.encode() if isinstance(data, str) else data
            paths.append(write(PACK[ending](data), f"{name}.{side}{ending}"))
        return repr(tuple(paths))

    return two


@pytest.mark.parametrize("block", [1, 2, 1 << 20])
@pytest.mark.parametrize("ending", PACK)
def test_nothing_shifts_the_lines(make, contents, two, monkeypatch, ending, block):
    monkeypatch.setattr(textfile, "_BLOCK", block)
    train, validation = two(ENGLISH, GERMAN, "a", ending), two("x", "y\r\n", "b", ending)
    source = make(f"pairs(train={train}, validation={validation})")
    assert contents(source) == {"train": PAIRS, "validation": [("x", "y")]}
    assert (source.fields, source.languages) == (("source", "text"), ("en", "de"))


@pytest.mark.parametrize("ending", PACK)
def test_table(make, contents, write, ending):
    lines = b"\xef\xbb\xbfone\teins\r\nt\xc2\x85wo\x0c\tzwei\n\t\n\tc \n d\t"
    path = write(PACK[ending](lines), f"a.tsv{ending}")
    source = make(f"pairs(train={path!r}, validation=0.4)")
    assert contents(source) == {
        "train": [("one", "eins"), ("t\x85wo\x0c", "zwei"), ("", "")],
        "validation": [("", "c "), (" d", "")],
    }
    assert source.languages == ("source", "target")
    assert make(f"pairs(train={path!r}, direction='en-de')").languages == ("en", "de")


def test_the_share_is_of_the_pairs(make, contents, two):
    train, test = two("1\n2\n3\n4\n5\n", "a\nb\nc\nd\ne\n"), two("6", "f", "test")
    parts = contents(make(f"pairs(train={train}, validation=0.3, test={test})"))
    assert list(parts) == ["train", "validation", "test"]
    assert parts["train"] == [("1", "a"), ("2", "b"), ("3", "c")]  # round(5 * 0.3) are held out
    assert parts["validation"] == [("4", "d"), ("5", "e")]
    assert parts["test"] == [("6", "f")]


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_unequal_lengths_are_refused_first(make, two, tmp_path, ending):
    train, validation = two("a\nb\n", "c\nd"), two("a\nb\n", "c\nd\n\n", "dev", ending)
    source = make(f"pairs(train={train}, validation={validation})")
    names = rf"{tmp_path}/dev.en{ending} has 2 lines and {tmp_path}/dev.de{ending} has 3"
    with pytest.raises(SpecError, match=names):
        source.fingerprint()
    with pytest.raises(SpecError, match=names):
        next(source.documents("validation"))


@pytest.mark.parametrize(
    ("line", "tabs"), [("no tab", 0), ("", 0), ("a\tb\tc", 2), ("a\tb\x0b\t", 2)]
)
def test_a_table_has_one_tab_a_line(make, contents, write, tmp_path, line, tabs):
    path = write(f"a\tb\n{line}\nc\td\n", "a.tsv")
    with pytest.raises(SpecError, match=rf"^{tmp_path}/a.tsv line 2: .*, found {tabs} tabs$"):
        contents(make(f"pairs(train={path!r})"))


@pytest.mark.parametrize(
    ("option", "languages"),
    [
        ("train=('{d}/a.en', '{d}/a.de')", ("en", "de")),
        ("train=('{d}/a.de', '{d}/a.en.gz')", ("de", "en")),
        ("train=('{d}/a.en', '{d}/b.en')", ("source", "target")),
        ("train=('{d}/a.en', '{d}/b.en'), direction='fr-it'", ("fr", "it")),
        ("train=('{d}/a.en', '{d}/none')", ("source", "target")),
        ("train=('{d}/a.en', '{d}/a.de'), direction='en-de'", ("en", "de")),
        ("train=('{d}/a.en', '{d}/none'), validation=('{d}/b.en', '{d}/a.de')", ("en", "de")),
        ("train='{d}/none', direction='zh_CN-pt'", ("zh_CN", "pt")),
    ],
)
def test_languages(make, write, tmp_path, option, languages):
    for name in ("a.en", "b.en", "a.de", "none"):
        write("a\tb\n", name)
    write(gzip.compress(b"a\n"), "a.en.gz")
    assert make(f"pairs({option.format(d=tmp_path)})").languages == languages


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("", "pairs: train must name a file"),
        ("train=()", "pairs: train must name a file"),
        ("train=('{d}/a.en', '')", "pairs: train must name a file"),
        ("train=('{d}/a.en', '{d}/a.de', '{d}/a.fr')", "train must be one file or two, got"),
        ("train=('{d}/a.en', '{d}/a.xx')", "pairs: train {d}/a.xx does not exist"),
        ("train=('{d}/a.en', '{d}/empty.de')", "pairs: train {d}/empty.de is empty"),
        ("train=('{d}/a.en', '{d}/empty.gz')", "pairs: train {d}/empty.gz is empty"),
        ("train='{d}'", "pairs: train {d} is a directory"),
        ("train='{d}/a.en', test='{d}/no'", "pairs: test {d}/no does not exist"),
        ("train='{d}/a.en', test='{d}/a.en'", "{d}/a.en is named twice"),
        ("train=('{d}/a.en', '{d}/a.en')", "{d}/a.en is named twice"),
        ("train='{d}/a.en', validation=0", r"validation: must lie in \(0, 1\), got 0"),
        ("train='{d}/a.en', direction='en'", "direction: must be two languages such as 'en-de'"),
        ("train='{d}/a.en', direction='en-de-fr'", "direction: must be two languages"),
        (
            "train=('{d}/a.en', '{d}/a.de'), direction='de-en'",
            r"pairs: train \({d}/a.en, {d}/a.de\) does not go from de to en",
        ),
        (
            "train=('{d}/a.en', '{d}/a.de'), validation=('{d}/b.de', '{d}/b.en')",
            r"pairs: validation \({d}/b.de, {d}/b.en\) does not go from en to de",
        ),
        (
            "train=('{d}/a.en', '{d}/a.de'), test=('{d}/b.en', '{d}/b.fr')",
            r"pairs: test \({d}/b.en, {d}/b.fr\) does not go from en to de",
        ),
    ],
)
def test_pairs_refused(make, write, tmp_path, option, message):
    for name in ("a.en", "a.de", "a.fr", "b.en", "b.de", "b.fr"):
        write("a\n", name)
    write("", "empty.de")
    write(gzip.compress(b""), "empty.gz")
    with pytest.raises(SpecError, match=message.format(d=tmp_path)):
        make(f"pairs({option.format(d=tmp_path)})")


@pytest.mark.parametrize("ending", PACK)
@pytest.mark.parametrize(
    ("content", "byte", "offset"),
    [
        (b"ok\nab\xffc\n", "0xff", 5),
        (b"\xef\xbb\xbfa\xc3(\n", "0xc3", 4),
        (b"a\r\n\xe2\x82\n", "0xe2", 3),
        (b"a\n\xed\xa0\x80", "0xed", 2),  # a surrogate
    ],
)
def test_invalid_utf8(make, contents, write, content, byte, offset, ending):
    path = write(PACK[ending](content), f"a{ending}")
    other = write(b"\n" * len(content.splitlines()), "b")
    with pytest.raises(SpecError, match=f"{path} is not UTF-8: byte {byte} at offset {offset} "):
        contents(make(f"pairs(train=({path!r}, {other!r}))"))


@pytest.mark.parametrize("ending", [".gz", ".xz"])
def test_damaged_archives(make, contents, write, ending):
    lines = "".join(f"{i}\t{i * i}\n" for i in range(50_000)).encode()
    whole = PACK[ending](lines)
    for data in (whole[:-10], whole[: len(whole) // 2], whole[:10], b"plain\ttext\n"):
        path = write(data, f"a.tsv{ending}")
        kind = ending.removeprefix(".")
        with pytest.raises(
            SpecError, match=f"^{path} is no {kind} archive, or a damaged one: [^\n]+$"
        ):
            make(f"pairs(train={path!r})").fingerprint()
        with pytest.raises(SpecError, match=f"^{path} is no {kind} archive"):
            contents(make(f"pairs(train={path!r})"))


@pytest.mark.parametrize("ending", [".gz", ".xz"])
def test_an_archive_is_what_it_holds(make, contents, write, ending):
    text = "one\r\n\r\nzwei é\nthree\n"
    plain, packed = write(text, "a.txt"), write(PACK[ending](text.encode()), f"a.txt{ending}")
    sources = [make(f"text(path={p!r}, documents='line', validation=0.5)") for p in (plain, packed)]
    assert (
        contents(sources[0])
        == contents(sources[1])
        == {
            "train": ["one", "zwei"],
            "validation": [" é", "three"],
        }
    )
    assert sources[0].fingerprint() == sources[1].fingerprint()


@pytest.mark.parametrize("ending", [".gz", ".xz"])
def test_a_large_archive_is_read_in_pieces(make, write, ending):
    lines = "a line of some words\n" * 1_000_000  # 21 MB
    path = write(PACK[ending](lines.encode()), f"a{ending}")
    del lines
    source = make(f"text(path={path!r})")
    tracemalloc.start()
    total = sum(len(text) for text, _ in source.pieces("train"))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert total == 0.9 * 21_000_000
    assert peak < 20_000_000, "the whole takes twice 21 MB, the dictionary of xz 8 MB"


@pytest.mark.parametrize("ending", PACK)
def test_labelled(make, contents, write, ending):
    lines = b"\xef\xbb\xbf1 a b\r\n0 \n1  c\x0b\xc2\x85\xe2\x80\xa8d\re\n\xc3\xa9t\xc3\xa9 x 1\n0 y"
    train = write(PACK[ending](lines), f"a{ending}")
    dev, test = write("0 v\n", "b"), write("été t\n1 u", "c")
    files = f"train={train!r}, validation={dev!r}, test={test!r}, separator=' '"
    source = make(f"labelled({files})")
    assert contents(source) == {
        "train": [
            ("a b", "1"),
            ("", "0"),
            (" c\x0b\x85\u2028d\re", "1"),
            ("x 1", "été"),
            ("y", "0"),
        ],
        "validation": [("v", "0")],
        "test": [("t", "été"), ("u", "1")],
    }
    assert (source.fields, source.languages) == (("text", "label"), None)


def test_labelled_share_and_tab(make, contents, write):
    path = write("noun.act\tto act: x\ty\nb\tc\nb\td\nb\te\n")
    parts = contents(make(f"labelled(train={path!r}, validation=0.25)"))
    assert parts == {
        "train": [("to act: x\ty", "noun.act"), ("c", "b"), ("d", "b")],
        "validation": [("e", "b")],
    }


@pytest.mark.parametrize(
    ("line", "separator"), [("label", "\t"), ("", "\t"), ("a text", "\t"), (" text", " ")]
)
def test_a_line_without_label_is_refused(make, contents, write, line, separator):
    path = write(f"0{separator}a\n{line}\n")
    source = make(f"labelled(train={path!r}, separator={separator!r})")
    with pytest.raises(SpecError, match=f"^{path} line 2: expected a label, the separator"):
        contents(source)


def test_a_label_that_training_lacks_is_refused(make, contents, write):
    train, dev = write("pos\ta\nneg\tb\n"), write("neg\tc\nPos\td\n", "b.txt")
    message = r"unknown label 'Pos'; did you mean 'pos'\? \(known: neg, pos\) with text 2 of the "
    for split in ("validation", "test"):
        source = make(f"labelled(train={train!r}, {split}={dev!r})")
        with pytest.raises(SpecError, match=f"{message}{split} split"):
            list(source.documents(split))
    with pytest.raises(
        SpecError, match="unknown label 'neg'.*known: pos.* 1 of the validation split"
    ):
        contents(make(f"labelled(train={train!r}, validation=0.5)"))


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("", "labelled: train must name a file"),
        ("train='{d}/a', validation=''", "labelled: validation must name a file"),
        ("train='{d}/a', validation='{d}/no'", "labelled: validation {d}/no does not exist"),
        ("train='{d}/a', test='{d}/a'", "labelled: {d}/a is named twice"),
        ("train='{d}/a', separator=''", "separator: must be some characters, but no line break"),
        ("train='{d}/a', separator='\\n'", "separator: must be some characters"),
    ],
)
def test_labelled_refused(make, write, tmp_path, option, message):
    write("0\ta\n", "a")
    with pytest.raises(SpecError, match=message.format(d=tmp_path)):
        make(f"labelled({option.format(d=tmp_path)})")


def test_fingerprints_follow_the_content(make, two, write):
    a, b = two("a\nb\n", "c\nd\n", "a"), two("a\nb\n", "c\nd\n", "b", ".gz")
    changed, test = two("a\nb\n", "c\ne\n", "c"), two("x", "y", "d")
    table, tables = write("0 a\tb\n1 c\td\n", "t.tsv"), write("0 a\tb\n1 c\te\n", "u.tsv")
    assert make(f"pairs(train={a})").fingerprint() == make(f"pairs(train={b})").fingerprint()
    others = [
        f"pairs(train={a})",
        f"pairs(train={a}, validation=0.5)",
        f"pairs(train={a}, validation={test})",
        f"pairs(train={a}, test={test})",
        f"pairs(train={changed})",
        f"pairs(train={table!r})",
        f"pairs(train={tables!r})",
        f"pairs(train={table!r}, direction='en-de')",
        f"labelled(train={table!r})",
        f"labelled(train={table!r}, separator=' ')",
        f"labelled(train={table!r}, validation=0.5)",
        f"labelled(train={table!r}, test={tables!r})",
        f"labelled(train={tables!r})",
    ]
    assert len({make(other).fingerprint() for other in others}) == len(others)
