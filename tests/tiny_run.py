"""A run of a few seconds that many tests train, stop, break and look at."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import common
import jax

from transformer import result, spec
from transformer.checkpoint import Checkpoints, CheckpointSpec
from transformer.data.tokens import Vocabulary
from transformer.experiment import RunSpec, defaults, resolve, train
from transformer.meter import Meter
from transformer.stop import Stop

ROOT = Path(__file__).resolve().parents[1]
TEXT = Path(__file__).parent / "bottles.txt"

# Twelve updates of a tiny model with everything on that a resumed run could get wrong.
OPTIONS = {
    "model.dim": 16,
    "model.depth": 2,
    "model.heads": 2,
    "model.dropout": 0.1,
    "data.source": f"text(path={str(TEXT)!r}, documents='paragraph')",
    "data.tokenizer": "chars",
    "data.batch_size": 16,
    "data.seq_len": 16,
    # Another rate at each step, and one compiled program for any number of steps.
    "schedule": "inverse_sqrt(peak=1e-2, warmup=1)",
    "train.steps": 12,
    "train.accumulate": 2,
    "eval.every": 4,
    "checkpoint.every": 3,
    "log.every": 1,
    "log.writers": ("jsonl",),
}


def config(**changed: Any) -> dict[str, Any]:
    """The run's config, with options changed: `train__steps=3` for `train.steps`."""
    out = defaults()
    options = OPTIONS | {name.replace("__", "."): value for name, value in changed.items()}
    for path, value in options.items():
        *sections, name = path.split(".")
        section: Any = out
        for key in sections:
            section = section[key]
        section[name] = value
    return out.to_dict()


def run_spec(**changed: Any) -> RunSpec:
    return spec.parse(RunSpec, config(**changed))


def run(workdir: Path, **changed: Any) -> dict[str, Any]:
    return train(config(**changed), workdir)


def lines(workdir: Path, split: str | None = None) -> list[dict[str, Any]]:
    """What metrics.jsonl holds, but for what depends on the clock."""
    found = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    for line in found:
        for name in {"seconds", "tokens_per_second"} & set(line):
            del line[name]
    return [line for line in found if split in (None, line["split"])]


@contextlib.contextmanager
def stopped(monkeypatch, step: int) -> Iterator[None]:
    """A signal seems to come while that step is made."""
    made = [-1]

    def add(self, step, sums, original=Meter.add):
        made.append(step)
        original(self, step, sums)

    with monkeypatch.context() as patch:
        patch.setattr(Meter, "add", add)
        requested = property(lambda self: made[-1] >= step, lambda self, value: None)
        patch.setattr(Stop, "requested", requested, raising=False)
        yield


def command(script: str, *arguments: Any, devices: int = 8, **more: Any):
    """Runs a command of the repository to its end."""
    return subprocess.run(
        [sys.executable, ROOT / script, *map(str, arguments)],
        capture_output=True,
        text=True,
        env=environment(devices),
        **more,
    )


def environment(devices: int) -> dict[str, str]:
    config: Any = jax.config
    flags = f"--xla_force_host_platform_device_count={devices}"
    return os.environ | {
        "XLA_FLAGS": flags,
        "PYTHONWARNINGS": "error",
        "GLIBC_TUNABLES": "",  # the user's own: nothing starts itself once more (launch.py)
        "JAX_COMPILATION_CACHE_DIR": config.jax_compilation_cache_dir,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
    }


# The same of letters that are to be said backwards, in batches of different shapes.
PAIRS = {
    "model.family": "encoder_decoder",
    "model.depth": 1,
    "data.source": "reverse(length=9, test_length=9, size=320, held_out=24, symbols=6)",
    "data.packing": "buckets(buckets=2)",
    "data.seq_len": 12,
    "objective": "seq2seq",
    "train.accumulate": 1,
    "eval.every": 6,
    "checkpoint.best": "nll",
}
# Texts with labels.
LABELS = PAIRS | {
    "model.family": "encoder",
    "data.source": "listops(length=12, test_length=20, size=320, held_out=24)",
    "data.seq_len": 15,
    "objective": "classify",
}


def untrained(workdir: Path, vocabulary: Vocabulary, **changed: Any) -> Path:
    """What a run leaves that others use, with random parameters."""
    run = resolve(run_spec(**changed), vocabulary)
    workdir.mkdir()
    result.write_json(workdir / "config.json", spec.as_dict(run))
    vocabulary.save(workdir)
    store = Checkpoints(workdir / "checkpoints", CheckpointSpec())
    store.save(0, {"params": jax.tree.map(lambda a: 4 * a, common.params(run.model))}, {})
    store.close()
    return workdir
