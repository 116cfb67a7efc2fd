"""Writers: what is written, and what a resumed run leaves of it."""

import io
import json
import math
import os
import re
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tensorboardX.proto import event_pb2

from transformer import log, spec
from transformer.log import WRITERS, Console, Jsonl, LogSpec, Samples, TensorBoard, Writers
from transformer.spec import SpecError

TRAIN = {"loss": 2.5, "tokens_per_second": 1234.5, "learning_rate": 1e-3}
PROTO: Any = event_pb2  # its classes are made when it is imported
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f\x80-\x9f]")


def strict(text):
    """JSON as its standard has it: no NaN, no Infinity."""

    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def jsonl(workdir, start, steps):
    writer = Jsonl(workdir, start, 100)
    for step in steps:
        writer.write(step, "train", {"loss": 1 / step})
    writer.close()
    return [line["step"] for line in strict((workdir / "metrics.jsonl").read_text())]


class Stream(io.StringIO):
    encoding = "utf-8"

    def __init__(self, terminal):
        super().__init__()
        self.isatty = lambda: terminal


@pytest.fixture
def console(monkeypatch, tmp_path):
    """(a console writer, what it has shown) on a terminal or not."""

    def make(terminal, start=0, total=200):
        for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "COLUMNS", "JUPYTER_COLUMNS"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("TERM", "xterm-256color")
        monkeypatch.setenv("COLUMNS", "120")
        monkeypatch.setattr(sys, "stderr", stream := Stream(terminal))
        return Console(tmp_path, start, total), stream

    return make


# -------------------------------------------------------------------------------- metrics.jsonl


def test_lines(tmp_path):
    writer = Jsonl(tmp_path, 0, 10)
    writer.write(5, "train", TRAIN)
    path = tmp_path / "metrics.jsonl"
    assert strict(path.read_text()) == [{"step": 5, "split": "train", **TRAIN}], "flushed at once"
    values = {"a": math.nan, "b": math.inf, "c": -math.inf, "d": np.float32(0.5), "e": np.int64(7)}
    writer.write(5, "validation", values)
    writer.close()
    assert strict(path.read_text())[1] == {
        **{"step": 5, "split": "validation"},
        **{"a": None, "b": None, "c": None, "d": 0.5, "e": 7},
    }


def test_resuming_removes_what_came_later(tmp_path):
    assert jsonl(tmp_path, 0, [10, 20, 30, 40]) == [10, 20, 30, 40]
    assert jsonl(tmp_path, 20, [25, 30]) == [10, 20, 25, 30]
    assert jsonl(tmp_path, 30, []) == [10, 20, 25, 30]
    assert jsonl(tmp_path, 0, [10]) == [10], "a run that begins anew"
    assert os.listdir(tmp_path) == ["metrics.jsonl"]


@pytest.mark.parametrize(
    "torn", ['{"step": 20, "split": "tr', '{"step": 20', "{", "2", '"', "\0\0\0", '{"split": "x"}']
)
def test_a_torn_last_line_is_removed(tmp_path, capsys, torn):
    jsonl(tmp_path, 0, [10])
    with (tmp_path / "metrics.jsonl").open("a") as f:
        f.write(torn)
    assert jsonl(tmp_path, 20, [30]) == [10, 30]
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_kill_tears_at_most_the_last_line(tmp_path):
    """The lines of a process that is killed without warning are in the file."""
    code = (
        "import os, pathlib, signal, sys; from transformer.log import Jsonl\n"
        "w = Jsonl(pathlib.Path(sys.argv[1]), 0, 9)\n"
        "for step in range(1, 6): w.write(step, 'train', {'loss': 1.0})\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    root = Path(log.__file__).parents[1]
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=root, timeout=60)
    assert [x["step"] for x in strict((tmp_path / "metrics.jsonl").read_text())] == [1, 2, 3, 4, 5]


def test_cutting_is_atomic(tmp_path, monkeypatch):
    """If it fails midway, the file is as it was."""
    jsonl(tmp_path, 0, [10, 20])
    before = (tmp_path / "metrics.jsonl").read_bytes()

    def fail(*_):
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="no space left"):
        Jsonl(tmp_path, 10, 100)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


# -------------------------------------------------------------------------------------- console


def test_a_pipe_gets_plain_lines_at_times(console, monkeypatch):
    writer, shown = console(terminal=False)
    now = 1000.0
    monkeypatch.setattr(log.time, "monotonic", lambda: now)
    for step in range(1, 121):
        now += 0.1  # 12 seconds in all
        writer.write(step, "train", TRAIN)
    writer.write(120, "validation", {"loss": 2.25, "perplexity": 9.4877})
    writer.text(120, "sample", "To be\x1b[31m or [bold]not\r\x07\n\tto be")
    writer.close()
    text = shown.getvalue()
    assert not CONTROL.search(text.replace("\n", "")), text
    lines = text.splitlines()
    training = [line for line in lines if "loss 2.5000" in line]
    assert len(training) == 3, "at once, and every five seconds"
    assert training[0].startswith("step 1/200: loss 2.5000, 1,234 tokens/s")
    assert "step 120/200 validation: loss 2.2500, perplexity 9.4877" in lines
    assert "[bold]not" in text and "\n" in text


def test_a_pipe_is_told_how_long_it_takes(console, monkeypatch):
    """100 of 200 steps were done before, 10 more took 60 s: 90 are left, nine minutes."""
    writer, shown = console(terminal=False, start=100)
    now = 1000.0
    monkeypatch.setattr(log.time, "monotonic", lambda: now)
    writer.write(101, "train", TRAIN)
    now += 60
    writer.write(111, "train", TRAIN)
    writer.close()
    assert shown.getvalue().splitlines()[-1].endswith("tokens/s, 0:08:54 left")


def test_colour_forced_on_leaves_a_pipe_plain(console, monkeypatch):
    console(terminal=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr(sys, "stderr", shown := Stream(terminal=False))
    writer = Console(Path(), 0, 10)
    writer.write(1, "train", TRAIN)
    writer.close()
    assert not CONTROL.search(shown.getvalue().replace("\n", "")), shown.getvalue()


def test_a_terminal_gets_a_bar(console):
    writer, shown = console(terminal=True, start=10)
    writer.write(20, "train", TRAIN)
    writer.write(20, "validation", {"loss": 2.25})
    writer.close()
    text = shown.getvalue()
    assert "\x1b[" in text and "20/200" in text and "2.5000" in text and "1,234 tokens/s" in text
    assert "step 20/200 validation: loss 2.2500\n" in text


@pytest.mark.parametrize("terminal", [True, False])
def test_metrics_that_are_missing_or_not_finite(console, terminal):
    writer, shown = console(terminal)
    writer.write(1, "validation", {})
    writer.write(1, "train", {"loss": math.nan})
    writer.close()
    assert "nan" in shown.getvalue()


# -------------------------------------------------------------------------- tensorboard, samples


def events(workdir) -> list[Any]:
    """The events of all files, in the order of their names: each is its length, 4 bytes of
    checksum, itself, and 4 bytes of checksum (the format of TFRecord)."""
    found = []
    for path in sorted((workdir / "tensorboard").iterdir()):
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            found.append(PROTO.Event.FromString(data[12 : 12 + length]))
            data = data[16 + length :]
    return found


def scalars(workdir):
    return [
        (event.step, value.tag, value.simple_value)
        for event in events(workdir)
        for value in event.summary.value
        if value.WhichOneof("value") == "simple_value"
    ]


def test_tensorboard(tmp_path):
    writer = TensorBoard(tmp_path, 0, 10)
    writer.write(5, "train", TRAIN)
    writer.write(5, "validation", {"loss": math.nan})
    writer.text(5, "sample", "To be")
    writer.close()
    *training, (step, tag, value) = scalars(tmp_path)
    assert training == [(5, f"train/{n}", pytest.approx(v)) for n, v in TRAIN.items()]
    assert (step, tag) == (5, "validation/loss") and math.isnan(value)
    (text,) = [v for e in events(tmp_path) for v in e.summary.value if v.HasField("tensor")]
    assert "sample" in text.tag and b"To be" in text.tensor.string_val[0]


@pytest.mark.parametrize(("start", "kept"), [(20, [10, 20, 25]), (0, [25])])
def test_tensorboard_hides_what_a_resumed_run_does_again(tmp_path, start, kept):
    """By TensorBoard's rule: a START event hides what comes before it with its step or a higher."""
    for part, (begin, done) in enumerate([(0, [10, 20, 30]), (start, [25])]):
        writer = TensorBoard(tmp_path, begin, 100)
        for step in done:
            writer.write(step, "train", {"loss": 1.0})
        writer.close()
        (new,) = [p for p in (tmp_path / "tensorboard").iterdir() if "tfevents" in p.name]
        new.rename(new.with_name(f"part {part}"))  # or a second within the same second replaces it
    shown: list[int] = []
    for event in events(tmp_path):
        if event.session_log.status == PROTO.SessionLog.START:
            shown = [step for step in shown if step < event.step]
        elif event.HasField("summary"):
            shown.append(event.step)
    assert shown == kept


def test_samples(tmp_path):
    writer = Samples(tmp_path, 0, 10)
    writer.text(5, "sample", "Zu sein – 你好\n")
    writer.text(5, "sample", "again")
    writer.text(10, "sample", "later")
    found = {p.name: p.read_text("utf-8") for p in (tmp_path / "samples").iterdir()}
    assert found == {"sample-5.txt": "again\n", "sample-10.txt": "later\n"}


# ----------------------------------------------------------------------------------- all of them


def test_all_writers_as_one(tmp_path, capsys):
    writers = Writers(LogSpec(), tmp_path, 0, 10)
    writers.write(5, "train", TRAIN)
    writers.text(5, "sample", "To be")
    writers.close()
    assert {p.name for p in tmp_path.iterdir()} == {"metrics.jsonl", "samples", "tensorboard"}
    assert "step 5/10" in capsys.readouterr().err


def test_writers_are_chosen(tmp_path):
    chosen = spec.parse(LogSpec, {"writers": "jsonl", "every": 5})
    Writers(chosen, tmp_path, 0, 10).close()
    assert os.listdir(tmp_path) == ["metrics.jsonl"]
    assert spec.parse(LogSpec, {}).writers == tuple(WRITERS)
    with pytest.raises(SpecError, match=r"config.writers\[1\]: unknown name 'consol'; did you"):
        spec.parse(LogSpec, {"writers": ("jsonl", "consol")})
    Writers(spec.parse(LogSpec, {"writers": ()}), tmp_path, 0, 10).write(1, "train", TRAIN)
