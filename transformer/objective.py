"""Objectives: a batch of token text becomes model inputs, targets and weights; logits become sums.

An objective never averages: it returns `Sums`, each metric as (sum, weight), so that micro-batches,
devices, hosts and evaluation batches add exactly. To add one, write a frozen dataclass whose fields
are its options, with the members of `CausalLM`, and give it a line in OBJECTIVES.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from transformer.layers.base import Array, Tokens
from transformer.model import ModelSpec
from transformer.spec import NonNegative, Rate

Batch = Mapping[str, Array]
Sums = dict[str, tuple[Array, Array]]  # metric -> (sum, weight); its value is sum / weight


@struct.dataclass
class Example:
    """Model inputs, what to predict [B, T], and how much each prediction counts [B, T]."""

    text: Tokens
    source: Tokens | None
    targets_BT: Array
    weights_BT: Array


@dataclasses.dataclass(frozen=True)
class CausalLM:
    """Predict the next token of the same document.

    Batch: `tokens`, `segments`, `positions`, int32 [B, T+1]. Inputs are columns 0..T-1, targets
    columns 1..T. A target counts if it belongs to the segment of the input before it, is no
    padding, and cannot be seen from there (under a prefix mask some can).
    """

    label_smoothing: Rate = 0.0  # spread evenly over the whole vocabulary (Szegedy et al. 2016)
    z_loss: NonNegative = 0.0  # times log(Z)² (Chowdhery et al. 2022, PaLM)

    families = ("decoder",)
    lower_is_better = ("loss", "nll", "perplexity", "bits_per_byte")  # among its metrics

    @staticmethod
    def rules(run: Any, **_) -> Iterator[str]:
        if run.model.family not in CausalLM.families:
            yield f"trains model.family=decoder, not {run.model.family}"

    def example(self, batch: Batch, model: ModelSpec, key: Array) -> Example:
        """The shifted inputs and targets; `key` is for objectives that draw."""
        text = Tokens(batch["tokens"], batch["segments"], batch["positions"])
        now, then = (
            jax.tree.map(lambda a, i=i: a[:, i : a.shape[1] - 1 + i], text) for i in (0, 1)
        )
        counts = (now.segments_BT == then.segments_BT) & (then.segments_BT > 0)
        for mask in model.masks.entries:
            counts &= ~mask(now.positions_BT, then.positions_BT)
        return Example(now, None, then.ids_BT, counts.astype(jnp.float32))

    def sums(self, logits_BTV: Array, example: Example, token_bytes_V: Array) -> Sums:
        """loss: what is minimised, in nats per target. nll: without smoothing and z-term.
        accuracy: share of targets with the highest logit. bits_per_byte: nll in bits per byte of
        target text, special tokens' cost included."""
        return cross_entropy(logits_BTV, example, token_bytes_V, self.label_smoothing, self.z_loss)


def cross_entropy(
    logits_BTV: Array,
    example: Example,
    token_bytes_V: Array,
    label_smoothing: float,
    z_loss: float,
) -> Sums:
    """Token-level sums in float32; see `CausalLM.sums`."""
    logits = logits_BTV.astype(jnp.float32)
    weights, targets = example.weights_BT, example.targets_BT
    log_z = jax.nn.logsumexp(logits, -1)
    nll = log_z - jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]
    loss = nll
    if label_smoothing:
        loss = (1 - label_smoothing) * nll + label_smoothing * (log_z - logits.mean(-1))
    if z_loss:
        loss = loss + z_loss * jnp.square(log_z)
    hit = (logits.argmax(-1) == targets).astype(jnp.float32)
    count, bytes_ = weights.sum(), (token_bytes_V[targets].astype(jnp.float32) * weights).sum()
    nll_sum = (nll * weights).sum()
    return {
        "loss": ((loss * weights).sum(), count),
        "nll": (nll_sum, count),
        "accuracy": ((hit * weights).sum(), count),
        "bits_per_byte": (nll_sum / jnp.log(2.0), bytes_),
    }


OBJECTIVES = {"causal_lm": CausalLM}
