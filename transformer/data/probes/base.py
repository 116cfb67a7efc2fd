"""What a probe is: `Probe`, questions and answers in which every symbol is one character, and
`Drawn`, a probe whose questions are drawn at random.

The same options give the same examples on every machine and in every version of Python. Nothing in
a question says that it ends: whoever puts an answer behind it puts a mark between them.
"""

import dataclasses
import functools
import hashlib
import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, TypeVar

from transformer.data.corpus import PAIR, Source, digest
from transformer.spec import Count, Must, Natural, SpecError

T = TypeVar("T")

TwoOrMore = Annotated[Count, Must("be at least 2", lambda v: v >= 2)]

_TRIES = 200  # to find a question that belongs to the split


class Dice:
    """Draws in an order that Python promises to keep: of all its methods, that of `random()`."""

    def __init__(self, *seed: Any):
        self._draw = random.Random("-".join(map(str, seed))).random

    def below(self, count: int) -> int:
        return int(self._draw() * count)

    def one(self, items: Sequence[T]) -> T:
        return items[self.below(len(items))]

    def word(self, letters: str, length: int) -> str:
        return "".join(self.one(letters) for _ in range(length))

    def shuffled(self, items: Sequence[T]) -> list[T]:
        return sorted(items, key=lambda _: self._draw())


@dataclasses.dataclass(frozen=True)
class Probe(Source):
    """Questions and their answers; the first of the two `fields` is the question."""

    seed: Natural = 0

    fields = PAIR

    def questions(self, split: str) -> Iterator[str]:
        """The questions of a split, in order."""
        raise NotImplementedError

    def solve(self, question: str) -> str:
        """The answer."""
        raise NotImplementedError

    def length_of(self, question: str, answer: str) -> int:
        """By what accuracy is reported; each probe says what it counts."""
        raise NotImplementedError

    def documents(self, split: str, field: str = "text") -> Iterator[str]:
        asked = self._questions[split]
        return iter(asked) if self.fields.index(field) == 0 else map(self.solve, asked)

    def fingerprint(self) -> str:
        asked = self._questions.items()
        return digest(self.fields, [(split, q, self.solve(q)) for split, qs in asked for q in qs])

    @functools.cached_property
    def _questions(self) -> dict[str, list[str]]:
        made = {split: list(self.questions(split)) for split in self.splits}
        for split, questions in made.items():
            if not questions:
                raise SpecError(
                    f"{self}: there are too few different questions, none is left for the "
                    f"{split} split; allow longer ones or more symbols"
                )
        return made


@dataclasses.dataclass(frozen=True)
class Drawn(Probe):
    """Questions drawn at random, as many of one length as of another.

    The hash of a question decides which split it belongs to: eight of ten are for training, one for
    validation, one for the test. Where there are few of a length, they repeat within a split, or
    the length is missing from a split to which none of them belongs.
    """

    length: Count = 20  # longest in the training and validation splits
    test_length: Count = 40  # longest in the test split, which has all lengths from the shortest on
    size: Count = 20_000  # training examples
    held_out: Count = 1000  # examples of each other split

    splits = ("train", "validation", "test")
    shortest = 1

    @classmethod
    def rules(cls, context: Any, **options: Any) -> Iterator[str]:
        del context
        for name in ("length", "test_length"):
            if options[name] < cls.shortest:
                yield f"{name} must be at least {cls.shortest}, got {options[name]}"

    def ask(self, dice: Dice, length: int) -> str:
        """A random question of the given length."""
        raise NotImplementedError

    def questions(self, split: str) -> Iterator[str]:
        count = self.size if split == "train" else self.held_out
        longest = self.test_length if split == "test" else self.length
        dice = Dice(type(self).__name__, self.seed, split)
        lengths = itertools.cycle(range(self.shortest, longest + 1))
        for length in itertools.islice(lengths, count):
            drawn = (self.ask(dice, length) for _ in range(_TRIES))
            if found := next((q for q in drawn if self._home(q) == split), None):
                yield found

    def _home(self, question: str) -> str:
        """The split that the question belongs to."""
        first, *_ = hashlib.sha256(f"{self.seed} {question}".encode()).digest()
        return {0: "validation", 1: "test"}.get(first % 10, "train")


def tens(length: int) -> int:
    """Rounded up, so that enough examples share a length."""
    return -(-length // 10) * 10
