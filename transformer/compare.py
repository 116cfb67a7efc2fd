"""Which of several variants is better, and how sure that is: runs that differ in nothing but the
seed are one variant; intervals are Student's t over seeds, differences are paired by seed.
"""

import dataclasses
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from scipy import stats

from transformer import result
from transformer.spec import SpecError, flat

LEVEL = 0.95
_NO_VARIANT = ("train.seed", "log", "checkpoint", "data.prefetch", "eval.every", "eval.sample")


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A mean over seeds, half the width of its interval (None with one seed) and the number of
    seeds; p: of a difference, the chance of one at least as large if there were none."""

    mean: float
    half: float | None
    seeds: int
    p: float | None = None

    def __str__(self) -> str:
        shown = f"{self.mean:.4f}" if self.half is None else f"{self.mean:.4f} ± {self.half:.4f}"
        return shown if self.p is None else f"{shown}, p = {self.p:.2g}"


def estimate(values: Sequence[float], difference: bool = False) -> Estimate:
    """The mean with its interval at the level of 95 %, by Student's t with n - 1 degrees of
    freedom; of differences also the p-value of the two-sided test against 0."""
    a, n = np.asarray(values, float), len(values)
    if n < 2:
        return Estimate(float(a.mean()), None, n)
    error = float(a.std(ddof=1)) / math.sqrt(n)
    half = float(stats.t.ppf((1 + LEVEL) / 2, n - 1)) * error
    p = None
    if difference:
        p = float(2 * stats.t.sf(abs(a.mean()) / error, n - 1)) if error else float(not a.any())
    return Estimate(float(a.mean()), half, n, p)


def sheet(workdirs: Sequence[str], metrics: Sequence[str] = ()) -> str:
    """The report on finished runs as text. `metrics` are those of the evaluation, by default all
    that every run has. SpecError for a directory without a result, or with an unfinished one."""
    runs = [_Finished(path) for path in workdirs]
    shared = [m for m in runs[0].metrics if all(m in run.metrics for run in runs)]
    for name in metrics:
        if name not in shared:
            raise SpecError(f"--metrics={name}: not every run has it (all have: {shared})")
    return "\n".join(_lines(_variants(runs), metrics or shared))


class _Finished:
    """A run that is done: its options but for those that make no variant, seed and metrics."""

    def __init__(self, path: str):
        folder: Path = result.folder(path)
        self.path, done = path, result.read_json(folder / "result.json")
        if done.get("exit_reason") != "done":
            raise SpecError(f"{path}: has not finished ({done.get('exit_reason')})")
        config = result.read_json(folder / "config.json")
        self.seed = config["train"]["seed"]
        self.metrics: dict[str, float] = {
            name: value
            for name, value in done[config["eval"]["split"]].items()
            if isinstance(value, int | float) and name != "tokens"
        }
        self.options = {
            name: value
            for name, value in flat(config)
            if not any(name == n or name.startswith(f"{n}.") for n in _NO_VARIANT)
        }


def _variants(runs: list[_Finished]) -> list[list[_Finished]]:
    found: dict[str, list[_Finished]] = {}
    for run in runs:
        found.setdefault(json.dumps(run.options, sort_keys=True), []).append(run)
    for same in found.values():
        seeds = [run.seed for run in same]
        if len(set(seeds)) < len(seeds):
            twice = [run.path for run in same if seeds.count(run.seed) > 1]
            raise SpecError(f"{' and '.join(twice)}: are the same run, with the same seed")
    return list(found.values())


def _lines(variants: list[list[_Finished]], metrics: Sequence[str]) -> Iterator[str]:
    options = [same[0].options for same in variants]
    names = sorted({name for o in options for name in o})
    differing = [n for n in names if len({json.dumps(o.get(n)) for o in options}) > 1]
    for i, (same, own) in enumerate(zip(variants, options, strict=True)):
        said = ", ".join(f"{n}={own.get(n)}" for n in differing) or "one variant"
        yield f"{_letter(i)}  {said}"
        yield f"   seeds {', '.join(str(run.seed) for run in same)}"
        for metric in metrics:
            yield f"   {metric}: {estimate([run.metrics[metric] for run in same])}"
    first = {run.seed: run for run in variants[0]}
    for i, same in enumerate(variants[1:], 1):
        pairs = [(first[run.seed], run) for run in same if run.seed in first]
        yield f"{_letter(0)} - {_letter(i)}, paired by seed, {len(pairs)} seeds"
        for metric in metrics if pairs else ():
            gaps = [a.metrics[metric] - b.metrics[metric] for a, b in pairs]
            yield f"   {metric}: {estimate(gaps, difference=True)}"
    yield f"± is half the width of the {LEVEL:.0%} interval of the mean over seeds (Student's t)"


def _letter(i: int) -> str:
    return chr(ord("A") + i) if i < 26 else f"variant {i + 1}"
