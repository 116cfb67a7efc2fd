"""Generation from models whose next token is known, and against decoding without a cache."""

import itertools
from typing import Any

import common
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer import generate as module
from transformer.generate import BUCKET, Sampling, bucket, generate
from transformer.layers.position import POSITIONS
from transformer.spec import SpecError, parse

V = 16
END, PAD = 2, 0
GREEDY = Sampling(temperature=0.0)
# The logits are those of a table [current token, next token]: no position, no layer, E = identity.
BIGRAM = common.spec(
    vocab=V, dim=V, tie=False, placement="none", position="none", depth=1, bias=False
)


def bigram(table):
    """Parameters of the model whose logits after token i are row i of the table."""
    params = jax.tree.map(jnp.zeros_like, common.params(BIGRAM))
    params["embed"] = {"embedding": jnp.eye(V)}
    return params | {"head": {"kernel": jnp.asarray(table, jnp.float32)}}


def chain(*tokens, strength=30.0):
    """A table in which each token leads to the next."""
    table = np.zeros((V, V))
    for now, then in itertools.pairwise(tokens):
        table[now, then] = strength
    return table


def continued(params, prompts, new, sampling=GREEDY, model=BIGRAM, **options):
    return generate(model, params, prompts, new, sampling, end=END, pad=PAD, **options)


# ------------------------------------------------------------------------------- the end of a row

# After the end and after padding, the table goes on: that nothing more comes is not its doing.
ENDINGS = chain(5, 7, END, 9) + chain(6, 8, 9, 11, 12, END) + chain(10, 10) + chain(PAD, 9)


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(), Sampling(top_k=3, top_p=0.9)])
def test_rows_end_one_by_one(sampling):
    """The end is kept; the others go on."""
    got = continued(bigram(ENDINGS), [[5], [4, 6], [10]], 8, sampling)
    assert got == [[7, END], [8, 9, 11, 12, END], [10] * 8]


def test_after_the_end_there_is_padding(monkeypatch):
    seen = {}
    decode = module._decode

    def spied(*args, **options):
        seen["out"] = decode(*args, **options)
        return seen["out"]

    monkeypatch.setattr(module, "_decode", spied)
    continued(bigram(ENDINGS), [[5], [6], [10]], 8)
    ids, lengths = map(np.asarray, seen["out"])
    np.testing.assert_array_equal(ids[0], [7, END, *[PAD] * 6])
    np.testing.assert_array_equal(ids[1], [8, 9, 11, 12, END, *[PAD] * 3])
    np.testing.assert_array_equal(lengths, [2, 5, 8])


# ------------------------------------------------------------------------------------ the drawing


def frequencies(logits, sampling, draws=4000, **options):
    params = bigram(np.broadcast_to(logits, (V, V)))
    got = continued(params, [[3]] * draws, 1, sampling, **options)
    return np.bincount([row[0] for row in got], minlength=V) / draws


def nucleus(logits, temperature, top_k, top_p):
    """The distribution by definition: temperature, the top k, then the top p of what is left."""
    p = np.exp(logits / temperature - np.max(logits / temperature))
    order = np.argsort(-p)
    kept = order[: top_k or V]
    before = np.cumsum(p[kept] / p[kept].sum()) - p[kept] / p[kept].sum()
    kept = kept[before < top_p]
    return np.where(np.isin(np.arange(V), kept), p, 0) / p[kept].sum()


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.0, 0, 1.0), (0.5, 0, 1.0), (2.0, 5, 1.0), (1.0, 0, 0.7), (1.3, 6, 0.8), (1.0, 0, 1e-46)],
)
def test_tokens_are_drawn_from_the_distribution(temperature, top_k, top_p):
    logits = np.random.default_rng(0).normal(size=V) * 2
    expected = nucleus(logits, temperature, top_k, top_p)
    got = frequencies(logits, Sampling(temperature, top_k, top_p))
    assert (got[expected == 0] == 0).all()
    np.testing.assert_allclose(got, expected, atol=5 * 0.5 / 4000**0.5)


def test_extreme_temperatures():
    logits = np.random.default_rng(1).normal(size=V)
    best = np.eye(V)[logits.argmax()]
    for sampling in (GREEDY, Sampling(temperature=1e-6), Sampling(temperature=5.0, top_k=1)):
        np.testing.assert_array_equal(frequencies(logits, sampling, 50), best)
    flat = frequencies(logits * 100, Sampling(temperature=1e6))
    np.testing.assert_allclose(flat, 1 / V, atol=5 * (1 / V / 4000) ** 0.5)
    close = np.where(np.arange(V) == 5, 0.01, 0.0)
    assert frequencies(close, Sampling(temperature=1e-6), 50)[5] == 1
    with pytest.raises(SpecError, match="temperature: must be at least 0, got -1"):
        parse(Sampling, {"temperature": -1})


def test_seeds():
    logits = np.zeros(V)
    a, b, c = (
        continued(bigram(np.broadcast_to(logits, (V, V))), [[3]], 12, Sampling(), seed=seed)
        for seed in (0, 0, 1)
    )
    assert a == b != c


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=1e6)])
def test_ids_that_are_not_allowed_are_never_drawn(sampling):
    """The unused rows of a padded vocabulary have logit 0, above all real ones."""
    allowed = np.arange(V - 4) != PAD
    logits = np.where(np.arange(V) < V - 4, -5.0, 0.0)
    got = frequencies(logits, sampling, allowed_V=allowed)
    assert got[V - 4 :].sum() == got[PAD] == 0


# --------------------------------------------------------------------------------------- the cache


def without_cache(model, params, prompt, new, source=None):
    """Greedy, by a full forward pass for each token."""
    ids = list(prompt)
    for _ in range(new):
        padded = jnp.asarray([ids + [PAD] * (16 - len(ids))], jnp.int32)
        text = type(common.text()).of(padded, jnp.arange(padded.shape[1])[None] < len(ids))
        logits = common.logits(model, params, text, source)
        ids.append(int(logits[0, len(ids) - 1].argmax()))
    return ids[len(prompt) :]


def until_end(ids):
    return ids[: ids.index(END) + 1] if END in ids else ids


@pytest.mark.slow
@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("family", common.DECODING)
def test_greedy_with_a_cache_is_greedy_without(family, position):
    """Prompts of different lengths in one batch, and each of them alone."""
    model = common.spec(family=family, position=position, embed_scale=True)
    params = common.params(model)
    prompts = [[5, 6, 7, 8, 9], [4], [11, 12, 13]]
    source = common.source_for(model, 3)
    together = continued(params, prompts, 6, model=model, source=source)
    for row, (prompt, got) in enumerate(zip(prompts, together, strict=True)):
        own = source and jax.tree.map(lambda a, row=row: a[row : row + 1], source)
        assert got == continued(params, [prompt], 6, model=model, source=own)[0]
        assert got == until_end(without_cache(model, params, prompt, 6, own))


def test_a_sampled_row_does_not_depend_on_its_batch_mates():
    params = bigram(np.random.default_rng(2).normal(size=(V, V)))
    alone = continued(params, [[5]], 8, Sampling())
    assert continued(params, [[5], [6, 7, 8], [9]], 8, Sampling())[0] == alone[0]


SHORT = common.spec(max_len=16)


def test_up_to_the_last_position():
    params, prompt = common.params(SHORT), [5, 6, 7, 8, 9, 10, 11, 12, 13, 14]
    got = continued(params, [prompt], 6, model=SHORT)[0]
    assert got == until_end(without_cache(SHORT, params, prompt, 6))
    assert len(continued(params, [[5]], 15, model=SHORT)[0]) >= 1
    assert continued(params, [[5] * 16], 0, model=SHORT) == [[]]
    assert continued(params, [], 3, model=SHORT) == []


@pytest.mark.parametrize(
    ("length", "new", "message"),
    [
        (10, 7, "10 tokens and 7 new ones are asked for: 17 exceed model.max_len=16"),
        (17, 0, "17 tokens and 0 new ones are asked for: 17 exceed model.max_len=16"),
        (0, 3, "prompt 1 has 0 tokens; mask=causal needs at least 1"),
    ],
)
def test_beyond_it_is_refused_with_the_numbers(length, new, message):
    with pytest.raises(SpecError, match=message):
        continued(common.params(SHORT), [[5], [5] * length], new, model=SHORT)


def test_buckets():
    assert [bucket(n) for n in (1, 2, 3, 5, 17, 32, 33, 64, 65)] == [1, 2, 4, 8, 32, 32, 64, 64, 96]


def test_one_compilation_for_all_prompts_of_a_bucket():
    decode: Any = module._decode
    params, compiled = bigram(ENDINGS), decode._cache_size
    continued(params, [[5] * (BUCKET // 2 + 1)], 5)
    before = compiled()
    for length in (BUCKET // 2 + 2, BUCKET - 1, BUCKET):
        continued(params, [[5] * length], 5, seed=length)
    assert compiled() == before
    continued(params, [[5] * (BUCKET + 1)], 5)
    assert compiled() == before + 1
