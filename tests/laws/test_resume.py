"""Stopping and going on equals never having stopped, bit for bit, at every step."""

import functools
import json
import random
import signal
import subprocess
import sys
import time

import pytest
import tiny_run

from transformer import experiment
from transformer.experiment import Experiment

STEPS = tiny_run.OPTIONS["train.steps"]


def same_outcome(workdir, uninterrupted):
    done, expected = (json.loads((w / "result.json").read_text()) for w in (workdir, uninterrupted))
    assert done["exit_reason"] == "done"
    for key in ("params_sha256", "steps", "tokens", "validation"):
        assert done[key] == expected[key], key
    assert tiny_run.lines(workdir) == tiny_run.lines(uninterrupted)
    for w in (workdir, uninterrupted):  # none was damaged, and so moved aside
        kept = {p.name for p in (w / "checkpoints").iterdir()}
        assert str(done["steps"]) in kept and all(name.isdigit() for name in kept)


def test_two_runs_are_one(tmp_path, trained):
    tiny_run.run(tmp_path)
    same_outcome(tmp_path, trained)


def test_stopped_after_every_step(tmp_path, trained, monkeypatch):
    """One run in twelve parts. Steps 4 and 8 are stopped in their evaluation."""
    for name in ("train_step", "eval_step"):  # traced once for all the parts
        monkeypatch.setattr(
            experiment, name, functools.partial(_once, getattr(experiment, name), {})
        )
    for step in range(1, STEPS):
        with tiny_run.stopped(monkeypatch, step):
            done = tiny_run.run(tmp_path)
        assert (done["exit_reason"], done["steps"]) == ("signal", step)
    tiny_run.run(tmp_path)
    same_outcome(tmp_path, trained)


def _once(build, built, *arguments):
    return built.setdefault("", build(*arguments))


def test_stopped_once(tmp_path, trained, monkeypatch):
    with tiny_run.stopped(monkeypatch, 7):
        assert tiny_run.run(tmp_path)["exit_reason"] == "signal"
    tiny_run.run(tmp_path)
    same_outcome(tmp_path, trained)


MIXED = (
    "mixture(sources=('reverse(length=9, size=200)', 'copy(length=6, size=150)'), weights=(1, 3))"
)
OTHERS = {
    "masked": {
        **{"model.family": "encoder", "objective": "masked_lm(whole_words=True)"},
        **{"data.packing": "buckets(buckets=3)", "train.accumulate": 1},
    },
    "labels": tiny_run.LABELS,
    "decoder": tiny_run.PAIRS | {"model.family": "decoder", "eval.decode": "bleu(beams=2)"},
    "mixture": tiny_run.PAIRS | {"data.source": MIXED, "eval.decode": "exact"},
    "texts": {
        "data.source": f"mixture(sources=({tiny_run.OPTIONS['data.source']!r},), weights=(1,))"
    },
    "spans": {"model.family": "encoder_decoder", "objective": "span_corruption(rate=0.3)"},
    "prefix": {"objective": "prefix_lm"},
}


@pytest.mark.slow
def test_stopped_among_batches_of_different_shapes(tmp_path, translated, monkeypatch):
    """Step 6 is stopped in its evaluation."""
    for step in (1, 6, 8):
        with tiny_run.stopped(monkeypatch, step):
            assert tiny_run.run(tmp_path, **tiny_run.PAIRS)["steps"] == step
    tiny_run.run(tmp_path, **tiny_run.PAIRS)
    same_outcome(tmp_path, translated)


@pytest.mark.slow
@pytest.mark.parametrize("kind", OTHERS)
def test_other_objectives_and_data(tmp_path, monkeypatch, kind):
    """What is drawn for each row, which batches follow each other, and what is decoded."""
    tiny_run.run(tmp_path / "whole", **OTHERS[kind])
    for step in (3, 4, 10):
        with tiny_run.stopped(monkeypatch, step):
            assert tiny_run.run(tmp_path / "parts", **OTHERS[kind])["steps"] == step
    tiny_run.run(tmp_path / "parts", **OTHERS[kind])
    same_outcome(tmp_path / "parts", tmp_path / "whole")


def test_stopped_in_the_last_evaluation(tmp_path, trained, monkeypatch):
    with tiny_run.stopped(monkeypatch, STEPS):
        done = tiny_run.run(tmp_path)
    assert (done["exit_reason"], done["steps"]) == ("signal", STEPS)
    tiny_run.run(tmp_path)
    same_outcome(tmp_path, trained)


def test_killed_before_its_result(tmp_path, trained, monkeypatch):
    """Between the last checkpoint and result.json."""
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(experiment._Session, "_conclude", _interrupted)
        tiny_run.run(tmp_path)
    assert not (tmp_path / "result.json").exists()
    done = tiny_run.run(tmp_path)
    same_outcome(tmp_path, trained)
    expected = json.loads((trained / "result.json").read_text())
    assert done["train"]["loss"] == expected["train"]["loss"]


def _interrupted(*_):
    raise KeyboardInterrupt


def test_batches_are_those_of_an_uninterrupted_run(tmp_path, monkeypatch):
    """Which rows, in which order; how many are made ahead may even change in between."""
    seen = []

    def put_rows(self, batch, original=experiment.Mesh.put_rows):
        seen.append({name: a.tobytes() for name, a in batch.items()})
        return original(self, batch)

    monkeypatch.setattr(experiment.Mesh, "put_rows", put_rows)
    monkeypatch.setattr(Experiment, "evaluate", lambda *_: {"loss": 1.0})
    tiny_run.run(tmp_path / "whole", data__prefetch=0)
    whole, seen[:] = list(seen), []
    with tiny_run.stopped(monkeypatch, 5):
        tiny_run.run(tmp_path / "parts", data__prefetch=5)
    tiny_run.run(tmp_path / "parts", data__prefetch=1)
    assert len(whole) == STEPS and seen == whole
    assert len({batch["tokens"] for batch in seen}) == STEPS


@pytest.mark.slow
def test_killed_at_ten_moments(tmp_path):
    """kill -9 whenever it comes, and once more from the top of the same command."""
    config, draw = tmp_path / "config.py", random.Random(0)
    # Long enough that most of the kills fall between the first step and the last.
    options = {"train__steps": 200, "checkpoint__every": 7, "eval__every": 10}
    config.write_text(f"def get_config():\n    return {tiny_run.config(**options)!r}\n")

    def arguments(name):
        return f"--config={config}", f"--workdir={tmp_path / name}"

    # What is compiled is kept: only a second run takes as long as those that are killed.
    assert tiny_run.command("train.py", *arguments("first")).returncode == 0
    begun = time.monotonic()
    assert tiny_run.command("train.py", *arguments("whole")).returncode == 0
    whole, killed = time.monotonic() - begun, 0
    for _ in range(10):
        with subprocess.Popen(
            [sys.executable, tiny_run.ROOT / "train.py", *arguments("parts")],
            env=tiny_run.environment(8),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        ) as process:
            time.sleep(draw.uniform(0.3, 0.8) * whole)
            process.send_signal(signal.SIGKILL)
        killed += process.returncode == -signal.SIGKILL
    assert killed
    assert tiny_run.command("train.py", *arguments("parts")).returncode == 0
    same_outcome(tmp_path / "parts", tmp_path / "whole")
