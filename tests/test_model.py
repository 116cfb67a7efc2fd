"""The families as wholes: embeddings and heads, sizes of each side, per-layer choices, refusals."""

import common
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer.layers.base import INITS
from transformer.model import FAMILIES
from transformer.spec import SpecError
from transformer.state import abstract_params, init_params


def count(model) -> int:
    return sum(a.size for a in jax.tree.leaves(abstract_params(model)))


def without_blocks(params):
    """The same parameters with silent sublayers: the logits come from the embedding alone."""

    def silent(path, leaf):
        return leaf * 0 if "block" in str(path) and "norm" not in str(path) else leaf

    return jax.tree.map_with_path(silent, params)


# ---------------------------------------------------------------------------- embedding and head


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("embed_scale", [True, False])
def test_logits_of_a_model_without_layers(tie, embed_scale):
    """The row of the token, times sqrt(16) only if asked for, against the head's columns."""
    model = common.spec(tie=tie, embed_scale=embed_scale, placement="none", position="none")
    params = without_blocks(common.params(model))
    table = np.asarray(params["embed"]["embedding"], np.float64)
    head = table.T if tie else np.asarray(params["head"]["kernel"], np.float64)
    text = common.text()
    expected = table[text.ids_BT] * (4.0 if embed_scale else 1.0) @ head
    np.testing.assert_allclose(common.logits(model, params, text), expected, atol=1e-5)


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("embed_scale", [True, False])
@pytest.mark.parametrize("init", ["normal", "lecun", "xavier"])
def test_a_fresh_model_knows_nothing(tie, embed_scale, init):
    """Its loss on random tokens is that of guessing, ln 256."""
    model = common.spec(vocab=256, tie=tie, embed_scale=embed_scale, init=init)
    params = nn.unbox(init_params(model, 0))
    text = common.text(4, 16)
    log_p = jax.nn.log_softmax(common.logits(model, params, text))
    targets = np.random.default_rng(5).integers(0, 256, text.ids_BT.shape)
    loss = -jnp.take_along_axis(log_p, jnp.asarray(targets)[..., None], -1).mean()
    assert float(loss) == pytest.approx(np.log(256), abs=1.0)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_untied_head_is_one_more_matrix(family):
    tied, untied = (common.spec(family=family, tie=tie) for tie in (True, False))
    assert count(untied) - count(tied) == common.VOCAB * 16


def test_the_gradient_of_a_tied_embedding_is_that_of_both_its_uses():
    tied, untied = (common.spec(tie=tie) for tie in (True, False))
    params, text = common.params(tied), common.text()
    apart = params | {"head": {"kernel": params["embed"]["embedding"].T}}

    def gradient(model, params):
        return jax.grad(lambda p: jnp.square(common.logits(model, p, text)).sum())(params)

    both, two = gradient(tied, params), gradient(untied, apart)
    expected = two["embed"]["embedding"] + two["head"]["kernel"].T
    common.assert_trees_close(expected, both["embed"]["embedding"], 1e-5)


# --------------------------------------------------------------------------- classes and sources


@pytest.mark.parametrize("family", FAMILIES)
def test_a_classifier_is_a_matrix_and_a_bias_in_place_of_the_head(family):
    tied, classes = common.spec(family=family), common.spec(family=family, classes=5)
    assert count(classes) - count(tied) == 16 * 5 + 5
    assert count(common.spec(family=family, classes=5, tie=False)) == count(classes)
    biased = common.spec(family=family, classes=5, bias=False)
    assert abstract_params(biased)["classifier"]["bias"].shape == (5,), "whatever the others have"


def test_logits_of_texts_from_a_model_without_layers():
    """The mean of the rows of the tokens, times the matrix, plus the bias."""
    model = common.spec(family="encoder", classes=3, placement="none", position="none")
    params = without_blocks(common.params(model))
    table, text = np.asarray(params["embed"]["embedding"], np.float64), common.text()
    text = type(text).of(text.ids_BT, jnp.asarray([[1] * 8, [1] * 3 + [0] * 5]))
    means = np.stack([table[text.ids_BT[0]].mean(0), table[text.ids_BT[1, :3]].mean(0)])
    head = {name: np.asarray(a, np.float64) for name, a in params["classifier"].items()}
    expected = means @ head["kernel"] + head["bias"]
    np.testing.assert_allclose(common.logits(model, params, text), expected, atol=1e-5)


def test_the_vector_of_a_text_is_dropped_too():
    """The only dropout there is here: of sixteen values about half are left, and doubled."""
    model = common.spec(
        family="encoder", classes=16, placement="none", position="none", dropout=0.5, depth=1
    )
    params = jax.tree.map(jnp.zeros_like, common.params(model))
    params["embed"]["embedding"] += 1.0
    params["classifier"]["kernel"] += jnp.eye(16)
    rows = common.text(400, 1)
    got = np.asarray(common.logits(model, params, rows, None, None, jax.random.key(0)))
    # Embedding and vector: each halves, each doubles.
    assert set(np.unique(got)) == {0.0, 4.0}
    assert (got > 0).mean() == pytest.approx(0.25, abs=4 * (0.1875 / got.size) ** 0.5)


def test_a_source_has_its_own_table_only_if_its_vocabulary_is_another():
    shared, apart = (
        common.spec(family="encoder_decoder", source_vocab=v) for v in (None, common.VOCAB)
    )
    params, text, source = common.params(shared), common.text(), common.source_for(shared)
    assert "source_embed" not in params
    assert count(apart) - count(shared) == common.VOCAB * 16
    copied = params | {"source_embed": params["embed"]}
    a = common.logits(shared, params, text, source)
    np.testing.assert_allclose(a, common.logits(apart, copied, text, source), atol=1e-6)
    other = params | {"source_embed": {"embedding": params["embed"]["embedding"] + 1.0}}
    assert jnp.abs(a - common.logits(apart, other, text, source)).max() > 1e-3


# --------------------------------------------------------------------------------- initialisation


@pytest.mark.parametrize(
    ("init", "role", "expected"),
    [
        ("normal", "query", 0.02),
        ("normal(std=0.1)", "up", 0.1),
        ("normal", "down", 0.02 / 8**0.5),  # 2 * 4 sublayers write into the stream
        ("normal(depth_scaled=False)", "down", 0.02),
        ("normal", "embedding", 0.02),
        ("lecun", "query", 128**-0.5),
        ("lecun", "down", 512**-0.5),
        ("lecun", "embedding", 128**-0.5),
        ("xavier", "up", (2 / (128 + 512)) ** 0.5),
        ("xavier(distribution='normal')", "down", (2 / (128 + 512)) ** 0.5),
        ("xavier", "embedding", 128**-0.5),
    ],
)
def test_initial_spread(init, role, expected):
    model = common.spec(dim=128, ffn_dim=512, vocab=256, depth=4, kv_heads=None, init=init)
    params = jax.jit(init_params, static_argnums=(0, 1))(model, 0)
    block = params["decoder"]["block_3"]
    matrices = {name: part["kernel"] for name, part in (block["attention"] | block["ffn"]).items()}
    values = nn.unbox((matrices | params["embed"])[role])
    assert float(values.std()) == pytest.approx(expected, rel=0.03)
    assert abs(float(values.mean())) < 5 * expected / values.size**0.5


@pytest.mark.parametrize("init", INITS)
def test_initial_values_depend_on_the_seed_alone(init):
    model = common.spec(init=init)
    a, b, c = (nn.unbox(init_params(model, seed)) for seed in (0, 0, 1))
    common.assert_trees_close(a, b, 0.0)
    assert jnp.abs(a["embed"]["embedding"] - c["embed"]["embedding"]).max() > 0.01


@pytest.mark.parametrize("scan", [False, True])
def test_layers_start_with_different_values(scan):
    params = nn.unbox(init_params(common.spec(scan=scan), 0))["decoder"]
    kernels = [*jax.tree.leaves(params["blocks"])] if scan else []
    pairs = kernels or [
        jnp.stack(pair)
        for pair in zip(*(jax.tree.leaves(params[f"block_{i}"]) for i in (0, 1)), strict=True)
    ]
    random = [pair for pair in pairs if pair[0].std() > 0]
    assert len(random) == 6
    assert all(jnp.abs(pair[0] - pair[1]).max() > 1e-3 for pair in random)


# ------------------------------------------------------------------------------- sides and layers


def test_an_encoder_of_its_own_sizes():
    model = common.spec(
        family="encoder_decoder",
        depth=3,
        encoder_depth=1,
        kv_heads=None,
        encoder_heads=8,  # more than the decoder has
        encoder_ffn_dim=40,
        encoder_mask="window(size=3, ahead=1)",
        head_dim=4,
    )
    params = abstract_params(model)
    blocks = {s: [n for n in params[s] if n.startswith("block")] for s in ("encoder", "decoder")}
    assert blocks == {"encoder": ["block_0"], "decoder": ["block_0", "block_1", "block_2"]}
    shapes = {
        side: (
            params[side]["block_0"]["attention"]["query"]["kernel"].shape,
            params[side]["block_0"]["ffn"]["up"]["kernel"].shape,
        )
        for side in ("encoder", "decoder")
    }
    assert shapes == {"encoder": ((16, 32), (16, 40)), "decoder": ((16, 16), (16, 24))}


def test_the_encoder_obeys_its_mask():
    """An encoder window of one position back: source token 0 reaches a layer's position 1 only."""
    model = common.spec(family="encoder", depth=1, mask="window(size=2)")
    params, text = common.params(model), common.text(1, 6)
    other = common.columns(text, 0, 6)
    other = type(text)(text.ids_BT.at[:, 0].add(1), text.segments_BT, text.positions_BT)
    difference = common.logits(model, params, text) - common.logits(model, params, other)
    moved = jnp.abs(difference).max((0, 2)) > 1e-4
    np.testing.assert_array_equal(moved, [True, True, False, False, False, False])


def test_choices_vary_by_layer():
    model = common.spec(
        depth=4, position="2*rope | none", ffn="mlp | gated", norm="rms | layer", mask="causal"
    )
    assert model.period == 6
    params = abstract_params(model)["decoder"]
    gated = ["gate" in params[f"block_{i}"]["ffn"] for i in range(4)]
    biased = ["bias" in params[f"block_{i}"]["ffn_residual"]["norm"] for i in range(4)]
    assert gated == [False, True, False, True]
    assert biased == [False, True, False, True]
    assert [model.layer(i).position.name for i in range(4)] == ["rope", "rope", "none", "rope"]


@pytest.mark.parametrize(
    ("options", "messages"),
    [
        ({"encoder_depth": 2}, ["encoder_depth=2: only family=encoder_decoder has it"]),
        (
            {"family": "encoder", "encoder_heads": 2, "encoder_mask": "full"},
            [
                "encoder_heads=2: only family=encoder_decoder has it",
                "encoder_mask=full: only family=encoder_decoder has it",
            ],
        ),
        ({"source_vocab": 9}, ["source_vocab=9: only family=encoder_decoder has a source"]),
        (
            {"classes": 3, "pool": "first"},
            ["pool=first: with mask=causal nothing is known there but the first token"],
        ),
        ({"mask": "full"}, ["mask=full: lets a decoder see the tokens it is to predict"]),
        (
            {"mask": "causal | window(ahead=2)"},
            ["mask=window(ahead=2): lets a decoder see the tokens it is to predict"],
        ),
        (
            {"position": "learned | none"},
            ["position=learned: acts on the embeddings, so it cannot vary by layer"],
        ),
        (
            {"family": "encoder_decoder", "encoder_heads": 3, "kv_heads": 2},
            [
                "in the encoder, kv_heads=2: must divide heads=3",
                "in the encoder, dim=16: not a multiple of heads=3",
            ],
        ),
        ({"family": "decodr"}, ["family: unknown name 'decodr'; did you mean 'decoder'?"]),
    ],
)
def test_what_cannot_be_is_refused_by_name(options, messages):
    with pytest.raises(SpecError) as caught:
        common.spec(**options)
    assert all(message in str(caught.value) for message in messages), caught.value


def test_an_encoder_decoder_needs_a_source():
    model = common.spec(family="encoder_decoder")
    with pytest.raises(AssertionError, match="an encoder-decoder needs a source"):
        common.logits(model, common.params(model), common.text())


def test_low_precision_is_close_and_its_gradient_is_float32():
    exact, rough = (common.spec(dtype=dtype) for dtype in ("float32", "bfloat16"))
    params, text = common.params(exact), common.text()

    def loss(params, model):
        return jnp.square(common.logits(model, params, text)).mean()

    (a, _), (b, gradient) = (jax.value_and_grad(loss)(params, m) for m in (exact, rough))
    assert float(a) == pytest.approx(float(b), rel=0.02)
    assert {g.dtype for g in jax.tree.leaves(gradient)} == {jnp.dtype("float32")}
