"""Objectives: which targets count, and the values of the sums, computed by hand or with NumPy."""

import functools
from typing import Any

import common
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer.data import feed
from transformer.evaluate import means, total
from transformer.model import FAMILIES
from transformer.objective import OBJECTIVES, Example
from transformer.spec import SpecError, parse

KEY = jax.random.key(0)


def lexicon(size):
    return common.lexicon(np.ones(size))


@functools.partial(jax.jit, static_argnums=(0, 1))
def made(objective, model, batch, keys, lexicon):
    """The examples of one batch for each of the keys."""
    return jax.vmap(lambda key: objective().example(batch, model, key, lexicon))(keys)


def example(batch, objective="causal_lm", key: Any = KEY, lexicon=common.LEXICON, **options):
    """The example of a batch; with a key of None, for scoring."""
    chosen, model = common.pick(OBJECTIVES, objective), common.learner(objective, **options)
    if key is None:
        return chosen().example(batch, model, None, lexicon)
    return jax.tree.map(lambda a: a[0], made(chosen, model, batch, key[None], lexicon))


def sums(logits, targets, weights=None, objective="causal_lm", lexicon=common.LEXICON):
    """The sums of one row of logits [T, V], or of the logits of texts [B, classes]."""
    chosen = common.pick(OBJECTIVES, objective)
    logits, targets = jnp.asarray(logits), jnp.asarray(targets, jnp.int32)
    weights = jnp.ones(targets.shape) if weights is None else jnp.asarray(weights)
    if chosen.factory.needs != "label":
        logits, targets, weights = logits[None], targets[None], weights[None]
    no_text: Any = None
    return chosen().sums(logits, Example(no_text, None, targets, weights), lexicon)


# --------------------------------------------------------------------------- inputs and targets


@pytest.mark.parametrize(
    ("rows", "segments", "weights"),
    [
        # BOS 11 12 13 EOS, padded: the end of the text is a target, padding is none.
        ([[1, 11, 12, 13, 2, 0, 0]], [[1, 1, 1, 1, 1, 0, 0]], [1, 1, 1, 1, 0, 0]),
        # A real token with the id of padding counts; padding is told by its segment.
        ([[5, 0, 6, 0, 0, 0]], [[1, 1, 1, 1, 0, 0]], [1, 1, 1, 0, 0]),
        # The first token of a document is no target of the last one before it.
        ([[1, 7, 2, 1, 8, 2]], [[1, 1, 1, 2, 2, 2]], [1, 1, 0, 1, 1]),
        ([[0, 0, 0, 0]], [[0, 0, 0, 0]], [0, 0, 0]),
    ],
)
def test_targets_are_the_next_tokens_of_the_same_document(rows, segments, weights):
    shown = example(common.batch(rows, segments))
    np.testing.assert_array_equal(shown.text.ids_BT[0], rows[0][:-1])
    np.testing.assert_array_equal(shown.targets_BT[0], rows[0][1:])
    np.testing.assert_array_equal(shown.weights_BT[0], weights)


def test_targets_that_can_be_seen_do_not_count():
    """With a prefix of 3, the inputs at positions 0 and 1 see the next token."""
    shown = example(common.batch([[4, 5, 6, 7, 8]]), mask="prefix(length=3)")
    np.testing.assert_array_equal(shown.weights_BT[0], [0, 0, 1, 1])


def test_a_short_window_makes_no_target_of_the_next_document():
    """The window does not reach from position 3 to position 0, the segment alone tells."""
    segments = [[1, 1, 1, 1, 2, 2]]
    shown = example(common.batch([[1, 7, 9, 2, 1, 8]], segments), mask="window(size=2)")
    np.testing.assert_array_equal(shown.weights_BT[0], [1, 1, 1, 0, 1])


class Run:
    """As much of a RunSpec as the rules of an objective look at."""

    def __init__(self, family, packing="documents"):
        self.model = common.spec(family=family)
        self.data = parse(feed.DataSpec, {"packing": packing})


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_family_that_an_objective_does_not_train_is_refused(name, family):
    objective = common.pick(OBJECTIVES, name)
    refused = [] if (name, family) in common.LEARNERS else [f"not {family}"]
    assert [line.split(", ")[-1] for line in objective.rules(Run(family))] == refused


def test_refusals_name_what_would_be_right():
    def refused(objective, family, packing="documents"):
        return list(common.pick(OBJECTIVES, objective).rules(Run(family, packing)))

    assert refused("causal_lm", "encoder") == ["trains model.family=decoder, not encoder"]
    assert refused("prefix_lm", "encoder") == [
        "trains model.family=decoder or encoder_decoder, not encoder"
    ]
    assert refused("classify", "encoder", "windows") == [
        "needs the label of each text, which data.packing=windows does not keep; documents and "
        "buckets do"
    ]
    assert refused("classify", "encoder", "buckets") == []
    assert refused("masked_lm(mask=0.8, random=0.3)", "encoder") == [
        "mask=0.8 and random=0.3: are shares, and add up to more than 1"
    ]
    assert refused("seq2seq(show_source=True)", "decoder") == []
    assert refused("seq2seq(show_source=True)", "encoder_decoder") == [
        "show_source=True: an encoder sees all of its source anyway"
    ]


# ------------------------------------------------------------------------- a text and its source

ANSWER = [1, 11, 12, 13, 2, 0, 0]
FIVE = [[1, 1, 1, 1, 1, 0, 0]]


def test_an_encoder_decoder_reads_the_text_shifted_by_one():
    given = common.batch([ANSWER], FIVE) | common.batch([[1, 7, 8, 2]], side="source_")
    shown = example(given, "seq2seq")
    np.testing.assert_array_equal(shown.text.ids_BT, [[1, 11, 12, 13, 2, 0]])  # no target: the 2
    np.testing.assert_array_equal(shown.targets_BT, [[11, 12, 13, 2, 0, 0]])
    np.testing.assert_array_equal(shown.weights_BT, [[1, 1, 1, 1, 0, 0]])
    assert shown.source is not None
    np.testing.assert_array_equal(shown.source.ids_BT, [[1, 7, 8, 2]])
    np.testing.assert_array_equal(shown.source.segments_BT, [[1, 1, 1, 1]])


@pytest.mark.parametrize("show", [False, True])
def test_a_decoder_reads_source_and_text_in_one_row(show):
    """Between them stands the padding of the source, which takes no position."""
    source = common.batch([[1, 7, 8, 2, 0, 0]], [[1, 1, 1, 1, 0, 0]], side="source_")
    given = common.batch([ANSWER], FIVE) | source
    shown = example(given, f"seq2seq(show_source={show})", family="decoder")
    text = shown.text
    np.testing.assert_array_equal(text.ids_BT, [[1, 7, 8, 2, 0, 0, 1, 11, 12, 13, 2, 0]])
    np.testing.assert_array_equal(text.segments_BT, [[1, 1, 1, 1, 0, 0, 1, 1, 1, 1, 1, 0]])
    real = np.array([0, 1, 2, 3, 6, 7, 8, 9, 10])
    np.testing.assert_array_equal(text.positions_BT[0, real], range(9))
    np.testing.assert_array_equal(shown.targets_BT[0, 6:], [11, 12, 13, 2, 0, 0])
    np.testing.assert_array_equal(shown.weights_BT, [[0] * 6 + [1, 1, 1, 1, 0, 0]])
    assert shown.source is None
    if show:
        np.testing.assert_array_equal(text.shown_BT, [[1, 1, 1, 1] + [0] * 8])
    else:
        assert text.shown_BT is None


@pytest.mark.parametrize("family", ["encoder_decoder", "decoder"])
def test_a_real_token_may_have_the_id_of_padding(family):
    """In the text, in the source, and as the last of either."""
    text, source = [[1, 0, 6, 0, 0]], [[1, 0, 5, 0, 0]]
    given = common.batch(text, [[1, 1, 1, 1, 0]])
    given |= common.batch(source, [[1, 1, 1, 1, 0]], side="source_")
    shown = example(given, "seq2seq", family=family)
    np.testing.assert_array_equal(shown.targets_BT[0, -4:], [0, 6, 0, 0])
    np.testing.assert_array_equal(shown.weights_BT[0, -4:], [1, 1, 1, 0])
    assert shown.weights_BT.sum() == 3
    read = shown.source or shown.text
    np.testing.assert_array_equal(read.segments_BT[0, :5], [1, 1, 1, 1, 0])


# ------------------------------------------------------------------------------------ prefixes

PACKED = [1, 4, 5, 6, 7, 2, 1, 8, 2, 1, 0, 0]  # of 6, 3 and 1 tokens, and padding
SEGMENTS = [1] * 6 + [2] * 3 + [3] + [0, 0]


@functools.cache
def cut_texts(family, draws=3000):
    """Inputs and targets of PACKED for many keys, and how long the prefix of each segment is."""
    given = common.batch([PACKED], [SEGMENTS])
    model = common.learner("prefix_lm", family)
    objective, keys = common.pick(OBJECTIVES, "prefix_lm"), jax.random.split(KEY, draws)
    cut = jax.tree.map(
        lambda a: np.asarray(a)[:, 0], made(objective, model, given, keys, common.LEXICON)
    )
    seen = cut.text.shown_BT if cut.source is None else cut.source.segments_BT > 0
    return cut, [seen[:, np.array(SEGMENTS[:-1]) == s].sum(1) for s in (1, 2, 3)]


@pytest.mark.parametrize("family", ["decoder", "encoder_decoder"])
def test_every_length_of_a_prefix_is_as_likely(family):
    _, (first, second, third) = cut_texts(family)
    for lengths, n in ((first, 6), (second, 3)):
        counts = np.bincount(lengths, minlength=n)
        share = 1 / (n - 1)
        assert counts[0] == 0 and len(counts) == n
        deviation = (3000 * share * (1 - share)) ** 0.5
        assert (np.abs(counts[1:] - 3000 * share) < 4 * deviation).all()
    assert (third == 1).all()
    both = np.corrcoef(first, second)[0, 1]
    assert abs(both) < 4 / 3000**0.5, "segments are cut on their own"


def test_a_decoder_is_shown_the_prefix_and_asked_for_the_rest():
    found, cuts = cut_texts("decoder")
    place = np.array([*range(6), *range(3), 0, 0, 0])
    for i in range(200):
        cut = np.array([0, *(c[i] for c in cuts)])[SEGMENTS]
        np.testing.assert_array_equal(found.text.ids_BT[i], PACKED[:-1])
        np.testing.assert_array_equal(found.text.segments_BT[i], SEGMENTS[:-1])
        np.testing.assert_array_equal(found.text.positions_BT[i], place[:-1])
        np.testing.assert_array_equal(found.text.shown_BT[i], (place < cut)[:-1])
        np.testing.assert_array_equal(found.targets_BT[i], PACKED[1:])
        # Not the first tokens of documents, nor padding: columns 6, 9, 10 and 11.
        inside = np.isin(np.arange(12), [1, 2, 3, 4, 5, 7, 8])
        np.testing.assert_array_equal(found.weights_BT[i], (inside & (place >= cut))[1:])


def test_an_encoder_reads_the_prefix_and_the_decoder_writes_the_rest():
    found, cuts = cut_texts("encoder_decoder")
    for i in range(200):
        for segment, cut in zip((1, 2, 3), (c[i] for c in cuts), strict=True):
            document = [t for t, s in zip(PACKED, SEGMENTS, strict=True) if s == segment]

            def of(tokens, i=i, segment=segment):
                own = tokens.segments_BT[i] == segment
                return tokens.ids_BT[i][own].tolist(), tokens.positions_BT[i][own].tolist()

            assert of(found.source) == (document[:cut], [*range(cut)])
            ids, positions = of(found.text)
            rest = [1, *document[cut:]]
            # The last token is read by nobody; it may be there where another document follows.
            assert ids[: len(rest) - 1] == rest[:-1] and ids in (rest, rest[:-1])
            assert positions == [*range(len(ids))]
            counted = (found.weights_BT[i] == 1) & (np.array(SEGMENTS[1:]) == segment)
            assert found.targets_BT[i][counted].tolist() == document[cut:]
            np.testing.assert_array_equal(found.text.segments_BT[i][counted], segment)
        assert found.weights_BT[i].sum() == 6 + 3 + 1 - sum(c[i] for c in cuts)


@pytest.mark.parametrize("family", ["decoder", "encoder_decoder"])
def test_without_a_key_the_prefix_is_the_beginning(family):
    """As a text is scored: of n tokens, n - 1 are predicted."""
    shown = example(common.batch([PACKED], [SEGMENTS]), "prefix_lm", None, family=family)
    np.testing.assert_array_equal(shown.weights_BT, [[1, 1, 1, 1, 1, 0, 1, 1, 0, 0, 0]])
    np.testing.assert_array_equal(shown.targets_BT, [PACKED[1:]])


# -------------------------------------------------------------------------------- masked tokens

SIZE = 100  # ids 4 to 99 are text


def hundred_thousand():
    """A hundred rows with a beginning, a thousand tokens of text, an end, and padding."""
    ids = np.random.default_rng(0).integers(10, SIZE, (100, 1000))
    rows = [[1, *row, 2, *[0] * 10] for row in ids.tolist()]
    return common.batch(rows, [[1] * 1002 + [0] * 10] * 100)


@functools.cache
def masked(objective="masked_lm", seed=0):
    """The batch, what is shown of it, and which tokens count."""
    given = hundred_thousand()
    shown = example(given, objective, jax.random.key(seed), lexicon(SIZE))
    text = np.asarray(given["tokens"])[:, :-1]
    np.testing.assert_array_equal(shown.targets_BT, text)
    np.testing.assert_array_equal(shown.text.segments_BT, given["segments"][:, :-1])
    np.testing.assert_array_equal(shown.text.positions_BT, given["positions"][:, :-1])
    return text, np.asarray(shown.text.ids_BT), np.asarray(shown.weights_BT)


def test_the_recipe_of_masked_language_modelling():
    """Devlin et al. 2019: of 15 % of the tokens, 80 % are replaced by <mask>, 10 % by any token,
    and 10 % stay. (Within four standard deviations.)"""
    text, shown, weights = masked()
    assert set(np.unique(weights)) == {0.0, 1.0}
    hidden = weights == 1
    assert hidden.sum() == pytest.approx(15_000, abs=450)
    assert text[hidden].min() >= 10, "no special token, no padding"
    np.testing.assert_array_equal(shown[~hidden], text[~hidden])
    of_mask, same = hidden & (shown == 3), hidden & (shown == text)
    drawn = hidden & ~of_mask & ~same
    total = hidden.sum()
    assert of_mask.sum() == pytest.approx(0.8 * total, abs=200)
    assert drawn.sum() == pytest.approx(0.1 * total * 95 / 96, abs=150)  # it may draw the same
    assert same.sum() == pytest.approx(0.1 * total * 97 / 96, abs=150)
    assert shown[drawn].min() == 4 and shown[drawn].max() == SIZE - 1
    counts = np.bincount(shown[drawn])[4:]
    expected = drawn.sum() / 96
    assert np.square(counts - expected).sum() / expected < 95 + 4 * (2 * 95) ** 0.5  # chi squared


def test_the_shares_of_hidden_tokens_at_their_ends():
    text, shown, weights = masked("masked_lm(rate=0.0)")
    assert not weights.any() and (shown == text).all()
    text, shown, weights = masked("masked_lm(rate=1.0, mask=1.0, random=0.0)")
    np.testing.assert_array_equal(weights == 1, text >= 10)
    np.testing.assert_array_equal(shown, np.where(text >= 10, 3, text))
    text, shown, weights = masked("masked_lm(rate=0.5, mask=0.0, random=0.0)")
    assert weights.sum() == pytest.approx(50_000, abs=650) and (shown == text).all()
    text, shown, weights = masked("masked_lm(rate=1.0, mask=0.0, random=1.0)")
    assert (shown[weights == 1] == text[weights == 1]).mean() == pytest.approx(1 / 96, abs=0.0015)


@pytest.mark.parametrize("objective", ["masked_lm", "masked_lm(whole_words=True)"])
def test_another_step_hides_other_tokens(objective):
    hidden = [masked(objective, seed)[2] for seed in (0, 1)]
    assert (hidden[0] * hidden[1]).sum() == pytest.approx(0.15**2 * 100_000, abs=190)


DRAWING = ["masked_lm", "masked_lm(whole_words=True)", "prefix_lm", "span_corruption"]


def drawn(batch, objective):
    return jax.device_get(jax.tree.leaves(example(batch, objective, seq_len=32)))


@pytest.mark.parametrize("objective", DRAWING)
def test_a_row_is_drawn_for_by_its_number_alone(objective):
    """Not by its place in the batch, nor by the rows beside it; with another number it differs."""
    rows = np.random.default_rng(0).integers(4, common.VOCAB, (6, 33)).tolist()
    numbers = np.array([7, 0, 2**31 - 1, 40, 41, -1], np.int32)
    whole = jax.device_get(common.batch(rows)) | {"rows": numbers}
    first = drawn(whole, objective)
    for order in ([5, 3, 2, 0, 4, 1], [1, 1, 3]):
        part = drawn({k: a[np.array(order)] for k, a in whole.items()}, objective)
        for a, b in zip(first, part, strict=True):
            np.testing.assert_array_equal(a[np.array(order)], b)
    other = drawn(whole | {"rows": numbers + 1}, objective)
    again = [all((a[i] == b[i]).all() for a, b in zip(first, other, strict=True)) for i in range(6)]
    assert sum(again) <= 1, "a row of 32 tokens is hardly ever cut in the same way twice"


#      <s> un break able , _the s _a </s>   one word each: un-break-able, `,`, _the-s, _a
WORDY = [1, 10, 11, 12, 13, 14, 16, 15, 2]
WORDS = [(1, 2, 3), (4,), (5, 6), (7,), (9,), (10, 11)]
BEGINS, ENDS = {10, 11, 12, 16}, {10, 11, 12, 14, 15, 16}  # with a letter


def test_words_are_hidden_as_wholes():
    """A word ends where a segment does: after `un`, `break able` is another document."""
    given = common.batch([[*WORDY, 10, 11, 12, 0, 0]], [[1] * 9 + [2] + [3] * 2 + [0] * 2])
    inside = np.array([[t in BEGINS for t in range(20)], [t in ENDS for t in range(20)]])
    known, model = common.lexicon(np.ones(20), inside), common.learner("masked_lm")
    objective = common.pick(OBJECTIVES, "masked_lm(rate=0.3, whole_words=True)")
    shown = made(objective, model, given, jax.random.split(KEY, 4000), known)
    hidden = np.asarray(shown.weights_BT[:, 0]) == 1
    rest = set(range(13)) - {column for word in WORDS for column in word}
    assert rest == {0, 8, 12} and not hidden[:, [*rest]].any()
    of_word = np.stack([hidden[:, word[0]] for word in WORDS], 1)
    for i, word in enumerate(WORDS):
        for column in word:
            np.testing.assert_array_equal(hidden[:, column], of_word[:, i])
    np.testing.assert_allclose(of_word.mean(0), 0.3, atol=4 * (0.21 / 4000) ** 0.5)
    together = np.cov(of_word.T.astype(float)) - np.diag(of_word.var(0))
    assert np.abs(together).max() < 5 * 0.21 / 4000**0.5, "words are hidden on their own"


# ------------------------------------------------------------------------------- hidden spans


def joined(source, text, size):
    """The row that was corrupted: for each sentinel of the source, the tokens that follow it in
    the text."""
    assert text[0] == 1 and text[-1] == 2
    hidden, current = {}, None
    for token in text[1:-1]:
        if token >= size:
            current = hidden.setdefault(token, [])
        else:
            assert current is not None
            current.append(token)
    sentinels = [token for token in source if token >= size]
    assert sentinels == [*hidden] == [*range(size, size + len(hidden))], "in order, from both sides"
    assert all(hidden.values()), "each stands for something"
    return [t for token in source for t in hidden.get(token, [token])], [*hidden.values()]


def corrupted(rows, segments=None, objective="span_corruption", size=common.VOCAB, key=KEY):
    """For each row its source and its text, as they are read by an encoder-decoder."""
    width = max(map(len, rows)) - 1
    shown = example(
        common.batch(rows, segments), objective, key, lexicon(size), seq_len=width, vocab=size
    )
    assert shown.source is not None
    texts = jnp.concatenate([shown.text.ids_BT[:, :1], shown.targets_BT], 1)
    ends = np.asarray(shown.weights_BT.sum(1), int) + 1
    real = np.asarray(shown.source.segments_BT)
    assert (np.diff(real, axis=1) <= 0).all(), "the source stands on the left"
    np.testing.assert_array_equal(
        shown.weights_BT, np.arange(texts.shape[1] - 1) < ends[:, None] - 1
    )
    return [
        (np.asarray(ids)[kept > 0].tolist(), np.asarray(text)[:n].tolist())
        for ids, kept, text, n in zip(shown.source.ids_BT, real, texts, ends, strict=True)
    ]


@pytest.mark.parametrize(
    ("n", "hidden", "spans"),
    # 15 % of n, and a third of that, rounded; at least one of each, and one token is kept.
    [(1, 0, 0), (2, 1, 1), (3, 1, 1), (16, 2, 1), (40, 6, 2), (512, 77, 26)],
)
def test_source_and_text_joined_are_the_row(n, hidden, spans):
    rows = np.random.default_rng(n).integers(4, common.VOCAB, (8, n)).tolist()
    for row, (source, text) in zip(rows, corrupted([[*r, 2] for r in rows]), strict=True):
        again, found = joined(source, text, common.VOCAB)
        assert again == row
        assert (sum(map(len, found)), len(found)) == (hidden, spans)
        assert source[0] < common.VOCAB, "a text begins with a kept token"
        assert not hidden or source[-1] >= common.VOCAB, "and ends with a span"


def test_the_shape_of_t5():
    """Raffel et al. 2020: 568 tokens make 512 of source, its end included, and 114 of text."""
    rows = np.random.default_rng(0).integers(4, common.VOCAB, (3, 568)).tolist()
    for source, text in corrupted([[*r, 2] for r in rows]):
        assert (len(source) + 1, len(text) - 1) == (512, 114)  # the text without its beginning


def test_spans_have_the_length_that_was_asked_for():
    rows = np.random.default_rng(0).integers(4, common.VOCAB, (40, 200)).tolist()
    texts = corrupted([[*r, 2] for r in rows], None, "span_corruption(rate=0.3, mean_span=5.0)")
    lengths = [len(span) for source, text in texts for span in joined(source, text, 23)[1]]
    assert np.mean(lengths) == 5.0 and len(lengths) == 40 * 12  # 60 of 200 tokens
    assert 1 in lengths and max(lengths) > 10, "they vary"


def test_special_tokens_stay_and_end_a_span():
    """Documents of a row are corrupted as one text, and padding on the right is left out."""
    rng = np.random.default_rng(0)
    rows, segments = [], []
    for _ in range(60):
        row = [1, *rng.integers(4, 23, 5), 2, 1, *rng.integers(4, 23, 9), 2, 1, 4, 5, 2]
        rows.append([int(t) for t in row] + [0] * 6)
        segments.append([1] * 7 + [2] * 11 + [3] * 4 + [0] * 6)
    texts = corrupted(rows, segments, "span_corruption(rate=0.5, mean_span=4.0)")
    for row, (source, text) in zip(rows, texts, strict=True):
        again, found = joined(source, text, common.VOCAB)
        assert again == row[:22]
        # Sixteen tokens of text: eight are hidden in two spans, if no special cuts one short.
        assert len(found) == 2 and 2 <= sum(map(len, found)) <= 8
        assert all(min(span) >= 4 for span in found)
    assert len({len(text) for _, text in texts}) > 1, "some are cut short"


def test_a_decoder_reads_the_corrupted_text_before_it_writes():
    row = [1, *range(4, 23), 2]
    ((source, text),) = corrupted([row])
    shown = example(common.batch([row]), "span_corruption", family="decoder", seq_len=20)
    now, S = shown.text, 20
    width = len(source)
    np.testing.assert_array_equal(now.ids_BT[0, :width], source)
    np.testing.assert_array_equal(now.segments_BT[0, :S], [1] * width + [0] * (S - width))
    n = len(text) - 1
    np.testing.assert_array_equal(now.ids_BT[0, S : S + n], text[:-1])
    np.testing.assert_array_equal(now.positions_BT[0, S : S + n], range(width, width + n))
    np.testing.assert_array_equal(shown.targets_BT[0, S : S + n], text[1:])
    counted = np.flatnonzero(shown.weights_BT[0])
    np.testing.assert_array_equal(counted, range(S, S + n))


def test_sentinels_and_positions_suffice_for_the_longest_row():
    """At 15 % of up to 512 tokens: 77 hidden in 26 spans; text and source in one row take
    512 + 77 + 26 and a beginning."""
    objective = common.pick(OBJECTIVES, "span_corruption")()
    assert objective.sentinels(512) == 26
    assert objective.length(common.spec(), 512, 512) == 512 + 77 + 26 + 1
    assert objective.length(common.spec(family="encoder_decoder"), 512, 512) == 512
    # At half of 16 tokens, each a span: 8 hidden, 8 sentinels and a beginning.
    half = common.pick(OBJECTIVES, "span_corruption(rate=0.5, mean_span=1.0)")()
    assert half.length(common.spec(family="encoder_decoder"), 16, 16) == 17
    # Many short spans: of four tokens, three of which may be hidden, at most two are kept apart.
    assert common.pick(OBJECTIVES, "span_corruption(rate=0.6, mean_span=1.0)")().sentinels(4) == 2


# --------------------------------------------------------------------------------------- labels


def test_texts_are_read_whole_and_their_labels_are_the_targets():
    given = common.batch(
        [[1, 7, 8, 2], [1, 2, 0, 0], [0, 0, 0, 0]], [[1] * 4, [1, 1, 0, 0], [0] * 4]
    )
    given |= {"labels": jnp.asarray([2, 1, 0], jnp.int32)}
    for family in FAMILIES:
        shown = example(given, "classify", family=family)
        np.testing.assert_array_equal(shown.targets_BT, [2, 1, 0])
        np.testing.assert_array_equal(shown.weights_BT, [1, 1, 0])
        read = shown.source or shown.text
        np.testing.assert_array_equal(read.ids_BT, given["tokens"])
        np.testing.assert_array_equal(read.segments_BT, given["segments"])
    assert shown.source is not None
    np.testing.assert_array_equal(shown.text.ids_BT, [[1], [1], [1]])


def test_accuracy_and_f1_by_hand():
    """Three of six are right. Class 0: 1 of 2 found and 3 taken for it; class 1: 2 of 3, 3 taken;
    class 2: 0 of 1, none taken; class 3 is not there at all."""
    real, taken = [0, 0, 1, 1, 1, 2], [0, 1, 1, 1, 0, 0]
    got = sums(np.float32(np.eye(4)[taken]), real, objective="classify")
    assert [float(x) for x in got["accuracy"]] == [3, 6]
    hits, of = (np.asarray(a) for a in got["macro_f1"])
    np.testing.assert_array_equal(hits, [2, 4, 0, 0])  # twice the hits
    np.testing.assert_array_equal(of, [2 + 3, 3 + 3, 1 + 0, 0])
    found = means(total([got]))
    assert found["accuracy"] == 0.5 and found["tokens"] == 6
    assert found["macro_f1"] == pytest.approx((2 / 5 + 4 / 6 + 0) / 3)
    assert set(found) == {"loss", "nll", "accuracy", "macro_f1", "tokens"}


def test_f1_against_its_definition_in_batches_with_padding():
    """Precision and recall of each class, their harmonic mean, and the mean of those."""
    rng = np.random.default_rng(0)
    real, logits = rng.integers(0, 7, 90), np.float32(rng.normal(size=(90, 8)))  # class 7: taken
    counts = np.float32(rng.random(90) < 0.8)
    parts = [
        sums(logits[i : i + 9], real[i : i + 9], counts[i : i + 9], "classify")
        for i in range(0, 90, 9)
    ]
    got = means(total(parts))
    t, p = real[counts > 0], logits.argmax(1)[counts > 0]
    scores = []
    for c in range(8):
        hits = ((t == c) & (p == c)).sum()
        precision, recall = hits / max((p == c).sum(), 1), hits / max((t == c).sum(), 1)
        if (p == c).any() or (t == c).any():
            scores.append(2 * precision * recall / max(precision + recall, 1e-9))
    assert got["macro_f1"] == pytest.approx(np.mean(scores), rel=1e-6)
    assert got["accuracy"] == pytest.approx((t == p).mean())
    assert got["tokens"] == counts.sum()


# -------------------------------------------------------------------------------------- values


P = np.log([[0.1, 0.2, 0.4, 0.2, 0.1]])


@pytest.mark.parametrize(
    ("smoothing", "probabilities", "expected"),
    [
        (0.0, P, 0.916291),
        (0.1, P, 0.999468),  # spread over all five classes
        (0.0, np.zeros((1, 5)), 1.609438),  # ln 5, whatever the smoothing
        (0.1, np.zeros((1, 5)), 1.609438),
        (0.7, np.zeros((1, 5)), 1.609438),
    ],
)
def test_label_smoothing(smoothing, probabilities, expected):
    logits = jnp.asarray(probabilities, jnp.float32) + 3.0  # a constant changes nothing
    got = sums(logits, [2], objective=f"causal_lm(label_smoothing={smoothing})", lexicon=lexicon(5))
    assert float(got["loss"][0]) == pytest.approx(expected, abs=1e-5)
    plain = sums(logits, [2], lexicon=lexicon(5))
    assert float(got["nll"][0]) == pytest.approx(float(plain["loss"][0]), abs=1e-6)


def test_z_loss_is_the_squared_log_of_the_normaliser():
    got = sums(jnp.full((1, 5), 2.0), [0], objective="causal_lm(z_loss=0.01)", lexicon=lexicon(5))
    assert float(got["loss"][0]) == pytest.approx(np.log(5) + 0.01 * (2 + np.log(5)) ** 2, abs=1e-5)
    assert float(got["nll"][0]) == pytest.approx(np.log(5), abs=1e-6)


def test_accuracy_and_bits_per_byte():
    """Two of three counted targets are the most probable; they stand for 1 + 2 + 3 bytes."""
    logits = jnp.log(jnp.asarray([[0.5, 0.25, 0.25], [0.2, 0.6, 0.2], [0.3, 0.4, 0.3], [1, 1, 1]]))
    got = sums(logits, [0, 1, 2, 2], [1.0, 1.0, 1.0, 0.0], lexicon=common.lexicon([1, 2, 3]))
    assert [float(x) for x in got["accuracy"]] == [2.0, 3.0]
    bits, weight = (float(x) for x in got["bits_per_byte"])
    assert bits == pytest.approx(-np.log2([0.5, 0.6, 0.3]).sum(), abs=1e-5)
    assert weight == 6.0


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_positions_without_weight_change_nothing(objective):
    rng = np.random.default_rng(0)
    logits, targets = rng.normal(size=(10, 7)), rng.integers(0, 7, 10)
    alone = sums(jnp.float32(logits[:3]), targets[:3], objective=objective, lexicon=lexicon(7))
    logits[3:] *= 1e4
    padded = sums(
        jnp.float32(logits), targets, np.float32(np.arange(10) < 3), objective, lexicon(7)
    )
    common.assert_trees_close(alone, padded, 1e-6)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_no_target_at_all_is_zero_and_has_a_gradient_of_zero(objective):
    def loss(logits):
        return sums(logits, [0, 0], jnp.zeros(2), objective, lexicon(5))["loss"][0]

    value, gradient = jax.value_and_grad(loss)(jnp.ones((2, 5)))
    assert value == 0
    np.testing.assert_array_equal(gradient, 0)


@functools.partial(jax.jit, static_argnums=(0, 1))
def gradient_and_sums(objective, model, params, batch):
    def loss(params):
        shown = objective().example(batch, model, KEY, common.LEXICON)
        logits = model.build().apply({"params": params}, shown.text, shown.source)
        sums = objective().sums(logits, shown, common.LEXICON)
        return sums["loss"][0], sums

    return jax.grad(loss, has_aux=True)(params)


def only(batch, kept):
    """The batch with padding in place of the rows that are not kept."""
    kept = jnp.asarray([i in kept for i in range(4)])
    out = {k: jnp.where(kept[:, None], a, 0) for k, a in batch.items() if a.ndim == 2}
    return out | {
        "rows": jnp.where(kept, batch["rows"], -1),
        "labels": jnp.where(kept, batch["labels"], 0),
    }


@pytest.mark.parametrize(("name", "family"), common.LEARNERS)
def test_rows_of_padding_count_for_nothing(name, family):
    """A batch of nothing else is zero and moves no parameter; beside texts they change nothing."""
    objective, model = common.pick(OBJECTIVES, name), common.learner(name, family, depth=1)
    run = functools.partial(gradient_and_sums, objective, model, common.params(model))
    given = common.everything((9, 6, 2, 1))
    gradient, sums = run(only(given, ()))
    for path, leaf in jax.tree.leaves_with_path((gradient, sums)):
        np.testing.assert_array_equal(leaf, 0, err_msg=str(path))
    parts = [run(only(given, (i,))) for i in range(4)]
    apart = jax.tree.map(lambda *a: sum(a[1:], a[0]), *parts)
    assert apart[1]["loss"][1] > 0
    common.assert_trees_close(run(given), apart, 1e-5)
    for part in parts:  # the shortest texts hold no target for some objectives
        assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(part))


@pytest.mark.parametrize("rate", [0.0, 1.0])
def test_texts_of_which_nothing_or_all_is_hidden_are_finite(rate):
    objective = common.pick(OBJECTIVES, f"masked_lm(rate={rate})")
    model = common.learner("masked_lm", depth=1)
    found = gradient_and_sums(objective, model, common.params(model), common.everything((2,) * 4))
    assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(found))
    assert found[1]["loss"][1] == 4 * rate  # the first of the two columns is read


def test_texts_together_sum_to_the_texts_alone():
    model = common.spec()
    params, objective = (
        common.params(model),
        common.pick(OBJECTIVES, "causal_lm(label_smoothing=0.1)")(),
    )
    texts = [4, 5, 6], [7, 8, 9, 10, 11, 12, 13, 14, 15]

    def total(*rows):
        shown = objective.example(common.batch(rows), model, KEY, common.LEXICON)
        return objective.sums(common.logits(model, params, shown.text), shown, common.LEXICON)

    apart = jax.tree.map(jnp.add, *(total(text) for text in texts))
    together = total(*texts)
    assert together["loss"][1] == 2 + 8
    common.assert_trees_close(apart, together, 1e-5)


# ----------------------------------------------------------------------------------- precision


def test_cross_entropy_of_low_precision_logits_is_float32():
    logits = jnp.zeros((1, 50257), jnp.bfloat16)
    loss, _ = sums(logits, [17], lexicon=lexicon(50257))["loss"]
    assert loss.dtype == jnp.float32
    assert float(loss) == pytest.approx(10.824905, abs=5e-4)


def test_a_sum_over_many_tokens_is_exact():
    """100,000 tokens of ln 3 each."""
    loss, count = sums(jnp.zeros((100_000, 3)), np.zeros(100_000), lexicon=lexicon(3))["loss"]
    assert count == 100_000
    assert float(loss / count) == pytest.approx(np.log(3), rel=1e-4)


def test_the_gradient_is_softmax_minus_one_hot():
    logits = np.random.default_rng(0).normal(40.0, 3.0, (4, 9))
    targets = np.array([0, 3, 8, 1])
    gradient = jax.grad(lambda x: sums(x, targets, lexicon=lexicon(9))["loss"][0])
    p = np.exp(logits - logits.max(-1, keepdims=True))
    expected = p / p.sum(-1, keepdims=True) - np.eye(9)[targets]
    np.testing.assert_allclose(gradient(jnp.float32(logits)), expected, atol=1e-5)


def test_options_out_of_range_are_refused():
    with pytest.raises(SpecError, match=r"label_smoothing: must lie in \[0, 1\)"):
        common.pick(OBJECTIVES, "causal_lm(label_smoothing=1.0)")
