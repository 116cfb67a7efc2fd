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

# Differences in these change no parameter and no meaning of one.
_HARMLESS = {"vocab", "max_len", "classes", "pool", "dropout", "attention_dropout", "init"}
_HARMLESS |= {"scan", "remat", "kernel", "dtype", "source_vocab"}


def transferred(params: Any, model: ModelSpec, vocabulary: Vocabulary, workdir: str) -> Any:
    """`params`, fresh and placed on their devices, with those that the newest checkpoint of
    `workdir` has too replaced by its own.

    Prints what was taken, what stays new, what the other run has besides, and which options of the
    two models differ. SpecError if a parameter has another shape there, if none is found, or if the
    tokenizer, on which the meaning of the embeddings depends, is another.
    """
    folder = result.folder(workdir)
    there = spec.parse(ModelSpec, result.read_json(folder / "config.json").get("model") or {})
    _refuse_tokenizer(vocabulary, folder)
    store = Checkpoints(folder / "checkpoints", CheckpointSpec())
    step, found = store.restore_params(abstract_params(there), "latest")
    theirs, ours = _flat(stack(unstack(found), model)), _flat(params)
    other = [
        f"{'/'.join(path)}: {_shape(theirs[path])} there, {_shape(leaf)} here"
        for path, leaf in ours.items()
        if path in theirs and theirs[path].shape != leaf.shape
    ]
    if other:
        lines = "\n  ".join(other)
        raise SpecError(f"train.init_from={workdir}: parameters of another shape\n  {lines}")
    taken = {path for path in ours if path in theirs}
    if not taken:
        raise SpecError(f"train.init_from={workdir}: no parameter of that run is found in this one")
    _report(f"{workdir}, step {step}", ours, theirs, taken)
    for line in _differences(there, model):
        print(f"  differs: {line}", file=sys.stderr)
    out = {
        path: jax.device_put(theirs[path], leaf.sharding) if path in taken else leaf
        for path, leaf in ours.items()
    }
    return traverse_util.unflatten_dict(out)


def _refuse_tokenizer(vocabulary: Vocabulary, folder: Path) -> None:
    if Vocabulary.load(folder).tokenizer.fingerprint != vocabulary.tokenizer.fingerprint:
        raise SpecError(
            f"train.init_from={folder}: was trained with another tokenizer; set data.tokenizer to "
            f"saved(path={str(folder)!r})"
        )


def _report(where: str, ours: Flat, theirs: Flat, taken: set[tuple[str, ...]]) -> None:
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
