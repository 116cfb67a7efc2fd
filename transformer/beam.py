"""Beam search over the key/value cache, in one jitted loop: the best continuations of each prompt
under the length-normalised log-probability of Wu et al. 2016.

A row never depends on its batch mates. In suffixes J is a beam of a row, C a candidate beside
others, N a new token; the rows of a cache are [B * J], the beams of a row side by side.
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct, traverse_util

from transformer.generate import aligned, drawable, refuse_lengths
from transformer.layers.base import Array, Tokens
from transformer.model import ModelSpec
from transformer.spec import Count, NonNegative, Spec

# The axis of the rows in each leaf of the cache, from the right: scanned layers stand before it. A
# leaf that is not named here is an error, since it would not follow its beam.
ROWS = dict.fromkeys(("cached_key", "cached_value"), -4)
ROWS |= dict.fromkeys(("segments", "positions", "shown", "source"), -2)


@dataclasses.dataclass(frozen=True)
class Beams(Spec):
    """How wide the search is and what it prefers."""

    beams: Count = 4  # continuations of a prompt that are kept at each step
    length_penalty: NonNegative = 0.6  # 0: the log-probability alone, which prefers short ones
    n_best: Count = 1  # how many are returned, at most `beams`

    def rules(self) -> Iterator[str]:
        if self.n_best > self.beams:
            yield f"n_best={self.n_best}: must be at most beams={self.beams}"


@dataclasses.dataclass(frozen=True)
class Hypothesis:
    """A continuation. tokens: the new ids, the end included if it was reached. logprob: their
    log-probability in nats, given the prompt. score: logprob / ((5 + len(tokens)) / 6) **
    length_penalty (Wu et al. 2016, eq. 14 without coverage)."""

    tokens: list[int]
    logprob: float
    score: float


def beam_search(
    spec: ModelSpec,
    params: Any,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    beams: Beams,
    *,
    allowed_V: np.ndarray | None = None,
    end: int,
    pad: int,
    source: Tokens | None = None,
    shown: Sequence[int] | None = None,
) -> list[list[Hypothesis]]:
    """For each prompt (ids, at least one) its `n_best` continuations, best first; fewer where
    fewer are possible.

    A continuation has at most `max_new_tokens` ids; one that has not ended by then counts as it
    is. Log-probabilities are those of the whole vocabulary, also where `allowed_V` restricts what
    may be chosen; `shown` is that of `generate`. Raises SpecError where a prompt and its
    continuation exceed model.max_len.
    """
    refuse_lengths(spec, [len(p) for p in prompts], max_new_tokens)
    if not max_new_tokens or not prompts:
        return [[Hypothesis([], 0.0, 0.0)] for _ in prompts]
    penalty_N = ((5 + np.arange(max_new_tokens + 1)) / 6) ** beams.length_penalty
    found = _search(
        spec,
        params,
        aligned(prompts, pad, shown),
        source,
        drawable(spec, allowed_V),
        jnp.asarray(penalty_N, jnp.float32),
        beams=beams.beams,
        n_best=beams.n_best,
        end=end,
        pad=pad,
    )
    arrays = (found.ids_BCN, found.logprob_BC, found.score_BC)
    return [
        [
            Hypothesis(_until(ids, end), logprob, score)
            for ids, logprob, score in zip(*row, strict=True)
            if logprob > -np.inf
        ]
        for row in zip(*(np.asarray(a).tolist() for a in arrays), strict=True)
    ]


def _until(ids: list[int], end: int) -> list[int]:
    return ids[: ids.index(end) + 1] if end in ids else ids


@struct.dataclass
class _Live:
    """Beams that have not ended, the most probable first. parent_BJ: the beam each continues, of
    those before the last step. A logprob of -inf: there is no such beam."""

    logprob_BJ: Array
    ids_BJN: Array
    parent_BJ: Array


@struct.dataclass
class _Ranked:
    """Continuations that count, best first. A logprob of -inf: there is no such continuation."""

    score_BC: Array
    logprob_BC: Array
    ids_BCN: Array


@functools.partial(jax.jit, static_argnums=0, static_argnames=("beams", "n_best", "end", "pad"))
def _search(
    spec, params, text, source, allowed_V, penalty_N, *, beams, n_best, end, pad
) -> _Ranked:  # fmt: skip
    model, (B, width) = spec.build(), text.ids_BT.shape
    limit = len(penalty_N) - 1

    def forward(variables, text, source=None):
        logits_BTV, new = model.apply(variables, text, source, width + limit, mutable=["cache"])
        logprob_BV = jax.nn.log_softmax(logits_BTV[:, -1], -1)
        return jnp.where(allowed_V[None], logprob_BV, -jnp.inf), new["cache"]

    def more(carry):
        step, _, live, done = carry
        return (step < limit) & _undecided(live, done, penalty_N[-1]).any()

    def extend(carry):
        step, cache, live, done = carry
        token_BJ1 = jax.lax.dynamic_slice_in_dim(live.ids_BJN, step - 1, 1, axis=2)
        ids = token_BJ1.reshape(B * beams, 1)
        place = jnp.repeat(text.positions_BT[:, -1:] + step, beams, axis=0)
        next = Tokens(ids, jnp.ones_like(ids), place)
        variables = {"params": params, "cache": _followed(cache, live.parent_BJ)}
        logprob_BV, cache = forward(variables, next)
        logprob_BJV = logprob_BV.reshape(B, beams, -1)
        return step + 1, cache, *_grown(live, done, logprob_BJV, step, penalty_N[step + 1], end)

    logprob_BV, cache = forward({"params": params}, text, source)
    ids_BJN = jnp.full((B, beams, limit), pad, jnp.int32)
    alone_BJ = jnp.full((B, beams), -jnp.inf).at[:, 0].set(0.0)  # else all beams were the same
    live = _Live(alone_BJ, ids_BJN, jnp.zeros((B, beams), jnp.int32))
    nothing = jnp.full((B, n_best), -jnp.inf)
    done = _Ranked(nothing, nothing, ids_BJN[:, :n_best])
    logprob_BJV = jnp.repeat(logprob_BV[:, None], beams, axis=1)
    live, done = _grown(live, done, logprob_BJV, 0, penalty_N[1], end)
    start = (jnp.int32(1), _repeated(cache, beams), live, done)
    _, _, live, done = jax.lax.while_loop(more, extend, start)
    # After an early stop this adds nothing: that is what it stopped for.
    return _merged(done, live.logprob_BJ, live.ids_BJN, penalty_N[-1])


def _undecided(live: _Live, done: _Ranked, last_penalty: Array) -> Array:
    """[B]: whether a live beam can still get in front of a continuation that counts. A
    log-probability only falls and the penalty only grows: the bound is both at their best."""
    return live.logprob_BJ[:, 0] / last_penalty > done.score_BC[:, -1]


def _grown(
    live: _Live, done: _Ranked, logprob_BJV: Array, step: Any, penalty: Array, end: int
) -> tuple[_Live, _Ranked]:
    """One token more. The J best continuations that go on are the new beams; an end is done where
    it is one of the J best of all, so that a single beam is greedy."""
    B, J, V = logprob_BJV.shape
    total = (live.logprob_BJ[:, :, None] + logprob_BJV).reshape(B, J * V)
    # Each beam has one end: among twice as many as there are beams, enough go on.
    total_BC, at_BC = jax.lax.top_k(total, min(2 * J, J * V))
    parent_BC, token_BC = at_BC // V, at_BC % V
    ids_BCN = jnp.take_along_axis(live.ids_BJN, parent_BC[:, :, None], 1)
    ids_BCN = jax.lax.dynamic_update_slice_in_dim(ids_BCN, token_BC[:, :, None], step, axis=2)
    ends_BC = token_BC == end
    done = _merged(done, jnp.where(ends_BC, total_BC, -jnp.inf)[:, :J], ids_BCN[:, :J], penalty)
    logprob_BJ, at_BJ = jax.lax.top_k(jnp.where(ends_BC, -jnp.inf, total_BC), J)
    ids_BJN = jnp.take_along_axis(ids_BCN, at_BJ[:, :, None], 1)
    return _Live(logprob_BJ, ids_BJN, jnp.take_along_axis(parent_BC, at_BJ, 1)), done


def _merged(done: _Ranked, logprob_BJ: Array, ids_BJN: Array, penalty: Array) -> _Ranked:
    """The best of what is done and what has come; of equals, what came first."""
    score = jnp.concatenate([done.score_BC, logprob_BJ / penalty], 1)
    logprob = jnp.concatenate([done.logprob_BC, logprob_BJ], 1)
    ids = jnp.concatenate([done.ids_BCN, ids_BJN], 1)
    score_BC, at_BC = jax.lax.top_k(score, done.score_BC.shape[1])
    return _Ranked(
        score_BC,
        jnp.take_along_axis(logprob, at_BC, 1),
        jnp.take_along_axis(ids, at_BC[:, :, None], 1),
    )


# ------------------------------------------------------------------------------------ the cache


def _repeated(cache: Any, beams: int) -> Any:
    """A cache with `beams` equal rows for each of its own."""
    flat: dict[Any, Any] = traverse_util.flatten_dict(cache)
    for path, leaf in flat.items():
        if path[-1] != "slot":  # the same number for all rows
            axis = ROWS[path[-1]]
            flat[path] = jax.tree.map(lambda a, at=axis: jnp.repeat(a, beams, axis=at), leaf)
    return traverse_util.unflatten_dict(flat)


def _followed(cache: Any, parent_BJ: Array) -> Any:
    """The cache in which every beam has the past of its parent. What is known of the source is
    the same for all beams of a row and stays where it is.

    So are the slots of the prompt, but to write only those after it into the cache they are taken
    from gives wrong numbers on CPUs (XLA overwrites what it has still to read:
    github.com/openxla/xla/issues/49176).
    """
    B, J = parent_BJ.shape
    parent = (parent_BJ + J * jnp.arange(B, dtype=parent_BJ.dtype)[:, None]).reshape(B * J)
    flat: dict[Any, Any] = traverse_util.flatten_dict(cache)
    for path, leaf in flat.items():
        if path[-1] not in ("slot", "source") and "cross_attention" not in path:
            flat[path] = jnp.take(leaf, parent, axis=ROWS[path[-1]], mode="clip")
    return traverse_util.unflatten_dict(flat)
