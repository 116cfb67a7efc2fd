"""The probes against solvers written from the definitions of the tasks."""

import dataclasses
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from transformer import cli, spec
from transformer.data.probes import PROBES
from transformer.experiment import RunSpec
from transformer.spec import Choice, Spec, SpecError, choice, parse, pick

SMALL = {name: f"{name}(size=400, held_out=200)" for name in PROBES} | {
    "modular_addition": "modular_addition(p=23)"
}
EVERY = (
    *SMALL.values(),
    "copy(symbols=3, length=7, test_length=9, size=300, held_out=100)",
    "sort(symbols=100, size=300, held_out=100)",
    "recall(symbols=40, queries=5, test_length=40, size=300, held_out=100)",
    "induction(symbols=2, size=300, held_out=100)",
    "modular_addition(p=11, share=0.7)",
    "dyck(kinds=4, depth=2, size=300, held_out=100)",
    "addition(reverse=False, size=300, held_out=100)",
    "needle(needles=5, digits=1, size=300, held_out=100)",
    "listops(depth=2, arguments=2, size=300, held_out=100)",
)


def make(text: str) -> Any:
    entry: Any = pick(PROBES, text)
    return entry()


def examples(source, split: str) -> list[tuple[str, str]]:
    asked, answered = (list(source.documents(split, field)) for field in source.fields)
    return list(zip(asked, answered, strict=True))


def everything(source) -> list[tuple[str, str]]:
    return [e for split in source.splits for e in examples(source, split)]


# Solvers: from a question to its answer.


def copied(word):
    return word


def reversed_(word):
    return "".join(word[i] for i in range(len(word) - 1, -1, -1))


def sorted_(word):
    return "".join(letter * word.count(letter) for letter in map(chr, range(0x250)))


def recalled(text):
    memory, _, asked = text.partition("|")
    return "".join(memory[memory.index(key) + 1] for key in asked)


def induced(text):
    (before,) = [i for i in range(len(text) - 1) if text[i] == text[-1]]
    return text[before + 1]


def added_modulo(p):
    def solve(text):
        a, plus, b, equals = text
        assert plus + equals == "+="
        return chr(0x100 + (ord(a) - 0x100 + ord(b) - 0x100) % p)

    return solve


def closed(text):
    while text != (shorter := re.sub(r"\(\)|\[\]|\{\}|<>", "", text)):
        text = shorter
    return text[::-1].translate(str.maketrans("([{<", ")]}>"))


def added(reverse):
    def solve(text):
        a, b = text.removesuffix("=").split("+")
        total = str(int(a) + int(b))
        return "".join(reversed(total)) if reverse else total

    return solve


def found(text):
    (value,) = re.findall(rf"{text[-1]}(\d+)", text[:-1])
    return value


def evaluated(text):
    value, rest = _expression(text)
    assert rest == ""
    return str(value)


def _expression(text):
    first, rest = text[0], text[1:]
    if first.isdigit():
        return int(first), rest
    values = []
    while not rest.startswith("]"):
        value, rest = _expression(rest)
        values.append(value)
    ordered = sorted(values)
    n = len(ordered)
    value = {
        "M": ordered[-1],
        "m": ordered[0],
        "d": (ordered[(n - 1) // 2] + ordered[n // 2]) // 2,
        "s": sum(ordered) % 10,
    }[first]
    return value, rest[1:]


def solver(source):
    plain = {
        "Copy": copied,
        "Reverse": reversed_,
        "Sort": sorted_,
        "Recall": recalled,
        "Induction": induced,
        "Dyck": closed,
        "Needle": found,
        "ListOps": evaluated,
    }
    kind = type(source).__name__
    if kind == "ModularAddition":
        return added_modulo(source.p)
    return added(source.reverse) if kind == "Addition" else plain[kind]


@pytest.mark.parametrize("text", EVERY)
def test_the_answer_is_the_answer(text):
    source = make(text)
    solve = solver(source)
    for question, answer in everything(source):
        assert answer == solve(question), question
        assert answer


@pytest.mark.parametrize("text", EVERY)
def test_no_question_stands_in_two_splits(text):
    source = make(text)
    asked = {split: {q for q, _ in examples(source, split)} for split in source.splits}
    assert all(asked.values())
    assert sum(map(len, asked.values())) == len(set().union(*asked.values()))


@pytest.mark.parametrize("text", EVERY)
def test_the_characters_of_training_are_those_of_all(text):
    source = make(text.replace("size=300", "size=2000"))
    known = set("".join(q + a for q, a in examples(source, "train")))
    assert known >= set("".join(q + a for q, a in everything(source)))
    assert all(c.isprintable() and not c.isspace() for c in known)


@pytest.mark.parametrize("name", PROBES)
def test_documents_of_splits_and_fields(name):
    source = make(SMALL[name])
    labelled = name == "listops"
    assert source.fields == (("text", "label") if labelled else ("source", "text"))
    assert source.splits[:2] == ("train", "validation")
    assert source.parts == (source,) and source.languages is None
    assert list(source.documents("train")) == list(source.documents("train", "text"))
    assert [p for p, _ in source.pieces("train")] == list(source.documents("train"))
    assert all(ends for _, ends in source.pieces("train"))


@pytest.mark.parametrize("name", [n for n in PROBES if n != "modular_addition"])
def test_sizes(name):
    entry: Any = PROBES[name]
    sizes = {split: len(examples(entry(size=500, held_out=60), split)) for split in entry.splits}
    # Dyck and induction have lengths of which there are only a few questions.
    least = 0.8 if name in ("dyck", "induction") else 1
    assert 500 * least <= sizes["train"] <= 500
    assert 60 * least <= sizes["validation"] <= 60
    assert 60 * least <= sizes["test"] <= 60
    assert entry().size == 20_000 and entry().held_out == 1000


def test_modular_addition_is_every_pair_once():
    source = make("modular_addition")
    train, validation = (examples(source, split) for split in source.splits)
    assert source.splits == ("train", "validation")
    assert len(train) == round(0.4 * 97 * 97) and len(train) + len(validation) == 97 * 97
    assert len({q for q, _ in train + validation}) == 97 * 97
    assert {source.length_of(*e) for e in train} == {1}
    assert source.solve("Ā+ā=") == "ā"  # 0 + 1
    assert source.solve("Š+Š=") == "ş"  # 96 + 96 = 95 modulo 97
    assert ord("ş") - 0x100 == 95


# What counts as the length of a question, from the question alone.
LENGTHS = {
    "copy": lambda q: len(q),
    "reverse": lambda q: len(q),
    "sort": lambda q: len(q),
    "recall": lambda q: sum(c.isdigit() for c in q),
    "induction": lambda q: len(q),
    "dyck": lambda q: sum(c in "()[]" for c in q),
    "addition": lambda q: max(len(n) for n in re.findall(r"\d+", q)),
    "needle": lambda q: (sum("a" <= c <= "z" for c in q) + 9) // 10 * 10,
    "listops": lambda q: (len(q) + 9) // 10 * 10,
}


@pytest.mark.parametrize("name", LENGTHS)
def test_lengths(name):
    """Short ones in training and validation; in the test all of them, evenly."""
    entry: Any = PROBES[name]
    source = entry(size=2000, held_out=1000)
    count = {}
    for split in source.splits:
        lengths = [source.length_of(*e) for e in examples(source, split)]
        assert lengths == [LENGTHS[name](q) for q, _ in examples(source, split)]
        count[split] = Counter(lengths)
    step = 10 if name in ("needle", "listops") else 1
    longest = {"train": source.length, "validation": source.length, "test": source.test_length}
    few = {"dyck": 4, "induction": 3}.get(name, 1)  # below it, the hash may leave a length out
    for split, lengths in count.items():
        assert set(range(max(few, step), longest[split] + 1, step)) <= set(lengths)
        assert max(lengths) == longest[split]
        if name != "listops":  # its expressions may be a little shorter than asked for
            assert max(lengths.values()) - min(lengths.values()) <= step
        else:
            assert max(lengths.values()) < 1.8 * min(lengths.values())


def test_formats_by_hand():
    assert make("copy").solve("dabba") == "dabba"
    assert make("reverse").solve("abcd") == "dcba"
    assert make("sort").solve("dabba") == "aabbd"
    assert make("sort").solve("āzĀa") == "azĀā"
    assert make("recall").solve("a7d2b0|ba") == "07"
    assert make("induction").solve("cabdea") == "b"
    assert make("dyck").solve("([]{") == "})"
    assert make("addition").solve("12+345=") == "753"
    assert make("addition(reverse=False)").solve("12+345=") == "357"
    assert make("needle").solve("qhB407xzucB") == "407"
    assert make("listops").solve("M29m47]0]") == "9"
    assert make("listops").solve("d1278]") == "4"  # int(median) as in the original: 4.5
    assert make("listops").solve("s991]") == "9"


@pytest.mark.parametrize(("kinds", "depth"), [(1, 2), (2, 4), (4, 3)])
def test_dyck_keeps_to_its_kinds_and_its_depth(kinds, depth):
    source = make(f"dyck(kinds={kinds}, depth={depth}, size=500, held_out=50)")
    deepest = 0
    for question, _ in everything(source):
        assert set(question) <= set("()[]{}<>"[: 2 * kinds])
        for end in range(len(question) + 1):
            begun = question[:end]
            deepest = max(deepest, sum(map(begun.count, "([{<")) - sum(map(begun.count, ")]}>")))
    assert deepest == depth


def test_recall_has_no_key_twice_and_asks_for_as_many_as_it_says():
    for question, answer in everything(make("recall(queries=4, size=300, held_out=50)")):
        pairs = re.fullmatch(r"((?:[a-z]\d)+)\|[a-z]{4}", question)
        assert pairs and len(answer) == 4
        assert max(Counter(pairs[1][::2]).values()) == 1


def test_numbers_begin_with_no_zero_and_have_any_length():
    pairs = [q[:-1].split("+") for q, _ in everything(make("addition(size=2000, held_out=50)"))]
    assert all(n == "0" or n[0] != "0" for pair in pairs for n in pair)
    assert {(len(a), len(b)) for a, b in pairs if max(len(a), len(b)) <= 5} == {
        (i, j) for i in range(1, 6) for j in range(1, 6)
    }


def test_a_needle_lies_anywhere():
    source = make("needle(needles=3, size=2000)")
    depths = [source.depth_of(q) for q in source.documents("train", "source")]
    assert min(depths) == 0 and max(depths) == 1
    assert 0.47 < sum(depths) / len(depths) < 0.53
    assert source.depth_of("abcK123dB9K") == 3 / 4
    assert all(len(re.findall(r"[A-Z]\d{3}", q)) == 3 for q in source.documents("test", "source"))


def test_the_nesting_of_listops_is_bounded():
    def nested(text):
        opened = [text[:end].count("]") for end in range(len(text) + 1)]
        begun = [sum(map(text[:end].count, "Mmds")) for end in range(len(text) + 1)]
        return max(b - o for b, o in zip(begun, opened, strict=True))

    for depth in (1, 3):
        texts = list(make(f"listops(depth={depth}, size=500, held_out=50)").documents("train"))
        assert max(map(nested, texts)) == depth
    # No answer is right for more than a fifth of the expressions.
    labels = Counter(make("listops(size=3000)").documents("train", "label"))
    assert set(labels) == set("0123456789")
    assert max(labels.values()) < 0.25 * 3000


def test_a_longer_run_begins_with_the_shorter():
    entry: Any = PROBES["reverse"]
    short, long = (examples(entry(size=n), "train") for n in (100, 250))
    assert long[:100] == short


def test_every_seed_is_another_draw():
    for name in PROBES:
        one, other = (make(SMALL[name].replace(")", f", seed={seed})")) for seed in (1, 2))
        assert examples(one, "train") != examples(other, "train")
        assert one.fingerprint() != other.fingerprint()


def test_the_fingerprint_is_of_the_content():
    assert make("copy(size=50)").fingerprint() == make("copy(size=50)").fingerprint()
    assert make("copy(size=50)").fingerprint() != make("copy(size=51)").fingerprint()
    assert make("copy(size=50)").fingerprint() != make("reverse(size=50)").fingerprint()
    one, other = "addition(size=50, reverse=True)", "addition(size=50, reverse=False)"
    assert make(one).fingerprint() != make(other).fingerprint()


def test_another_process_draws_the_same():
    """Hashes of strings differ from process to process; nothing here may depend on them."""
    program = (
        "from transformer.data.probes import PROBES\n"
        "from transformer.spec import pick\n"
        f"print(*(pick(PROBES, text)().fingerprint() for text in {tuple(SMALL.values())!r}))"
    )
    environment = os.environ | {"PYTHONHASHSEED": "1234"}
    run = [sys.executable, "-c", program]
    out = subprocess.run(run, env=environment, capture_output=True, text=True, check=True).stdout
    assert out.split() == [make(text).fingerprint() for text in SMALL.values()]


@dataclasses.dataclass(frozen=True)
class Chosen(Spec):
    source: Choice = choice(PROBES, "copy")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("copy(symbols=1)", "source.symbols: must be from 2 to 362"),
        ("sort(length=0)", "length: must be at least 1"),
        ("recall(test_length=30)", "test_length=30 needs as many keys, got symbols=26"),
        ("induction(length=1)", "length must be at least 2, got 1"),
        ("dyck(kinds=5)", "kinds: must be from 1 to 4"),
        ("dyck(depth=1)", "depth: must be at least 2"),
        ("modular_addition(p=400)", "p: must be from 2 to 336"),
        ("modular_addition(length=9)", "unknown option of modular_addition: 'length'"),
        ("listops(length=3)", "length must be at least 4, got 3"),
        ("needle(needles=27)", "needles: must be from 1 to 26"),
    ],
)
def test_what_is_refused(text, complaint):
    with pytest.raises(SpecError, match=re.escape(complaint)):
        parse(Chosen, {"source": text})


def test_too_few_questions_are_refused():
    with pytest.raises(SpecError, match="too few different questions, none is left for the"):
        list(make("copy(symbols=2, length=1)").documents("train"))
    with pytest.raises(SpecError, match="none is left for the validation split"):
        make("modular_addition(p=2, share=0.9)").fingerprint()


CONFIG = Path(__file__).parents[2] / "configs" / "probe.py"


@pytest.mark.parametrize("name", PROBES)
def test_the_config_of_every_probe_has_room_for_its_longest_question_and_answer(name):
    config: Any = cli.load(f"{CONFIG}:{name}")
    run = spec.parse(RunSpec, config.to_dict())
    assert run.data.source.name == name
    probe: Any = run.data.source()
    if name != "modular_addition":
        probe = dataclasses.replace(probe, size=200)
    asked, answered = zip(*everything(probe), strict=True)
    # A row of targets holds a text and its end, a source its beginning and its end too.
    if name == "listops":
        assert run.data.seq_len == max(map(len, asked)) + 1
        assert run.model.family == "encoder"
    else:
        assert run.data.longest == (max(map(len, answered)) + 1, max(map(len, asked)) + 2)


def test_the_config_refuses_a_task_that_is_none():
    with pytest.raises(SpecError) as error:
        cli.load(f"{CONFIG}:revers")
    (line,) = str(error.value).splitlines()
    assert "unknown task 'revers'; did you mean 'reverse'?" in line
    assert all(name in line for name in PROBES)
