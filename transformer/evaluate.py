"""Evaluation over whole splits: sums of sums, divided once at the end."""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np

from transformer.mesh import Mesh
from transformer.objective import Sums
from transformer.step import EvalStep

Totals = dict[str, tuple[float, float]]


def total(parts: Iterable[Sums]) -> Totals:
    """Adds (sum, weight) pairs in float64, batch by batch."""
    out: Totals = {}
    for part in parts:
        for name, (value, weight) in jax.device_get(part).items():
            v, w = out.get(name, (0.0, 0.0))
            out[name] = (v + float(value), w + float(weight))
    return out


def means(totals: Mapping[str, tuple[float, float]]) -> dict[str, float]:
    """sum / weight of each metric (0 where nothing counted), `tokens`, the number of targets that
    counted, and `perplexity`, exp of the unsmoothed nll."""
    out = {name: value / weight if weight else 0.0 for name, (value, weight) in totals.items()}
    out["tokens"] = round(totals["loss"][1])
    out["perplexity"] = math.exp(min(out["nll"], 700.0)) if not math.isnan(out["nll"]) else math.nan
    return out


def evaluate(
    step: EvalStep,
    params: Any,
    mesh: Mesh,
    batches: Iterable[Mapping[str, np.ndarray]],
    stopped: Callable[[], bool] = lambda: False,
) -> dict[str, float] | None:
    """The metrics of the split that `batches` covers, or None if `stopped` said so on the way."""
    parts = []
    for batch in batches:
        if stopped():
            return None
        parts.append(step(params, mesh.put_rows(dict(batch))))
    return means(total(parts))
