"""TFDS datasets: what is read of a prepared one, and what of a source that we prepare."""

import json
import re
import subprocess
import sys
import warnings

import numpy as np
import pytest
import tiny_run

from transformer.data import prepared
from transformer.spec import SpecError

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


def test_tfds_without_validation_split_holds_out_the_tail(make, contents, tmp_path):
    prepare_poems(tmp_path, POEMS)
    parts = contents(make(f"tfds(name='tiny_poem', data_dir='{tmp_path}')"))
    texts = "".join(parts["train"] + parts["validation"])
    assert sorted(texts.split("vers")) == sorted("".join(POEMS["train"]).split("vers"))
    assert len("".join(parts["validation"])) == round(0.1 * len(texts))


def test_tfds_splits_by_name(make, contents, tmp_path):
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


def test_tfds_fingerprint_follows_the_content(make, tmp_path):
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
def test_tfds_refusals(make, contents, tmp_path, option, message):
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
from transformer.data import prepared
prepared.write(source, "again", {str(tmp_path)!r})
assert "tensorflow" not in sys.modules
"""
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True, timeout=60)


# ------------------------------------------------------------------------ pairs and labelled texts


def prepare(directory, name, features, splits, config=None):
    """A dataset as another program would prepare it; `features` is made from the module of them."""
    import tensorflow_datasets as tfds

    class Given(tfds.core.GeneratorBasedBuilder, skip_registration=True):
        VERSION = tfds.core.Version("1.0.0")

        def _info(self):
            return tfds.core.DatasetInfo(
                builder=self, features=features(tfds.features), disable_shuffling=True
            )

        def _split_generators(self, dl_manager):
            return {split: self._generate_examples(rows) for split, rows in splits.items()}

        def _generate_examples(self, rows):
            yield from enumerate(rows)

    Given.name = name
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = tfds.core.BuilderConfig(name=config) if config else None
        Given(data_dir=directory, config=config).download_and_prepare(file_format="array_record")


def test_translations(make, contents, tmp_path):
    """A dataset of the catalogue, whose code has to be imported only to prepare it."""
    rows = [{"de": f"Satz {i}", "en": f"sentence {i}"} for i in range(12)]
    splits = {"train": rows[:10], "validation": rows[10:11], "test": rows[11:]}
    features = lambda kinds: kinds.Translation(languages=("de", "en"))  # noqa: E731
    prepare(tmp_path, "wmt14_translate", features, splits, "de-en")
    call = f"tfds(name='wmt14_translate/de-en', data_dir='{tmp_path}', "
    source = make(f"{call}source_key='en', text_key='de')")
    pairs = [(f"sentence {i}", f"Satz {i}") for i in range(12)]
    assert contents(source) == {
        "train": pairs[:10],
        "validation": pairs[10:11],
        "test": pairs[11:],
    }
    assert (source.fields, source.languages) == (("source", "text"), ("en", "de"))
    turned = make(f"{call}source_key='de', text_key='en', validation=0.2)")
    assert (turned.languages, turned.splits) == (("de", "en"), ("train", "test", "validation"))
    assert contents(turned)["validation"] == [("Satz 8", "sentence 8"), ("Satz 9", "sentence 9")]
    other = make(f"{call}source_key='de', text_key='en')")
    assert len({s.fingerprint() for s in (source, turned, other)}) == 3


def labelled_rows(*labels):
    return [
        {"text": f"t{i}", "kind": label, "n": 10 * label, "name": f"n{label}"}
        for i, label in enumerate(labels)
    ]


@pytest.fixture
def kinds(tmp_path):
    """A dataset with a class, a number and a text to classify by; in its test split the class is
    withheld. Returns the beginning of the call-string."""

    def features(kinds):
        return kinds.FeaturesDict(
            {
                "text": kinds.Text(),
                "kind": kinds.ClassLabel(names=["good", "bad"]),
                "n": kinds.Scalar(np.int64),
                "name": kinds.Text(),
            }
        )

    splits = {
        "train": labelled_rows(0, 1, 1),
        "validation": labelled_rows(1, 0),
        "test": labelled_rows(-1),
    }
    prepare(tmp_path, "kinds", features, splits)
    return f"tfds(name='kinds', data_dir='{tmp_path}', "


def test_labels(make, contents, kinds):
    source = make(f"{kinds}label_key='kind')")
    assert contents(source) == {
        "train": [("t0", "good"), ("t1", "bad"), ("t2", "bad")],
        "validation": [("t0", "bad"), ("t1", "good")],
    }
    assert (source.fields, source.languages) == (("text", "label"), None)
    numbers = contents(make(f"{kinds}label_key='n')"))
    assert numbers["train"] == [("t0", "0"), ("t1", "10"), ("t2", "10")]
    assert numbers["test"] == [("t0", "-10")]
    names = contents(make(f"{kinds}label_key='name', text_key='name', validation=0.4)"))
    assert names == {"train": [("n0",) * 2, ("n1",) * 2], "validation": [("n1",) * 2]} | {
        "test": [("n-1",) * 2]
    }
    keys = ["kind", "n", "name"]
    assert len({make(f"{kinds}label_key='{key}')").fingerprint() for key in keys}) == 3


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("label_key='kind', source_key='name'", "tfds: give source_key or label_key, not both"),
        ("label_key='class'", "has no feature 'class' .known: kind, n, name, text"),
        ("source_key='en'", "has no feature 'en' .known: kind, n, name, text"),
        ("source_key='n'", "'n' of example 0 in kinds train is not UTF-8 text"),
        ("text_key='n', label_key='kind'", "'n' of example 0 in kinds train is not UTF-8 text"),
        (
            "label_key='kind', validation='test'",
            "'kind' of example 0 in kinds test is withheld, as that of a test may be",
        ),
    ],
)
def test_keys_refused(make, contents, kinds, option, message):
    with pytest.raises(SpecError, match=message):
        contents(make(f"{kinds}{option})"))


# ------------------------------------------------------------------------------ our own datasets


# More than ten documents, for an order that a hash of their numbers would change.
LINES = [f"line {i}\u2028é" for i in range(30)]


@pytest.fixture
def sources(write):
    text = write("\n\n".join(LINES), "a.txt")
    table = write("".join(f"{line}\t{i or ''}\n" for i, line in enumerate(LINES)), "a.tsv")
    classes = write("".join(f"kind {i % 3}\t{line}\n" for i, line in enumerate(LINES)), "a.lab")
    return {
        "text": f"text(path={text!r}, documents='paragraph')",
        "pairs": f"pairs(train={table!r}, validation=0.2, direction='en-de')",
        "no direction": f"pairs(train={table!r})",
        "labelled": f"labelled(train={classes!r}, separator='\\t')",
        "probe": "copy(size=50, held_out=20)",
    }


def written(make, text, directory, name="my_books"):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the libraries of tensorflow_datasets
        return prepared.write(make(text), name, str(directory))


@pytest.mark.parametrize("kind", ["text", "pairs", "no direction", "labelled", "probe"])
def test_what_is_written_is_read(make, contents, tmp_path, sources, kind):
    call = written(make, sources[kind], tmp_path / "data")
    given, read = make(sources[kind]), make(call)
    assert contents(read) == contents(given)
    assert (read.fields, read.languages) == (given.fields, given.languages)
    assert len(contents(read)["train"]) >= 24
    features = next((tmp_path / "data").glob("my_books/*/1.0.0/features.json")).read_text()
    expected = {"text": "Text", "labelled": "ClassLabel"}.get(kind, "Translation")
    assert f".{expected}" in json.loads(features)["pythonClassName"] + features


def test_empty_documents_and_a_test_split(make, contents, tmp_path, write):
    train, test = write("a\t\n\tb\n\t\n", "a.tsv"), write("x\ty", "b.tsv")
    call = written(make, f"pairs(train={train!r}, validation=0.3, test={test!r})", tmp_path)
    assert contents(make(call)) == {
        "train": [("a", ""), ("", "b")],
        "validation": [("", "")],
        "test": [("x", "y")],
    }


def test_another_content_is_another_dataset(make, contents, tmp_path, write):
    call = f"text(path={write('one two')!r})"
    first = written(make, call, tmp_path / "d")
    files = {p: p.stat().st_mtime_ns for p in tmp_path.glob("d/**/*") if p.is_file()}
    assert written(make, call, tmp_path / "d") == first
    assert {p: p.stat().st_mtime_ns for p in tmp_path.glob("d/**/*") if p.is_file()} == files
    write("one three")
    second = written(make, call, tmp_path / "d")
    assert second != first
    assert "".join(sum(contents(make(first)).values(), [])) == "one two"
    assert "".join(sum(contents(make(second)).values(), [])) == "one three"


def test_a_name_of_the_catalogue(make, contents, tmp_path, sources):
    call = written(make, sources["text"], tmp_path, "lm1b")
    assert contents(make(call)) == contents(make(sources["text"]))


@pytest.mark.parametrize("label", [" a", "a\u2028"])
def test_labels_that_would_change_are_refused(make, tmp_path, write, label):
    path = write(f"b\tx\n{label}\ty\n")
    with pytest.raises(SpecError, match="the label .* cannot be stored"):
        written(make, f"labelled(train={path!r}, separator='\\t')", tmp_path / "d")


def test_a_fault_of_the_source_leaves_nothing(make, tmp_path, write):
    path = write("a\tb\nc\n")
    with pytest.raises(SpecError, match=f"^{path} line 2: expected source, one tab and target"):
        written(make, f"pairs(train={path!r})", tmp_path / "d")
    assert not [p for p in (tmp_path / "d").rglob("*") if p.is_file()]


def test_long_work_says_so(make, tmp_path, sources, monkeypatch, capsys):
    seconds = iter(range(0, 10_000, 2))
    monkeypatch.setattr(prepared.time, "monotonic", lambda: next(seconds))
    written(make, sources["pairs"], tmp_path)
    out, err = capsys.readouterr()
    said = [
        re.fullmatch(r"my_books: (train|validation): (\d+) documents", e) for e in err.splitlines()
    ]
    assert out == "" and all(said)
    counts = [int(match[2]) for match in said if match and match[1] == "train"]
    assert counts == sorted(set(counts)) and len(counts) > 4 and counts[-1] <= 24


def command(source, name, data_dir):
    return tiny_run.command(
        "scripts/prepare.py", f"--source={source}", f"--name={name}", f"--data_dir={data_dir}"
    )


def test_the_command(make, contents, tmp_path, sources):
    ran = command(sources["labelled"], "kinds", tmp_path / "d")
    assert (ran.returncode, ran.stderr) == (0, "")
    (line,) = ran.stdout.splitlines()
    assert line.startswith(f"tfds(data_dir='{tmp_path}/d', label_key='label', name='kinds/")
    assert contents(make(line)) == contents(make(sources["labelled"]))


@pytest.mark.parametrize(
    ("source", "name", "place", "message"),
    [
        ("bibel", "a", "d", "--source: unknown name 'bibel'; did you mean 'bible'? (known: "),
        ("text(path='/none')", "a", "d", "text: path /none does not exist"),
        ("bible", "My-Books", "d", "name must be small letters, digits and underscores"),
        ("bible", "a", "file/d", "file/d cannot be written to (Not a directory)"),
    ],
)
def test_refusals_of_the_command(tmp_path, source, name, place, message):
    (tmp_path / "file").write_text("")
    ran = command(source, name, tmp_path / place)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert message in ran.stderr and ran.stderr.count("\n") == 1
