"""One update and one evaluation batch: pure functions, jitted here, without input or output."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from transformer.layers.base import Array
from transformer.mesh import Mesh
from transformer.model import ModelSpec
from transformer.objective import Batch, Sums
from transformer.state import State, stream

TrainStep = Callable[[State, Batch], tuple[State, Sums]]
EvalStep = Callable[[Any, Batch], Sums]


def train_step(
    spec: ModelSpec,
    objective: Any,
    tx: optax.GradientTransformation,
    mesh: Mesh,
    shardings: State,
    token_bytes: np.ndarray,
    seed: int,
    accumulate: int = 1,
) -> TrainStep:
    """Builds the jitted update (state, batch) -> (state, sums); the given state is consumed.

    The gradient is that of the sum of losses over all targets of the batch, divided by their
    number, whatever the split into micro-batches and devices. `sums` adds `grad_norm` (before
    clipping) and `update_norm`.
    """
    model, bytes_V = spec.build(), jnp.asarray(token_bytes, jnp.int32)

    def loss(params, batch, key):
        example = objective.example(batch, spec, jax.random.fold_in(key, 1))
        logits = model.apply(
            {"params": params}, example.text, example.source, rngs={"dropout": key}
        )
        sums = objective.sums(logits, example, bytes_V)
        return sums["loss"][0], sums

    def gradient(params, batch, key):
        (_, sums), grads = jax.value_and_grad(loss, has_aux=True)(params, batch, key)
        return grads, sums

    def accumulated(params, batch, key):
        if accumulate == 1:
            return gradient(params, batch, key)
        micro = {name: _split(a, accumulate) for name, a in batch.items()}
        keys = jax.random.split(key, accumulate)
        first = jax.eval_shape(gradient, params, {n: a[0] for n, a in micro.items()}, keys[0])
        zeros = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), first)

        def add(total, now):
            return jax.tree.map(jnp.add, total, gradient(params, *now)), None

        return jax.lax.scan(add, zeros, (micro, keys))[0]

    def update(state: State, batch: Batch) -> tuple[State, Sums]:
        grads, sums = accumulated(state.params, batch, stream(seed, "dropout", state.step))
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
    spec: ModelSpec, objective: Any, mesh: Mesh, params_sharding: Any, token_bytes: np.ndarray
) -> EvalStep:
    """Builds the jitted (params, batch) -> sums, without dropout."""
    model, bytes_V = spec.build(), jnp.asarray(token_bytes, jnp.int32)

    def evaluate(params: Any, batch: Batch) -> Sums:
        example = objective.example(batch, spec, stream(0, "evaluation"))
        logits = model.apply({"params": params}, example.text, example.source)
        return objective.sums(logits, example, bytes_V)

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
