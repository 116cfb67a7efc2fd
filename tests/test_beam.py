"""Beam search against all continuations there are, scored in one pass without a cache."""

import collections
import dataclasses
import functools
import itertools
from typing import Any

import common
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_generate import BIGRAM, ENDINGS, SHORT, V, bigram

from transformer import beam as module
from transformer.beam import Beams, Hypothesis, beam_search
from transformer.generate import Sampling, generate
from transformer.layers.attention import Attention
from transformer.layers.base import Tokens
from transformer.model import Stack
from transformer.spec import SpecError, parse

END, PAD = 2, 0
found = functools.partial(beam_search, end=END, pad=PAD)


def log_softmax(logits):
    logits = np.asarray(logits, np.float64)
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def teacher_forced(model, params, prompts, continuations, source=None, shown=0):
    """The log-probability of each continuation of its prompt, by one pass over the whole texts,
    whose first tokens are `shown` to all."""
    whole = [[*p, *c] for p, c in zip(prompts, continuations, strict=True)]
    ids = np.array(list(itertools.zip_longest(*whole, fillvalue=PAD)), np.int32).T
    real = np.arange(ids.shape[1])[None] < np.array([[len(row)] for row in whole])
    text = Tokens.of(jnp.asarray(ids), jnp.asarray(real))
    if shown:
        text = dataclasses.replace(text, shown_BT=text.positions_BT < shown)
    logprobs = log_softmax(common.logits(model, params, text, source))
    return np.array(
        [
            sum(logprobs[row, len(p) + i - 1, token] for i, token in enumerate(c))
            for row, (p, c) in enumerate(zip(prompts, continuations, strict=True))
        ]
    )


def penalised(logprobs, continuations, length_penalty):
    lengths = np.array([len(ids) for ids in continuations])
    return logprobs / ((5 + lengths) / 6) ** length_penalty


# ------------------------------------------------------------------------- against all there are

TOY, LIMIT = 5, 3  # 4 ids that are no end: 21 continuations that end, 64 that do not
ENOUGH = 20  # beams: the second step has 4 + 16 continuations, and of the third, n_best count
PROMPTS = [[1, 3, 4], [4], [3, 3]]


@functools.cache
def toy(family):
    """A model of a tiny vocabulary, sure enough of itself that lengths differ."""
    model = common.spec(family=family, vocab=TOY, depth=1, position="rope", tie=False)
    return model, jax.tree.map(lambda a: a * 4, common.params(model, seed=3))


def toy_source(model, rows):
    source = common.source_for(model, len(PROMPTS))
    return source and jax.tree.map(lambda a: a[jnp.asarray(rows)] % TOY, source)


@functools.cache
def everything(family, row):
    """Every continuation of a prompt, and their log-probabilities."""
    model, params = toy(family)
    going_on = [i for i in range(TOY) if i != END]
    out = [
        [*body, *([END] if n < LIMIT else [])]
        for n in range(LIMIT + 1)
        for body in itertools.product(going_on, repeat=n)
    ]
    assert len(out) == 21 + 64
    source = toy_source(model, [row] * len(out))
    return out, teacher_forced(model, params, [PROMPTS[row]] * len(out), out, source)


@pytest.mark.parametrize("length_penalty", [0.0, 0.6, 2.0])
@pytest.mark.parametrize("family", common.DECODING)
def test_enough_beams_find_the_best_of_all(family, length_penalty):
    model, params = toy(family)
    source = toy_source(model, range(len(PROMPTS)))
    got = found(model, params, PROMPTS, LIMIT, Beams(ENOUGH, length_penalty, 7), source=source)
    lengths = set()
    for row, hypotheses in enumerate(got):
        out, logprobs = everything(family, row)
        scores = penalised(logprobs, out, length_penalty)
        best = np.argsort(-scores)[:7]
        assert [h.tokens for h in hypotheses] == [out[i] for i in best]
        np.testing.assert_allclose([h.logprob for h in hypotheses], logprobs[best], atol=1e-4)
        np.testing.assert_allclose([h.score for h in hypotheses], scores[best], atol=1e-4)
        lengths |= {len(h.tokens) for h in hypotheses}
    assert len(lengths) > 1


# ------------------------------------------------------------------------------- tables of logits


def tables(n):
    """Random tables in which the end is likely."""
    for seed in range(n):
        table = np.random.default_rng(seed).normal(size=(V, V)) * 2
        table[:, END] += 2
        yield table


EVERY = [[token] for token in range(3, V)]


def by_definition(table, prompt, limit, beams, length_penalty):
    """Beam search over a table, in lists and to the limit: [(ids, logprob, score)], best first."""
    logprobs, live, done = log_softmax(table), [([], 0.0)], []
    for _ in range(limit):
        grown = [
            ([*ids, token], logprob + logprobs[[*prompt, *ids][-1], token])
            for ids, logprob in live
            for token in range(V)
        ]
        grown.sort(key=lambda h: -h[1])
        done += [h for h in grown[:beams] if h[0][-1] == END]
        live = [h for h in grown if h[0][-1] != END][:beams]
    scored = [(*h, h[1] / ((5 + len(h[0])) / 6) ** length_penalty) for h in done + live]
    return sorted(scored, key=lambda h: -h[2])


@pytest.mark.parametrize(("beams", "length_penalty"), [(2, 0.6), (3, 1.0)])
def test_few_beams_find_what_the_definition_finds(beams, length_penalty):
    """An end takes no other beam's place, and where the search stops makes no difference."""
    for table in tables(4):
        got = found(BIGRAM, bigram(table), EVERY, 7, Beams(beams, length_penalty, 2))
        for prompt, hypotheses in zip(EVERY, got, strict=True):
            expected = by_definition(table, prompt, 7, beams, length_penalty)[:2]
            assert [h.tokens for h in hypotheses] == [ids for ids, _, _ in expected]
            numbers = [(h.logprob, h.score) for h in hypotheses]
            np.testing.assert_allclose(numbers, [h[1:] for h in expected], atol=1e-4)


def test_one_beam_is_greedy():
    for table in tables(3):
        got = found(BIGRAM, bigram(table), EVERY, 8, Beams(1, 0.0))
        greedy = generate(BIGRAM, bigram(table), EVERY, 8, Sampling(0.0), end=END, pad=PAD)
        assert [h.tokens for (h,) in got] == greedy
        assert {ids[-1] == END for ids in greedy} == {True, False}


def test_only_what_is_allowed_with_the_probability_it_has():
    """Four continuations are left, fewer than beams; the probabilities are those of all ids."""
    (table,) = tables(1)
    (got,) = found(
        BIGRAM, bigram(table), [[7]], 3, Beams(6, 0.0, 6), allowed_V=np.isin(np.arange(4), (2, 3))
    )
    p = np.exp(log_softmax(table))
    expected = {
        (END,): p[7, END],
        (3, END): p[7, 3] * p[3, END],
        (3, 3, END): p[7, 3] * p[3, 3] * p[3, END],
        (3, 3, 3): p[7, 3] * p[3, 3] * p[3, 3],
    }
    assert {tuple(h.tokens) for h in got} == set(expected) and len(got) == 4
    for h in got:
        np.testing.assert_allclose(h.logprob, np.log(expected[tuple(h.tokens)]), atol=1e-5)


# ------------------------------------------------------------------------------- the end of a row


@pytest.fixture
def runs(monkeypatch):
    """Counts how often the stack of each side runs, in the compiled program."""
    counted = collections.Counter()
    call: Any = Stack.__call__

    def counting(self, *args, **options):
        side = self.spec.side
        jax.debug.callback(lambda: counted.update([side]))
        return call(self, *args, **options)

    monkeypatch.setattr(Stack, "__call__", counting)
    module._search.clear_cache()
    yield counted
    module._search.clear_cache()


def test_rows_end_one_by_one(runs):
    """The end is kept, the others go on, and the loop runs no longer than the last of them."""
    prompts = [[5], [4, 6], [10]]
    got = found(BIGRAM, bigram(ENDINGS), prompts, 8, Beams(3))
    assert [h.tokens for (h,) in got] == [[7, END], [8, 9, 11, 12, END], [10] * 8]
    np.testing.assert_allclose([h.logprob for (h,) in got], 0, atol=1e-4)
    jax.effects_barrier()
    assert runs == {"decoder": 8}
    assert found(BIGRAM, bigram(ENDINGS), prompts[:2], 8, Beams(3)) == got[:2]
    jax.effects_barrier()
    assert runs == {"decoder": 8 + 5}


@pytest.mark.parametrize("n_best", [1, 3])
def test_stopping_early_changes_nothing(n_best, runs, monkeypatch):
    def search():
        runs.clear()
        got = [
            found(BIGRAM, bigram(table), [[row]], 12, Beams(3, length_penalty, n_best))
            for length_penalty in (0.0, 0.6, 1.0, 2.0)
            for table in tables(3)
            for row in range(3, V)
        ]
        jax.effects_barrier()
        return got, runs["decoder"]

    stopped, steps = search()
    monkeypatch.setattr(module, "_undecided", lambda live, *_: live.logprob_BJ[:, 0] > -np.inf)
    module._search.clear_cache()
    whole, all_steps = search()
    assert stopped == whole
    assert steps < 0.9 * all_steps


# ------------------------------------------------------------------------------------- the cache


@pytest.mark.parametrize("family", common.DECODING)
def test_a_row_does_not_depend_on_its_batch_mates(family):
    """Neither on their number nor on their width; what is done waits for the others."""
    model = common.spec(family=family, position="learned", depth=1)
    params = jax.tree.map(lambda a: a * 4, common.params(model))
    prompts, source = [[5, 6, 7], [4] * 33, [11, 12, 13]], common.source_for(model, 3)
    together = found(model, params, prompts, 6, Beams(3, n_best=2), source=source)
    for row in (0, 2):
        own = source and jax.tree.map(lambda a, row=row: a[row : row + 1], source)
        (alone,) = found(model, params, [prompts[row]], 6, Beams(3, n_best=2), source=own)
        for a, b in zip(together[row], alone, strict=True):
            assert a.tokens == b.tokens
            np.testing.assert_allclose([a.logprob, a.score], [b.logprob, b.score], atol=1e-4)


def test_what_is_shown_of_a_prompt_stays_shown():
    model = common.spec(depth=2)
    params = jax.tree.map(lambda a: a * 3, common.params(model))
    (hidden,), (got,) = (
        found(model, params, [[5, 6, 7, 8]], 5, Beams(3, n_best=3), shown=shown)
        for shown in (None, [3])
    )
    expected = teacher_forced(model, params, [[5, 6, 7, 8]] * 3, [h.tokens for h in got], shown=3)
    np.testing.assert_allclose([h.logprob for h in got], expected, atol=1e-4)
    assert abs(got[0].logprob - hidden[0].logprob) > 1e-2


def test_the_source_is_read_once(runs, monkeypatch):
    """One run of the encoder, and the keys and values it gave are those of every step."""
    seen = []
    cached: Any = Attention._cached

    def spied(self, new, where):
        keys = cached(self, new, where)
        if self.cross:
            jax.debug.callback(lambda *a: seen.append([np.asarray(x) for x in a]), *keys)
        return keys

    monkeypatch.setattr(Attention, "_cached", spied)
    model = common.spec(family="encoder_decoder", depth=1)
    prompts, source = [[5, 6, 7], [4], [11, 12]], common.source_for(model, 3)
    found(model, common.params(model), prompts, 6, Beams(4), source=source)
    jax.effects_barrier()
    assert runs == {"encoder": 1, "decoder": 6}
    (first,) = (keys for keys in seen if len(keys[0]) == 3)
    rest = [keys for keys in seen if len(keys[0]) == 3 * 4]
    assert len(rest) == 5
    for keys in rest:
        for once, now in zip(first, keys, strict=True):
            np.testing.assert_array_equal(np.repeat(once, 4, axis=0), now)


@pytest.mark.parametrize("scan", [False, True])
def test_each_beam_has_the_past_of_its_parent(scan):
    """Every leaf of self-attention moves, and nothing else."""
    model = common.spec(family="encoder_decoder", scan=scan, depth=3)
    text, source = common.text(6, 4), common.source_for(model, 6)
    apply = functools.partial(model.build().apply, mutable=["cache"])
    params = {"params": common.params(model)}
    _, new = jax.eval_shape(lambda: apply(params, text, source, 9))
    rng = np.random.default_rng(0)
    cache = jax.tree.map(lambda a: jnp.asarray(rng.normal(size=a.shape)), new["cache"])
    after = module._followed(cache, jnp.asarray([[2, 0, 0], [1, 1, 2]]))
    rows, moved = [2, 0, 0, 4, 4, 5], 0
    for (path, a), b in zip(jax.tree.leaves_with_path(cache), jax.tree.leaves(after), strict=True):
        name, expected = jax.tree_util.keystr(path), np.asarray(a)
        if not any(word in name for word in ("slot", "source", "cross")):
            expected, moved = expected[:, rows] if "blocks" in name else expected[rows], moved + 1
        np.testing.assert_array_equal(expected, b, err_msg=name)
    assert moved == 2 + 2 * (1 if scan else 3)


def test_one_compilation_for_all_prompts_of_a_bucket_and_all_penalties():
    search: Any = module._search
    params = bigram(ENDINGS)
    found(BIGRAM, params, [[5] * 11], 5, Beams(2))
    before = search._cache_size()
    for length in (9, 12, 16):
        found(BIGRAM, params, [[5] * length], 5, Beams(2, length / 10))
    assert search._cache_size() == before


# -------------------------------------------------------------------------------------- refusals


def test_more_of_the_best_than_beams_are_refused():
    with pytest.raises(SpecError, match="^beam: n_best=5: must be at most beams=4$"):
        parse(Beams, {"n_best": 5}, "beam")
    assert parse(Beams, {"n_best": 5, "beams": 5}, "beam").n_best == 5


def test_lengths():
    params, prompt = common.params(SHORT), [5] * 10
    with pytest.raises(SpecError, match="10 tokens and 7 new ones .*exceed model.max_len=16"):
        found(SHORT, params, [[5], prompt], 7, Beams())
    with pytest.raises(SpecError, match="prompt 1 has 0 tokens"):
        found(SHORT, params, [[5], []], 3, Beams())
    ((best,),) = found(SHORT, params, [prompt], 6, Beams())
    expected = teacher_forced(SHORT, params, [prompt], [best.tokens])
    np.testing.assert_allclose(best.logprob, expected[0], atol=1e-4)
    assert found(SHORT, params, [[5] * 16], 0, Beams()) == [[Hypothesis([], 0.0, 0.0)]]
    assert found(SHORT, params, [], 3, Beams()) == []
