"""One update and one evaluation batch: pure functions, jitted here, without input or output."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from transformer.layers.base import Array
from transformer.mesh import Mesh
from transformer.model import ModelSpec
from transformer.objective import Batch, Lexicon, Objective, Sums, padding
from transformer.state import State, stream

TrainStep = Callable[[State, Batch], tuple[State, Sums]]
EvalStep = Callable[[Any, Batch], Sums]


def train_step(
    spec: ModelSpec,
    objective: Objective,
    tx: optax.GradientTransformation,
    mesh: Mesh,
    shardings: State,
    lexicon: Lexicon,
    seed: int,
    accumulate: int = 1,
) -> TrainStep:
    """Builds the jitted update (state, batch) -> (state, sums); the given state is consumed.

    The gradient is that of the sum of losses over all targets of the batch, divided by their
    number, whatever the split into micro-batches and devices. `sums` adds `grad_norm` (before
    clipping), `update_norm` and `padding` (the share of padding in the inputs).
    """
    model = spec.build()

    def loss(params, batch, key, draws):
        example = objective.example(batch, spec, draws, lexicon)
        logits: Any = model.apply(
            {"params": params}, example.text, example.source, rngs={"dropout": key}
        )
        sums = objective.sums(logits, example, lexicon) | {"padding": padding(example)}
        return sums["loss"][0], sums

    def gradient(params, batch, key, draws):
        (_, sums), grads = jax.value_and_grad(loss, has_aux=True)(params, batch, key, draws)
        return grads, sums

    def accumulated(params, batch, key, draws):
        if accumulate == 1:
            return gradient(params, batch, key, draws)
        micro = {name: _split(a, accumulate) for name, a in batch.items()}
        keys = jax.random.split(key, accumulate)
        one = {name: a[0] for name, a in micro.items()}
        first = jax.eval_shape(gradient, params, one, keys[0], draws)
        zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), first)

        def add(total, now):
            batch, key = now
            return jax.tree.map(jnp.add, total, gradient(params, batch, key, draws)), None

        return jax.lax.scan(add, zeros, (micro, keys))[0]

    def update(state: State, batch: Batch) -> tuple[State, Sums]:
        key, draws = (stream(seed, name, state.step) for name in ("dropout", "objective"))
        grads, sums = accumulated(state.params, batch, key, draws)
        count = jnp.maximum(sums["loss"][1], 1.0)
        grads = jax.tree.map(lambda g: g / count, grads)
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        one = jnp.ones(())
        sums["grad_norm"] = (optax.tree.norm(grads), one)
        sums["update_norm"] = (optax.tree.norm(updates), one)
        return State(state.step + 1, params, opt_state), sums

    return _on(
        mesh,
        jax.jit(
            update,
            in_shardings=(shardings, mesh.rows),
            out_shardings=(shardings, mesh.replicated),
            donate_argnums=0,
        ),
    )


def eval_step(
    spec: ModelSpec, objective: Objective, mesh: Mesh, params_sharding: Any, lexicon: Lexicon
) -> EvalStep:
    """Builds the jitted (params, batch) -> sums, without dropout. What an objective draws is the
    same in every evaluation."""
    model = spec.build()

    def evaluate(params: Any, batch: Batch) -> Sums:
        example = objective.example(batch, spec, stream(0, "evaluation"), lexicon)
        logits: Any = model.apply({"params": params}, example.text, example.source)
        return objective.sums(logits, example, lexicon)

    return _on(
        mesh,
        jax.jit(evaluate, in_shardings=(params_sharding, mesh.rows), out_shardings=mesh.replicated),
    )


def _split(a: Array, parts: int) -> Array:
    """[B, ...] -> [parts, B / parts, ...], each part with rows from every device."""
    return a.reshape(a.shape[0] // parts, parts, *a.shape[1:]).swapaxes(0, 1)


def _on(mesh: Mesh, function: Callable) -> Callable:
    """The function, always called under its mesh."""

    def call(*args):
        with mesh.on():
            return function(*args)

    return call
