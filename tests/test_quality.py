"""Judging what a model writes: the numbers of sacreBLEU called directly, or counted by hand."""

import dataclasses
import itertools
from typing import Any

import pytest
import sacrebleu
import tiny_run

from transformer import experiment, quality, spec, workdir
from transformer.data.corpus import LABELLED, PAIR, Rows
from transformer.data.tokens import CharTokenizer, Vocabulary
from transformer.experiment import RunSpec
from transformer.quality import Bleu, Exact
from transformer.run import Run

SOURCES = [
    "The cat sat on the mat.",
    "It's raining (again), isn't it?",
    "Nobody came.",
    "He paid 3,500.50 euros.",
    "No.",
]
REFERENCES = [
    "Die Katze saß auf der Matte.",
    "Es regnet (schon wieder), nicht wahr?",
    "Niemand ist gekommen.",
    "Er hat 3.500,50 Euro bezahlt.",
    "Nein.",
]
WRITTEN = [
    "Die Katze saß auf der Matte.",
    "Es regnet (wieder), oder nicht?",
    "niemand ist da gekommen",
    "Er zahlte 3.500,50 Euro.",
    "",
]


def rows(*columns: Any, fields=PAIR, languages=None) -> Rows:
    return Rows({"validation": lambda: zip(*columns, strict=True)}, lambda: None, fields, languages)


def never() -> bool:
    return False


@pytest.fixture
def answering(monkeypatch):
    """A run that writes what it is told to, and the options with which it is asked."""

    def answering(answers: dict[str, Any], **options: Any) -> tuple[Run, list[dict[str, Any]]]:
        asked = []

        def generate(self, prompts, **how):
            asked.append(how | {"prompts": len(prompts)})
            return [answers[prompt] for prompt in prompts]

        monkeypatch.setattr(Run, "generate", generate)
        monkeypatch.setattr(Run, "classify", lambda self, texts: [answers[text] for text in texts])
        run = experiment.resolve(
            tiny_run.run_spec(**tiny_run.PAIRS | options), Vocabulary(CharTokenizer("a"))
        )
        return Run(run, None, Vocabulary(CharTokenizer("a"))), asked

    return answering


@pytest.mark.parametrize("tokenize", ["13a", "intl", "char", "none"])
def test_bleu_and_chrf_are_those_of_sacrebleu(answering, tokenize):
    run, asked = answering(dict(zip(SOURCES, WRITTEN, strict=True)))
    source = rows(SOURCES, REFERENCES, languages=("en", "de"))
    found = Bleu(tokenize=tokenize)(run, source, "validation", never)
    assert found is not None
    expected = {
        "bleu": sacrebleu.corpus_bleu(WRITTEN, [REFERENCES], tokenize=tokenize).score,
        "chrf": sacrebleu.corpus_chrf(WRITTEN, [REFERENCES]).score,
    }
    assert found.metrics == pytest.approx(expected, abs=1e-9)
    assert 10 < found.metrics["bleu"] < 90
    version = sacrebleu.__version__
    assert found.notes == {
        "bleu_signature": f"nrefs:1|case:mixed|eff:no|tok:{tokenize}|smooth:exp|version:{version}",
        "chrf_signature": f"nrefs:1|case:mixed|eff:yes|nc:6|nw:0|space:no|version:{version}",
        "direction": "en-de",
        "sentences": 5,
    }
    names = ("source", "reference", "text")
    assert found.texts == [
        dict(zip(names, row, strict=True)) for row in zip(SOURCES, REFERENCES, WRITTEN, strict=True)
    ]
    assert asked == [{"beams": 4, "length_penalty": 0.6, "max_new_tokens": 12, "prompts": 5}]


def test_the_bleu_of_a_hand_computation(answering):
    """Of words 3 of 4 are right, of pairs 2 of 3, of triples 1 of 2; of one quadruple none, which
    is smoothed to 1/2."""
    run, _ = answering({"x": "a b c e"})
    found = Bleu(tokenize="none")(run, rows(["x"], ["a b c d"]), "validation", never)
    assert found is not None
    expected = 100 * (3 / 4 * 2 / 3 * 1 / 2 * 1 / 2) ** 0.25
    assert found.metrics["bleu"] == pytest.approx(expected, rel=1e-9)
    assert found.notes["direction"] == "source-text"


@pytest.mark.parametrize("mark", ["\n", "\r\n", "\u2028", "\x85", "\x0b", "\t", "  "])
def test_a_line_break_in_a_text_shifts_nothing(answering, mark):
    written = [text.replace(" ", mark) for text in WRITTEN]
    run, _ = answering(dict(zip(SOURCES, written, strict=True)))
    broken = [mark + text.replace(" ", mark, 1) + mark for text in REFERENCES]
    found = Bleu()(run, rows(SOURCES, broken), "validation", never)
    assert found is not None and found.notes["sentences"] == 5
    expected = sacrebleu.corpus_bleu(WRITTEN, [REFERENCES]).score
    assert found.metrics["bleu"] == pytest.approx(expected, abs=1e-9)
    assert [record["text"] for record in found.texts] == written, "as they were written"


def test_a_hyphen_before_a_line_break_joins_no_words(answering):
    """As it would in a file of lines, where no such break can be."""
    run, _ = answering({"x": "Ein gut-\ngemeinter Rat ist teuer."})
    found = Bleu()(run, rows(["x"], ["Ein gut gemeinter Rat ist teuer."]), "validation", never)
    assert found is not None
    one_line, references = "Ein gut- gemeinter Rat ist teuer.", ["Ein gut gemeinter Rat ist teuer."]
    expected = sacrebleu.corpus_bleu([one_line], [references]).score
    assert found.metrics["bleu"] == pytest.approx(expected, abs=1e-9)


def test_options_reach_the_search(answering):
    run, asked = answering({"x": "y"})
    source = rows(["x"], ["y"])
    Bleu(beams=2, length_penalty=1.5, max_new_tokens=7)(run, source, "validation", never)
    Exact()(run, source, "validation", never)
    Exact(beams=3, length_penalty=0.5, max_new_tokens=9)(run, source, "validation", never)
    assert asked == [
        {"beams": 2, "length_penalty": 1.5, "max_new_tokens": 7, "prompts": 1},
        {"temperature": 0.0, "max_new_tokens": 12, "prompts": 1},
        {"beams": 3, "length_penalty": 0.5, "max_new_tokens": 9, "prompts": 1},
    ]


@pytest.mark.parametrize(
    ("options", "limit"),
    [
        ({}, 12),
        ({"data.source_len": 20}, 12),
        ({"model.max_len": 12}, 11),  # with its beginning
        ({"model.max_len": 40}, 12),
        ({"model.family": "decoder", "model.max_len": 12 + 12}, 11),  # and with its source
        ({"model.family": "decoder", "model.max_len": 12 + 9, "data.source_len": 9}, 11),
        ({"model.family": "decoder", "model.max_len": 40}, 12),
    ],
)
def test_answers_are_as_long_as_rows_are(answering, options, limit):
    run, asked = answering({"x": "y"}, **options)
    Exact()(run, rows(["x"], ["y"]), "validation", never)
    assert [how["max_new_tokens"] for how in asked] == [limit]


def test_many_texts_come_in_their_order(answering, monkeypatch, capsys):
    """They are asked by length, a few hundred at a time; every ten seconds a line says how many."""
    questions = [f"{'a' * (i * 7 % 50)}{i}" for i in range(600)]
    run, asked = answering({q: q[::-1] for q in questions})
    clock = itertools.count(0.0, 8.0)
    monkeypatch.setattr(quality.time, "monotonic", lambda: next(clock))
    found = Exact()(run, rows(questions, [q[::-1] for q in questions]), "validation", never)
    assert found is not None and found.metrics == {"exact_match": 1.0}
    assert [record["source"] for record in found.texts] == questions
    assert sum(how["prompts"] for how in asked) == 600 and len(asked) > 1
    assert capsys.readouterr().err == "evaluation: 512 of 600 texts decoded\n"


def test_it_stops_when_it_is_told_to(answering):
    questions = [str(i) for i in range(600)]
    run, asked = answering({q: q for q in questions})
    stops = iter([False, True])
    for judge in (Bleu(), Exact()):
        stops = iter([False, True])
        asked.clear()
        source = rows(questions, questions)
        assert judge(run, source, "validation", lambda s=stops: next(s)) is None
        assert len(asked) == 1


def test_exact_matches_by_length(answering):
    """Lengths are words of the question; right are 1 of 2, 2 of 3 and 0 of 1."""
    answers = {
        "one": ("A", "A"),
        "two": ("B", "b"),
        "three words here": ("", ""),
        "four words here": ("C D", "C D"),
        "five words here": ("C D", "C  D"),
        "six is": ("E", "E E"),
    }
    run, _ = answering({question: found for question, (_, found) in answers.items()})
    source = rows(list(answers), [answer for answer, _ in answers.values()])
    found = Exact()(run, source, "validation", never)
    assert found is not None
    assert found.metrics == {"exact_match": pytest.approx(3 / 6)}
    by_length = {"1": 1 / 2, "2": 0.0, "3": pytest.approx(2 / 3)}
    assert found.notes == {"exact_match_by_length": by_length, "answers": 6}
    assert list(found.notes["exact_match_by_length"]) == ["1", "2", "3"]


def test_lengths_are_those_of_the_source(answering):
    """Of a probe its own, and in the order of numbers."""

    class Numbered(Rows):
        def length_of(self, question, answer):
            return int(question) + len(answer)

    run, _ = answering({str(i): "x" for i in range(12)})
    questions = [str(i) for i in range(12)]
    source = Numbered(rows(questions, ["x"] * 11 + ["y"])._rows, lambda: None, PAIR)
    found = Exact()(run, source, "validation", never)
    assert found is not None
    shares = found.notes["exact_match_by_length"]
    assert list(shares) == [str(n) for n in range(1, 13)]
    assert shares["12"] == 0.0 and set(shares.values()) == {0.0, 1.0}


def test_the_likeliest_label_is_the_answer(answering):
    probabilities = {
        "a dog": {"animal": 0.7, "plant": 0.3},
        "a red rose": {"animal": 0.2, "plant": 0.8},
        "a tree": {"animal": 0.6, "plant": 0.4},
    }
    run, asked = answering(probabilities, **tiny_run.LABELS)
    source = rows(list(probabilities), ["animal", "plant", "plant"], fields=LABELLED)
    found = Exact()(run, source, "validation", never)
    assert found is not None and asked == []
    assert found.metrics == {"exact_match": pytest.approx(2 / 3)}
    assert found.notes["exact_match_by_length"] == {"2": 0.5, "3": 1.0}
    assert found.texts[2] == {"source": "a tree", "reference": "plant", "text": "animal"}


# ------------------------------------------------------------------------------ with a real run


def judged(folder, split, decode, **data):
    run = spec.parse(RunSpec, workdir.stored(folder))
    run = dataclasses.replace(
        run,
        eval=spec.parse(type(run.eval), {"decode": decode}, base=run.eval),
        data=spec.parse(type(run.data), data, base=run.data),
    )
    return workdir.evaluate_run(folder, "latest", split, run)


def test_an_evaluation_tells_what_was_written(translated):
    """The losses are those without it; the texts are those that the run writes."""
    metrics, texts = judged(translated, "test", "exact")
    plain, nothing = judged(translated, "test", None)
    assert nothing == [] and {n: metrics[n] for n in plain} == plain
    assert set(metrics) - set(plain) == {"exact_match", "exact_match_by_length", "answers"}
    run = workdir.load(translated)
    source = run.spec.data.source()
    questions, answers = (list(source.documents("test", field)) for field in source.fields)
    written = run.generate(questions, max_new_tokens=12, temperature=0)
    names = ("source", "reference", "text")
    assert texts == [
        dict(zip(names, row, strict=True)) for row in zip(questions, answers, written, strict=True)
    ]
    assert metrics["answers"] == len(questions)
    hits = [a == b for a, b in zip(written, answers, strict=True)]
    assert metrics["exact_match"] == sum(hits) / len(hits)


def test_an_evaluation_by_labels(labelled):
    metrics, texts = judged(labelled, "validation", "exact")
    assert metrics["exact_match"] == pytest.approx(metrics["accuracy"])
    assert {t["text"] for t in texts} <= set("0123456789")


def test_a_training_reports_it(tmp_path):
    """In every evaluation, in metrics.jsonl and in the result."""
    done = tiny_run.run(
        tmp_path,
        **tiny_run.PAIRS | {"train.steps": 2, "eval.every": 1, "eval.decode": "bleu(beams=2)"},
    )
    lines = tiny_run.lines(tmp_path, "validation")
    assert [line["step"] for line in lines] == [1, 2]
    assert all(0 <= line["bleu"] <= 100 and 0 <= line["chrf"] <= 100 for line in lines)
    metrics, texts = judged(tmp_path, "validation", "bleu(beams=2)")
    for name in ("bleu", "chrf"):
        assert metrics[name] == done["validation"][name] == lines[-1][name]
    assert len(texts) == metrics["sentences"]
