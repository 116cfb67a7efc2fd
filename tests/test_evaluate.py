"""Sums over whole splits, whatever the batches and the devices."""

import functools
import math

import common
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer.data import feed
from transformer.data.store import Data, Stream
from transformer.data.tokens import ByteTokenizer, Vocabulary
from transformer.evaluate import evaluate, means, total
from transformer.mesh import Mesh, MeshSpec
from transformer.objective import OBJECTIVES
from transformer.spec import parse
from transformer.step import eval_step

BYTES = np.array([0, 0, 0, 0, *(i % 3 for i in range(common.VOCAB - 4))])


LENGTHS = (3, 0, 11, 1, 30, 7, 2)


def stream(lengths, seed=0, **more) -> Stream:
    draw = np.random.default_rng(seed)
    flat, starts = [], [0]
    for n in lengths:
        flat += [1, *draw.integers(4, common.VOCAB, n), 2]
        starts.append(len(flat))
    return Stream(np.array(flat, np.uint16), np.array(starts), **more)


def data(**more) -> Data:
    return Data(Vocabulary(ByteTokenizer()), "", {"validation": stream(LENGTHS, **more)})


def everything() -> Data:
    """With sources and labels."""
    labels = np.array([0, 2, 1, 1, 0, 2, 2], np.int32)
    return data(source=stream((4, 1, 0, 9, 2, 5, 5), seed=1), labels=labels)


@functools.cache
def step_of(objective, family, devices):
    mesh, model = Mesh(MeshSpec(), jax.devices()[:devices]), common.learner(objective, family)
    chosen = common.pick(OBJECTIVES, objective)()
    return mesh, model, eval_step(model, chosen, mesh, mesh.replicated, common.lexicon(BYTES))


def metrics(
    batch_size,
    devices=1,
    packing="documents",
    objective="causal_lm(label_smoothing=0.1)",
    family="decoder",
    given=None,
):
    mesh, model, step = step_of(objective, family, devices)
    spec = parse(feed.DataSpec, {"seq_len": 8, "packing": packing})
    batches = feed.eval_batches(given or data(), spec, "validation", batch_size, devices)
    found = evaluate(step, common.params(model), mesh, batches)
    assert found is not None
    return found


@pytest.mark.slow
@pytest.mark.parametrize("packing", feed.PACKINGS)
def test_batches_and_devices_change_nothing(packing):
    expected = metrics(1, packing=packing)
    # Each document has its tokens and its end as targets.
    assert expected["tokens"] == sum(n + 1 for n in LENGTHS)
    for batch_size, devices in ((3, 1), (7, 1), (8, 8), (16, 8)):
        assert metrics(batch_size, devices, packing) == pytest.approx(expected, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("objective", "family", "tokens"),
    [
        ("prefix_lm", "decoder", None),
        ("masked_lm", "encoder", None),
        ("span_corruption", "encoder_decoder", None),
        ("seq2seq", "decoder", 4 + 1 + 8 + 2 + 8 + 8 + 3),  # rows of eight targets at most
        ("classify", "encoder", 7),
    ],
)
def test_no_metric_of_any_objective_depends_on_the_batches(objective, family, tokens):
    """Neither do the draws: a row is hidden in the same way in every company."""
    given = everything()
    expected = metrics(1, 1, "documents", objective, family, given)
    assert tokens is None or expected["tokens"] == tokens
    assert expected["tokens"] > 0 and ("perplexity" in expected) == (objective != "classify")
    for batch_size, devices, packing in ((3, 1, "documents"), (8, 8, "documents")):
        found = metrics(batch_size, devices, packing, objective, family, given)
        assert found == pytest.approx(expected, rel=1e-5)
    if objective in ("seq2seq", "classify"):  # what is not drawn is not changed by the width
        found = metrics(5, 1, "buckets", objective, family, given)
        assert found == pytest.approx(expected, rel=1e-5)


def test_f1_of_a_split_is_not_a_mean_over_batches():
    """A class at a time: hits twice over what was and what was taken, all batches together."""
    sums = [
        {"loss": (1.0, 2.0), "macro_f1": (np.array([2, 0, 0]), np.array([3, 0, 1]))},
        {"loss": (1.0, 3.0), "macro_f1": (np.array([2, 0, 0]), np.array([5, 0, 0]))},
    ]
    found = means(total(sums))  # type: ignore[arg-type]
    assert found["macro_f1"] == pytest.approx((4 / 8 + 0 / 1) / 2), "the second class is nowhere"
    assert found["tokens"] == 5 and found["loss"] == pytest.approx(0.4)


def test_against_the_definition():
    """From the logits, document by document, in NumPy."""
    model = common.spec()
    spec = parse(feed.DataSpec, {"seq_len": 8, "packing": "documents"})
    nll, hits, count, size = 0.0, 0, 0, 0
    for batch in feed.eval_batches(data(), spec, "validation", 1):
        ids = batch["tokens"][0][batch["segments"][0] > 0]
        text = common.Tokens.of(ids[None, :-1])
        logits = np.asarray(common.logits(model, common.params(model), text)[0], np.float64)
        logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        nll -= logp[np.arange(len(ids) - 1), ids[1:]].sum()
        hits += int((logits.argmax(-1) == ids[1:]).sum())
        count, size = count + len(ids) - 1, size + int(BYTES[ids[1:]].sum())
    found = metrics(3)
    assert found["tokens"] == count
    assert found["nll"] == pytest.approx(nll / count, rel=1e-5)
    assert found["accuracy"] == pytest.approx(hits / count)
    assert found["perplexity"] == pytest.approx(math.exp(nll / count), rel=1e-5)
    assert found["bits_per_byte"] == pytest.approx(nll / math.log(2) / size, rel=1e-5)
    assert found["loss"] > found["nll"], "smoothing is in the loss alone"


def test_sums_are_added_in_double_precision():
    """2^24 + 1 is no float32."""
    part = {
        "loss": (jnp.float32(2**24), jnp.float32(2**24)),
        "nll": (jnp.float32(1), jnp.float32(1)),
    }
    one = {"loss": (jnp.float32(1), jnp.float32(1)), "nll": (jnp.float32(1), jnp.float32(1))}
    assert total([part, one])["loss"] == (2**24 + 1, 2**24 + 1)


def test_means_at_the_edges():
    def of(value, weight):
        sums = {name: (jnp.float32(value), jnp.float32(weight)) for name in names}
        return means(total([sums]))

    names = ("loss", "nll", "bits_per_byte")
    assert of(0.0, 0.0)["loss"] == of(0.0, 0.0)["bits_per_byte"] == 0.0
    assert math.isnan(of(math.nan, 1.0)["perplexity"])
    assert math.isfinite(of(1e4, 1.0)["perplexity"])
    assert of(2.0, 1.0)["perplexity"] == pytest.approx(math.e**2)
    names = ("loss", "nll")
    assert "perplexity" not in of(2.0, 1.0), "of labels there is none"


def test_an_evaluation_can_be_stopped():
    mesh, seen = Mesh(MeshSpec(), jax.devices()[:1]), []

    def step(params, batch):
        seen.append(batch)
        return {}

    batches = feed.eval_batches(data(), parse(feed.DataSpec, {"seq_len": 8}), "validation", 1)
    assert evaluate(step, None, mesh, batches, lambda: len(seen) == 2) is None
    assert len(seen) == 2
