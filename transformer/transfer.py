"""Parameters of another run as a beginning: matched by name, and nothing left unsaid."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
from flax import traverse_util

from transformer import result, spec
from transformer.checkpoint import Checkpoints, CheckpointSpec
from transformer.data.tokens import Vocabulary
from transformer.model import ModelSpec, stack, unstack
from transformer.spec import SpecError
from transformer.state import abstract_params

Flat = Mapping[tuple[str, ...], Any]
Paths = set[tuple[str, ...]]

# Differences in these change no parameter and no meaning of one.
_HARMLESS = {"vocab", "max_len", "classes", "pool", "dropout", "attention_dropout", "init"}
_HARMLESS |= {"scan", "remat", "kernel", "dtype", "source_vocab"}
_ROWS = ("vocab", "source_vocab", "max_len")  # of tables; a run may have more than its data needs


def transferred(params: Any, model: ModelSpec, vocabulary: Vocabulary, workdir: str) -> Any:
    """`params`, fresh and placed on their devices, with those that the newest checkpoint of
    `workdir` has too replaced by its own; a classifier of other labels stays fresh.

    Prints what was taken, what stays new, what the other run has besides, and which options of the
    two models differ. SpecError if a parameter has another shape there, if none is found, or if the
    tokenizer, on which the meaning of the embeddings depends, is another.
    """
    try:
        folder = result.folder(workdir)
        there = spec.parse(ModelSpec, result.read_json(folder / "config.json").get("model") or {})
        was = Vocabulary.load(folder)
        store = Checkpoints(folder / "checkpoints", CheckpointSpec())
        step, found = store.restore_params(abstract_params(there), "latest")
        # Layer by layer, whether or not either of the two is scanned over its layers.
        theirs, ours = _flat(unstack(found)), _flat(unstack(jax.device_get(params)))
        taken = {path for path in ours if path in theirs}
        if was.labels != vocabulary.labels:
            taken = {path for path in taken if "classifier" not in path}
        _refuse_tokenizers(was, vocabulary, folder, taken)
        _refuse_shapes(ours, theirs, taken, there, model)
    except SpecError as e:
        raise SpecError(f"train.init_from={workdir}: {e}") from None
    _report(f"{workdir}, step {step}", ours, theirs, taken)
    for line in _differences(there, model):
        print(f"  differs: {line}", file=sys.stderr)
    merged = {path: theirs[path] if path in taken else leaf for path, leaf in ours.items()}
    made = stack(traverse_util.unflatten_dict(jax.device_get(merged)), model)
    return jax.tree.map(lambda leaf, value: jax.device_put(value, leaf.sharding), params, made)


def _refuse_tokenizers(was: Vocabulary, now: Vocabulary, folder: Path, taken: Paths) -> None:
    fields = {"text": "tokenizer"}
    if any("source_embed" in path for path in taken):
        fields["source"] = "source_tokenizer"
    for field, name in fields.items():
        if was.of(field).fingerprint != now.of(field).fingerprint:
            place = str(folder / f"{name}.json" if field == "source" else folder)
            raise SpecError(
                f"was trained with another tokenizer; set data.{name} to saved(path={place!r})"
            )


def _refuse_shapes(
    ours: Flat, theirs: Flat, taken: Paths, there: ModelSpec, here: ModelSpec
) -> None:
    """SpecError where parameters have another shape, or there are none to be taken."""
    if not taken:
        raise SpecError("no parameter of that run is found in this one")
    problems = [
        f"{'/'.join(path)}: {_shape(theirs[path])} there, {_shape(leaf)} here"
        for path, leaf in ours.items()
        if path in taken and theirs[path].shape != leaf.shape
    ]
    if problems:
        sizes = {name: (getattr(there, name) or 0, getattr(here, name) or 0) for name in _ROWS}
        problems += [f"set model.{n}={was}" for n, (was, now) in sizes.items() if was > now]
        raise SpecError("\n  ".join(["parameters of another shape", *problems]))


def _report(where: str, ours: Flat, theirs: Flat, taken: Paths) -> None:
    values = sum(ours[path].size for path in taken)
    print(f"train.init_from: {where}", file=sys.stderr)
    print(f"  taken: {len(taken)} of {len(ours)} parameters, {values:,} values", file=sys.stderr)
    for what, tree in (("new", ours), ("left there", theirs)):
        for path in tree:
            if path not in taken:
                print(f"  {what}: {'/'.join(path)} {_shape(tree[path])}", file=sys.stderr)


def _differences(there: ModelSpec, here: ModelSpec) -> list[str]:
    was, now = spec.as_dict(there), spec.as_dict(here)
    return [
        f"model.{name}={was[name]} there, {now[name]} here"
        for name in now
        if was[name] != now[name] and name not in _HARMLESS
    ]


def _flat(params: Any) -> Flat:
    flat: Any = traverse_util.flatten_dict(params)
    return flat


def _shape(leaf: Any) -> str:
    return "x".join(map(str, leaf.shape))
