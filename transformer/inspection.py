"""What a config means before it runs, as text: resolved options, layers, parameters."""

import math
import tempfile
from collections.abc import Iterator
from typing import Any

import jax

from transformer import result, spec
from transformer.data import feed
from transformer.experiment import RunSpec, resolve
from transformer.model import PER_LAYER, ModelSpec
from transformer.state import init_params


def sheet(run: RunSpec, workdir: str | None = None) -> str:
    """The whole report. The data is tokenised (in `workdir`, or for nothing but its vocabulary),
    since sizes of the model depend on it."""
    with tempfile.TemporaryDirectory() as scratch:
        place = result.folder(workdir or scratch)
        run = resolve(run, feed.prepare(run.data, place).vocabulary)
    boxed = jax.eval_shape(lambda: init_params(run.model, 0))
    parts = [
        "\n".join(f"config.{path} = {value!r}" for path, value in spec.flat(spec.as_dict(run))),
        "\n".join(_layers(run.model)),
        "\n".join(_parameters(boxed)),
    ]
    return "\n\n".join(filter(None, parts))


def _layers(model: ModelSpec) -> Iterator[str]:
    """One line a layer, where choices vary."""
    for side, depth in zip(("encoder", "decoder"), model.depths, strict=True):
        here = model.of(side)
        if not depth or here.period == 1:
            continue
        for i in range(depth):
            layer = here.layer(i)
            varied = {n: getattr(layer, n) for n in PER_LAYER if len(getattr(here, n).entries) > 1}
            if len(here.masks.entries) > 1:
                varied["mask"] = here.masks.at(i)
            yield f"{side} layer {i}: " + ", ".join(f"{n}={c}" for n, c in varied.items())


def _parameters(boxed: Any) -> Iterator[str]:
    rows = []
    for path, leaf in jax.tree.leaves_with_path(boxed, is_leaf=lambda x: hasattr(x, "names")):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        rows.append((name, leaf.value.shape, leaf.names, math.prod(leaf.value.shape)))
    total = sum(row[3] for row in rows)
    width = max(len(row[0]) for row in rows)
    yield f"{'parameter':{width}}  {'shape':>16}  {'count':>12}  {'share':>6}  axes"
    for name, shape, axes, count in rows:
        yield (
            f"{name:{width}}  {'x'.join(map(str, shape)):>16}  {count:>12,}  "
            f"{count / total:>6.1%}  {', '.join(map(str, axes))}"
        )
    embeddings = sum(row[3] for row in rows if row[0].endswith("embedding"))
    yield f"total {total:,} parameters ({embeddings:,} in embeddings), {4 * total:,} bytes"
