"""A trained model with its tokenizer, for notebooks and for the commands that use a working
directory: logits, continuations and scores of texts."""

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from transformer.data.tokens import BOS, EOS, PAD, SPECIALS, Tokenizer
from transformer.generate import Sampling, generate
from transformer.layers.base import Array, Tokens
from transformer.layers.mask import looks_ahead
from transformer.model import ModelSpec
from transformer.spec import SpecError, parse

SCORE_BUCKET = 64  # lengths of scored texts are padded to a multiple


@dataclasses.dataclass(frozen=True, repr=False)
class Run:
    """Attributes: `spec`, the resolved RunSpec; `params`; `tokenizer`; `step` of the checkpoint."""

    spec: Any
    params: Any
    tokenizer: Tokenizer
    step: int = 0

    @property
    def model(self):
        return self.spec.model.build()

    def logits(self, tokens, mask=None, source=None, source_mask=None) -> Array:
        """ids [B, T] -> float32 [B, T, V]; masks are true at real tokens, `source` [B, S] is for an
        encoder-decoder. SpecError for what are no ids of the vocabulary."""
        for name, ids in (("tokens", tokens), ("source", source)):
            self._refuse_ids(name, ids)
        text = Tokens.of(jnp.asarray(tokens, jnp.int32), _array(mask))
        given = None
        if source is not None:
            given = Tokens.of(jnp.asarray(source, jnp.int32), _array(source_mask))
        return _logits(self.spec.model, self.params, text, given)

    def generate(
        self,
        prompts: Sequence[str],
        *,
        max_new_tokens: int = 128,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
    ) -> list[str]:
        """The continuation of each prompt, up to `max_new_tokens` or the end of the text, whichever
        comes first. temperature 0: greedy. SpecError for options out of their range."""
        _refuse_text(prompts)
        sampling = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
        out = generate(
            self.spec.model,
            self.params,
            [[BOS, *self.tokenizer.encode(prompt)] for prompt in prompts],
            max_new_tokens,
            parse(Sampling, sampling, "generate"),
            allowed_V=self._drawable(),
            end=EOS,
            pad=PAD,
            seed=seed,
        )
        return [self.tokenizer.decode(ids) for ids in out]

    def score(self, texts: Iterable[str], batch_size: int = 32) -> Iterator[dict[str, float]]:
        """For each text, in order: `logprob`, the sum of the log-probabilities in nats of its
        tokens and of the end after them, given the beginning; `tokens`, how many those are;
        `eos_logprob`, the part of the end alone."""
        _refuse_text(texts)
        texts = list(texts)
        rows = [np.array([BOS, *self.tokenizer.encode(t), EOS], np.int32) for t in texts]
        self._refuse_long(rows)
        order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
        done: dict[int, dict[str, float]] = {}
        for at in range(0, len(order), batch_size):
            chosen = order[at : at + batch_size]
            done |= zip(chosen, self._scored([rows[i] for i in chosen], batch_size), strict=True)
        yield from (done[i] for i in range(len(rows)))

    def _scored(self, rows: list[np.ndarray], batch_size: int) -> list[dict[str, float]]:
        width = -(-max(map(len, rows)) // SCORE_BUCKET) * SCORE_BUCKET + 1
        ids = np.full((batch_size, width), PAD, np.int32)
        real = np.zeros_like(ids)
        for ids_T, real_T, row in zip(ids, real, rows, strict=False):
            ids_T[: len(row)], real_T[: len(row)] = row, 1
        logprob_BT = np.asarray(
            _target_logprobs(self.spec.model, self.params, jnp.asarray(ids), jnp.asarray(real)),
            np.float64,
        )
        # As in training, a target that can be seen from the position before it does not count.
        masks = self.spec.model.masks.entries
        counts = ~np.array([any(looks_ahead(m, t) for m in masks) for t in range(width - 1)])
        return [
            {
                "logprob": float((logprob_T * counts)[: len(row) - 1].sum()),
                "tokens": int(counts[: len(row) - 1].sum()),
                "eos_logprob": float(logprob_T[len(row) - 2]),
            }
            for logprob_T, row in zip(logprob_BT, rows, strict=False)
        ]

    def _refuse_long(self, rows: list[np.ndarray]) -> None:
        limit = self.spec.model.max_len
        for line, row in enumerate(rows, 1):
            if limit is not None and len(row) - 1 > limit:
                raise SpecError(
                    f"text {line} has {len(row) - 1} tokens with its beginning, more than "
                    f"model.max_len={limit}"
                )

    def _refuse_ids(self, name: str, ids: Any) -> None:
        if ids is None:
            return
        a = np.asarray(ids)
        if a.ndim != 2 or not np.issubdtype(a.dtype, np.integer):
            raise SpecError(f"{name}: must be whole numbers [B, T], got {a.dtype} {list(a.shape)}")
        if a.size and not 0 <= a.min() <= a.max() < self.spec.model.V:
            raise SpecError(
                f"{name}: ids must lie in [0, {self.spec.model.V}), got {a.min()} to {a.max()}"
            )

    def __repr__(self) -> str:
        count = sum(a.size for a in jax.tree.leaves(self.params))
        return f"<Run: {self.spec.model.family}, {count:,} parameters, step {self.step}>"

    def _drawable(self) -> np.ndarray:
        """Tokens that stand for text, and the end."""
        allowed = np.ones(self.tokenizer.size, bool)
        allowed[: len(SPECIALS)] = False
        allowed[EOS] = True
        return allowed


def _refuse_text(texts: Any) -> None:
    if isinstance(texts, str):
        raise SpecError(f"texts: must be a list of texts, got one: {texts[:40]!r}")


def _array(mask) -> Array | None:
    return None if mask is None else jnp.asarray(mask)


@functools.partial(jax.jit, static_argnums=0)
def _logits(spec: ModelSpec, params: Any, text: Tokens, source: Tokens | None) -> Array:
    logits_BTV: Any = spec.build().apply({"params": params}, text, source)
    return logits_BTV


@functools.partial(jax.jit, static_argnums=0)
def _target_logprobs(spec: ModelSpec, params: Any, ids_BT: Array, real_BT: Array) -> Array:
    text = Tokens.of(ids_BT[:, :-1], real_BT[:, :-1])
    logits_BTV: Any = spec.build().apply({"params": params}, text)
    logprobs_BTV = jax.nn.log_softmax(logits_BTV, -1)
    return jnp.take_along_axis(logprobs_BTV, ids_BT[:, 1:, None], -1)[..., 0]
