"""What the tests of sources share."""

from typing import Any

import pytest

from transformer.data.corpus import Source
from transformer.data.source import SOURCES
from transformer.spec import pick


@pytest.fixture(scope="session")
def make():
    """The source of a call-string."""

    def make(text: str) -> Source:
        entry: Any = pick(SOURCES, text)
        return entry()

    return make


@pytest.fixture(scope="session")
def contents():
    """All fields of all splits: documents as they are where there is only text, else tuples."""

    def contents(source: Source) -> dict[str, list]:
        columns = {
            split: [list(source.documents(split, field)) for field in source.fields]
            for split in source.splits
        }
        if len(source.fields) == 1:
            return {split: texts for split, (texts,) in columns.items()}
        return {split: list(zip(*fields, strict=True)) for split, fields in columns.items()}

    return contents


@pytest.fixture
def write(tmp_path):
    """Writes a file and returns its path."""

    def write(content: bytes | str, name: str = "a.txt") -> str:
        data = content.encode() if isinstance(content, str) else content
        (tmp_path / name).write_bytes(data)
        return str(tmp_path / name)

    return write
