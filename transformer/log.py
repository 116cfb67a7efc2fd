"""Where metrics and samples go. A writer has `write`, `text` and `close`; to add one, write a class
that is made with (workdir, start, total) and give it a line in WRITERS."""

import dataclasses
import json
import math
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Annotated

from rich.console import Console as Terminal
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from transformer.spec import Among, Count, Spec

Metrics = dict[str, float]
QUIET = 5.0  # seconds between progress lines where the output is no terminal


class Writer:
    """Receives everything; the base ignores it. `start` is the step the run goes on from."""

    def __init__(self, workdir: Path, start: int, total: int):
        del workdir, start, total

    def write(self, step: int, split: str, metrics: Metrics) -> None:
        """Metrics of a step: of training, averaged over the steps since the last, or of a split."""

    def text(self, step: int, name: str, text: str) -> None:
        """A piece of text, such as a sample."""

    def close(self) -> None:
        pass


_SHOWN = ("loss", "perplexity", "bits_per_byte", "accuracy", "macro_f1", "bleu", "exact_match")


class Console(Writer):
    """A progress line on stderr with loss, speed and time left; evaluations and samples stand above
    it. Where stderr is no terminal, plain lines every few seconds, without control characters."""

    def __init__(self, workdir: Path, start: int, total: int):
        # Left to itself, rich would obey variables that make pipes pass for terminals.
        self._terminal = Terminal(
            stderr=True, force_terminal=None if sys.stderr.isatty() else False
        )
        self._total, self._last = total, -math.inf
        self._begun: tuple[float, int] | None = None  # time and step of the first line
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[now]}"),
            TimeRemainingColumn(),
            console=self._terminal,
            refresh_per_second=2,
            disable=not self._terminal.is_terminal,
        )
        self._task = self._bar.add_task("training", total=total, completed=start, now="")
        self._bar.start()

    def write(self, step, split, metrics):
        if split != "train":
            shown = [f"{n} {metrics[n]:.4f}" for n in _SHOWN if n in metrics]
            self._print(f"step {step}/{self._total} {split}: {', '.join(shown)}")
            return
        forms = {"loss": "loss {:.4f}", "tokens_per_second": "{:,.0f} tokens/s"}
        now = [form.format(metrics[n]) for n, form in forms.items() if n in metrics]
        self._bar.update(self._task, completed=step, now=", ".join(now))
        if self._bar.disable and time.monotonic() - self._last >= QUIET:
            self._last = time.monotonic()
            self._print(f"step {step}/{self._total}: {', '.join(now + self._left(step))}")

    def text(self, step, name, text):
        self._print(f"{name} at step {step}:\n{text}\n")

    def close(self):
        self._bar.stop()

    def _left(self, step: int) -> list[str]:
        """The time left at the pace since the first line, which also paid for compilation."""
        if self._begun is None:
            self._begun = time.monotonic(), step
        time_0, step_0 = self._begun
        if step == step_0:
            return []
        pace = (time.monotonic() - time_0) / (step - step_0)
        return [f"{timedelta(seconds=round(pace * (self._total - step)))} left"]

    def _print(self, line: str) -> None:
        # Text of a model may hold anything: no markup, and control characters made visible.
        line = "".join(c if c.isprintable() or c in "\n\t" else f"\\x{ord(c):02x}" for c in line)
        self._terminal.print(line, markup=False, highlight=False, soft_wrap=True)


class Jsonl(Writer):
    """metrics.jsonl: one strict JSON object a line, flushed at once. A value that is not finite is
    null. Going on from a step removes what was written after it."""

    def __init__(self, workdir: Path, start: int, total: int):
        path = workdir / "metrics.jsonl"
        kept = [line for line in _lines(path) if line["step"] <= start]
        part = path.with_name(".metrics.jsonl.part")  # replaced as a whole, or not at all
        part.write_text("".join(json.dumps(line) + "\n" for line in kept))
        os.replace(part, path)
        self._file = path.open("a")

    def write(self, step, split, metrics):
        values = {n: _number(v) for n, v in metrics.items()}
        line = {"step": step, "split": split, **values}
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        self._file.flush()

    def close(self):
        self._file.close()


class TensorBoard(Writer):
    """Event files in tensorboard/: scalars as split/name, and text."""

    def __init__(self, workdir: Path, start: int, total: int):
        # Takes a third of a second to import, for this writer only.
        from tensorboardX import SummaryWriter

        # TensorBoard then hides what an earlier part of the run wrote from that step on.
        self._events = SummaryWriter(str(workdir / "tensorboard"), purge_step=start + 1)

    def write(self, step, split, metrics):
        for name, value in metrics.items():
            self._events.add_scalar(f"{split}/{name}", value, step)

    def text(self, step, name, text):
        self._events.add_text(name, f"```\n{text}\n```", step)

    def close(self):
        self._events.close()


class Samples(Writer):
    """samples/NAME-STEP.txt."""

    def __init__(self, workdir: Path, start: int, total: int):
        self._folder = workdir / "samples"

    def text(self, step, name, text):
        self._folder.mkdir(exist_ok=True)
        (self._folder / f"{name}-{step}.txt").write_text(text + "\n", "utf-8")


WRITERS = {"console": Console, "jsonl": Jsonl, "tensorboard": TensorBoard, "samples": Samples}


@dataclasses.dataclass(frozen=True)
class LogSpec(Spec):
    """How often metrics are written, and to whom."""

    every: Count = 10
    writers: tuple[Annotated[str, Among(WRITERS)], ...] = tuple(WRITERS)


class Writers(Writer):
    """All writers of a spec, as one."""

    def __init__(self, spec: LogSpec, workdir: Path, start: int, total: int):
        self._all = [WRITERS[name](workdir, start, total) for name in dict.fromkeys(spec.writers)]

    def write(self, step, split, metrics):
        for writer in self._all:
            writer.write(step, split, metrics)

    def text(self, step, name, text):
        for writer in self._all:
            writer.text(step, name, text)

    def close(self):
        for writer in self._all:
            writer.close()


def _number(value: float) -> float | None:
    if not math.isfinite(value):
        return None
    return value if isinstance(value, int) else float(value)


def _lines(path: Path) -> list[dict]:
    """What is in the file; a last line that a kill cut off is left out."""
    lines = []
    for text in path.read_text(errors="replace").splitlines() if path.exists() else ():
        try:
            line = json.loads(text)
        except ValueError:
            line = None
        if isinstance(line, dict) and isinstance(line.get("step"), int):
            lines.append(line)
        else:
            print(f"{path}: a damaged line is dropped", file=sys.stderr)
    return lines
