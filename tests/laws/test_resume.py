"""Stopping and going on equals never having stopped, bit for bit, at every step."""

import json
import random
import signal
import subprocess
import sys
import time

import pytest
import tiny_run

from transformer import experiment
from transformer.experiment import Experiment, train

STEPS = tiny_run.OPTIONS["train.steps"]


def same_outcome(workdir, uninterrupted):
    done, expected = (
        json.loads((w / "result.json").read_text()) for w in (workdir, uninterrupted)
    )
    assert done["exit_reason"] == "done"
    for key in ("params_sha256", "steps", "tokens", "validation"):
        assert done[key] == expected[key], key
    assert tiny_run.lines(workdir) == tiny_run.lines(uninterrupted)


def test_two_runs_are_one(tmp_path, trained):
    tiny_run.run(tmp_path)
    same_outcome(tmp_path, trained)


def test_stopped_after_every_step(tmp_path, trained, monkeypatch):
    """One run in twelve parts. Steps 4 and 8 are stopped in their evaluation."""
    for step in range(1, STEPS):
        with tiny_run.stopped(monkeypatch, step):
            done = tiny_run.run(tmp_path)
        assert (done["exit_reason"], done["steps"]) == ("signal", step)
    tiny_run.run(tmp_path)
    same_outcome(tmp_path, trained)


@pytest.mark.parametrize("step", [1, 4, 7])
def test_stopped_once(tmp_path, trained, monkeypatch, step):
    with tiny_run.stopped(monkeypatch, step):
        assert tiny_run.run(tmp_path)["exit_reason"] == "signal"
    tiny_run.run(tmp_path)
    same_outcome(tmp_path, trained)


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
def test_killed_at_ten_moments(tmp_path, trained):
    """kill -9 as often as it takes, whenever it comes."""
    moments, config = random.Random(0), tmp_path / "config.py"
    config.write_text(f"def get_config():\n    return {tiny_run.config()!r}\n")
    for _ in range(10):
        process = subprocess.Popen(
            [sys.executable, tiny_run.ROOT / "train.py", f"--config={config}"]
            + [f"--workdir={tmp_path / 'w'}"],
            env=tiny_run.environment(8),
            stderr=subprocess.DEVNULL,
        )
        time.sleep(moments.uniform(2, 9))
        process.send_signal(signal.SIGKILL)
        process.wait()
    train(tiny_run.config(), tmp_path / "w")
    same_outcome(tmp_path / "w", trained)
