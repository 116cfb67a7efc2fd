"""Every part learns: a task that needs attention is solved in a few seconds.

A row repeats one letter after a separator, `a , a , a ,`: after a separator the letter can only be
known by looking back. Without looking, the loss cannot fall below ln(letters) on these targets.
"""

import dataclasses

import common
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from transformer.layers.base import INITS
from transformer.layers.ffn import FFNS
from transformer.layers.norm import NORMS
from transformer.layers.position import POSITIONS
from transformer.layers.residual import ORDERS, PLACEMENTS
from transformer.objective import OBJECTIVES, cross_entropy
from transformer.state import init_params

BEGIN, SEPARATOR, LETTERS = 1, 4, range(6, 22)
FLOOR = np.log(len(LETTERS))
ROWS, T, UPDATES = 32, 8, 150

# With options that leave letters to be told; and which share of the targets those are that can
# only be known by looking: half of a text; in a text that begins anew, the first of eight.
OBJECTIVES_HERE = {
    "causal_lm": ("causal_lm", 1 / 2),
    "prefix_lm": ("prefix_lm", 1 / 2),
    "masked_lm": ("masked_lm(rate=0.3)", 1 / 2),
    "span_corruption": ("span_corruption(rate=0.5, mean_span=4.0)", 1 / 3),  # <1> a , a , and end
    "seq2seq": ("seq2seq", 1 / 8),
    "classify": ("classify", 1),
}


def tokens(ids, side=""):
    place = jnp.broadcast_to(jnp.arange(ids.shape[1])[None], ids.shape)
    named = {"tokens": ids, "segments": jnp.ones_like(ids), "positions": place}
    return {f"{side}{name}": a for name, a in named.items()}


def sentences(key, begun=False):
    """A batch as every objective can read it: [ROWS, T + 1] of `a , a , a , a , a`, or after a
    beginning `a , a , a , a ,`, with the source `a` and the number of the letter as label."""
    letter = jax.random.randint(key, (ROWS, 1), LETTERS.start, LETTERS.stop)
    even = jnp.arange(T + 1)[None] % 2 == int(begun)
    ids = jnp.where(even, letter, SEPARATOR)
    ids = ids.at[:, 0].set(BEGIN) if begun else ids
    source = jnp.concatenate([jnp.full_like(letter, BEGIN), letter], 1)
    more = {"rows": jnp.arange(ROWS), "labels": letter[:, 0] - LETTERS.start}
    return tokens(ids) | tokens(source, "source_") | more


def shown_to(name):
    """Makes the examples of an objective."""
    objective = common.pick(OBJECTIVES, OBJECTIVES_HERE[name][0])()

    def example_of(model, key):
        batch = sentences(key, begun=objective.needs is not None)
        return objective.example(batch, model, jax.random.fold_in(key, 1), common.LEXICON)

    return example_of


def losses(model, example_of):
    """Loss per target in units of the floor, before and after training."""
    tx = optax.adam(1e-2)

    def loss(params, key):
        example = example_of(model, key)
        logits = model.build().apply({"params": params}, example.text, example.source)
        total, count = cross_entropy(logits, example, common.LEXICON)["loss"]
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


@pytest.mark.slow
@pytest.mark.parametrize("model", CASES)
def test_a_decoder_learns_to_look_back(model):
    before, after = losses(model, shown_to("causal_lm"))
    assert before > 0.7 * FLOOR
    assert after < 0.1 * FLOOR / 2  # half of the targets are letters


@pytest.mark.slow
@pytest.mark.parametrize(("name", "family"), common.LEARNERS)
def test_every_objective_is_learnt_by_its_families(name, family):
    text, share = OBJECTIVES_HERE[name]
    more = {"classes": len(LETTERS)} if name == "classify" else {}
    # Where a token is hidden on both sides, only its place tells a letter from a separator.
    model = common.learner(text, family, seq_len=T, position="learned", **SMALL, **more)
    _, after = losses(model, shown_to(name))
    assert after < 0.1 * FLOOR * share


def test_without_looking_back_it_cannot_be_learnt():
    model = common.spec(**SMALL, mask="window(size=1)")
    _, after = losses(model, shown_to("causal_lm"))
    assert after > 0.9 * FLOOR / 2


@pytest.mark.parametrize("name", ["masked_lm", "classify"])
def test_without_looking_around_it_cannot_be_learnt(name):
    """Nor can a label be told from the separator that a text ends with."""
    more = {"classes": len(LETTERS), "pool": "last"} if name == "classify" else {}
    model = common.learner(
        OBJECTIVES_HERE[name][0], "encoder", **SMALL, mask="window(size=1)", **more
    )
    _, after = losses(model, shown_to(name))
    assert after > (0.8 if name == "classify" else 0.3) * FLOOR


def test_without_its_source_it_cannot_be_learnt():
    """Each text has the source of the one before."""
    right = shown_to("seq2seq")

    def example_of(model, key):
        example = right(model, key)
        return dataclasses.replace(
            example, source=jax.tree.map(lambda a: jnp.roll(a, 1, 0), example.source)
        )

    model = common.learner("seq2seq", "encoder_decoder", **SMALL)
    _, after = losses(model, example_of)
    assert after > 0.8 * FLOOR / 8
