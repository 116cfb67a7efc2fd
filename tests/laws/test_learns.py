"""Every part learns: a task that needs attention is solved in a few seconds.

A row repeats one letter after a separator, `a , a , a ,`: after a separator the letter can only be
known by looking back. Without looking, the loss cannot fall below ln(letters) on these targets.
"""

import functools

import common
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from transformer.layers.base import INITS, Tokens
from transformer.layers.ffn import FFNS
from transformer.layers.norm import NORMS
from transformer.layers.position import POSITIONS
from transformer.layers.residual import ORDERS, PLACEMENTS
from transformer.objective import OBJECTIVES, Example, cross_entropy
from transformer.state import init_params

SEPARATOR, BLANK, LETTERS = 4, 5, range(6, 22)
FLOOR = np.log(len(LETTERS))
BYTES = jnp.ones(common.VOCAB, jnp.int32)
ROWS, T, UPDATES = 32, 8, 150


def letters(key):
    return jax.random.randint(key, (ROWS, 1), LETTERS.start, LETTERS.stop)


def sentences(key):
    """[ROWS, T + 1]: a , a , a , a , a"""
    even = jnp.arange(T + 1)[None] % 2 == 0
    return jnp.where(even, letters(key), SEPARATOR)


def next_token(objective, model, key):
    """A batch as the objective reads it."""
    ids = sentences(key)
    place = jnp.broadcast_to(jnp.arange(T + 1)[None], ids.shape)
    batch = {"tokens": ids, "segments": jnp.ones_like(ids), "positions": place}
    return objective.example(batch, model, key)


def filled_in(model, key):
    """An encoder sees some letters blanked out, and names them."""
    ids = sentences(key)[:, :T]
    hidden = jnp.arange(T)[None] % 4 == 0
    text = Tokens.of(jnp.where(hidden, BLANK, ids))
    return Example(text, None, ids, jnp.broadcast_to(hidden, ids.shape).astype(jnp.float32))


def copied(model, key):
    """An encoder-decoder is given separators alone and finds the letter in the source."""
    ids = sentences(key)[:, :T]
    text = Tokens.of(jnp.full_like(ids, SEPARATOR))
    return Example(text, Tokens.of(ids[:, 1:4]), ids[:, :1] + 0 * ids, jnp.ones(ids.shape))


def losses(model, example_of):
    """Loss per target in units of the floor, before and after training."""
    tx = optax.adam(1e-2)

    def loss(params, key):
        example = example_of(model, key)
        logits = model.build().apply({"params": params}, example.text, example.source)
        total, count = cross_entropy(logits, example, BYTES, 0.0, 0.0)["loss"]
        return total / count

    def update(state, key):
        params, memory = state
        value, gradient = jax.value_and_grad(loss)(params, key)
        change, memory = tx.update(gradient, memory, params)
        return (optax.apply_updates(params, change), memory), value

    @jax.jit
    def train(key):
        params = nn.unbox(init_params(model, 0))
        return jax.lax.scan(update, (params, tx.init(params)), jax.random.split(key, UPDATES))[1]

    history = np.asarray(train(jax.random.key(1)))
    return history[0], history[-10:].mean()


SMALL = {"depth": 1, "dim": 32, "init": "lecun"}
TABLES = {
    "position": POSITIONS,
    "placement": PLACEMENTS,
    "ffn": FFNS,
    "norm": NORMS,
    "order": ORDERS,
    "init": INITS,
}
# One choice at a time, so that a failure names the entry that does not learn.
CASES = common.accepted(
    [{field: name} for field, table in TABLES.items() for name in table] + [{"dtype": "bfloat16"}],
    **SMALL,
)


@pytest.mark.parametrize("model", CASES)
def test_a_decoder_learns_to_look_back(model):
    example_of = functools.partial(next_token, common.pick(OBJECTIVES, "causal_lm")())
    before, after = losses(model, example_of)
    assert before > 0.7 * FLOOR
    assert after < 0.1 * FLOOR / 2  # half of the targets are letters


@pytest.mark.parametrize(
    ("name", "family"), [(name, f) for name, table in OBJECTIVES.items() for f in table.families]
)
def test_every_objective_is_learnt_by_its_families(name, family):
    example_of = functools.partial(next_token, common.pick(OBJECTIVES, name)())
    _, after = losses(common.spec(**SMALL, family=family), example_of)
    assert after < 0.1 * FLOOR / 2


@pytest.mark.parametrize(
    ("family", "example_of"), [("encoder", filled_in), ("encoder_decoder", copied)]
)
def test_the_other_families_learn_to_look(family, example_of):
    _, after = losses(common.spec(**SMALL, family=family), example_of)
    assert after < 0.1 * FLOOR


def test_without_looking_back_it_cannot_be_learnt():
    model = common.spec(**SMALL, mask="window(size=1)")
    _, after = losses(model, functools.partial(next_token, common.pick(OBJECTIVES, "causal_lm")()))
    assert after > 0.9 * FLOOR / 2
