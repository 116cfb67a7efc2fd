"""Text to token ids and back: TOKENIZERS, the ways to make a vocabulary from training text.

Every tokenizer has the same four special ids, encodes any text its vocabulary covers without ever
producing one of them, and decodes to exactly the text it encoded. To add one, subclass
`Tokenizer` and add the function that trains it to `TOKENIZERS`. A `Vocabulary` is all that turns
the data of a run into numbers and back.
"""

import dataclasses
import functools
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np

from transformer.spec import Count, Must, SpecError

SPECIALS = ("<pad>", "<bos>", "<eos>", "<mask>")
PAD, BOS, EOS, MASK = range(len(SPECIALS))

_TOKENIZER, _LABELS = "tokenizer.json", "labels.json"

Texts = Callable[[], Iterator[str]]
"""The training text, as often as it is called, in pieces of any length."""

_BREAK = re.compile(r"(?<=\S)[ \n\t](?=\S)")
_PIECE = 1 << 16  # characters given to the BPE encoder at once; its cost per character grows beyond


class Tokenizer:
    """A vocabulary: `pieces[i]` are the UTF-8 bytes that token i stands for (none for specials)."""

    def __init__(self, pieces: Iterable[bytes]):
        self.pieces = (b"",) * len(SPECIALS) + tuple(pieces)

    @property
    def size(self) -> int:
        return len(self.pieces)

    @functools.cached_property
    def byte_lengths(self) -> np.ndarray:
        """int32 [size]: UTF-8 bytes per token; over an encoded text they sum to its bytes."""
        return np.array([len(p) for p in self.pieces], np.int32)

    @functools.cached_property
    def inside_words(self) -> np.ndarray:
        """bool [2, size]: whether the token begins, and ends, with a letter, a digit or a part of
        a character beyond ASCII. A word goes on where one such token meets another."""
        ends = [(p[:1], p[-1:]) for p in self.pieces]
        return np.array([[b.isalnum() or b >= b"\x80" for b in pair] for pair in ends], bool).T

    @functools.cached_property
    def fingerprint(self) -> str:
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def encode(self, text: str) -> np.ndarray:
        """The ids of `text`, int32 [n]; SpecError where the vocabulary does not cover it."""
        raise NotImplementedError

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of `ids`; specials vanish, bytes that are not UTF-8 become U+FFFD."""
        ids = np.asarray(ids).reshape(-1)
        if ids.size and not 0 <= ids.min() <= ids.max() < self.size:
            raise ValueError(
                f"token ids must lie in [0, {self.size}), got {ids.min()} to {ids.max()}"
            )
        return b"".join([self.pieces[i] for i in ids.tolist()]).decode("utf-8", errors="replace")

    def to_json(self) -> str:
        return json.dumps({"kind": type(self).__name__} | self._state(), sort_keys=True)

    @staticmethod
    def from_json(text: str) -> "Tokenizer":
        state = json.loads(text)
        kinds = {kind.__name__: kind for kind in Tokenizer.__subclasses__()}
        return kinds[state.pop("kind")](**state)

    def _state(self) -> dict[str, Any]:
        """What the constructor needs to make the same tokenizer again."""
        return {}


class ByteTokenizer(Tokenizer):
    """One token per UTF-8 byte: id = byte + number of specials."""

    def __init__(self):
        super().__init__(bytes([b]) for b in range(256))

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(_utf8(text), np.uint8).astype(np.int32) + len(SPECIALS)


class CharTokenizer(Tokenizer):
    """One token per Unicode code point of `characters`, in their order."""

    def __init__(self, characters: str):
        super().__init__(c.encode() for c in characters)
        self.characters = characters
        codes = _codes(characters)
        self._ids = np.full(int(codes.max(initial=0)) + 2, -1, np.int32)
        self._ids[codes] = np.arange(len(codes)) + len(SPECIALS)

    def encode(self, text: str) -> np.ndarray:
        codes = _codes(text)
        # Everything beyond the table shares its last place, which stands for "not covered".
        ids = self._ids[np.minimum(codes, len(self._ids) - 1)]
        if ids.size and ids.min() < 0:
            self._refuse(text, int(np.argmin(ids)))
        return ids

    def _refuse(self, text: str, at: int):
        raise SpecError(
            f"tokenizer 'chars' does not know {text[at]!r} (U+{ord(text[at]):04X}) at "
            f"position {at}, near {text[max(0, at - 20) : at + 20]!r}; its "
            f"{len(self.characters)} characters are those of the training text, and 'bytes' and "
            "'bpe' cover every text"
        )

    def _state(self) -> dict[str, Any]:
        return {"characters": self.characters}


class BpeTokenizer(Tokenizer):
    """Byte-level byte-pair encoding as in GPT-2 (Radford et al. 2019); `model` is the JSON of the
    `tokenizers` library."""

    def __init__(self, model: dict[str, Any]):
        import tokenizers  # optional for whoever uses another tokenizer, hence not at the top

        self.model = model
        self._encoder = tokenizers.Tokenizer.from_str(json.dumps(model))
        # A "<eos>" that a user types is five characters, not the end of a document.
        self._encoder.encode_special_tokens = True
        alphabet = {c: b for b, c in enumerate(_byte_alphabet())}
        vocabulary = sorted(model["model"]["vocab"].items(), key=lambda item: item[1])
        super().__init__(bytes(alphabet[c] for c in t) for t, _ in vocabulary[len(SPECIALS) :])

    def encode(self, text: str) -> np.ndarray:
        _utf8(text)
        texts = list(_split(text, _PIECE))
        parts = self._encoder.encode_batch_fast(texts, add_special_tokens=False)
        ids = [np.array(p.ids, np.int32) for p in parts]
        return np.concatenate(ids) if ids else np.zeros(0, np.int32)

    def _state(self) -> dict[str, Any]:
        return {"model": self.model}


def train_bytes(texts: Texts) -> Tokenizer:
    """The 256 bytes; needs no training."""
    del texts
    return ByteTokenizer()


def train_chars(texts: Texts) -> Tokenizer:
    """Every character of the training text, sorted by code point."""
    return CharTokenizer("".join(sorted(set().union(*map(set, texts())))))


def train_bpe(
    texts: Texts,
    vocab_size: Annotated[
        int, Must("be at least 260 (4 specials and 256 bytes)", lambda v: v >= 260)
    ] = 8192,
    min_frequency: Count = 2,  # pairs seen less often are not merged
) -> Tokenizer:
    """Byte-pair merges learnt from the training text; the same text gives the same vocabulary.

    The vocabulary is smaller than `vocab_size` when the text holds too few pairs.
    """
    import tokenizers  # optional for whoever uses another tokenizer, hence not at the top

    learner = tokenizers.Tokenizer(tokenizers.models.BPE())
    learner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    learner.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=min_frequency,
        special_tokens=list(SPECIALS),
        initial_alphabet=sorted(_byte_alphabet()),
        show_progress=False,
    )
    # The library keeps the text of one item in memory several times over: feed it small ones.
    pieces = (piece for text in texts() for piece in _split(text, _PIECE))
    learner.train_from_iterator(pieces, trainer)
    return BpeTokenizer(json.loads(learner.to_str()))


def train_saved(
    texts: Texts,
    path: str = "",  # a working directory, or a tokenizer's file in one
) -> Tokenizer:
    """The tokenizer of another run, as fine-tuning needs it."""
    del texts
    given = Path(path).expanduser()
    return load(given if given.is_file() else given / _TOKENIZER)


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """The tokenizers of a run and the names of its labels, in the order of their numbers."""

    tokenizer: Tokenizer
    source_tokenizer: Tokenizer | None = None  # of the source of a pair; None: the same
    labels: tuple[str, ...] = ()

    def of(self, field: str) -> Tokenizer:
        """The tokenizer of a field of the data."""
        return (self.source_tokenizer if field == "source" else None) or self.tokenizer

    @functools.cached_property
    def fingerprint(self) -> str:
        source = self.source_tokenizer and self.source_tokenizer.fingerprint
        parts = json.dumps([self.tokenizer.fingerprint, source, self.labels])
        return hashlib.sha256(parts.encode()).hexdigest()

    def save(self, folder: Path) -> None:
        """One file for each part that there is."""
        save(self.tokenizer, folder / _TOKENIZER)
        if self.source_tokenizer:
            save(self.source_tokenizer, folder / f"source_{_TOKENIZER}")
        if self.labels:
            _write(folder / _LABELS, json.dumps(self.labels, ensure_ascii=False))

    @staticmethod
    def load(folder: Path) -> "Vocabulary":
        """Reads what `save` wrote; SpecError when something is missing or broken."""
        source, labels = folder / f"source_{_TOKENIZER}", folder / _LABELS
        return Vocabulary(
            load(folder / _TOKENIZER),
            load(source) if source.exists() else None,
            _read_labels(labels) if labels.exists() else (),
        )


def save(tokenizer: Tokenizer, path: Path) -> None:
    """Writes one JSON file, under another name first so that it is never half there."""
    _write(path, tokenizer.to_json())


def load(path: Path) -> Tokenizer:
    """Reads what `save` wrote; SpecError when the file is missing or something else."""
    try:
        return Tokenizer.from_json(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SpecError(f"there is no tokenizer at {Path(path).absolute()}") from None
    except Exception as e:  # the tokenizers library raises nothing narrower
        raise SpecError(f"{Path(path).absolute()} is not a saved tokenizer: {e!r}") from None


def _write(path: Path, text: str) -> None:
    partial = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def _read_labels(path: Path) -> tuple[str, ...]:
    try:
        return tuple(map(str, json.loads(path.read_text(encoding="utf-8"))))
    except (OSError, ValueError, TypeError) as e:
        raise SpecError(f"{path.absolute()} is not a list of labels: {e!r}") from None


def last_break(text: str) -> int:
    """Where `text` can be cut so that its two parts encode to the same tokens as the whole.

    That is before the last single white space between two words: byte-level BPE starts a word
    there whatever comes before. The end of the text where the last 4096 characters hold none.
    """
    start = max(0, len(text) - 4096)
    cut = len(text)
    for found in _BREAK.finditer(text, start):
        cut = found.start()
    return cut


def _split(text: str, size: int) -> Iterator[str]:
    start = 0
    while start < len(text):
        piece = text[start : start + size]
        if start + size < len(text):
            piece = piece[: last_break(piece)]
        yield piece
        start += len(piece)


def _codes(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)


def _utf8(text: str) -> bytes:
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as e:
        raise SpecError(
            f"the text is not valid Unicode: it holds half a surrogate pair, "
            f"U+{ord(text[e.start]):04X}, at position {e.start}"
        ) from None


def _byte_alphabet() -> str:
    """The printable character that byte-level BPE writes for each of the 256 bytes (GPT-2)."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return "".join(chr(b if b in printable else next(others)) for b in range(256))


TOKENIZERS = {"bytes": train_bytes, "chars": train_chars, "bpe": train_bpe, "saved": train_saved}
