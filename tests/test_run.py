"""A trained model in hand: logits, continuations, scores."""

import dataclasses
import functools
import re
from typing import Any

import common
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_run

import transformer
import transformer.run
from transformer import experiment, result
from transformer.data import feed
from transformer.data.tokens import CharTokenizer, Vocabulary
from transformer.evaluate import evaluate
from transformer.layers.base import Tokens
from transformer.layers.mask import MASKS
from transformer.mesh import Mesh, MeshSpec
from transformer.run import Run, lexicon
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
    data = feed.prepare(run.spec.data, trained, run.vocabulary)
    spec = tiny_run.run_spec(data__packing="documents", data__seq_len=200).data
    mesh = Mesh(MeshSpec())
    step = eval_step(
        *(run.spec.model, run.spec.objective(), mesh, mesh.replicated),
        lexicon(run.tokenizer),
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
        ({"beams": -1}, "generate.beams: must be at least 1, got -1"),
        ({"beams": 2, "n_best": 3}, "generate: n_best=3: must be at most beams=2"),
        ({"beams": 2, "n_best": 0}, "generate.n_best: must be at least 1, got 0"),
        ({"beams": 2, "length_penalty": -1.0}, "generate.length_penalty: must be at least 0"),
        ({"beams": 2, "temperature": 0.0}, "temperature, .* are for drawing; beams=2 searches"),
        ({"n_best": 1}, "length_penalty and n_best need beams, got beams=0"),
        ({"length_penalty": 0.0}, "length_penalty and n_best need beams, got beams=0"),
        ({"batch_size": 0}, "batch_size: must be at least 1, got 0"),
    ],
)
def test_options_out_of_range_or_of_no_effect_are_refused(trained, options, message):
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
    example = run.spec.objective().example(batch, model, None, lexicon(run.tokenizer))
    assert score["tokens"] == len(text) + 1 - 2 == example.weights_BT.sum()
    logprobs = jax.nn.log_softmax(run.logits(ids[:, :-1]), -1)
    each = np.take_along_axis(np.asarray(logprobs)[0], ids[0, 1:, None], -1)[2:]
    np.testing.assert_allclose(score["logprob"], each.sum(), rtol=1e-5)


# ------------------------------------------------------- pairs and labels, untrained parameters

SOURCES = ["abba", "", "c" * 20, "dcbaabcd", "cd"]
VOCABULARY = Vocabulary(CharTokenizer("abcd"), None, ("no", "perhaps", "yes"))
PAIRED = {"enc-dec": {}, "two": {"tokens": "two"}, "dec": {"model.family": "decoder"}}
PAIRED["shown"] = PAIRED["dec"] | {"objective": "seq2seq(show_source=True)"}


@functools.cache
def made(kind: str) -> Run:
    """A run of pairs with random parameters; "two" has an alphabet of its own for the source."""
    return untrained(**tiny_run.PAIRS | PAIRED[kind])


def untrained(tokens: str = "", vocabulary: Vocabulary = VOCABULARY, **options: Any) -> Run:
    if tokens:
        vocabulary = Vocabulary(CharTokenizer("xyz"), VOCABULARY.tokenizer)
    run = experiment.resolve(tiny_run.run_spec(**options), vocabulary)
    # Large enough for one answer to be likelier than another.
    params = jax.tree.map(lambda a: 4 * a, common.params(run.model))
    return Run(run, params, vocabulary)


def teacher_forced(run: Run, source: str, ids: list[int]) -> np.ndarray:
    """log p of each of the ids, given the source and those before it, by NumPy."""
    read = [1, *run.vocabulary.of("source").encode(source), 2]
    if all(run.spec.model.depths):
        logits = run.logits([[1, *ids[:-1]]], source=[read])
    else:
        assert not run.objective.show_source
        logits = run.logits([[*read, 1, *ids[:-1]]])
    logits = np.asarray(logits[0, -len(ids) :], np.float64)
    logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return logp[np.arange(len(ids)), ids]


@pytest.mark.parametrize("kind", ["enc-dec", "two", "dec"])
def test_scores_of_pairs(kind):
    run = made(kind)
    text = "xyz" if kind == "two" else "dad"
    pairs = [(source, text[:i]) for i, source in enumerate(SOURCES)]
    for batch_size in (2, 8):
        for (source, text), score in zip(pairs, run.score(pairs, batch_size), strict=True):
            each = teacher_forced(run, source, [*run.tokenizer.encode(text), 2])
            assert score["tokens"] == len(each) == len(text) + 1
            assert score["logprob"] == pytest.approx(each.sum(), abs=1e-4)
            assert score["eos_logprob"] == pytest.approx(each[-1], abs=1e-4)


@pytest.mark.slow
def test_scores_of_pairs_are_those_of_an_evaluation(translated):
    run = transformer.load(translated)
    source = run.spec.data.source()
    columns = [list(source.documents("validation", field)) for field in source.fields]
    scores = list(run.score(list(zip(*columns, strict=True))))
    found = result.read_json(translated / "result.json")["validation"]
    assert sum(s["tokens"] for s in scores) == found["tokens"]
    nll = -sum(s["logprob"] for s in scores) / found["tokens"]
    assert nll == pytest.approx(found["nll"], abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("how", [{"temperature": 0.0}, {"seed": 5}, {"beams": 3}], ids=str)
@pytest.mark.parametrize("kind", ["enc-dec", "shown"])
def test_an_answer_depends_on_no_other_source(kind, how):
    """Nor on how many are answered at once, nor on the padding that they need."""
    run = made(kind)
    together = run.generate(SOURCES, max_new_tokens=6, **how)
    assert len(set(together)) > 1, "else nothing is shown"
    assert run.generate(SOURCES, max_new_tokens=6, batch_size=2, **how) == together
    for i in (0, 2, 4) if "seed" not in how else (0,):  # draws are those of the place in the list
        assert run.generate(SOURCES[i : i + 1], max_new_tokens=6, **how) == together[i : i + 1]


def test_drawn_texts_are_those_of_one_batch(run):
    """The draws of a text are a function of the seed and of its place in the list."""
    together = run.generate([*TEXTS, "wall"], max_new_tokens=12, seed=3)
    assert together[2] != together[4], "draws of their own"
    for batch_size in (1, 2):
        found = run.generate([*TEXTS, "wall"], max_new_tokens=12, seed=3, batch_size=batch_size)
        assert found == together


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["enc-dec", "two", "dec"])
def test_what_beams_find_has_its_log_probability(kind):
    run = made(kind)
    found = run.generate(SOURCES, max_new_tokens=5, beams=4, n_best=3, length_penalty=0.8)
    best = run.generate(SOURCES, max_new_tokens=5, beams=4, length_penalty=0.8)
    assert best == [written[0].text for written in found]
    ended = 0
    for source, written in zip(SOURCES, found, strict=True):
        assert len(written) == 3 and len({tuple(h.tokens) for h in written}) == 3
        assert [h.score for h in written] == sorted((h.score for h in written), reverse=True)
        for h in written:
            logprob = teacher_forced(run, source, h.tokens).sum()
            assert h.logprob == pytest.approx(logprob, abs=1e-4)
            assert h.score == pytest.approx(logprob / ((5 + len(h.tokens)) / 6) ** 0.8, abs=1e-4)
            assert h.text == run.tokenizer.decode(h.tokens)
            if h.tokens[-1] == 2:
                (score,) = run.score([(source, h.text)])
                assert score["logprob"] == pytest.approx(logprob, abs=1e-4)
                ended += 1
    assert ended


def test_beams_continue_texts(run):
    (written,) = run.generate(["ten green"], max_new_tokens=6, beams=3, n_best=3)
    ids = [1, *run.tokenizer.encode("ten green")]
    for h in written:
        logp = jax.nn.log_softmax(run.logits([[*ids, *h.tokens]])[0, len(ids) - 1 : -1], -1)
        each = np.take_along_axis(np.asarray(logp), np.array(h.tokens)[:, None], -1)
        assert h.logprob == pytest.approx(each.sum(), abs=1e-4)


def test_a_prefix_is_continued_by_both_families():
    """An encoder-decoder reads it as its source, a decoder sees all of it from everywhere."""
    for family in ("encoder_decoder", "decoder"):
        run = untrained(objective="prefix_lm", model__family=family)
        prompt = run.prompt("ab")
        ids = [1, *run.tokenizer.encode("ab")]
        if family == "decoder":
            assert (prompt.source, list(prompt.text), prompt.shown) == (None, ids, 3)
        else:
            assert (list(prompt.source or ()), list(prompt.text)) == (ids, [1])
        (text,) = run.generate(["ab"], max_new_tokens=1, temperature=0)
        logits = _seen_by_all(run, ids) if family == "decoder" else run.logits([[1]], source=[ids])
        allowed = [2, *range(4, 8)]
        likeliest = allowed[int(np.asarray(logits)[0, -1, np.array(allowed)].argmax())]
        assert text == run.tokenizer.decode([likeliest])


def _seen_by_all(run, ids):
    text = Tokens.of(jnp.asarray([ids], jnp.int32))
    text = dataclasses.replace(text, shown_BT=jnp.ones((1, len(ids)), bool))
    return run.model.apply({"params": run.params}, text)


def test_sentinels_are_shown_by_their_number(monkeypatch):
    run = untrained(objective="span_corruption(rate=0.5)", model__family="encoder_decoder")
    count = run.objective.sentinels(run.spec.data.seq_len)
    assert count == 3  # half of 16 tokens, in spans of three
    a, b = run.tokenizer.encode("ab").tolist()
    written = [[8, a, b, 9, a, 2], [a, 10, 2], [8], [2]]
    monkeypatch.setattr(transformer.run, "generate", lambda *_, **__: written)
    assert run.generate(["a"] * 4) == ["<1>ab<2>a", "a<3>", "<1>", ""]
    monkeypatch.undo()
    text = "".join(run.generate(["abcd"] * 8, max_new_tokens=16))
    assert set(re.findall(r"<\d+>", text)) == {"<1>", "<2>", "<3>"}
    assert not re.sub(r"<[123]>|[abcd]", "", text)


# ------------------------------------------------------------------------------------- labels


@functools.cache
def classifier(family: str = "encoder", **options: Any) -> Run:
    return untrained(**tiny_run.LABELS | {"model.family": family} | options)


@pytest.mark.parametrize("family", ["encoder", "decoder", "encoder_decoder"])
def test_probabilities_of_labels(family):
    """Those of the text alone, whatever the batch."""
    run = classifier(family)
    texts = ["abba", "", "dcbaabcd"]
    found = run.classify(texts)
    for text, p in zip(texts, found, strict=True):
        assert tuple(p) == ("no", "perhaps", "yes")
        assert sum(p.values()) == pytest.approx(1, abs=1e-6)
        ids = [[1, *run.tokenizer.encode(text), 2]]
        whole = family == "encoder_decoder"
        logits = np.asarray(run.logits([[1]], source=ids) if whole else run.logits(ids), np.float64)
        np.testing.assert_allclose(list(p.values()), np.exp(logits[0]) / np.exp(logits).sum(), 1e-4)
    for batch_size in (1, 2):
        for a, b in zip(run.classify(texts, batch_size), found, strict=True):
            assert a == pytest.approx(b, abs=1e-6)
    assert run.classify([]) == []


def test_labels_are_those_of_an_evaluation(labelled):
    run = transformer.load(labelled)
    source = run.spec.data.source()
    texts, labels = (list(source.documents("validation", field)) for field in source.fields)
    found = [max(p, key=lambda name: p[name]) for p in run.classify(texts)]
    right = np.mean([a == b for a, b in zip(found, labels, strict=True)])
    assert right == pytest.approx(
        result.read_json(labelled / "result.json")["validation"]["accuracy"]
    )


def test_what_is_beyond_a_row_is_not_read_as_in_training():
    """A row has 16 tokens, of which the first is the beginning."""
    run = classifier(**{"model.position": "learned"})
    assert run.spec.model.max_len == 16
    a, b, c = run.classify(["abcd" * 4, "abcd" * 4 + "ddd", "abcd" * 3 + "abdd"])
    assert a == pytest.approx(b, abs=1e-6) and a != pytest.approx(c, abs=1e-6)


def test_a_model_with_room_for_more_labels():
    p = classifier(**{"model.classes": 5}).classify(["abba"])[0]
    assert len(p) == 3 and sum(p.values()) == pytest.approx(1, abs=1e-6)


# ----------------------------------------------------------------------------- what is refused


def test_who_writes_no_texts_says_what_to_use_instead():
    reader = untrained(objective="masked_lm", model__family="encoder")
    with pytest.raises(SpecError, match="model.family=encoder.* writes no texts: use logits"):
        reader.generate([])
    with pytest.raises(SpecError, match="objective=classify.* gives labels, not texts: use class"):
        classifier().generate(["a"])
    with pytest.raises(SpecError, match="objective=masked_lm.* has no labels"):
        reader.classify(["a"])
    for run in (reader, classifier()):
        with pytest.raises(SpecError, match="gives no log-probability of a text"):
            list(run.score([]))


def test_texts_that_are_no_pairs_are_refused(run):
    with pytest.raises(SpecError, match=r"text 2 has 1 parts; this run scores a source and a text"):
        list(made("enc-dec").score([("a", "b"), "ab"]))
    with pytest.raises(SpecError, match="text 1 has 2 parts; this run scores one text"):
        list(run.score([("ten", "wall")]))


def test_a_source_is_given_to_an_encoder_decoder_only(run):
    with pytest.raises(SpecError, match="source: model.family=decoder needs no source"):
        run.logits([[1]], source=[[1]])
    with pytest.raises(SpecError, match="source: model.family=encoder_decoder needs a source"):
        made("enc-dec").logits([[1]])
    with pytest.raises(SpecError, match=r"source: ids must lie in \[0, 8\), got 1 to 8"):
        made("two").logits([[1]], source=[[1, 8]])
    with pytest.raises(SpecError, match=r"tokens: ids must lie in \[0, 7\), got 7 to 7"):
        made("two").logits([[7]], source=[[1, 7]])


@pytest.mark.parametrize(
    ("family", "longest", "new", "message"),
    [
        ("encoder_decoder", 11, 3, "prompt 1 has 13 tokens, which exceed model.max_len=12"),
        ("encoder_decoder", 10, 12, "prompt 0 has 1 tokens and 12 new .* exceed model.max_len=12"),
        ("decoder", 11, 11, "prompt 1 has 14 tokens and 11 new .* exceed model.max_len=24"),
    ],
)
def test_sources_that_are_too_long_are_refused_by_their_place(family, longest, new, message):
    run = untrained(**tiny_run.PAIRS | {"model.family": family, "model.position": "learned"})
    with pytest.raises(SpecError, match=message):
        run.generate(["ab", "a" * longest, "a"], max_new_tokens=new, batch_size=1)
