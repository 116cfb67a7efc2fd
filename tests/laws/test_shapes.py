"""Every combination of choices traces with the right shapes and dtypes, or is refused by name."""

import itertools

import common
import jax
import jax.numpy as jnp
import pytest

from transformer.layers.ffn import FFNS
from transformer.layers.mask import MASKS
from transformer.layers.norm import NORMS
from transformer.layers.pool import POOLS
from transformer.layers.position import POSITIONS
from transformer.layers.residual import ORDERS, PLACEMENTS
from transformer.model import FAMILIES
from transformer.spec import SpecError

REST = list(itertools.product(PLACEMENTS, NORMS, FFNS, MASKS))


def traced(model, text, source):
    key = jax.random.key(0)
    logits, boxed = jax.eval_shape(lambda: model.build().init_with_output(key, text, source))
    return boxed["params"], logits


@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "rest", [REST[::13], pytest.param(REST, marks=pytest.mark.slow)], ids=["some", "all"]
)
def test_the_product_of_choices(family, position, rest):
    text = common.text(2, 5)
    for placement, norm, ffn, mask in rest:
        options = {"placement": placement, "norm": norm, "ffn": ffn, "mask": mask}
        try:
            model = common.spec(depth=1, family=family, position=position, **options)
        except SpecError as e:
            refused = [f"{name}={value}" for name, value in options.items()]
            assert any(name in str(e) for name in [*refused, f"position={position}"]), str(e)
            continue
        boxed, logits = traced(model, text, common.source_for(model))
        assert (logits.shape, logits.dtype) == ((2, 5, common.VOCAB), jnp.float32), options
        assert {a.dtype for a in jax.tree.leaves(boxed)} == {jnp.dtype("float32")}, options


def test_what_is_refused_is_little():
    """Only a decoder that would see its targets is refused: a law met by refusing is none."""
    refused = set()
    for family, position, mask in itertools.product(FAMILIES, POSITIONS, MASKS):
        try:
            common.spec(family=family, position=position, mask=mask)
        except SpecError:
            refused.add((family, mask))
    assert refused == {("decoder", "full"), ("encoder_decoder", "full")}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "bfloat16", "position": "t5"},
        {"dtype": "float16", "position": "rope"},
        {"kv_heads": 1, "head_dim": 6, "value_dim": 10},
        {"kv_heads": None, "tie": False, "bias": False, "embed_scale": True},
        {"scan": True, "depth": 5, "position": "rope | none", "remat": "full"},
        {"ffn": "2*mlp | gated(act='relu2')", "norm": "layer(bias=False) | rms", "depth": 5},
        {"dropout": 0.3, "attention_dropout": 0.0, "score_scale": 1.0, "position": "alibi"},
    ],
    ids=lambda o: "-".join(o),
)
def test_the_other_options(family, order, options):
    model = common.spec(family=family, order=order, **options)
    boxed, logits = traced(model, common.text(3, 6), common.source_for(model, 3))
    assert (logits.shape, logits.dtype) == ((3, 6, common.VOCAB), jnp.float32)
    assert {a.dtype for a in jax.tree.leaves(boxed)} == {jnp.dtype("float32")}


@pytest.mark.parametrize("pool", [None, *POOLS])
@pytest.mark.parametrize("family", FAMILIES)
def test_classes_of_texts(family, pool):
    """One row of logits a text, whatever the pool and the precision; only a decoder that sees
    nothing there has no use for the first token."""
    for options in ({}, {"dtype": "bfloat16"}, {"scan": True, "tie": False}):
        try:
            model = common.spec(family=family, classes=5, pool=pool, **options)
        except SpecError as e:
            assert (family, pool) == ("decoder", "first") and "pool=first" in str(e)
            continue
        assert (family, pool) != ("decoder", "first")
        boxed, logits = traced(model, common.text(3, 6), common.source_for(model, 3))
        assert (logits.shape, logits.dtype) == ((3, 5), jnp.float32)
        assert {a.dtype for a in jax.tree.leaves(boxed)} == {jnp.dtype("float32")}


@pytest.mark.parametrize("tie", [True, False])
def test_a_source_of_another_vocabulary(tie):
    model = common.spec(family="encoder_decoder", source_vocab=31, tie=tie)
    boxed, logits = traced(model, common.text(3, 6), common.source_for(model, 3))
    assert logits.shape == (3, 6, common.VOCAB)
    assert boxed["source_embed"]["embedding"].value.shape == (31, 16)
    assert boxed["embed"]["embedding"].value.shape == (common.VOCAB, 16)
