"""Which device holds what: LAYOUTS map the logical axes of parameters and activations to mesh axes.

Model code names logical axes only; this file is the only one that knows the mesh. Every axis exists
in every mesh, with size 1 where it is not used. Use `Mesh.on()` around whatever is traced: without
it the constraints in the model are silently dropped.
"""

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import flax.linen as nn
import jax
import numpy as np
from flax.linen import spmd
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from transformer.spec import Choice, Count, Spec, SpecError, choice, unknown

AXES = ("data", "fsdp", "tensor")
_LOGICAL = (  # of parameters, then of activations
    *("embed", "heads", "kv_heads", "ffn", "vocab", "norm", "positions", "buckets"),
    *("layers", "classes"),
    *("batch", "length", "width", "head"),
)
Rules = tuple[tuple[str, Any], ...]


def data() -> dict[str, Any]:
    """Every device holds all parameters and a part of the batch."""
    return {"batch": ("data",)}


def fsdp() -> dict[str, Any]:
    """Parameters and optimizer state are split along the model width too (Rajbhandari et al.
    2020, ZeRO-3), gathered where they are used."""
    return {"batch": ("data", "fsdp"), "embed": "fsdp"}


def tensor() -> dict[str, Any]:
    """Heads, feed-forward width and vocabulary are split as well (Shoeybi et al. 2019)."""
    split = dict.fromkeys(("heads", "kv_heads", "ffn", "vocab"), "tensor")
    return fsdp() | split


LAYOUTS = {"data": data, "fsdp": fsdp, "tensor": tensor}


@dataclasses.dataclass(frozen=True)
class MeshSpec(Spec):
    """The layout's own axis takes all devices that the other axes leave, unless it is given."""

    layout: Choice = choice(LAYOUTS, "data")
    data: Count | None = None
    fsdp: Count | None = None
    tensor: Count | None = None

    def rules(self) -> Iterator[str]:
        used = AXES[: AXES.index(self.layout.name) + 1]
        for axis in AXES:
            if axis not in used and getattr(self, axis) is not None:
                yield f"{axis}={getattr(self, axis)}: layout={self.layout.name} has no such axis"

    def sizes(self, devices: int) -> dict[str, int]:
        """Devices along each axis; SpecError if they do not multiply to `devices`."""
        sizes = {axis: getattr(self, axis) or 1 for axis in AXES}
        own = self.layout.name
        if getattr(self, own) is None:
            sizes[own] = max(1, devices // math.prod(sizes.values()))
        if math.prod(sizes.values()) != devices:
            shape = " * ".join(f"{axis}={n}" for axis, n in sizes.items())
            raise SpecError(f"config.mesh: {shape} is not the number of devices, {devices}")
        return sizes


class Mesh:
    """The mesh of a run with the rules of its layout."""

    def __init__(self, spec: MeshSpec, devices: Any = None):
        devices = devices or jax.devices()
        self.sizes = spec.sizes(len(devices))
        shape = tuple(self.sizes[axis] for axis in AXES)
        self.mesh = jax.make_mesh(
            shape, AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices
        )
        chosen = spec.layout()
        self.rules: Rules = tuple((name, chosen.get(name)) for name in _LOGICAL)

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        with jax.set_mesh(self.mesh), nn.logical_axis_rules(self.rules):
            yield

    @property
    def batch_shards(self) -> int:
        return math.prod(self.sizes[axis] for axis in dict(self.rules)["batch"])

    @property
    def rows(self) -> NamedSharding:
        """Batches are split along their first axis."""
        return NamedSharding(self.mesh, PartitionSpec(dict(self.rules)["batch"]))

    @property
    def replicated(self) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec())

    def shardings(self, boxed: Any) -> Any:
        """The sharding of every leaf of an abstract tree whose parameters carry logical axes."""
        specs = nn.get_partition_spec(boxed)
        return spmd.logical_to_mesh_sharding(specs, self.mesh, self.rules)

    def refuse_indivisible(self, boxed_params: Any, heads: dict[str, int]) -> None:
        """SpecError for every parameter axis, and number of heads, that its mesh axis does not
        divide. (Left alone, some versions of JAX replicate in silence.)"""
        problems = []
        for name, count in heads.items():
            size = self._size(name)
            if count % size:
                problems.append(f"config.mesh: {name}={count} cannot be split over {size} devices")
        for path, leaf in jax.tree.leaves_with_path(
            boxed_params, is_leaf=lambda x: isinstance(x, nn.LogicallyPartitioned)
        ):
            where = jax.tree_util.keystr(path, simple=True, separator="/")
            if not isinstance(leaf, nn.LogicallyPartitioned):
                raise SpecError(
                    f"parameter {where} has no logical axes; make it with Dense, Embedding or "
                    "parameter() of transformer/layers/base.py"
                )
            for length, name in zip(leaf.value.shape, leaf.names, strict=True):
                if name not in dict(self.rules):
                    raise SpecError(f"parameter {where}: {unknown(name, dict(self.rules), 'axis')}")
                if length % self._size(name):
                    problems.append(
                        f"config.mesh: {where} has {length} along {name}, which cannot be split "
                        f"over {self._size(name)} devices"
                    )
        if problems:
            raise SpecError("\n".join(problems))

    def _size(self, logical: str) -> int:
        axes = dict(self.rules).get(logical) or ()
        return math.prod(self.sizes[a] for a in ((axes,) if isinstance(axes, str) else axes))

    def put_rows(self, batch: dict[str, np.ndarray]) -> dict[str, jax.Array]:
        return jax.device_put(batch, self.rows)
