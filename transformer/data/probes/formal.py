"""Probes of computing: numbers to add, brackets to close, expressions to evaluate."""

import dataclasses
import statistics
import string
from collections.abc import Callable, Iterator
from typing import Annotated, Any

from transformer.data.corpus import LABELLED, Share
from transformer.data.probes.base import Dice, Drawn, Probe, TwoOrMore, tens
from transformer.spec import Count, Must

_NUMBERS = "".join(map(chr, range(0x100, 0x250)))  # Ā, ā, Ă …: each one printable letter
_CLOSING = {"(": ")", "[": "]", "{": "}", "<": ">"}
_OPERATIONS: dict[str, Callable[[list[int]], int]] = {
    "M": max,
    "m": min,
    "d": lambda values: int(statistics.median(values)),
    "s": lambda values: sum(values) % 10,
}

Modulus = Annotated[int, Must(f"be from 2 to {len(_NUMBERS)}", lambda v: 2 <= v <= len(_NUMBERS))]
Kinds = Annotated[int, Must("be from 1 to 4", lambda v: 1 <= v <= 4)]


@dataclasses.dataclass(frozen=True)
class ModularAddition(Probe):
    """Add two numbers modulo p, all p² pairs of them: "Ā+ā=" (0 + 1) gives "ā" (1).

    The number i is the one character U+0100 + i: 0 is Ā, 1 ā, 2 Ă, and 96 Š. A fixed share of the
    pairs is for training, the rest is the validation split; `length_of` is always 1. Probes the
    optimizer and its weight decay: the validation split is learnt long after the training split
    (Power et al. 2022, Grokking).
    """

    p: Modulus = 97
    share: Share = 0.4  # of the pairs in training

    def questions(self, split: str) -> Iterator[str]:
        numbers = _NUMBERS[: self.p]
        pairs = [f"{a}+{b}=" for a in numbers for b in numbers]
        pairs = Dice(type(self).__name__, self.seed).shuffled(pairs)
        joint = round(self.share * len(pairs))
        return iter(pairs[:joint] if split == "train" else pairs[joint:])

    def solve(self, question: str) -> str:
        a, b = (_NUMBERS.index(number) for number in question[:-1].split("+"))
        return _NUMBERS[(a + b) % self.p]

    def length_of(self, question: str, answer: str) -> int:
        return 1


@dataclasses.dataclass(frozen=True)
class Addition(Drawn):
    """Add two numbers of many digits: "12+345=" gives "753", that is 357 with its last digit first.

    `length`, `test_length` and `length_of` count the digits of the longer number. Probes whether
    digits are aligned by their place and carried over (Nogueira et al. 2021). With the last digit
    first, each digit of the answer follows from two others and a carry that is known by then (Lee
    et al. 2023, Teaching Arithmetic to Small Transformers).
    """

    length: Count = 5
    test_length: Count = 10
    reverse: bool = True  # the answer begins with its last digit

    def ask(self, dice: Dice, length: int) -> str:
        sizes = dice.shuffled((length, 1 + dice.below(length)))
        return "+".join(_number(dice, size) for size in sizes) + "="

    def solve(self, question: str) -> str:
        total = str(sum(int(number) for number in question[:-1].split("+")))
        return total[::-1] if self.reverse else total

    def length_of(self, question: str, answer: str) -> int:
        return max(len(number) for number in question[:-1].split("+"))


@dataclasses.dataclass(frozen=True)
class Dyck(Drawn):
    """Close the brackets that are open: "([]{" gives "})".

    The question begins a word of Dyck-(k, D), brackets of k kinds nested at most D deep, with at
    least one left open; `length_of` counts its symbols. Probes hierarchy: bounded depth is within
    reach of attention (Yao et al. 2021), unbounded depth is not (Hahn 2020). There are only k
    questions of length 1, so that this length may be left out of a split.
    """

    kinds: Kinds = 2  # k
    depth: TwoOrMore = 4  # D

    def ask(self, dice: Dice, length: int) -> str:
        text, closers = "", ""
        for left in reversed(range(length)):
            must = len(closers) <= (left == 0)  # nothing to close, or nothing would be left open
            if must or (len(closers) < self.depth and dice.below(2)):
                opening = dice.one(tuple(_CLOSING)[: self.kinds])
                text, closers = text + opening, _CLOSING[opening] + closers
            else:
                text, closers = text + closers[0], closers[1:]
        return text

    def solve(self, question: str) -> str:
        closers = ""
        for symbol in question:
            closers = _CLOSING[symbol] + closers if symbol in _CLOSING else closers[1:]
        return closers

    def length_of(self, question: str, answer: str) -> int:
        return len(question)


@dataclasses.dataclass(frozen=True)
class ListOps(Drawn):
    """Evaluate nested operations on digits, a classification: "M29m47]0]" has the label "9".

    M is MAX, m MIN, d MED (the lower whole number where it lies between two), s the sum modulo 10,
    and "]" ends the arguments: the example is MAX(2, 9, MIN(4, 7), 0). `length` counts symbols,
    `length_of` does so rounded up to tens. Probes hierarchy over long inputs in an encoder (Nangia
    and Bowman 2018, ListOps; Tay et al. 2020, Long Range Arena).
    """

    length: Count = 50
    test_length: Count = 100
    depth: Count = 5  # operations within each other
    arguments: TwoOrMore = 5  # most of an operation; the fewest are two

    fields = LABELLED
    shortest = 4

    def ask(self, dice: Dice, length: int) -> str:
        """Digits are replaced by operations as long as one fits, so that one or two symbols may be
        missing; more, where the greatest depth leaves no digit to replace."""
        root: list[Any] = [dice.one(string.digits)]
        open_places, room = [(root, 0, 1)], length - 1
        while open_places and room > 2:
            parent, place, depth = open_places.pop(dice.below(len(open_places)))
            count = 2 + dice.below(min(self.arguments, room - 1) - 1)
            made = [dice.one(tuple(_OPERATIONS)), *dice.word(string.digits, count), "]"]
            parent[place] = made
            room -= count + 1
            if depth < self.depth:
                open_places += [(made, i, depth + 1) for i in range(1, count + 1)]
        return "".join(_leaves(root))

    def solve(self, question: str) -> str:
        open_: list[tuple[Callable, list[int]]] = [(sum, [])]
        for symbol in question:
            if symbol in _OPERATIONS:
                open_.append((_OPERATIONS[symbol], []))
                continue
            if symbol == "]":
                operation, values = open_.pop()
                value = operation(values)
            else:
                value = int(symbol)
            open_[-1][1].append(value)
        return str(open_[0][1][0])

    def length_of(self, question: str, answer: str) -> int:
        return tens(len(question))


def _leaves(tree: list[Any]) -> Iterator[str]:
    for part in tree:
        yield from _leaves(part) if isinstance(part, list) else part


def _number(dice: Dice, digits: int) -> str:
    """Without a leading zero, unless it is 0."""
    first = string.digits if digits == 1 else string.digits[1:]
    return dice.one(first) + dice.word(string.digits, digits - 1)
