"""Every file in configs/: it parses, its run traces, and its resolved text is the one on file, so
that a changed default shows in the diff."""

import contextlib
import json
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer import cli, optim, spec
from transformer.experiment import RunSpec, resolve
from transformer.generate import refuse_lengths
from transformer.mesh import Mesh
from transformer.state import Birth
from transformer.step import train_step

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden" / "configs"
CONFIGS = sorted(p for p in (ROOT / "configs").rglob("*.py"))
VOCAB = 100  # in place of what the data would say
UPDATE = "UPDATE_GOLDEN"


def name(config: Path) -> str:
    return ".".join(config.relative_to(ROOT / "configs").with_suffix("").parts)


@pytest.fixture(params=CONFIGS, ids=name)
def config(request) -> tuple[str, RunSpec]:
    config: Any = cli.load(str(request.param))
    return name(request.param), spec.parse(RunSpec, config.to_dict())


def test_there_are_configs():
    assert CONFIGS


def test_the_resolved_text(config):
    title, run = config
    text = "".join(f"{path} = {value!r}\n" for path, value in leaves(spec.as_dict(run)))
    file = GOLDEN / f"{title}.txt"
    if os.environ.get(UPDATE):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    assert file.exists() and file.read_text() == text, (
        f"configs/{title} now means something else than tests/golden/configs/{title}.txt says. "
        f"If that is meant, write it anew: {UPDATE}=1 pytest {Path(__file__).relative_to(ROOT)}"
    )


def leaves(section, path="config"):
    for key, value in section.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{path}.{key}")
        else:
            yield f"{path}.{key}", value


def test_the_stored_form_is_read_back(config):
    _, run = config
    assert spec.parse(RunSpec, json.loads(json.dumps(spec.as_dict(run)))) == run


def test_an_update_traces(config, monkeypatch):
    """With the whole model, on one device, without computing anything."""
    _, run = config
    run = resolve(run, run.model.vocab or VOCAB)
    refuse_lengths(run.model, [1 + len(run.eval.prompt)], run.eval.sample)
    mesh = Mesh(run.mesh, jax.devices()[:1])
    steps = run.train.steps or 10**5
    tx, _ = optim.build(run.optimizer, run.schedule, steps, run.model.dim, run.train.clip)
    birth = Birth(run.model, tx, mesh, run.train.seed)
    update = train_step(
        *(run.model, run.objective(), tx, mesh, birth.shardings),
        np.ones(VOCAB, np.int32),
        *(run.train.seed, run.train.accumulate),
    )
    row = jax.ShapeDtypeStruct((run.data.batch_size, run.data.seq_len + 1), jnp.int32)
    batch = dict.fromkeys(("tokens", "segments", "positions"), row)
    with mesh.on():
        monkeypatch.setattr(mesh, "on", contextlib.nullcontext)  # it may not be entered in a trace
        state, sums = jax.eval_shape(update, birth.abstract, batch)
    assert jax.tree.map(lambda a: (a.shape, a.dtype), state) == jax.tree.map(
        lambda a: (a.shape, a.dtype), birth.abstract
    )
    assert all(value.shape == () for value in jax.tree.leaves(sums))
