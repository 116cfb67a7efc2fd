"""Strictness for every test: no shape or dtype adapts silently, warnings are errors
(pyproject.toml), and eight virtual CPU devices stand in for a cluster.
"""

import functools
import os
import tempfile
from pathlib import Path

# Read when jax is imported or its backend starts, so they stand before the first import of it.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
)

import jax  # noqa: E402
import optax  # noqa: E402
import pytest  # noqa: E402
from absl import logging  # noqa: E402

# Compiled programs outlive the run; XDG_CACHE_HOME is where such things belong.
_CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path(tempfile.gettempdir(), "cache")))

jax.config.update("jax_compilation_cache_dir", str(_CACHE / "transformer-lab" / "xla"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_disable_most_optimizations", True)  # compiles tiny programs in half the time
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")
logging.set_verbosity(logging.ERROR)


def _new_transformation(cls, init, update):
    """Makes an optax transformation that promotes as it likes: optax multiplies step counts with
    floats, and strictness is meant for the code around it."""

    @functools.wraps(update)
    def relaxed(*args, **kwargs):
        with jax.numpy_dtype_promotion("standard"):
            return update(*args, **kwargs)

    return tuple.__new__(cls, (init, relaxed))


optax.GradientTransformation.__new__ = _new_transformation


@pytest.fixture(scope="module", autouse=True)
def _programs_of_a_module():
    """Forgets what a module compiled: each program holds some of the few memory maps that Linux
    gives a process."""
    yield
    jax.clear_caches()


@pytest.fixture(scope="session")
def trained(tmp_path_factory) -> Path:
    """The working directory of a finished tiny run; to be read only."""
    import tiny_run  # late: it imports the whole package

    workdir = tmp_path_factory.mktemp("trained")
    tiny_run.run(workdir)
    return workdir


@pytest.fixture(scope="session")
def translated(tmp_path_factory) -> Path:
    """As `trained`, of a model of pairs."""
    import tiny_run

    workdir = tmp_path_factory.mktemp("translated")
    tiny_run.run(workdir, **tiny_run.PAIRS)
    return workdir


@pytest.fixture(scope="session")
def labelled(tmp_path_factory) -> Path:
    """As `trained`, of a model of labels."""
    import tiny_run

    workdir = tmp_path_factory.mktemp("labelled")
    tiny_run.run(workdir, **tiny_run.LABELS)
    return workdir
