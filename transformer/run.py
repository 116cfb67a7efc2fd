"""A trained model with its vocabulary, for notebooks and for the commands that use a working
directory: logits, continuations and translations, scores and labels of texts."""

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from transformer.beam import Beams, beam_search
from transformer.data.corpus import PAIR, TEXT
from transformer.data.tokens import BOS, EOS, MASK, PAD, SPECIALS, Tokenizer, Vocabulary
from transformer.generate import Sampling, bucket, generate, refuse_lengths
from transformer.layers.base import Array, Tokens
from transformer.objective import Example, Lexicon, Objective, Prompt
from transformer.spec import SpecError, parse

SCORE_BUCKET = 64  # lengths of scored texts are padded to a multiple
Text = str | tuple[str, str]  # a text, or a source and its text


@dataclasses.dataclass(frozen=True)
class Written:
    """A continuation found by beam search. logprob: of its tokens and its end in nats; score:
    logprob / ((5 + tokens) / 6) ** length_penalty; tokens: its ids, the end included."""

    text: str
    score: float
    logprob: float
    tokens: list[int]


@dataclasses.dataclass(frozen=True, repr=False)
class Run:
    """Attributes: `spec`, the resolved RunSpec; `params`; `vocabulary`, with the `tokenizer`;
    `step` of the checkpoint."""

    spec: Any
    params: Any
    vocabulary: Vocabulary
    step: int = 0

    @property
    def model(self):
        return self.spec.model.build()

    @property
    def tokenizer(self) -> Tokenizer:
        return self.vocabulary.tokenizer

    @functools.cached_property
    def objective(self) -> Objective:
        return self.spec.objective()

    def logits(self, tokens, mask=None, source=None, source_mask=None) -> Array:
        """ids [B, T] -> float32 [B, T, V], or [B, classes]; masks are true at real tokens, `source`
        [B, S] is for an encoder-decoder. SpecError for what are no ids of the vocabulary."""
        if (source is not None) != all(self.spec.model.depths):
            need = "needs no" if source is not None else "needs a"
            raise SpecError(f"source: model.family={self.spec.model.family} {need} source")
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
        beams: int = 0,
        length_penalty: float = 0.6,
        n_best: int | None = None,
        batch_size: int = 64,
    ) -> list[Any]:
        """The continuation of each prompt, or for a model of pairs what answers it, up to
        `max_new_tokens` or the end of the text, whichever comes first.

        Drawn (temperature 0: greedy) or, with `beams`, searched for; then `n_best` gives for each
        prompt a list of that many `Written`, best first, instead of one text. No result depends
        on the batch a prompt stands in. SpecError for options out of their range or of no effect,
        and for a model that writes no texts.
        """
        _refuse_text(prompts)
        self._refuse_silence()
        sampled, searched = _sought(beams, length_penalty, n_best, temperature, top_k, top_p)
        given = [self.prompt(text) for text in prompts]
        self.refuse_lengths(given, max_new_tokens)
        ends: dict[str, Any] = {"allowed_V": self._drawable(), "end": EOS, "pad": PAD}
        out: list[Any] = [None] * len(given)
        for chosen in _alike([len(p.source or p.text) for p in given], batch_size):
            texts, more = self._inputs([given[i] for i in chosen])
            if searched:
                found: list[Any] = beam_search(
                    self.spec.model, self.params, texts, max_new_tokens, searched,
                    **more, **ends,
                )  # fmt: skip
                found = [[self._written(h) for h in best] for best in found]
                found = found if n_best else [best[0].text for best in found]
            else:
                ids = generate(
                    self.spec.model, self.params, texts, max_new_tokens, sampled,
                    seed=seed, rows=chosen, **more, **ends,
                )  # fmt: skip
                found = [self._decoded(row) for row in ids]
            for i, result in zip(chosen, found, strict=True):
                out[i] = result
        return out

    def prompt(self, text: str) -> Prompt:
        """What the model is given to go on from `text`. SpecError if it writes nothing."""
        self._refuse_silence()
        field = "source" if self.objective.needs == "source" else "text"
        ids = self.vocabulary.of(field).encode(text).tolist()
        return self.objective.prompt(ids, self.spec.model, BOS, EOS)

    def refuse_lengths(self, prompts: Sequence[Prompt], new: int) -> None:
        """SpecError where a prompt, or it and `new` tokens after it, exceed model.max_len."""
        model = self.spec.model
        for i, prompt in enumerate(prompts):
            length = len(prompt.source or ())
            if model.max_len is not None and length > model.max_len:
                raise SpecError(
                    f"prompt {i} has {length} tokens, which exceed model.max_len={model.max_len}"
                )
        refuse_lengths(model, [len(prompt.text) for prompt in prompts], new)

    def score(self, texts: Iterable[Text], batch_size: int = 32) -> Iterator[dict[str, float]]:
        """For each text, or (source, text), in order: `logprob`, the sum of the log-probabilities
        in nats of its tokens and of the end after them, given the beginning and the source;
        `tokens`, how many those are; `eos_logprob`, the part of the end alone."""
        _refuse_text(texts)
        if not self.objective.scores:
            name = self.spec.objective.name
            raise SpecError(f"objective={name}: gives no log-probability of a text")
        rows = [self._framed(text, i) for i, text in enumerate(texts, 1)]
        done: dict[int, dict[str, float]] = {}
        for chosen in _alike([max(map(len, row)) for row in rows], batch_size):
            done |= zip(chosen, self._scored([rows[i] for i in chosen], batch_size), strict=True)
        yield from (done[i] for i in range(len(rows)))

    def classify(self, texts: Sequence[str], batch_size: int = 32) -> list[dict[str, float]]:
        """For each text the probability of each label. Of a text the first data.seq_len + 1 tokens
        are read, as in training."""
        _refuse_text(texts)
        if not self.spec.model.classes:
            raise SpecError(f"this run (objective={self.spec.objective.name}) has no labels")
        names, width = self.vocabulary.labels, self.spec.data.seq_len + 1
        rows = [[self._ids("text", text)[:width]] for text in texts]
        out: list[dict[str, float]] = [{} for _ in rows]
        for chosen in _alike([len(row[0]) for row in rows], batch_size):
            batch = _batch([rows[i] for i in chosen], batch_size, TEXT)
            batch["labels"] = np.zeros(batch_size, np.int32)
            logits_BC = self._outputs(batch)[1][:, : len(names)]  # the model may have room for more
            p_BC = np.asarray(jax.nn.softmax(logits_BC, -1))[: len(chosen)]
            for i, p_C in zip(chosen, p_BC, strict=True):
                out[i] = dict(zip(names, p_C.tolist(), strict=True))
        return out

    def _scored(self, rows: list[list[np.ndarray]], batch_size: int) -> list[dict[str, float]]:
        fields = PAIR if self.objective.needs else TEXT
        example, logits_BTV = self._outputs(_batch(rows, batch_size, fields))
        logprob_BT = np.asarray(_target_logprobs(logits_BTV, example.targets_BT), np.float64)
        weights_BT = np.asarray(example.weights_BT, np.float64)
        last_B = weights_BT.shape[1] - 1 - np.argmax(weights_BT[:, ::-1], 1)
        return [
            {
                "logprob": float(logprob_BT[b] @ weights_BT[b]),
                "tokens": int(weights_BT[b].sum()),
                "eos_logprob": float((logprob_BT * weights_BT)[b, last_B[b]]),
            }
            for b in range(len(rows))
        ]

    def _outputs(self, batch: dict[str, np.ndarray]) -> tuple[Example, Array]:
        return _apply(self.objective, self.spec.model, self.params, batch, lexicon(self.tokenizer))

    def _framed(self, text: Text, line: int) -> list[np.ndarray]:
        """The ids of a text, or of its source and itself, as they stand in a batch."""
        fields = PAIR if self.objective.needs else TEXT
        parts = (text,) if isinstance(text, str) else text
        if len(parts) != len(fields):
            wanted = "a source and a text, (source, text)" if len(fields) > 1 else "one text"
            raise SpecError(f"text {line} has {len(parts)} parts; this run scores {wanted}")
        row = [self._ids(field, part) for field, part in zip(fields, parts, strict=True)]
        lengths = len(row[-1]) - 1, len(row[0])
        length, limit = self.objective.length(self.spec.model, *lengths), self.spec.model.max_len
        if limit is not None and length > limit:
            raise SpecError(
                f"text {line} has {length} tokens with its beginning, more than "
                f"model.max_len={limit}"
            )
        return row

    def _ids(self, field: str, text: str) -> np.ndarray:
        return np.array([BOS, *self.vocabulary.of(field).encode(text), EOS], np.int32)

    def _inputs(self, prompts: list[Prompt]) -> tuple[list[Sequence[int]], dict[str, Any]]:
        """The beginnings of the texts of one batch, and what else decoding is given of them."""
        texts = [p.text for p in prompts]
        if prompts[0].source is None:
            return texts, {"shown": [p.shown for p in prompts]}
        sources = [p.source or () for p in prompts]
        width = bucket(max(map(len, sources)))
        ids = np.full((len(prompts), width), PAD, np.int32)
        for row, source in zip(ids, sources, strict=True):
            row[: len(source)] = source
        real = jnp.arange(width)[None] < np.array(list(map(len, sources)))[:, None]
        return texts, {"source": Tokens.of(jnp.asarray(ids), real)}

    def _written(self, found: Any) -> Written:
        return Written(self._decoded(found.tokens), found.score, found.logprob, found.tokens)

    def _decoded(self, ids: Sequence[int]) -> str:
        """Text of ids; the sentinels of span corruption are shown as <1>, <2> …"""
        size, parts, begin = self.tokenizer.size, [], 0
        for i, token in enumerate([*ids, size]):
            if token >= size:
                parts += [self.tokenizer.decode(ids[begin:i]), f"<{token - size + 1}>"]
                begin = i + 1
        return "".join(parts[:-1])

    def _refuse_silence(self) -> None:
        """SpecError if the model writes no texts."""
        model = self.spec.model
        what = f"this run (objective={self.spec.objective.name}, model.family={model.family})"
        if model.classes:
            raise SpecError(
                f"{what} gives labels, not texts: use classify(texts), or eval.py with "
                "--config.eval.decode=exact and --output"
            )
        if not model.depths[1]:
            raise SpecError(f"{what} writes no texts: use logits(tokens)")

    def _refuse_ids(self, name: str, ids: Any) -> None:
        if ids is None:
            return
        a, model = np.asarray(ids), self.spec.model
        if a.ndim != 2 or not np.issubdtype(a.dtype, np.integer):
            raise SpecError(f"{name}: must be whole numbers [B, T], got {a.dtype} {list(a.shape)}")
        size = (model.source_vocab if name == "source" else None) or model.V
        if a.size and not 0 <= a.min() <= a.max() < size:
            raise SpecError(f"{name}: ids must lie in [0, {size}), got {a.min()} to {a.max()}")

    def __repr__(self) -> str:
        count = sum(a.size for a in jax.tree.leaves(self.params))
        return f"<Run: {self.spec.model.family}, {count:,} parameters, step {self.step}>"

    def _drawable(self) -> np.ndarray:
        """Tokens that stand for text, sentinels, and the end."""
        sentinels = self.objective.sentinels(self.spec.data.seq_len)
        allowed = np.ones(self.tokenizer.size + sentinels, bool)
        allowed[: len(SPECIALS)] = False
        allowed[EOS] = True
        return allowed


def lexicon(tokenizer: Tokenizer) -> Lexicon:
    """What objectives are told of a tokenizer."""
    return Lexicon(
        jnp.asarray(tokenizer.byte_lengths, jnp.int32),
        jnp.asarray(tokenizer.inside_words),
        bos=BOS,
        eos=EOS,
        mask=MASK,
        specials=len(SPECIALS),
    )


def _sought(
    beams: int, length_penalty: float, n_best: int | None, *how: float
) -> tuple[Sampling, Beams | None]:
    """How to draw, or how to search. SpecError for options of the other of the two."""
    names = ("temperature", "top_k", "top_p")
    sampled: Sampling = parse(Sampling, dict(zip(names, how, strict=True)), "generate")
    if beams and sampled != Sampling():
        raise SpecError(f"generate: {', '.join(names)} are for drawing; beams={beams} searches")
    if not beams and (n_best is not None or length_penalty != Beams().length_penalty):
        raise SpecError(f"generate: length_penalty and n_best need beams, got beams={beams}")
    if not beams:
        return sampled, None
    search = {
        "beams": beams,
        "length_penalty": length_penalty,
        "n_best": 1 if n_best is None else n_best,
    }
    return sampled, parse(Beams, search, "generate")


def _batch(
    rows: list[list[np.ndarray]], batch_size: int, fields: tuple[str, ...]
) -> dict[str, np.ndarray]:
    """Rows of framed ids as a batch of the data has them, filled up to `batch_size`."""
    out = {"rows": np.arange(batch_size, dtype=np.int32)}
    for column, field in enumerate(fields):
        width = -(-max(len(row[column]) for row in rows) // SCORE_BUCKET) * SCORE_BUCKET + 1
        ids, segments = np.zeros((2, batch_size, width), np.int32)
        for i, row in enumerate(rows):
            n = len(row[column])
            ids[i, :n], segments[i, :n] = row[column], 1
        place = np.broadcast_to(np.arange(width, dtype=np.int32), ids.shape) * segments
        side = "" if field in TEXT else f"{field}_"
        named = {"tokens": ids, "segments": segments, "positions": place}
        out |= {f"{side}{name}": a for name, a in named.items()}
    return out


def _alike(lengths: Sequence[int], batch_size: int) -> Iterator[list[int]]:
    """Batches of numbers of texts of about the same length."""
    if batch_size < 1:
        raise SpecError(f"batch_size: must be at least 1, got {batch_size}")
    order = sorted(range(len(lengths)), key=lambda i: lengths[i])
    yield from (order[i : i + batch_size] for i in range(0, len(order), batch_size))


def _refuse_text(texts: Any) -> None:
    if isinstance(texts, str):
        raise SpecError(f"texts: must be a list of texts, got one: {texts[:40]!r}")


def _array(mask) -> Array | None:
    return None if mask is None else jnp.asarray(mask)


@functools.partial(jax.jit, static_argnums=0)
def _logits(spec, params: Any, text: Tokens, source: Tokens | None) -> Array:
    logits_BTV: Any = spec.build().apply({"params": params}, text, source)
    return logits_BTV


@functools.partial(jax.jit, static_argnums=(0, 1))
def _apply(objective: Objective, spec, params: Any, batch, lexicon: Lexicon):
    """Example and logits of a batch, nothing drawn."""
    example = objective.example(batch, spec, None, lexicon)
    return example, spec.build().apply({"params": params}, example.text, example.source)


@jax.jit
def _target_logprobs(logits_BTV: Array, targets_BT: Array) -> Array:
    logprobs_BTV = jax.nn.log_softmax(logits_BTV, -1)
    return jnp.take_along_axis(logprobs_BTV, targets_BT[..., None], -1)[..., 0]
