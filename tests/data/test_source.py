import tracemalloc
from pathlib import Path

import pytest

from transformer.data import textfile
from transformer.spec import SpecError


def test_mark_and_line_ends(make, contents, write):
    path = write(b"\xef\xbb\xbfone\r\ntwo\rthree\n")
    parts = contents(make(f"text(path={path!r}, validation=0.5)"))
    assert "".join(parts["train"] + parts["validation"]) == "one\ntwo\rthree\n"


@pytest.mark.parametrize("block", [1, 2, 3, 7, 1 << 20])
def test_reading_in_blocks_changes_nothing(write, monkeypatch, block):
    monkeypatch.setattr(textfile, "_BLOCK", block)
    path = write("\ufeffa€ b\r\r\nc  d\r\n \r\n\r\n\r\n  eé\n \nf g  \r\n".encode())

    def documents(unit: str) -> list[str]:
        pieces = textfile.pieces(textfile.find(path, "path"), unit)
        return "".join(text + "|" * ends for text, ends in pieces).split("|")[:-1]

    assert documents("line") == ["a€ b", "c  d", "  eé", "f g"]
    assert documents("file") == ["a€ b\r\nc  d\n \n\n\n  eé\n \nf g  \n"]
    assert documents("paragraph") == ["a€ b\r\nc  d", "  eé", "f g"]


def test_lines(make, contents, write):
    path = write("one \n\n  two\n \nthree")
    parts = contents(make(f"text(path={path!r}, documents='line', validation=0.3)"))
    # 3 + 5 + 5 characters, of which round(13 * 0.3) = 4 are held out: "three" is cut.
    assert parts == {"train": ["one", "  two", "t"], "validation": ["hree"]}


def test_the_share_counts_over_all_files_in_order(make, contents, write, tmp_path):
    write("b" * 10, "2.txt")
    write("a" * 10, "1.txt")
    parts = contents(make(f"text(path='{tmp_path}/*.txt', validation=0.25)"))
    assert parts == {"train": ["a" * 10, "b" * 5], "validation": ["b" * 5]}
    swapped = make(f"text(path=('{tmp_path}/2.txt', '{tmp_path}/1.txt'), validation=0.5)")
    assert contents(swapped) == {"train": ["b" * 10], "validation": ["a" * 10]}


def test_validation_files_of_its_own(make, contents, write, tmp_path, monkeypatch):
    write("aaa", "a.txt")
    write("bbb", "b.txt")
    monkeypatch.chdir(tmp_path)
    source = make("text(path='a.txt', validation='b.txt')")
    assert contents(source) == {"train": ["aaa"], "validation": ["bbb"]}
    with pytest.raises(SpecError, match=f"{tmp_path}/b.txt is in path and in validation"):
        make("text(path='*.txt', validation='b.txt')")


def test_fingerprint_is_of_content_not_of_names(make, write):
    one = make(f"text(path={write('same text', 'a.txt')!r})")
    two = make(f"text(path={write('same text', 'b.txt')!r})")
    assert one.fingerprint() == two.fingerprint()
    others = [
        make(f"text(path={write('some text', 'c.txt')!r})"),
        make(f"text(path={write('same text')!r}, validation=0.2)"),
        make(f"text(path={write('same text')!r}, documents='line')"),
        make("shakespeare"),
    ]
    assert len({s.fingerprint() for s in [one, *others]}) == 5


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("", "path must name a file"),
        ("path='{d}/none.txt'", "path {d}/none.txt does not exist"),
        ("path='{d}/*.none'", r"no file matches path '{d}/\*.none'"),
        ("path='{d}'", "path {d} is a directory"),
        ("path='{d}/empty.txt'", "path {d}/empty.txt is empty"),
        ("path='{d}/bom.txt'", "path {d}/bom.txt is empty"),
        ("path='{d}/a.txt', validation='{d}/no'", "validation {d}/no does not exist"),
        ("path='{d}/a.txt', validation=1.0", r"must lie in \(0, 1\), got 1.0"),
        ("path='{d}/a.txt', documents='word'", "unknown name 'word'"),
    ],
)
def test_refused_by_name(make, write, tmp_path, option, message):
    write("a")
    write("", "empty.txt")
    write(b"\xef\xbb\xbf", "bom.txt")
    with pytest.raises(SpecError, match=message.format(d=tmp_path)):
        make(f"text({option.format(d=tmp_path)})")


def test_a_missing_relative_path_is_shown_whole(make, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SpecError, match=f"{tmp_path}/sub/none.txt does not exist"):
        make("text(path='sub/none.txt')")


def test_unreadable_file(make, write, monkeypatch):
    def deny(*_):
        raise PermissionError(13, "Permission denied")

    path = write("a")
    monkeypatch.setattr(Path, "open", deny)
    with pytest.raises(SpecError, match=f"path {path} cannot be read: Permission denied"):
        make(f"text(path={path!r})")


@pytest.mark.parametrize("block", [1, 3, 1 << 20])
@pytest.mark.parametrize(
    ("content", "byte", "offset"),
    [
        (b"abc\xffdef", "0xff", 3),
        ("é€".encode()[:4], "0xe2", 2),
        (b"\xef\xbb\xbfa\xc3(", "0xc3", 4),
    ],
)
def test_invalid_utf8_is_named_with_its_offset(
    make, contents, write, monkeypatch, block, content, byte, offset
):
    monkeypatch.setattr(textfile, "_BLOCK", block)
    path = write(content)
    with pytest.raises(SpecError, match=f"{path} is not UTF-8: byte {byte} at offset {offset} "):
        contents(make(f"text(path={path!r})"))


def test_blank_file(make, contents, write):
    path = write(" \n\n ")
    with pytest.raises(SpecError, match="holds nothing but white space"):
        contents(make(f"text(path={path!r}, documents='paragraph')"))


def test_a_long_line_is_read_in_pieces(make, write):
    path = write("word " * 4_000_000)  # 20 MB
    source = make(f"text(path={path!r})")
    tracemalloc.start()
    total = sum(len(text) for split in source.splits for text, _ in source.pieces(split))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert total == 20_000_000
    assert peak < 8_000_000


@pytest.fixture
def parts(write):
    """Texts in three files, and a table of pairs."""
    for name in "abc":
        write(f"{name}1 {name}2", f"{name}.txt")
    write("one\teins\ntwo\tzwei\n", "t.tsv")


def mixture(tmp_path, weights, *sources):
    """The call-string; in the sources {d} is the folder."""
    return f"mixture(sources={tuple(s.format(d=tmp_path) for s in sources)!r}, weights={weights})"


A, B, C = (f"text(path='{{d}}/{name}.txt', validation=0.4)" for name in "abc")
T = "pairs(train='{d}/t.tsv', validation=0.5, test='{d}/a.tsv')"


def test_mixture(make, contents, parts, tmp_path):
    source = make(mixture(tmp_path, (3, 1), A, B))
    assert contents(source) == {"train": ["a1 ", "b1 "], "validation": ["a2", "b2"]}
    assert (source.fields, source.splits) == (("text",), ("train", "validation"))
    assert source.weights == (0.75, 0.25)
    assert [list(part.documents("train")) for part in source.parts] == [["a1 "], ["b1 "]]
    assert [part.parts for part in source.parts] == [(part,) for part in source.parts]


def test_a_mixture_in_a_mixture_counts_as_its_parts(make, contents, parts, tmp_path):
    inner = mixture(tmp_path, (1, 3), A, B)
    source = make(mixture(tmp_path, (0.5, 0.5), inner, C))
    assert contents(source)["train"] == ["a1 ", "b1 ", "c1 "]
    assert source.weights == (0.125, 0.375, 0.5)
    assert [part.weights for part in source.parts] == [(1.0,)] * 3


def test_a_mixture_of_pairs(make, contents, parts, write, tmp_path):
    write("x\ty\n", "a.tsv")
    spoken = T.replace("validation", "direction='en-de', validation")
    source = make(mixture(tmp_path, (1, 1), "bible", spoken))
    assert (source.fields, source.languages) == (("source", "text"), None)
    assert list(source.documents("test", "source"))[-1] == "x"
    assert list(source.documents("train"))[-1] == "eins"
    assert make(mixture(tmp_path, (1, 1), spoken, spoken)).languages == ("en", "de")
    # There is what all have: the second has no test split.
    short = make(mixture(tmp_path, (1, 1), "bible", "pairs(train='{d}/t.tsv', validation=0.5)"))
    assert short.splits == ("train", "validation")


def test_the_fingerprint_of_a_mixture(make, parts, tmp_path):
    """Of the content: the weights say what is made of it."""
    prints = [
        make(mixture(tmp_path, *given)).fingerprint()
        for given in [((1, 1), A, B), ((1, 2), A, B), ((1, 1), B, A), ((1,), A), ((1, 1), A, C)]
    ]
    assert prints[0] == prints[1] and len(set(prints)) == 4


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("mixture", "sources and weights must be as many, at least one, got 0 and 0"),
        ("mixture(sources=('bible',), weights=(1, 2))", "as many, at least one, got 1 and 2"),
        ("mixture(sources=('bible',), weights=(0,))", r"weights\[0\]: must be above 0, got 0"),
        (
            "mixture(sources=('bible', 'bibel'), weights=(1, 1))",
            r"mixture: sources\[1\]: unknown name 'bibel'; did you mean 'bible'",
        ),
        (
            "mixture(sources=('bible', 'wordnet(lema=1)'), weights=(1, 1))",
            r"mixture: sources\[1\].lema: unknown option of wordnet: 'lema'; did you mean 'lemma'",
        ),
        (
            "mixture(sources=('shakespeare', 'bible(reverse=True)'), weights=(1, 1))",
            r"must have the same fields, but shakespeare has text, bible\(reverse=True\) has "
            "source and text",
        ),
    ],
)
def test_mixtures_refused(make, call, message):
    with pytest.raises(SpecError, match=message):
        make(call)
