"""Probes of attention itself: where to look, by place, by content, or by what stands beside it."""

import dataclasses
import string
from collections.abc import Iterator
from typing import Annotated, Any

from transformer.data.probes.base import Dice, Drawn, tens
from transformer.spec import Count, Must

# Ordered as Python orders them.
LETTERS = string.ascii_lowercase + "".join(map(chr, range(0x100, 0x250)))  # a to z, then Ā, ā, Ă …

Symbols = Annotated[int, Must(f"be from 2 to {len(LETTERS)}", lambda v: 2 <= v <= len(LETTERS))]
Needles = Annotated[int, Must("be from 1 to 26", lambda v: 1 <= v <= 26)]


@dataclasses.dataclass(frozen=True)
class Word(Drawn):
    """Questions about a word of random letters; `length_of` counts them."""

    symbols: Symbols = 26  # different letters: a to z, then Ā and its successors

    def ask(self, dice: Dice, length: int) -> str:
        return dice.word(LETTERS[: self.symbols], length)

    def length_of(self, question: str, answer: str) -> int:
        return len(question)


class Copy(Word):
    """Repeat a word: "dabba" gives "dabba".

    Probes the causal mask and, on words longer than those in training, the scheme of positions
    (Graves et al. 2014, Neural Turing Machines; Kazemnejad et al. 2023 on length generalisation).
    """

    def solve(self, question: str) -> str:
        return question


class Reverse(Word):
    """Say a word backwards: "abcd" gives "dcba".

    Each step of the answer looks one symbol further back than the step before, which positions
    relative to the reader do not give directly (Dehghani et al. 2018, Universal Transformers; Zhou
    et al. 2023, What Algorithms can Transformers Learn).
    """

    def solve(self, question: str) -> str:
        return question[::-1]


class Sort(Word):
    """Put the letters of a word in order: "dabba" gives "aabbd".

    Probes comparison and counting, for which the order of the letters need not be known (Weiss et
    al. 2021, Thinking Like Transformers).
    """

    def solve(self, question: str) -> str:
        return "".join(sorted(question))


@dataclasses.dataclass(frozen=True)
class Induction(Word):
    """Say what followed the last letter when it stood there before: "cabdea" gives "b".

    The last letter has occurred exactly once before. Takes two layers, the first of which tells
    each letter its predecessor (Olsson et al. 2022, In-context Learning and Induction Heads).
    """

    shortest = 2

    def ask(self, dice: Dice, length: int) -> str:
        letters = LETTERS[: self.symbols]
        last = dice.one(letters)
        others = dice.word(letters.replace(last, ""), length - 2)
        before = dice.below(length - 1)
        return f"{others[:before]}{last}{others[before:]}{last}"

    def solve(self, question: str) -> str:
        return question[question.index(question[-1]) + 1]


@dataclasses.dataclass(frozen=True)
class Recall(Drawn):
    """Look up the values of keys: "a7d2b0|ba" gives "07".

    Each pair is a letter and a digit, no letter twice; the keys asked for are drawn independently.
    `length_of` counts the pairs. Probes how much attention can hold and find (Arora et al. 2023,
    Zoology, multi-query associative recall; there each query is answered where it stands).
    """

    length: Count = 8
    test_length: Count = 16
    symbols: Symbols = 26  # different keys
    queries: Count = 3  # keys asked for

    @classmethod
    def rules(cls, context: Any, **options: Any) -> Iterator[str]:
        yield from super().rules(context, **options)
        for name in ("length", "test_length"):
            if options[name] > options["symbols"]:
                yield f"{name}={options[name]} needs as many keys, got symbols={options['symbols']}"

    def ask(self, dice: Dice, length: int) -> str:
        keys = dice.shuffled(LETTERS[: self.symbols])[:length]
        pairs = "".join(key + dice.one(string.digits) for key in keys)
        return f"{pairs}|{''.join(dice.one(keys) for _ in range(self.queries))}"

    def solve(self, question: str) -> str:
        pairs, asked = question.split("|")
        values = dict(zip(pairs[::2], pairs[1::2], strict=True))
        return "".join(values[key] for key in asked)

    def length_of(self, question: str, answer: str) -> int:
        return question.index("|") // 2


@dataclasses.dataclass(frozen=True)
class Needle(Drawn):
    """Find a key in a haystack and say its value: "qhB407xzucB" gives "407".

    The haystack is random small letters, a needle a capital followed by digits; with several
    needles one is asked for. `length` counts the letters, `length_of` does so rounded up to tens,
    and `depth_of` says where the needle is. Probes long contexts: windows, scaled positions, the
    cache (Mohtashami and Jaggi 2023, Landmark Attention; Hsieh et al. 2024, RULER).
    """

    length: Count = 100
    test_length: Count = 200
    digits: Count = 3  # of a value
    needles: Needles = 1

    def ask(self, dice: Dice, length: int) -> str:
        hay = dice.word(string.ascii_lowercase, length)
        keys = dice.shuffled(string.ascii_uppercase)[: self.needles]
        places = sorted(dice.below(length + 1) for _ in keys)
        text = hay[: places[0]]
        for key, start, end in zip(keys, places, [*places[1:], length], strict=True):
            text += key + dice.word(string.digits, self.digits) + hay[start:end]
        return text + dice.one(keys)

    def solve(self, question: str) -> str:
        place = question.index(question[-1]) + 1
        return question[place : place + self.digits]

    def length_of(self, question: str, answer: str) -> int:
        return tens(sum(symbol.islower() for symbol in question))

    def depth_of(self, question: str) -> float:
        """The share of the haystack that lies before the needle asked for: 0 to 1."""
        hay = [symbol.islower() for symbol in question]
        return sum(hay[: question.index(question[-1])]) / sum(hay)
