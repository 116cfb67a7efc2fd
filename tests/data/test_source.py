import subprocess
import sys
import tracemalloc
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from transformer.data import textfile
from transformer.data.source import SOURCES, Source
from transformer.spec import SpecError, pick


def make(text: str) -> Source:
    entry: Any = pick(SOURCES, text)
    return entry()


def contents(source: Source) -> dict[str, list[str]]:
    return {split: list(source.documents(split)) for split in source.splits}


@pytest.fixture
def write(tmp_path):
    def write(content: bytes | str, name: str = "a.txt") -> str:
        data = content.encode() if isinstance(content, str) else content
        (tmp_path / name).write_bytes(data)
        return str(tmp_path / name)

    return write


def test_shakespeare_is_42_works_and_the_tail_is_held_out():
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


def test_mark_and_line_ends(write):
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


def test_lines(write):
    path = write("one \n\n  two\n \nthree")
    parts = contents(make(f"text(path={path!r}, documents='line', validation=0.3)"))
    # 3 + 5 + 5 characters, of which round(13 * 0.3) = 4 are held out: "three" is cut.
    assert parts == {"train": ["one", "  two", "t"], "validation": ["hree"]}


def test_the_share_counts_over_all_files_in_order(write, tmp_path):
    write("b" * 10, "2.txt")
    write("a" * 10, "1.txt")
    parts = contents(make(f"text(path='{tmp_path}/*.txt', validation=0.25)"))
    assert parts == {"train": ["a" * 10, "b" * 5], "validation": ["b" * 5]}
    swapped = make(f"text(path=('{tmp_path}/2.txt', '{tmp_path}/1.txt'), validation=0.5)")
    assert contents(swapped) == {"train": ["b" * 10], "validation": ["a" * 10]}


def test_validation_files_of_its_own(write, tmp_path, monkeypatch):
    write("aaa", "a.txt")
    write("bbb", "b.txt")
    monkeypatch.chdir(tmp_path)
    source = make("text(path='a.txt', validation='b.txt')")
    assert contents(source) == {"train": ["aaa"], "validation": ["bbb"]}
    with pytest.raises(SpecError, match=f"{tmp_path}/b.txt is in path and in validation"):
        make("text(path='*.txt', validation='b.txt')")


def test_fingerprint_is_of_content_not_of_names(write):
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
def test_refused_by_name(write, tmp_path, option, message):
    write("a")
    write("", "empty.txt")
    write(b"\xef\xbb\xbf", "bom.txt")
    with pytest.raises(SpecError, match=message.format(d=tmp_path)):
        make(f"text({option.format(d=tmp_path)})")


def test_a_missing_relative_path_is_shown_whole(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SpecError, match=f"{tmp_path}/sub/none.txt does not exist"):
        make("text(path='sub/none.txt')")


def test_unreadable_file(write, monkeypatch):
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
def test_invalid_utf8_is_named_with_its_offset(write, monkeypatch, block, content, byte, offset):
    monkeypatch.setattr(textfile, "_BLOCK", block)
    path = write(content)
    with pytest.raises(SpecError, match=f"{path} is not UTF-8: byte {byte} at offset {offset} "):
        contents(make(f"text(path={path!r})"))


def test_blank_file(write):
    path = write(" \n\n ")
    with pytest.raises(SpecError, match="holds nothing but white space"):
        contents(make(f"text(path={path!r}, documents='paragraph')"))


def test_a_long_line_is_read_in_pieces(write):
    path = write("word " * 4_000_000)  # 20 MB
    source = make(f"text(path={path!r})")
    tracemalloc.start()
    total = sum(len(text) for split in source.splits for text, _ in source.pieces(split))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert total == 20_000_000
    assert peak < 8_000_000


POEMS = {"train": [f"vers é {i}" for i in range(20)], "test": ["a", "b"]}


def prepare_poems(directory, splits, file_format="array_record"):
    import tensorflow_datasets as tfds

    class TinyPoem(tfds.core.GeneratorBasedBuilder, skip_registration=True):
        VERSION = tfds.core.Version("1.0.0")

        def _info(self):
            features = {"text": tfds.features.Text(), "n": tfds.features.Scalar(np.int32)}
            return tfds.core.DatasetInfo(
                builder=self, features=tfds.features.FeaturesDict(features)
            )

        def _split_generators(self, dl_manager):
            return {split: self._generate_examples(texts) for split, texts in splits.items()}

        def _generate_examples(self, texts):
            for i, text in enumerate(texts):
                yield i, {"text": text, "n": i}

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        TinyPoem(data_dir=directory).download_and_prepare(file_format=file_format)


def test_tfds_without_validation_split_holds_out_the_tail(tmp_path):
    prepare_poems(tmp_path, POEMS)
    parts = contents(make(f"tfds(name='tiny_poem', data_dir='{tmp_path}')"))
    texts = "".join(parts["train"] + parts["validation"])
    assert sorted(texts.split("vers")) == sorted("".join(POEMS["train"]).split("vers"))
    assert len("".join(parts["validation"])) == round(0.1 * len(texts))


def test_tfds_splits_by_name(tmp_path):
    prepare_poems(tmp_path, POEMS | {"validation": ["v1", "v2"]})
    parts = contents(make(f"tfds(name='tiny_poem:1.0.0', data_dir='{tmp_path}')"))
    assert {split: sorted(d) for split, d in parts.items()} == {
        "train": sorted(POEMS["train"]),
        "validation": ["v1", "v2"],
        "test": ["a", "b"],
    }
    some = make(f"tfds(name='tiny_poem', data_dir='{tmp_path}', split='train[:50%]')")
    assert len(list(some.documents("train"))) == 10
    other = make(f"tfds(name='tiny_poem', data_dir='{tmp_path}', validation='test')")
    assert sorted(other.documents("validation")) == ["a", "b"]
    assert some.fingerprint() != other.fingerprint()


def test_tfds_fingerprint_follows_the_content(tmp_path):
    prints = []
    for name, poems in [("1", POEMS), ("2", POEMS), ("3", POEMS | {"train": ["other"] * 20})]:
        prepare_poems(tmp_path / name, poems)
        prints.append(make(f"tfds(name='tiny_poem', data_dir='{tmp_path / name}')").fingerprint())
    assert prints[0] == prints[1] != prints[2]


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (
            "name='tiny_poem', text_key='n'",
            "'n' of example 0 in tiny_poem train is not UTF-8 text",
        ),
        ("name='tiny_poem', text_key='txt'", "has no feature 'txt' .known: n, text"),
        ("name='tiny_poem', validation='dev'", "has no split 'dev' .known: train, test"),
        ("name='tiny_poem', split='test', validation='test'", "are both 'test'"),
        ("name='tiny_poem:2.0.0'", r"is not prepared in {d}.*file_format='array_record'"),
        ("name='ag_news_subset'", r"is not prepared in {d}.*download_and_prepare"),
        ("name='glue/sst2'", "is not prepared in {d}.*import of their module"),
        ("name='huggingface:x'", "name must be one of the catalogue"),
        ("", "name must be one of the catalogue"),
    ],
)
def test_tfds_refusals(tmp_path, option, message):
    prepare_poems(tmp_path, POEMS)
    with pytest.raises(SpecError, match=message.format(d=tmp_path)):
        contents(make(f"tfds({option and option + ', '}data_dir='{tmp_path}')"))


def test_tfds_needs_no_tensorflow_and_others_no_tfds(tmp_path):
    prepare_poems(tmp_path, POEMS)
    program = f"""
import sys
from transformer.data import feed
from transformer.spec import pick
heavy = {{"grain", "tensorflow_datasets", "tokenizers", "tensorflow", "jax"}}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
source = pick(feed.SOURCES, "tfds(name='tiny_poem', data_dir={str(tmp_path)!r})")()
assert len(list(source.documents("train"))) == 18
assert "tensorflow" not in sys.modules
"""
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True, timeout=60)
