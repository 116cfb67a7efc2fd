"""What a model writes, or answers, for a whole split against what it should: QUALITIES.

To add one, write a frozen dataclass whose fields are its options, with `refusals`, which says what
run it is of no use for, and `__call__`, and give it a line in the table.
"""

import dataclasses
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import numpy as np

from transformer.data.corpus import Source
from transformer.data.store import Stream
from transformer.data.tokens import BOS, EOS, PAD
from transformer.run import Run
from transformer.spec import Count, Natural, NonNegative, SpecError


@dataclasses.dataclass(frozen=True)
class Judged:
    """metrics: numbers for the log. notes: what belongs to them, for the reader. texts: one record
    for each document, in order."""

    metrics: dict[str, float]
    notes: dict[str, Any]
    texts: list[dict[str, Any]]


Stopped = Callable[[], bool]


@dataclasses.dataclass(frozen=True)
class Bleu:
    """BLEU and chrF of translations found by beam search, by sacreBLEU (Post 2018), with its
    signatures and the direction; of the texts as they are in the data, cased and detokenised."""

    beams: Count = 4
    length_penalty: NonNegative = 0.6  # Wu et al. 2016, eq. 14
    max_new_tokens: Count | None = None  # None: as many as a row of the data has
    tokenize: Literal["13a", "intl", "char", "zh", "none"] = "13a"  # of sacreBLEU

    @staticmethod
    def refusals(run: Any) -> Iterator[str]:
        if run.objective.factory.needs != "source":
            yield f"judges translations, which objective={run.objective} does not make"

    def __call__(self, run: Run, source: Source, split: str, stopped: Stopped) -> Judged | None:
        import sacrebleu  # a fifth of a second, for translations only

        sources, references = _documents(source, split, "source", "text")
        search = {"beams": self.beams, "length_penalty": self.length_penalty}
        limit = _limit(run, self.max_new_tokens)
        written = _written(run, sources, limit, stopped, **search)
        if written is None:
            return None
        bleu = sacrebleu.BLEU(tokenize=self.tokenize)
        chrf = sacrebleu.CHRF()
        # A hypothesis is one line to sacreBLEU's users; what breaks lines is white space to it.
        lines, targets = ([" ".join(t.split()) for t in side] for side in (written, references))
        metrics = {
            "bleu": bleu.corpus_score(lines, [targets]).score,
            "chrf": chrf.corpus_score(lines, [targets]).score,
        }
        notes = {
            "bleu_signature": str(bleu.get_signature()),
            "chrf_signature": str(chrf.get_signature()),
            "direction": "-".join(source.languages or ("source", "text")),
            "sentences": len(lines),
        }
        return Judged(metrics, notes, _records(sources, references, written))


@dataclasses.dataclass(frozen=True)
class Exact:
    """The share of answers that are right as a whole, and that share by the length of the question;
    the answer is the greedy continuation, or with beams the best found, or the likeliest label."""

    beams: Natural = 0  # 0: greedy
    length_penalty: NonNegative = 0.0  # of beams; Wu et al. 2016, eq. 14
    max_new_tokens: Count | None = None  # None: as many as a row of the data has

    @staticmethod
    def rules(context: Any, beams: int = 0, length_penalty: float = 0.0, **_) -> Iterator[str]:
        del context
        if length_penalty and not beams:
            yield f"length_penalty={length_penalty}: is of beams, got beams={beams}"

    @staticmethod
    def refusals(run: Any) -> Iterator[str]:
        if not run.objective.factory.needs:
            yield f"judges answers, which objective={run.objective} does not give"
        elif run.objective.factory.needs == "label":
            for name, value in run.eval.decode.bound:
                yield f"{name}={value}: is for answers that are written, and labels are not"

    def __call__(self, run: Run, source: Source, split: str, stopped: Stopped) -> Judged | None:
        if run.objective.needs == "label":
            questions, answers = _documents(source, split, "text", "label")
            found = [max(p, key=lambda name: p[name]) for p in run.classify(questions)]
        else:
            questions, answers = _documents(source, split, "source", "text")
            how: dict[str, Any] = {"temperature": 0.0}
            if self.beams:
                how = {"beams": self.beams, "length_penalty": self.length_penalty}
            limit = _limit(run, self.max_new_tokens)
            found = _written(run, questions, limit, stopped, **how)
        if found is None:
            return None
        right = [a == b for a, b in zip(found, answers, strict=True)]
        by_length: dict[int, list[bool]] = defaultdict(list)
        for question, answer, hit in zip(questions, answers, right, strict=True):
            by_length[source.length_of(question, answer)].append(hit)
        shares = {str(n): sum(hits) / len(hits) for n, hits in sorted(by_length.items())}
        metrics = {"exact_match": sum(right) / len(right)}
        notes = {"exact_match_by_length": shares, "answers": len(right)}
        return Judged(metrics, notes, _records(questions, answers, found))


def refuse_lengths(run: Run, stream: Stream) -> None:
    """SpecError where what the model has to read or write of a split exceeds model.max_len."""
    if stream.source is not None:
        longest = int(np.diff(stream.source.starts).max()) - 2  # without its beginning and end
        asked = run.objective.prompt([PAD] * longest, run.spec.model, BOS, EOS)
        decode = run.spec.eval.decode
        try:
            run.refuse_lengths([asked], _limit(run, decode().max_new_tokens))
        except SpecError as e:
            raise SpecError(f"decode={decode}: the longest source of the split: {e}") from None


def _limit(run: Run, given: int | None) -> int:
    """The most tokens of an answer, its end included."""
    model, (targets, source) = run.spec.model, run.spec.data.longest
    begin = 1 if all(model.depths) else source + 1
    room = targets if model.max_len is None else model.max_len - begin
    return given or max(1, min(targets, room))


def _documents(source: Source, split: str, *fields: str) -> list[list[str]]:
    return [list(source.documents(split, field)) for field in fields]


def _written(
    run: Run, sources: Sequence[str], limit: int, stopped: Stopped, **options: Any
) -> list[str] | None:
    """What the run writes for each source; None if `stopped` said so on the way. Sources of about
    the same length are decoded together; progress is shown every ten seconds."""
    order = sorted(range(len(sources)), key=lambda i: len(sources[i]))
    out = [""] * len(sources)
    shown = time.monotonic()
    for begin in range(0, len(order), 256):
        if stopped():
            return None
        chosen = order[begin : begin + 256]
        texts = run.generate([sources[i] for i in chosen], max_new_tokens=limit, **options)
        for i, text in zip(chosen, texts, strict=True):
            out[i] = text
        if time.monotonic() - shown > 10:
            shown = time.monotonic()
            done = f"{begin + len(chosen):,} of {len(order):,}"
            print(f"evaluation: {done} texts decoded", file=sys.stderr, flush=True)
    return out


def _records(
    sources: Sequence[str], references: Sequence[str], found: Sequence[str]
) -> list[dict[str, Any]]:
    names = ("source", "reference", "text")
    return [
        dict(zip(names, row, strict=True)) for row in zip(sources, references, found, strict=True)
    ]


QUALITIES = {"bleu": Bleu, "exact": Exact}
