"""The training state and its birth, sharded from the first moment.

Nothing random is carried: every draw comes from `stream(seed, name, step)`, so a resumed run
repeats exactly what an uninterrupted one would have drawn.
"""

import zlib
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import struct

from transformer.layers.base import Array, Tokens
from transformer.mesh import Mesh
from transformer.model import ModelSpec


@struct.dataclass
class State:
    """What training changes: updates done so far, parameters, optimizer state."""

    step: Array
    params: Any
    opt_state: Any


def stream(seed: int, name: str, step: int | Array = 0) -> Array:
    """The random key of a named stream at a step."""
    key = jax.random.fold_in(jax.random.key(seed), zlib.crc32(name.encode()))
    return jax.random.fold_in(key, step)


def init_params(spec: ModelSpec, seed: int) -> Any:
    """Fresh parameters, boxed with their logical axis names."""
    text = Tokens.of(jnp.zeros((1, 2), jnp.int32))
    source = text if all(spec.depths) else None
    return spec.build().init(stream(seed, "init"), text, source)["params"]


def abstract_params(spec: ModelSpec) -> Any:
    """Shapes and dtypes of the parameters."""
    return jax.eval_shape(lambda: nn.unbox(init_params(spec, 0)))


class Birth:
    """Everything known about the state before it exists: its shapes and where they will live."""

    def __init__(self, spec: ModelSpec, tx: optax.GradientTransformation, mesh: Mesh, seed: int):
        self._make = lambda: _state(nn.unbox(init_params(spec, seed)), tx)
        self._mesh = mesh
        with mesh.on():
            self.boxed = jax.eval_shape(lambda: init_params(spec, seed))
            shapes = jax.eval_shape(self._make)
        mesh.refuse_indivisible(self.boxed, {"heads": spec.H, "kv_heads": spec.G})
        self.shardings = _shardings(shapes, mesh.shardings(self.boxed), mesh)
        self.abstract = jax.tree.map(
            lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), shapes, self.shardings
        )

    def fresh(self) -> State:
        """A new state, each device making its own part."""
        with self._mesh.on():
            return jax.jit(self._make, out_shardings=self.shardings)()

    @property
    def parameters(self) -> int:
        return sum(a.size for a in jax.tree.leaves(self.abstract.params))


def _state(params: Any, tx: optax.GradientTransformation) -> State:
    return State(jnp.zeros((), jnp.int32), params, tx.init(params))


def _shardings(shapes: State, of_params: Any, mesh: Mesh) -> Any:
    """A State of shardings. Optimizer leaves that mirror a parameter (same path, same shape) live
    where it lives."""
    params = {
        path: (leaf.shape, sharding)
        for (path, leaf), sharding in zip(
            jax.tree.leaves_with_path(shapes.params), jax.tree.leaves(of_params), strict=True
        )
    }

    def place(path, leaf):
        mirrored = (params.get(path[i:]) for i in range(len(path)))
        return next(
            (s for shape, s in filter(None, mirrored) if shape == leaf.shape), mesh.replicated
        )

    step: Any = mesh.replicated
    return State(step, of_params, jax.tree.map_with_path(place, shapes.opt_state))
