"""Sums over whole splits, whatever the batches and the devices."""

import math

import common
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer.data import feed
from transformer.data.store import Data, Stream
from transformer.data.tokens import ByteTokenizer
from transformer.evaluate import evaluate, means, total
from transformer.mesh import Mesh, MeshSpec
from transformer.objective import CausalLM
from transformer.spec import parse
from transformer.step import eval_step

BYTES = np.array([0, 0, 0, 0, *(i % 3 for i in range(common.VOCAB - 4))])


def data(lengths=(3, 0, 11, 1, 30, 7, 2)) -> Data:
    draw = np.random.default_rng(0)
    flat, starts = [], [0]
    for n in lengths:
        flat += [1, *draw.integers(4, common.VOCAB, n), 2]
        starts.append(len(flat))
    stream = Stream(np.array(flat, np.uint16), np.array(starts))
    return Data(ByteTokenizer(), "", {"validation": stream})


def metrics(batch_size, devices=1, packing="documents"):
    mesh, model = Mesh(MeshSpec(), jax.devices()[:devices]), common.spec()
    spec = parse(feed.DataSpec, {"seq_len": 8, "packing": packing})
    step = eval_step(model, CausalLM(label_smoothing=0.1), mesh, mesh.replicated, BYTES)
    batches = feed.eval_batches(data(), spec, "validation", batch_size)
    found = evaluate(step, common.params(model), mesh, batches)
    assert found is not None
    return found


@pytest.mark.parametrize("packing", feed.PACKINGS)
def test_batches_and_devices_change_nothing(packing):
    expected = metrics(1, packing=packing)
    # Each document has its tokens and its end as targets.
    assert expected["tokens"] == sum(n + 1 for n in (3, 0, 11, 1, 30, 7, 2))
    for batch_size, devices in ((3, 1), (7, 1), (8, 8), (16, 8)):
        assert metrics(batch_size, devices, packing) == pytest.approx(expected, rel=1e-6)


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
    assert means({"loss": (0.0, 0.0), "nll": (0.0, 0.0)})["loss"] == 0.0
    assert math.isnan(means({"loss": (math.nan, 1.0), "nll": (math.nan, 1.0)})["perplexity"])
    assert math.isfinite(means({"loss": (1e4, 1.0), "nll": (1e4, 1.0)})["perplexity"])


def test_an_evaluation_can_be_stopped():
    mesh, seen = Mesh(MeshSpec(), jax.devices()[:1]), []

    def step(params, batch):
        seen.append(batch)
        return {}

    batches = feed.eval_batches(data(), parse(feed.DataSpec, {"seq_len": 8}), "validation", 1)
    assert evaluate(step, None, mesh, batches, lambda: len(seen) == 2) is None
    assert len(seen) == 2
