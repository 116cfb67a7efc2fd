"""What a run leaves for other programs: config.json, result.json and what they are stamped with."""

import functools
import hashlib
import importlib.metadata
import json
import math
import os
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from transformer.spec import SpecError

_LIBRARIES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")


def params_sha256(params: Any) -> str:
    """Digest of all parameters: the bytes of the leaves in the order of their paths."""
    leaves = {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in jax.tree.leaves_with_path(params)
    }
    digest = hashlib.sha256()
    for path in sorted(leaves):
        digest.update(np.ascontiguousarray(jax.device_get(leaves[path])).tobytes())
    return digest.hexdigest()


@functools.cache
def provenance() -> dict[str, Any]:
    """Versions of Python and the libraries, and the commit of the code with whether it was dirty
    (None outside of a checkout)."""
    versions = {name: importlib.metadata.version(name) for name in _LIBRARIES}
    return {
        "versions": {"python": platform.python_version(), **versions},
        "git_commit": _git("rev-parse", "HEAD"),
        "git_dirty": None if (changes := _git("status", "--porcelain")) is None else bool(changes),
        "devices": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
    }


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *arguments],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def folder(workdir: str | Path) -> Path:
    """The absolute path of a working directory; SpecError if it names none."""
    try:
        if str(workdir):
            return Path(workdir).expanduser().absolute()
    except RuntimeError as e:  # ~somebody who has no home
        raise SpecError(f"--workdir={workdir}: {e}") from None
    raise SpecError("--workdir: must not be empty")


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Writes the file as a whole or not at all."""
    part = path.with_name(f".{path.name}.part")
    part.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n")
    os.replace(part, path)


def read_json(path: Path) -> dict[str, Any]:
    """Reads a file that `write_json` wrote; SpecError if it is missing or damaged."""
    try:
        content = json.loads(path.read_text())
        if not isinstance(content, dict):
            raise ValueError("it holds no object")
        return content
    except FileNotFoundError:
        raise SpecError(f"{path.parent} is no working directory: it has no {path.name}") from None
    except (OSError, ValueError) as e:
        raise SpecError(f"{path}: cannot be read ({e})") from None


def finite(metrics: Mapping[str, float | None]) -> dict[str, float | None]:
    """Metrics as strict JSON can hold them: what is not finite becomes null."""
    return {n: v if v is not None and math.isfinite(v) else None for n, v in metrics.items()}
