"""Counts what a run has done and turns the sums of its steps into metrics, without making the
device wait: values are read a step after they are due."""

import contextlib
import math
import time
from collections.abc import Iterator

import jax

from transformer.evaluate import means, total
from transformer.objective import Sums


class NumericalFailure(ArithmeticError):
    """An update is no longer finite; the message names what of it, and its step."""


class Meter:
    """Spans all processes of a run.

    Attributes:
      tokens: targets that counted in all updates read so far.
      seconds: time spent on updates and their data; evaluation and checkpointing do not count.
      step: the last update read.
      last: the metrics of the last group of steps.
    """

    def __init__(self, every: int, tokens: int = 0, seconds: float = 0.0, step: int = 0):
        self.tokens, self.seconds, self.step = tokens, seconds, step
        self.last: dict[str, float] = {}
        self._every = every
        self._waiting: list[tuple[int, Sums]] = []
        self._group: list[Sums] = []
        self._since = time.perf_counter()
        self._reported = tokens, seconds

    def add(self, step: int, sums: Sums) -> None:
        self._waiting.append((step, sums))

    def due(self, before: int | None = None) -> Iterator[tuple[int, dict[str, float]]]:
        """The metrics of each group of `every` steps that is complete: (last step, metrics).

        With `before`, steps from that one on are left alone, and nothing is read unless a group is
        complete. Without, all steps are read: afterwards the attributes are up to date.
        """
        ready = [(n, s) for n, s in self._waiting if before is None or n < before]
        if before is not None and not any(n % self._every == 0 for n, _ in ready):
            return
        self._waiting = self._waiting[len(ready) :]
        for step, sums in ready:
            self._read(step, jax.device_get(sums))
            if step % self._every == 0:
                yield step, self._close()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Time inside does not count."""
        self._tick()
        yield
        self._since = time.perf_counter()

    def _read(self, step: int, sums: Sums) -> None:
        for name in ("loss", "grad_norm", "update_norm"):  # the last tells of the new parameters
            if not math.isfinite(sums[name][0]):
                raise NumericalFailure(f"{name} at step {step}")
        self.tokens += round(float(sums["loss"][1]))
        self.step = step
        self._group.append(sums)

    def _close(self) -> dict[str, float]:
        self._tick()
        tokens, seconds = self._reported
        self.last = means(total(self._group)) | {
            "tokens": self.tokens,
            "seconds": self.seconds,
            "tokens_per_second": (self.tokens - tokens) / max(self.seconds - seconds, 1e-9),
        }
        self._reported, self._group = (self.tokens, self.seconds), []
        return dict(self.last)

    def _tick(self) -> None:
        now = time.perf_counter()
        self.seconds, self._since = self.seconds + now - self._since, now
