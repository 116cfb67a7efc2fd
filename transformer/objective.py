"""Objectives: a batch of tokens becomes model inputs, targets and weights; logits become sums.

An objective never averages: it returns `Sums`, each metric as (sum, weight), so that micro-batches,
devices, hosts and evaluation batches add exactly. To add one, write a frozen dataclass whose fields
are its options, with the members of `Objective`, and give it a line in OBJECTIVES. What a batch
holds is said in data/feed.py: T + 1 tokens a row, S of a source.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from transformer import noise
from transformer.layers.base import Array, Tokens
from transformer.model import ModelSpec
from transformer.spec import Must, NonNegative, Rate

Batch = Mapping[str, Array]
Sums = dict[str, tuple[Array, Array]]  # metric -> (sum, weight), or a vector of each
Open = Annotated[float, Must("lie in (0, 1)", lambda v: 0 < v < 1)]
Share = Annotated[float, Must("lie in [0, 1]", lambda v: 0 <= v <= 1)]
Length = Annotated[float, Must("be at least 1", lambda v: v >= 1)]


@struct.dataclass
class Example:
    """Model inputs, what to predict, and how much each prediction counts: [B, T] of tokens, [B] of
    classes."""

    text: Tokens
    source: Tokens | None
    targets_BT: Array
    weights_BT: Array


@struct.dataclass
class Lexicon:
    """What objectives know of the vocabulary: the UTF-8 bytes of each token (none for special
    ones), whether it begins and ends inside a word, and the special ids, which are the first."""

    bytes_V: Array
    inside_2V: Array
    bos: int = struct.field(pytree_node=False)
    eos: int = struct.field(pytree_node=False)
    mask: int = struct.field(pytree_node=False)
    specials: int = struct.field(pytree_node=False)

    @property
    def size(self) -> int:
        return self.bytes_V.size

    def begins_word(self, text: Tokens) -> Array:
        """Whether a token is the first of a word, a punctuation mark or the like [B, T]."""
        begins, ends = self.inside_2V[:, text.ids_BT]
        goes_on = begins[:, 1:] & ends[:, :-1] & (text.positions_BT[:, 1:] > 0)
        return jnp.pad(~goes_on, ((0, 0), (1, 0)), constant_values=True)


@dataclasses.dataclass(frozen=True)
class Prompt:
    """What a model is given before it writes: ids of a source, ids of the beginning of the text,
    and how many of the latter all may look at."""

    source: Sequence[int] | None
    text: Sequence[int]
    shown: int = 0


class Objective:
    """What the objectives share.

    Attributes:
      families: those of the model that it trains.
      needs: the field that the data must have besides the text, if any.
      scores: whether the log-probability of a text can be asked for.
      lower_is_better: those of its metrics.
    """

    families: tuple[str, ...] = ("decoder",)
    needs: str | None = None
    scores = True
    lower_is_better: tuple[str, ...] = ("loss", "nll", "perplexity", "bits_per_byte")

    @classmethod
    def rules(cls, run: Any, **_) -> Iterator[str]:
        if run.model.family not in cls.families:
            yield f"trains model.family={' or '.join(cls.families)}, not {run.model.family}"
        if cls.needs and run.data.packing.factory.turns:
            yield (
                f"needs the {cls.needs} of each text, which data.packing={run.data.packing} does "
                "not keep; documents and buckets do"
            )

    def sentinels(self, seq_len: int) -> int:
        """How many ids it needs beyond those of the tokenizer."""
        return 0

    def length(self, model: ModelSpec, seq_len: int, source_len: int) -> int:
        """The most positions that one side of the model is given."""
        return seq_len

    def prompt(self, ids: Sequence[int], model: ModelSpec, bos: int, eos: int) -> Prompt:
        """What a trained model is given to continue the text `ids`, or to answer it."""
        return Prompt(None, [bos, *ids])

    def example(
        self, batch: Batch, model: ModelSpec, key: Array | None, lexicon: Lexicon
    ) -> Example:
        """Inputs and targets. Draws are made for each row from `key` and the row's number; without
        a key, for scoring, there are none."""
        raise NotImplementedError

    def sums(self, logits: Array, example: Example, lexicon: Lexicon) -> Sums:
        """loss: what is minimised, in nats per target. nll: without smoothing and z-term.
        accuracy: share of targets with the highest logit. bits_per_byte: nll in bits per byte of
        target text, special tokens' cost included."""
        return cross_entropy(logits, example, lexicon)


@dataclasses.dataclass(frozen=True)
class CausalLM(Objective):
    """Predict the next token of the same document.

    Inputs are columns 0..T-1 [B, T], targets columns 1..T. A target counts if it belongs to the
    segment of the input before it, is no padding, and cannot be seen from there (under a prefix
    mask some can).
    """

    label_smoothing: Rate = 0.0  # spread evenly over the whole vocabulary (Szegedy et al. 2016)
    z_loss: NonNegative = 0.0  # times log(Z)² (Chowdhery et al. 2022, PaLM)

    def example(
        self, batch: Batch, model: ModelSpec, key: Array | None, lexicon: Lexicon
    ) -> Example:
        now, then = _shifted(_text(batch))
        return Example(now, None, then.ids_BT, _counts(model, now, then).astype(jnp.float32))

    def sums(self, logits: Array, example: Example, lexicon: Lexicon) -> Sums:
        return cross_entropy(logits, example, lexicon, self.label_smoothing, self.z_loss)


@dataclasses.dataclass(frozen=True)
class PrefixLM(Objective):
    """Predict the rest of a document from its beginning, which is seen as a whole (Raffel et al.
    2020, §3.2.1).

    Of each segment's n tokens the first c are the prefix, c uniform in 1..n-1. A decoder gets the
    text as for causal_lm, with the prefix shown to all its segment; an encoder-decoder the prefix
    as source [B, T] and the rest [B, T] after a BOS. Targets that count are those after the prefix.
    """

    families = ("decoder", "encoder_decoder")

    def prompt(self, ids: Sequence[int], model: ModelSpec, bos: int, eos: int) -> Prompt:
        begin = [bos, *ids]
        return Prompt(begin, [bos]) if all(model.depths) else Prompt(None, begin, len(begin))

    def example(
        self, batch: Batch, model: ModelSpec, key: Array | None, lexicon: Lexicon
    ) -> Example:
        text = _text(batch)
        cut_BT = _cuts(key, batch["rows"], text)
        prefix_BT = (text.positions_BT < cut_BT) & (text.segments_BT > 0)
        now, then = _shifted(text)
        if not all(model.depths):
            counts = _counts(model, now, then) & ~prefix_BT[:, 1:]
            now = dataclasses.replace(now, shown_BT=prefix_BT[:, :-1])
            return Example(now, None, then.ids_BT, counts.astype(jnp.float32))
        source = dataclasses.replace(text, segments_BT=jnp.where(prefix_BT, text.segments_BT, 0))
        source = jax.tree.map(lambda a: a[:, :-1], source)
        place = now.positions_BT - cut_BT[:, :-1] + 1  # 0 at the last token of the prefix
        rest = Tokens(
            jnp.where(place == 0, lexicon.bos, now.ids_BT),
            jnp.where(place >= 0, now.segments_BT, 0),
            jnp.maximum(place, 0),
        )
        counts = _counts(model, rest, dataclasses.replace(then, positions_BT=place + 1))
        return Example(rest, source, then.ids_BT, counts.astype(jnp.float32))


@dataclasses.dataclass(frozen=True)
class MaskedLM(Objective):
    """Predict hidden tokens from all others (Devlin et al. 2019, BERT).

    Inputs are columns 0..T-1 with hidden tokens replaced [B, T], targets the tokens that stood
    there, of which the hidden ones count. Special tokens are never hidden nor drawn. Each row's
    draws depend on the step and the row alone: in an evaluation they are always the same.
    """

    rate: Share = 0.15  # of tokens, or of words, that are hidden, each on its own
    mask: Share = 0.8  # of the hidden ones: replaced by <mask>
    random: Share = 0.1  # of the hidden ones: replaced by another token; the rest stays
    whole_words: bool = False  # hide all tokens of a word or none

    families = ("encoder",)
    scores = False

    @classmethod
    def rules(
        cls, run: Any, rate: float = 1, mask: float = 0, random: float = 0, **options
    ) -> Iterator[str]:
        yield from super().rules(run, **options)
        if not rate:
            yield f"rate={rate}: hides nothing, so that there is nothing to learn"
        if mask + random > 1:
            yield f"mask={mask} and random={random}: are shares, and add up to more than 1"

    def example(
        self, batch: Batch, model: ModelSpec, key: Array | None, lexicon: Lexicon
    ) -> Example:
        assert key is not None
        text = jax.tree.map(lambda a: a[:, :-1], _text(batch))
        keys = jax.vmap(lambda row: jax.random.split(jax.random.fold_in(key, row), 3))(
            batch["rows"]
        )
        eligible_BT = (text.segments_BT > 0) & (text.ids_BT >= lexicon.specials)
        if self.whole_words:
            begins_BT = lexicon.begins_word(text)
            hide = jax.vmap(noise.words, (0, 0, 0, None))
            hidden_BT = hide(keys[:, 0], eligible_BT, begins_BT, self.rate)
        else:
            hidden_BT = jax.vmap(noise.tokens, (0, 0, None))(keys[:, 0], eligible_BT, self.rate)
        T = text.ids_BT.shape[1]
        fate_BT = jax.vmap(lambda k: jax.random.uniform(k, (T,)))(keys[:, 1])
        drawn_BT = jax.vmap(lambda k: jax.random.randint(k, (T,), lexicon.specials, lexicon.size))(
            keys[:, 2]
        )
        ids_BT = jnp.where(fate_BT < self.mask + self.random, drawn_BT, text.ids_BT)
        ids_BT = jnp.where(fate_BT < self.mask, lexicon.mask, ids_BT)
        shown = dataclasses.replace(text, ids_BT=jnp.where(hidden_BT, ids_BT, text.ids_BT))
        return Example(shown, None, text.ids_BT, hidden_BT.astype(jnp.float32))


@dataclasses.dataclass(frozen=True)
class Seq2Seq(Objective):
    """Predict a text from its source: translation, or the answer to a question.

    An encoder-decoder reads the source [B, S] and predicts the text as causal_lm does. A decoder
    reads source and text one after the other [B, S + T]; targets that count are those of the text.
    """

    label_smoothing: Rate = 0.0  # spread evenly over the whole vocabulary (Szegedy et al. 2016)
    show_source: bool = False  # a decoder sees all of the source from everywhere in it

    families = ("encoder_decoder", "decoder")
    needs = "source"

    @classmethod
    def rules(cls, run: Any, show_source: bool = False, **options) -> Iterator[str]:
        yield from super().rules(run, **options)
        if show_source and all(run.model.depths):
            yield "show_source=True: an encoder sees all of its source anyway"

    def length(self, model: ModelSpec, seq_len: int, source_len: int) -> int:
        return max(seq_len, source_len) if all(model.depths) else seq_len + source_len

    def prompt(self, ids: Sequence[int], model: ModelSpec, bos: int, eos: int) -> Prompt:
        return _asked([bos, *ids, eos], model, bos, self.show_source)

    def example(
        self, batch: Batch, model: ModelSpec, key: Array | None, lexicon: Lexicon
    ) -> Example:
        return _answered(_text(batch, "source_"), _text(batch), model, self.show_source)

    def sums(self, logits: Array, example: Example, lexicon: Lexicon) -> Sums:
        return cross_entropy(logits, example, lexicon, self.label_smoothing)


@dataclasses.dataclass(frozen=True)
class SpanCorruption(Objective):
    """Predict hidden spans from the rest (Raffel et al. 2020, T5).

    The source [B, T] is columns 0..T-1 with each hidden span replaced by a sentinel of its own; the
    text is each sentinel followed by the tokens it stands for, then EOS, predicted as in seq2seq.
    The documents of a row are one text. Special tokens are never hidden: a span ends before one.
    """

    rate: Open = 0.15  # of tokens that are hidden
    mean_span: Length = 3.0  # tokens of a hidden span

    families = ("encoder_decoder", "decoder")
    scores = False

    def sentinels(self, seq_len: int) -> int:
        return self._widths(seq_len)[1]

    def length(self, model: ModelSpec, seq_len: int, source_len: int) -> int:
        text = sum(self._widths(seq_len)) + 1  # and BOS
        return max(seq_len, text) if all(model.depths) else seq_len + text

    def prompt(self, ids: Sequence[int], model: ModelSpec, bos: int, eos: int) -> Prompt:
        return _asked([bos, *ids, eos], model, bos, False)

    def example(
        self, batch: Batch, model: ModelSpec, key: Array | None, lexicon: Lexicon
    ) -> Example:
        assert key is not None
        keys = jax.vmap(jax.random.fold_in, (None, 0))(key, batch["rows"])
        row = _text(batch)
        corrupt = jax.vmap(self._corrupt, (0, 0, 0, None))
        source, text = corrupt(keys, row.ids_BT[:, :-1], row.segments_BT[:, :-1] > 0, lexicon)
        return _answered(Tokens.of(*source), Tokens.of(*text), model, False)

    def _corrupt(self, key: Array, ids_T: Array, real_T: Array, lexicon: Lexicon):
        """Source and text of one row, each as ids and which of them are real."""
        span_T = noise.spans(key, real_T & (ids_T >= lexicon.specials), self.rate, self.mean_span)
        hidden_T = span_T > 0
        first_T = hidden_T & (span_T != jnp.pad(span_T, (1, 0))[:-1])
        sentinel_T = lexicon.size + jnp.cumsum(first_T) - 1
        source = noise.compacted(
            jnp.where(first_T, sentinel_T, ids_T), real_T & (~hidden_T | first_T), ids_T.size
        )
        width = sum(self._widths(ids_T.size)) + 2  # with BOS and EOS
        before_T = jnp.cumsum(hidden_T) + jnp.cumsum(first_T)  # with the token itself, and BOS
        out = jnp.zeros(width, ids_T.dtype).at[0].set(lexicon.bos)
        out = out.at[jnp.where(hidden_T, before_T, width)].set(ids_T, mode="drop")
        out = out.at[jnp.where(first_T, before_T - 1, width)].set(sentinel_T, mode="drop")
        end = before_T[-1] + 1
        real = (jnp.arange(width) <= end) & real_T.any()  # of a row of padding, nothing is asked
        return source, (out.at[end].set(lexicon.eos), real)

    def _widths(self, seq_len: int) -> tuple[int, int]:
        """The most hidden tokens and spans in a row."""
        lengths = np.arange(1, seq_len + 1, dtype=np.int32)
        hidden, spans = noise.span_sizes(lengths, self.rate, self.mean_span, np)
        return int(hidden.max()), int(spans.max())


@dataclasses.dataclass(frozen=True)
class Classify(Objective):
    """Predict the label of a text from its vector (`model.pool`).

    Inputs are all columns [B, T + 1]; an encoder-decoder reads them as source and is given a BOS.
    Targets are the numbers of the labels [B]; a row counts if it holds a text.
    """

    label_smoothing: Rate = 0.0  # spread evenly over all labels

    families = ("encoder", "decoder", "encoder_decoder")
    needs = "label"
    scores = False
    lower_is_better = ("loss", "nll")

    def length(self, model: ModelSpec, seq_len: int, source_len: int) -> int:
        return seq_len + 1

    def example(
        self, batch: Batch, model: ModelSpec, key: Array | None, lexicon: Lexicon
    ) -> Example:
        text, source = _text(batch), None
        if all(model.depths):
            source, text = text, Tokens.of(jnp.full_like(text.ids_BT[:, :1], lexicon.bos))
        real_B = (batch["segments"] > 0).any(1)
        return Example(text, source, batch["labels"], real_B.astype(jnp.float32))

    def sums(self, logits: Array, example: Example, lexicon: Lexicon) -> Sums:
        """loss, nll and accuracy as for tokens, of texts; macro_f1: the mean over classes of
        2 * hits / (texts of the class + texts taken for it), classes with neither left out."""
        sums = cross_entropy(logits, example, lexicon, self.label_smoothing)
        del sums["bits_per_byte"]
        C, weights_B1 = logits.shape[-1], example.weights_BT[:, None]
        real_BC = jax.nn.one_hot(example.targets_BT, C) * weights_B1
        taken_BC = jax.nn.one_hot(logits.argmax(-1), C) * weights_B1
        hits_C = (real_BC * taken_BC).sum(0)
        return sums | {"macro_f1": (2 * hits_C, real_BC.sum(0) + taken_BC.sum(0))}


def cross_entropy(
    logits: Array,
    example: Example,
    lexicon: Lexicon,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Sums:
    """Sums in float32 over targets; see `Objective.sums`. logits [..., V], targets [...]."""
    logits = logits.astype(jnp.float32)
    weights, targets = example.weights_BT, example.targets_BT
    log_z = jax.nn.logsumexp(logits, -1)
    nll = log_z - jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]
    loss = nll
    if label_smoothing:
        loss = (1 - label_smoothing) * nll + label_smoothing * (log_z - logits.mean(-1))
    if z_loss:
        loss = loss + z_loss * jnp.square(log_z)
    hit = (logits.argmax(-1) == targets).astype(jnp.float32)
    # Sentinels stand for no bytes.
    bytes_ = lexicon.bytes_V.at[targets].get(mode="fill", fill_value=0).astype(jnp.float32)
    count, nll_sum = weights.sum(), (nll * weights).sum()
    return {
        "loss": ((loss * weights).sum(), count),
        "nll": (nll_sum, count),
        "accuracy": ((hit * weights).sum(), count),
        "bits_per_byte": (nll_sum / jnp.log(2.0), (bytes_ * weights).sum()),
    }


def padding(example: Example) -> tuple[Array, Array]:
    """Positions of the model's inputs that hold padding, and all of them."""
    sides = [side.segments_BT for side in (example.text, example.source) if side is not None]
    empty = sum((a == 0).sum() for a in sides)
    return jnp.asarray(empty, jnp.float32), jnp.asarray(sum(a.size for a in sides), jnp.float32)


def _text(batch: Batch, side: str = "") -> Tokens:
    return Tokens(*(batch[f"{side}{name}"] for name in ("tokens", "segments", "positions")))


def _shifted(text: Tokens) -> tuple[Tokens, Tokens]:
    """Inputs and targets: all columns but the last, and all but the first."""
    return jax.tree.map(lambda a: a[:, :-1], text), jax.tree.map(lambda a: a[:, 1:], text)


def _counts(model: ModelSpec, now: Tokens, then: Tokens) -> Array:
    """Which targets are of the same document, and cannot be seen from the input before."""
    counts = (now.segments_BT == then.segments_BT) & (then.segments_BT > 0)
    for mask in model.masks.entries:
        counts &= ~mask(now.positions_BT, then.positions_BT)
    return counts


def _cuts(key: Array | None, rows_B: Array, text: Tokens) -> Array:
    """The length of the prefix of each token's segment [B, T]; without a key, the BOS alone."""
    if key is None:
        return jnp.ones_like(text.ids_BT)
    same_BTS = text.segments_BT[:, :, None] == text.segments_BT[:, None, :]
    n_BT = same_BTS.sum(-1)
    width = text.ids_BT.shape[1] + 1
    draw = jax.vmap(lambda row: jax.random.uniform(jax.random.fold_in(key, row), (width,)))
    u_BT = jnp.take_along_axis(draw(rows_B), text.segments_BT, 1)
    more_BT = (u_BT * (n_BT - 1).astype(jnp.float32)).astype(jnp.int32)
    return 1 + jnp.clip(more_BT, 0, jnp.maximum(n_BT - 2, 0))


def _asked(source: Sequence[int], model: ModelSpec, bos: int, shown: bool) -> Prompt:
    """The prompt that goes with `_answered`."""
    if all(model.depths):
        return Prompt(source, [bos])
    return Prompt(None, [*source, bos], len(source) if shown else 0)


def _answered(source: Tokens, text: Tokens, model: ModelSpec, shown: bool) -> Example:
    """A text [B, T + 1] to be predicted from its source [B, S]: by an encoder-decoder, or by a
    decoder that reads both in one row."""
    if all(model.depths):
        now, then = _shifted(text)
        return Example(now, source, then.ids_BT, _counts(model, now, then).astype(jnp.float32))
    S = source.ids_BT.shape[1]
    ids, segments = (
        jnp.concatenate([getattr(source, name), getattr(text, name)], 1)
        for name in ("ids_BT", "segments_BT")
    )
    now, then = _shifted(Tokens.of(ids, segments > 0))
    column = jnp.arange(now.ids_BT.shape[1])[None]
    if shown:
        now = dataclasses.replace(now, shown_BT=(column < S) & (now.segments_BT > 0))
    counts = _counts(model, now, then) & (column >= S)
    return Example(now, None, then.ids_BT, counts.astype(jnp.float32))


OBJECTIVES = {
    "causal_lm": CausalLM,
    "prefix_lm": PrefixLM,
    "masked_lm": MaskedLM,
    "span_corruption": SpanCorruption,
    "seq2seq": Seq2Seq,
    "classify": Classify,
}
