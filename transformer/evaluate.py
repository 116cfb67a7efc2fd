"""Evaluation over whole splits: sums of sums, divided once at the end."""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np

from transformer.mesh import Mesh
from transformer.objective import Sums
from transformer.step import EvalStep

Totals = dict[str, tuple[np.ndarray, np.ndarray]]  # float64, one value or a vector


def total(parts: Iterable[Sums]) -> Totals:
    """Adds (sum, weight) pairs in float64, batch by batch."""
    out: Totals = {}
    for part in parts:
        for name, (value, weight) in jax.device_get(part).items():
            v, w = out.get(name, (np.float64(0.0), np.float64(0.0)))
            out[name] = (v + np.asarray(value, float), w + np.asarray(weight, float))
    return out


def means(totals: Totals) -> dict[str, float]:
    """sum / weight of each metric (0 where nothing counted; of a vector the mean over what
    counted), `tokens`, the number of targets that counted, and `perplexity`, exp of the nll per
    token."""
    out = {name: _mean(value, weight) for name, (value, weight) in totals.items()}
    out["tokens"] = round(float(totals["loss"][1]))
    if "bits_per_byte" in totals:  # targets are tokens
        nll = out["nll"]
        out["perplexity"] = math.exp(min(nll, 700.0)) if not math.isnan(nll) else math.nan
    return out


def _mean(value: np.ndarray, weight: np.ndarray) -> float:
    counted = weight != 0
    return float((value[counted] / weight[counted]).mean()) if counted.any() else 0.0


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
