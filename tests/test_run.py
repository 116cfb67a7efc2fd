"""A trained model in hand: logits, continuations, scores."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_run

import transformer
from transformer.data import feed
from transformer.evaluate import evaluate
from transformer.layers.base import Tokens
from transformer.layers.mask import MASKS
from transformer.mesh import Mesh, MeshSpec
from transformer.spec import SpecError, pick
from transformer.step import eval_step

TEXTS = ["ten green bottles", "", "wall", "if one green bottle should accidentally fall\n" * 2]


@pytest.fixture(scope="module")
def run(trained):
    return transformer.load(trained)


def test_what_is_in_hand(run):
    assert run.step == 12 and run.spec.model.dim == 16
    assert type(run.model).__name__ == "Decoder"
    assert run.tokenizer.decode(run.tokenizer.encode("wall")) == "wall"
    assert run.params["embed"]["embedding"].shape == (run.tokenizer.size, 16)


def test_logits(run):
    ids = np.array([[1, *run.tokenizer.encode("green bottles")]])
    logits = run.logits(ids)
    assert logits.shape == (1, 14, run.tokenizer.size) and logits.dtype == np.float32
    direct = run.model.apply({"params": run.params}, Tokens.of(jnp.asarray(ids, jnp.int32)))
    np.testing.assert_allclose(logits, direct, atol=1e-5)
    padded = np.pad(ids, ((0, 1), (0, 5)))
    mask = np.pad(np.ones_like(ids), ((0, 1), (0, 5)))
    np.testing.assert_allclose(run.logits(padded, mask)[:1, :14], logits, atol=1e-5)
    left = np.pad(ids, ((0, 0), (5, 0)))
    np.testing.assert_allclose(run.logits(left, left > 0)[:, 5:], logits, atol=1e-5)


def test_scores_are_sums_of_log_probabilities(run):
    for text, score in zip(TEXTS, run.score(TEXTS), strict=True):
        ids = np.array([1, *run.tokenizer.encode(text), 2])
        logits = np.asarray(run.logits(ids[None, :-1])[0], np.float64)
        logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        each = logp[np.arange(len(ids) - 1), ids[1:]]
        assert score["tokens"] == len(text) + 1
        assert score["logprob"] == pytest.approx(each.sum(), abs=1e-4)
        assert score["eos_logprob"] == pytest.approx(each[-1], abs=1e-4)


def test_a_score_depends_on_no_other_text(run):
    together = list(run.score(TEXTS))
    for batch_size in (1, 3):
        for a, b in zip(run.score(TEXTS, batch_size), together, strict=True):
            assert a == pytest.approx(b, abs=1e-4)
    assert list(run.score([])) == []


def test_scores_are_those_of_an_evaluation_by_documents(run, trained):
    data = feed.prepare(run.spec.data, trained, run.tokenizer)
    spec = tiny_run.run_spec(data__packing="documents", data__seq_len=200).data
    mesh = Mesh(MeshSpec())
    step = eval_step(
        *(run.spec.model, run.spec.objective(), mesh, mesh.replicated),
        run.tokenizer.byte_lengths,
    )
    found = evaluate(step, run.params, mesh, feed.eval_batches(data, spec, "validation", 8))
    assert found is not None
    source = run.spec.data.source()
    scores = list(run.score(source.documents("validation")))
    assert sum(s["tokens"] for s in scores) == found["tokens"]
    nll = -sum(s["logprob"] for s in scores) / found["tokens"]
    assert nll == pytest.approx(found["nll"], abs=1e-5)


def test_generation_alone_and_in_a_batch(run):
    alone = [run.generate([t], max_new_tokens=12, temperature=0)[0] for t in TEXTS]
    assert run.generate(TEXTS, max_new_tokens=12, temperature=0) == alone
    drawn = [run.generate(TEXTS[:n], max_new_tokens=12, seed=3)[0] for n in (1, 4)]
    assert len(set(drawn)) == 1
    assert len(set(run.generate(["a"] * 4, max_new_tokens=12, seed=3))) > 1


def test_generation_follows_its_seed(run):
    a, again, other = (run.generate(["ten"], max_new_tokens=20, seed=s) for s in (1, 1, 2))
    assert a == again != other
    assert run.generate(["ten"], max_new_tokens=0) == [""]
    assert run.generate([], max_new_tokens=3) == []


def test_what_cannot_be_encoded_or_is_too_long(run, trained, tmp_path):
    with pytest.raises(SpecError, match="ß"):
        run.generate(["ß"])
    tiny_run.run(tmp_path, train__steps=1, model__position="learned")
    short = transformer.load(tmp_path)
    assert short.spec.model.max_len == 16
    with pytest.raises(SpecError, match="text 2 has 21 tokens .* more than model.max_len=16"):
        list(short.score(["wall", "a" * 20]))
    assert jax.tree.leaves(short.params)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1.0}, "generate.temperature: must be at least 0, got -1.0"),
        ({"temperature": float("nan")}, "generate.temperature: expected a number, got nan"),
        ({"top_k": -1}, "generate.top_k: must be at least 0, got -1"),
        ({"top_p": 0.0}, "generate.top_p: must lie in"),
        ({"top_p": 2.0}, "generate.top_p: must lie in"),
    ],
)
def test_sampling_out_of_range_is_refused(trained, options, message):
    with pytest.raises(SpecError, match=message):
        transformer.load(trained).generate(["a"], max_new_tokens=1, **options)


def test_what_is_no_list_of_texts_or_no_ids_is_refused(trained):
    run = transformer.load(trained)
    for call in (run.generate, lambda text: list(run.score(text))):
        with pytest.raises(SpecError, match="must be a list of texts"):
            call("To be")
    for ids, message in ([[10**6]], "ids must lie in"), ([[1.5]], "whole numbers"), ([1], "B, T"):
        with pytest.raises(SpecError, match=message):
            run.logits(ids)
    assert repr(run).startswith("<Run: decoder, ")


def test_scoring_leaves_out_what_a_prefix_mask_shows(trained):
    """Of a text and its end, the tokens at positions 1 and 2 can be seen from before them."""
    run = transformer.load(trained)
    mask = pick(MASKS, "prefix(length=3)")
    model = dataclasses.replace(run.spec.model, mask=mask)
    run = dataclasses.replace(run, spec=dataclasses.replace(run.spec, model=model))
    text = "ten green"
    (score,) = run.score([text])
    ids = np.array([[1, *run.tokenizer.encode(text), 2]])
    place = np.arange(ids.shape[1])[None]
    batch = {"tokens": ids, "segments": np.ones_like(ids), "positions": place}
    example = run.spec.objective().example(batch, model, jax.random.key(0))
    assert score["tokens"] == len(text) + 1 - 2 == example.weights_BT.sum()
    logprobs = jax.nn.log_softmax(run.logits(ids[:, :-1]), -1)
    each = np.take_along_axis(np.asarray(logprobs)[0], ids[0, 1:, None], -1)[2:]
    np.testing.assert_allclose(score["logprob"], each.sum(), rtol=1e-5)
