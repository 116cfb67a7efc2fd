"""Checkpoints that can be trusted: written by Orbax in the background, kept by number and by best
metric, verified byte for byte when they are read.

Each step is a directory with the state and a record (JSON): what else a run needs to go on, and a
manifest with shape, dtype and checksum of every array, since a flipped bit would load in silence.
"""

import contextlib
import dataclasses
import functools
import json
import logging
import math
import re
import sys
import zlib
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from transformer.spec import Count, Spec, SpecError, flat

Which = int | str  # a step, "latest" or "best"


@dataclasses.dataclass(frozen=True)
class CheckpointSpec(Spec):
    """When checkpoints are made and which are kept. The last step is always saved."""

    every: Count = 250
    keep: Count = 2  # the newest so many
    best: str | None = "loss"  # and the one with the lowest value of this metric of the evaluation
    # made at its step; None: not kept


class Damaged(Exception):
    """A checkpoint that cannot be used; the message says why."""


class Checkpoints:
    """The checkpoints of one directory. Reading creates and changes nothing in it."""

    def __init__(self, directory: Path, spec: CheckpointSpec):
        self.directory, self._spec = Path(directory).expanduser().absolute(), spec
        self._orbax: ocp.CheckpointManager | None = None
        self._saved = -1  # the step that was last saved or restored
        self._broken: list[int] = []  # steps above it that cannot be read
        self._metrics: dict[int, float] = {}  # finite ones, of the checkpoints there are

    def steps(self) -> list[int]:
        """Steps with a directory, oldest first; whether they can be read is another matter."""
        if not self.directory.is_dir():
            return []
        found = (p.name for p in self.directory.iterdir() if p.name.isdecimal() and p.is_dir())
        return sorted(int(name) for name in found if name == str(int(name)))

    def best_step(self) -> int | None:
        """The step with the lowest metric, the first of them if several have it."""
        return _lowest(self._read_metrics())

    def save(self, step: int, state: Any, record: dict, metric: float | None = None) -> bool:
        """Starts writing the state (a tree of arrays) and the record of a step, and returns once
        the arrays may be overwritten; False if that step was just saved or restored. A metric that
        is not finite never counts as best. SpecError for a step below the newest; OSError if this
        checkpoint, or the one before it, cannot be written."""
        if step == self._saved:
            return False
        self.wait()
        manager = self._manager()
        if (newest := manager.latest_step()) is not None and step <= newest:
            raise SpecError(
                f"{self.directory}: step {step} is not above the newest there, {newest}"
            )
        metric = float(metric) if metric is not None and math.isfinite(metric) else None
        record = {**record, "step": step, "metric": metric, "manifest": _manifest(state)}
        record["checksum"] = _checksum(record)
        if metric is not None:
            self._metrics[step] = metric
        with self._writing(step):
            done = manager.save(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.StandardSave(state), record=ocp.args.JsonSave(record)
                ),
            )
        assert done
        self._saved = step
        return True

    def restore(
        self, abstract: Any, which: Which, agree: Callable[[dict], None] = lambda record: None
    ) -> tuple[int, Any, dict] | None:
        """(step, state, record) of a checkpoint, None if there is none at all.

        `abstract` has the shapes, dtypes and shardings to restore to; `agree` sees the record
        before the arrays are read and raises what it has against it. "latest" is the newest that
        is intact; those skipped are named on stderr. Raises SpecError if none is.
        """
        steps = self.steps()
        if not steps:
            return None
        if which != "latest":
            step = self._find(which)
            try:
                return self._intact(step, abstract, agree)
            except Damaged as e:
                raise SpecError(f"{self.directory}/{step}: cannot be used: {e}") from None
        problems = []
        for step in reversed(steps):
            try:
                found = self._intact(step, abstract, agree)
            except Damaged as e:
                problems.append(f"step {step} ({e})")
                continue
            if problems:
                print(f"skipped damaged checkpoints: {'; '.join(problems)}", file=sys.stderr)
            self._broken, self._saved = [n for n in steps if n > step], step
            return found
        raise SpecError(f"{self.directory}: no checkpoint can be read: {'; '.join(problems)}")

    def restore_params(self, abstract: Any, which: Which) -> tuple[int, Any]:
        """(step, parameters) of a checkpoint, without the optimizer's state. SpecError if there is
        none."""
        found = self.restore({"params": abstract}, which)
        if found is None:
            raise SpecError(f"{self.directory}: holds no checkpoint")
        return found[0], found[1]["params"]

    def wait(self) -> None:
        """Returns when the checkpoint in the making is complete on disk."""
        if self._orbax is not None:
            with self._writing(self._saved):
                self._orbax.wait_until_finished()

    def close(self) -> None:
        self.wait()
        if self._orbax is not None:
            self._orbax.close()

    def should_preserve(self, checkpoints, *, context) -> list[bool]:
        """Orbax asks which of its checkpoints, oldest first, to keep once a save is complete.
        Directories that merely have a number are not ours to remove."""
        del context
        ours = [c.step for c in checkpoints if self._is_ours(c.step)]
        keep = set(ours[-self._spec.keep :])
        metrics = {n: m for n, m in self._metrics.items() if n in ours}
        if self._spec.best is not None and metrics:
            keep.add(_lowest(metrics))
        return [c.step in keep or c.step not in ours for c in checkpoints]

    def _is_ours(self, step: int) -> bool:
        parts = ("state", "record", "_CHECKPOINT_METADATA")  # a kill may have left any one of them
        folder = self.directory / str(step)
        return not folder.exists() or any((folder / part).exists() for part in parts)

    def _manager(self) -> ocp.CheckpointManager:
        """Made with the first save, when damaged steps are moved out of its way."""
        if self._orbax is None:
            _hush_orbax()
            for step in self._broken:
                aside = self._free_name(f"damaged-{step}")
                (self.directory / str(step)).rename(aside)
                print(f"moved {self.directory / str(step)} to {aside.name}", file=sys.stderr)
            self._broken, self._metrics = [], self._read_metrics()
            options = ocp.CheckpointManagerOptions(
                preservation_policy=self, cleanup_tmp_directories=True
            )
            self._orbax = ocp.CheckpointManager(self.directory, options=options)
        return self._orbax

    def _free_name(self, name: str) -> Path:
        names = (self.directory / f"{name}{'-' * n}" for n in range(1000))
        return next(path for path in names if not path.exists())

    def _find(self, which: Which) -> int:
        steps = self.steps()
        if which == "best":
            if (best := self.best_step()) is None:
                raise SpecError(f"{self.directory}: no checkpoint has a metric to be best by")
            return best
        if which not in steps:
            raise SpecError(f"{self.directory}: has no step {which!r} (there are: {steps})")
        return int(which)

    def _read_metrics(self) -> dict[int, float]:
        metrics = {}
        for step in self.steps():
            with contextlib.suppress(Damaged):
                if (metric := self._record(step)["metric"]) is not None:
                    metrics[step] = metric
        return metrics

    def _intact(
        self, step: int, abstract: Any, agree: Callable[[dict], None]
    ) -> tuple[int, Any, dict]:
        record = self._record(step)
        agree(record)
        manifest = record.pop("manifest")
        _refuse_other_arrays(manifest, abstract)
        state = self._arrays(step, abstract)
        wrong = [p for p, entry in _manifest(state).items() if entry != manifest[p]]
        if wrong:
            raise Damaged(f"checksum of {wrong[0]}" + (" and others" if wrong[1:] else ""))
        return step, state, record

    def _arrays(self, step: int, abstract: Any) -> Any:
        _hush_orbax()
        try:
            return ocp.PyTreeCheckpointer().restore(
                self.directory / str(step) / "state",
                args=ocp.args.PyTreeRestore(
                    item=abstract,
                    restore_args=ocp.checkpoint_utils.construct_restore_args(abstract),
                    partial_restore=True,
                ),
            )
        except Exception as e:  # whatever Orbax makes of damaged files
            raise Damaged(f"its arrays cannot be read: {_brief(e)}") from None

    def _record(self, step: int) -> dict[str, Any]:
        path = self.directory / str(step) / "record"
        if not path.is_dir():
            raise Damaged("incomplete")
        try:
            record = ocp.Checkpointer(ocp.JsonCheckpointHandler()).restore(path)
            checksum = record.pop("checksum")
        except Exception as e:
            raise Damaged(f"record: {type(e).__name__}") from None
        if _checksum(record) != checksum:
            raise Damaged("checksum of its record")
        return record

    @contextlib.contextmanager
    def _writing(self, step: int) -> Iterator[None]:
        """Names the checkpoint in whatever goes wrong while it is written, and forgets it."""
        try:
            yield
        except (OSError, ValueError, RuntimeError) as e:
            self._orbax, self._saved = None, -1  # the next save begins with what is on disk
            raise OSError(
                f"checkpoint of step {step} in {self.directory}: cannot be written: {_brief(e)}"
            ) from e


def _lowest(metrics: dict[int, float]) -> int | None:
    """The step with the lowest metric, the first of them if several have it."""
    return min(metrics, key=lambda n: (metrics[n], n), default=None)


@functools.cache
def _hush_orbax() -> None:
    """What Orbax raises is reported here, in one line. It also logs the traceback, and leaves
    coroutines behind that print theirs, in hundreds of lines, whenever they are collected."""
    logging.getLogger("absl").addFilter(lambda entry: "orbax" not in entry.pathname)
    report = sys.unraisablehook

    def report_others(late):
        code = getattr(late.object, "cr_code", None)
        of_orbax = code is not None and "orbax" in code.co_filename
        if not of_orbax and str(late.exc_value) != "Event loop is closed":
            report(late)

    sys.unraisablehook = report_others


def _brief(error: Exception) -> str:
    """The first line of an error; of a long one of TensorStore the beginning, and what the
    operating system said."""
    line = next(iter(str(error).splitlines()), type(error).__name__).split(". See full")[0]
    system = re.search(r"([^:]+) \[os_error_code", line)
    return line if len(line) < 300 else f"{line[:120]} …{system[1] if system else ''}"


def refuse_changed(old: dict, new: dict, ignore: Collection[str]) -> None:
    """SpecError that lists every option in which two configs differ, but for sections and options
    in `ignore`."""
    was, now = ({p: _as_json(v) for p, v in flat(config)} for config in (old, new))
    differing = [
        f"{path}: {was.get(path)!r} -> {now.get(path)!r}"
        for path in {**was, **now}
        if was.get(path) != now.get(path)
        and not any(path == p or path.startswith(p + ".") for p in ignore)
    ]
    if differing:
        lines = "\n  ".join(differing)
        raise SpecError(
            f"the checkpoint is of another run; take another --workdir, or undo\n  {lines}"
        )


def _as_json(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _manifest(state: Any) -> dict[str, list]:
    """path -> [shape, dtype, CRC-32 of the bytes] of every array."""
    out = {}
    for path, leaf in jax.tree.leaves_with_path(state):
        a = np.asarray(jax.device_get(leaf))
        data = np.ascontiguousarray(a).reshape(-1).view(np.uint8)
        out[_path(path)] = [list(a.shape), str(a.dtype), zlib.crc32(data.data)]
    return out


def _refuse_other_arrays(manifest: dict[str, list], abstract: Any) -> None:
    """SpecError where the checkpoint lacks an array or has it in another shape or dtype."""
    problems = []
    for path, leaf in jax.tree.leaves_with_path(abstract):
        name, wanted = _path(path), [list(leaf.shape), str(leaf.dtype)]
        found = manifest.get(name, [None, None])[:2]
        if found != wanted:
            problems.append(
                f"{name}: checkpoint {found[0]} {found[1]}, model {wanted[0]} {wanted[1]}"
            )
    if problems:
        more = [f"and {len(problems) - 5} more"] if len(problems) > 5 else []
        raise SpecError("\n  ".join(["the checkpoint is of another model:", *problems[:5], *more]))


def _path(path) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def _checksum(record: dict) -> int:
    return zlib.crc32(json.dumps(record, sort_keys=True).encode())
