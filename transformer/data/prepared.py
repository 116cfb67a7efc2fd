"""TFDS datasets without TensorFlow: `tfds` reads prepared ones, `write` prepares any source.

Both want ArrayRecord files, which are read by random access. Nothing is ever downloaded.
"""

# tensorflow_datasets takes 0.3 to 2 s to import, so only what needs it imports it.

import contextlib
import functools
import io
import numbers
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformer.data.corpus import (
    LABELLED,
    PAIR,
    Divided,
    Row,
    Rows,
    Separate,
    Share,
    Source,
    digest,
    held_out,
)
from transformer.data.textfile import Piece
from transformer.spec import SpecError, pick


def tfds(
    name: str = "",  # as in the catalogue: 'ag_news_subset', 'wiki40b/en:1.3.0'
    split: str = "train",  # the training split, or a slice such as 'train[:10%]'
    validation: str | Share | None = None,  # a split, the last share of `split`, or see below
    text_key: str = "text",  # the feature that holds the text
    source_key: str | None = None,  # that of what the text is a translation of, such as 'en'
    label_key: str | None = None,  # that of the text's label: a class, a number or a text
    data_dir: str | None = None,  # where it was prepared; None is the usual place
) -> Source:
    """A prepared TFDS dataset, one document an example, read by random access.

    Without `validation`, the dataset's own validation split, or else the last tenth of `split`.
    A test split, if there is one, is offered for evaluation, unless its labels are withheld or
    texts without labels are divided by a share.
    Nothing is ever downloaded: SpecError says how to prepare a dataset that is not there.
    """
    if source_key and label_key:
        raise SpecError("tfds: give source_key or label_key, not both")
    keys = tuple(key for key in (source_key, text_key, label_key) if key)
    stored = _Prepared(name, keys, label_key, data_dir)
    if validation is None:
        validation = "validation" if "validation" in stored.splits else 0.1
    if validation == split:
        raise SpecError(f"tfds: split and validation are both {split!r}")
    names = {"train": split}
    if isinstance(validation, str):
        names["validation"] = validation
    whole = source_key or label_key or "validation" in names  # else one text that is divided
    if whole and "test" in stored.splits and "test" not in names.values() and stored.told("test"):
        names["test"] = "test"
    if source_key or label_key:
        return _rows(stored, names, validation, PAIR if source_key else LABELLED)
    if not isinstance(validation, str):
        return Divided(lambda: stored.pieces(split), validation, lambda: stored.digest(split))
    return Separate(
        {key: functools.partial(stored.pieces, value) for key, value in names.items()},
        lambda: digest(*(stored.digest(value) for value in names.values())),
    )


def _rows(
    stored: "_Prepared",
    names: dict[str, str],
    validation: str | float,
    fields: tuple[str, str],
) -> Source:
    splits = {key: functools.partial(stored.rows, value) for key, value in names.items()}
    if not isinstance(validation, str):
        splits |= held_out(splits["train"], lambda: stored.count(names["train"]), validation)
    return Rows(
        splits,
        lambda: digest(*(stored.digest(value) for value in names.values()), validation),
        fields,
        # Features with the names of the fields say nothing of languages.
        stored.keys if fields == PAIR != stored.keys else None,
    )


class _Prepared:
    """A TFDS dataset on disk, of which the features `keys` are read; one may be a label."""

    def __init__(self, name: str, keys: tuple[Any, ...], label: str | None, data_dir: str | None):
        import tensorflow_datasets
        from tensorflow_datasets.core import constants

        self.name, self.keys, self._label = name, keys, label
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
        for key in keys:
            if key not in features:
                known = ", ".join(sorted(features))
                raise SpecError(f"tfds: {name} has no feature {key!r} (known: {known})")
        feature = features[label] if label else None
        self._classes: Any = feature if hasattr(feature, "int2str") else None

    @property
    def splits(self) -> tuple[str, ...]:
        return tuple(self._builder.info.splits)

    def count(self, split: str) -> int:
        return len(self._examples(split))

    def pieces(self, split: str) -> Iterator[Piece]:
        return ((row[0], True) for row in self.rows(split))

    def rows(self, split: str) -> Iterator[Row]:
        examples = self._examples(split)
        # One call for many examples: single reads of ArrayRecord are fifty times slower.
        for start in range(0, len(examples), 1000):
            chunk = examples.__getitems__(range(start, min(start + 1000, len(examples))))
            yield from (self._row(e, split, start + i) for i, e in enumerate(chunk))

    def told(self, split: str) -> bool:
        """Whether the labels of a split are given; where they are withheld they are -1."""
        examples = self._examples(split)
        return not (self._classes and len(examples)) or examples[0][self._label] >= 0

    def digest(self, split: str) -> str:
        """The split's sizes and 64 of its examples: the stored bytes differ from one preparation of
        the same data to the next, and reading everything would take as long as tokenising."""
        info = self._builder.info
        examples = self._examples(split)
        chosen = sorted({i * len(examples) // 64 for i in range(64)} if len(examples) else ())
        read = zip(chosen, examples.__getitems__(chosen), strict=True)
        rows = [self._row(example, split, i) for i, example in read]
        sizes = [(s.name, s.num_examples, s.num_bytes) for s in info.splits.values()]
        keys = self.keys, self._classes and self._classes.names
        return digest(info.full_name, sorted(sizes), split, keys, len(examples), *rows)

    def _examples(self, split: str) -> Any:
        try:
            return self._builder.as_data_source(split)
        except (ValueError, KeyError, AssertionError):
            known = ", ".join(self.splits)
            raise SpecError(f"tfds: {self.name} has no split {split!r} (known: {known})") from None

    def _row(self, example: dict[str, Any], split: str, index: int) -> Row:
        where = f"of example {index} in {self.name} {split}"
        return tuple(self._field(key, example[key], where) for key in self.keys)

    def _field(self, key: str, value: Any, where: str) -> str:
        if key == self._label and isinstance(value, numbers.Integral):
            if self._classes is None:
                return str(int(value))
            if value < 0:
                raise SpecError(f"tfds: {key!r} {where} is withheld, as that of a test may be")
            return self._classes.int2str(int(value))
        try:
            return value if isinstance(value, str) else value.decode("utf-8")
        except (AttributeError, UnicodeDecodeError) as e:
            raise SpecError(f"tfds: {key!r} {where} is not UTF-8 text: {e}") from None


def write(source: Source, name: str, data_dir: str) -> str:
    """Prepares `source` as a TFDS dataset and returns the `tfds(...)` that reads it.

    Its documents keep their order. The configuration is named by the content, so another content
    is another dataset, and one that is there is not made again. SpecError for a name TFDS would
    not take, a directory that cannot be written, and whatever is wrong with the source.
    """
    import tensorflow_datasets

    if not re.fullmatch("[a-z][a-z0-9_]*", name):
        raise SpecError(f"name must be small letters, digits and underscores, got {name!r}")
    directory = Path(data_dir).expanduser().absolute()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=directory).close()
    except OSError as e:
        raise SpecError(f"{directory} cannot be written to ({e.strerror})") from None
    config = tensorflow_datasets.core.BuilderConfig(name=source.fingerprint()[:16])
    builder: Any = _builder(source, name)(data_dir=str(directory), config=config)
    if not builder.is_prepared():
        tensorflow_datasets.disable_progress_bar()
        # What it prints is about downloads, of which there are none.
        with contextlib.redirect_stdout(io.StringIO()), tempfile.TemporaryDirectory() as none:
            builder.download_and_prepare(file_format="array_record", download_dir=none)
    given = {"name": f"{name}/{config.name}", "data_dir": str(directory)}
    keys = zip(source.fields, _stored_as(source), strict=True)
    given |= {f"{field}_key": key for field, key in keys}
    options = ", ".join(f"{key}={value!r}" for key, value in given.items())
    return str(pick({"tfds": tfds}, f"tfds({options})"))


def _stored_as(source: Source) -> tuple[str, ...]:
    """The names of the features that hold the fields of `source`."""
    return source.languages or source.fields


def _builder(source: Source, dataset: str) -> Any:
    """The class of a dataset of that name."""
    import tensorflow_datasets

    class Builder(tensorflow_datasets.core.GeneratorBasedBuilder, skip_registration=True):
        """Documents of a text source, in its order."""

        name = dataset
        VERSION = tensorflow_datasets.core.Version("1.0.0")

        def _info(self):
            return tensorflow_datasets.core.DatasetInfo(
                builder=self, features=_features(source), disable_shuffling=True
            )

        def _split_generators(self, dl_manager):
            del dl_manager  # nothing is downloaded
            return {split: self._generate_examples(split) for split in source.splits}

        def _generate_examples(self, split):
            columns = (source.documents(split, field) for field in source.fields)
            shown = time.monotonic()
            for i, row in enumerate(zip(*columns, strict=True)):
                yield i, dict(zip(_stored_as(source), row, strict=True))
                if time.monotonic() - shown >= 5:
                    shown = time.monotonic()
                    print(f"{dataset}: {split}: {i + 1:,} documents", file=sys.stderr, flush=True)

    return Builder


def _features(source: Source) -> Any:
    from tensorflow_datasets import features as kinds

    names = _stored_as(source)
    if source.fields == PAIR:
        return kinds.Translation(languages=names)
    made: dict[str, Any] = {name: kinds.Text() for name in names}
    if source.fields == LABELLED:
        label = names[-1]
        labels = {each for split in source.splits for each in source.documents(split, label)}
        for each in labels:
            if not each or each != each.strip() or "\n" in each:
                raise SpecError(
                    f"the label {each!r} cannot be stored: TFDS keeps no white space around a "
                    "label and no line break in it"
                )
        made[label] = kinds.ClassLabel(names=sorted(labels))
    return kinds.FeaturesDict(made)


def _how_to_prepare(name: str, what: str, directory: str | None) -> str:
    place = f", data_dir={directory!r}" if directory else ""
    return (
        f'tfds: {name} {what}; prepare it once, where there is a network, with python -c "import '
        f"tensorflow_datasets as t; t.builder({name!r}{place}).download_and_prepare("
        "file_format='array_record')\" (older datasets need an import of their module before, such "
        "as tensorflow_datasets.text.glue)"
    )
