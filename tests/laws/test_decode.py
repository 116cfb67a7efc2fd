"""Decoding with a cache, in pieces of any size or by beams, equals the full forward pass."""

import dataclasses
import functools

import common
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_beam import teacher_forced

from transformer.beam import Beams, beam_search
from transformer.layers.base import Tokens
from transformer.layers.ffn import FFNS
from transformer.layers.mask import MASKS, horizon
from transformer.layers.norm import NORMS
from transformer.layers.position import POSITIONS
from transformer.layers.residual import ORDERS, PLACEMENTS

EVERYWHERE = [  # for both families
    *({"position": name} for name in POSITIONS),
    *({"placement": name} for name in PLACEMENTS),
    *({"order": name} for name in ORDERS),
    {"scan": True, "depth": 3, "position": "rope | none"},
]
DECODER = [
    *({"mask": name} for name in [*MASKS, "window(size=3)", "prefix(length=3)"]),
    *({"norm": name} for name in NORMS),
    *({"ffn": name} for name in FFNS),
    {"kv_heads": 1},
    {"kv_heads": 4, "value_dim": 6},
    {"scan": True, "depth": 5, "mask": "window(size=2) | causal"},
    {"tie": False, "embed_scale": True},
]
CASES = common.accepted(
    [{"family": family, **options} for family in common.DECODING for options in EVERYWHERE]
    + [{"family": "decoder", **options} for options in DECODER],
    depth=1,
)
CAPACITY = 48
BEAMED = common.accepted(
    [
        {"family": family, **options}
        for family in common.DECODING
        for options in [
            *({"position": name} for name in POSITIONS),
            {"kv_heads": 1},
            {"scan": True, "depth": 3, "position": "rope | none"},
        ]
    ],
    depth=1,
)


@functools.partial(jax.jit, static_argnums=(0, 4))
def in_pieces(model, params, text, source, first):
    """Logits of the text, given to the cache as `first` tokens, two more, and one by one."""
    apply = functools.partial(model.build().apply, mutable=["cache"])

    def step(cache, piece):
        logits, new = apply({"params": params, **cache}, piece, None, CAPACITY)
        return new, logits

    start, cache = apply({"params": params}, common.columns(text, 0, first), source, CAPACITY)
    later = dataclasses.replace(text, shown_BT=None)  # what is shown is among the first
    cache, two = step(cache, common.columns(later, first, first + 2))
    one_by_one = jax.tree.map(
        lambda a: a[:, first + 2 :].swapaxes(0, 1)[..., None], later
    )  # [steps, B, 1]
    _, rest = jax.lax.scan(step, cache, one_by_one)
    return jnp.concatenate([start, two, rest[:, :, 0].swapaxes(0, 1)], 1)


@pytest.mark.parametrize("model", CASES)
def test_pieces_equal_the_whole(model):
    params, source = common.params(model), common.source_for(model)
    first = 3 + max(horizon(mask) for mask in model.masks.entries)
    # Prompts of different lengths stand right-aligned: the first three columns of row 0 are empty.
    real = jnp.ones((2, first + 5), jnp.int32).at[0, :3].set(0)
    text = Tokens.of(common.text(2, first + 5).ids_BT, real)
    whole = common.logits(model, params, text, source)
    got = in_pieces(model, params, text, source, first)
    np.testing.assert_allclose(whole[0, 3:], got[0, 3:], atol=1e-5)
    np.testing.assert_allclose(whole[1], got[1], atol=1e-5)


SHOWN = common.accepted(
    [
        *({"position": name} for name in POSITIONS),
        {"mask": "window(size=3)"},
        {"mask": "prefix(length=3)"},
        {"scan": True, "depth": 3, "mask": "window(size=2) | causal"},
    ],
    depth=2,
)


@pytest.mark.parametrize("model", SHOWN)
def test_a_shown_prefix_is_remembered_as_such(model):
    """Six tokens in the first row, which stands on the right, and four in the second."""
    params, first = common.params(model), 9
    real = jnp.ones((2, first + 5), jnp.int32).at[0, :3].set(0)
    text = Tokens.of(common.text(2, first + 5).ids_BT, real)
    shown = (text.positions_BT < jnp.asarray([[6], [4]])) & (real > 0)
    text = dataclasses.replace(text, shown_BT=shown)
    whole = common.logits(model, params, text, None)
    got = in_pieces(model, params, text, None, first)
    np.testing.assert_allclose(whole[0, 3:], got[0, 3:], atol=1e-5)
    np.testing.assert_allclose(whole[1], got[1], atol=1e-5)
    hidden = common.logits(model, params, dataclasses.replace(text, shown_BT=None), None)
    assert jnp.abs(whole - hidden)[:, first:].max() > 1e-3, "it matters to what follows"


def test_keys_of_a_source_are_computed_once():
    """A later step finds them in the cache: it runs without a source and without the encoder."""
    model = common.spec(family="encoder_decoder", depth=1)
    params, text, source = common.params(model), common.text(), common.source_for(model)
    without_encoder = {name: p for name, p in params.items() if name != "encoder"}
    apply = jax.jit(functools.partial(model.build().apply, mutable=["cache"]), static_argnums=3)
    first, then = common.columns(text, 0, 7), common.columns(text, 7, 8)
    _, cache = apply({"params": params}, first, source, CAPACITY)
    last, _ = apply({"params": without_encoder, **cache}, then, None, CAPACITY)
    whole = common.logits(model, params, text, source)
    np.testing.assert_allclose(whole[:, -1:], last, atol=1e-5)


@pytest.mark.parametrize("model", BEAMED)
def test_beams_have_the_logprob_of_the_whole(model):
    """Each new token changes which beam continues which, and their caches with them."""
    prompts, source = [[5, 6, 7, 8, 9], [4], [11, 12, 13]], common.source_for(model, 3)
    params = common.params(model)
    beams = Beams(beams=4, n_best=4)
    found = beam_search(model, params, prompts, 10, beams, end=2, pad=0, source=source)
    assert [len(row) for row in found] == [4, 4, 4]
    every = [(prompt, h) for prompt, row in zip(prompts, found, strict=True) for h in row]
    four = source and jax.tree.map(lambda a: jnp.repeat(a, 4, axis=0), source)
    expected = teacher_forced(
        model, params, [prompt for prompt, _ in every], [h.tokens for _, h in every], four
    )
    np.testing.assert_allclose([h.logprob for _, h in every], expected, atol=1e-4)
