"""Checkpoints: exact, verified, kept by number and by best metric, and never in their own way."""

import contextlib
import json
import math
import os
import resource
import signal
import threading
import time
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from transformer.checkpoint import Checkpoints, CheckpointSpec, Which, refuse_changed
from transformer.spec import SpecError
from transformer.state import State

RECORD = {"data": {"next": 3}, "spec": {"model": {"depth": 2}}}


def state(step, seed=0, width=64):
    """Parameters and optimizer state of several dtypes, scalars and an empty node among them."""
    draw = np.random.default_rng(seed + step)
    params = {
        "embed": {"embedding": jnp.asarray(draw.normal(size=(16, width)), jnp.float32)},
        "block": {"kernel": jnp.asarray(draw.normal(size=(width, 3)), jnp.bfloat16)},
    }
    moments = {
        "count": jnp.asarray(step, jnp.int32),
        "bits": jnp.asarray(draw.integers(0, 2**32, 5, dtype=np.uint32)),
        "nan": jnp.asarray([np.nan, np.inf, -0.0], jnp.float32),
    }
    return State(jnp.asarray(step, jnp.int32), params, (moments, ()))


def abstract(tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


def same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


def saved(directory, steps, metrics=None, **options):
    """A directory with checkpoints of those steps, written by a process that has ended."""
    store = Checkpoints(directory, CheckpointSpec(**options))
    for step in steps:
        store.save(step, state(step), RECORD | {"n": step}, (metrics or {}).get(step))
    store.close()
    return Checkpoints(directory, CheckpointSpec(**options))


def restored(store, which: Which = "latest"):
    found = store.restore(abstract(state(0)), which)
    assert found is not None
    return found


def data_file(directory: Path, step) -> Path:
    """The file that holds most of the arrays."""
    files = [p for p in (directory / str(step) / "state").rglob("*") if p.is_file()]
    return max(files, key=lambda p: p.stat().st_size)


def flip(path: Path, at: int | None = None):
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if at is None else at] ^= 0x10
    path.write_bytes(data)


# ---------------------------------------------------------------------------- there and back


def test_round_trip_is_exact(tmp_path):
    step, found, record = restored(saved(tmp_path, [7]))
    assert step == 7 and record["data"] == RECORD["data"] and record["spec"] == RECORD["spec"]
    same(found, state(7))


def test_nothing_there(tmp_path):
    for path in (tmp_path, tmp_path / "absent"):
        store = Checkpoints(path, CheckpointSpec())
        assert store.restore(abstract(state(0)), "latest") is None and store.steps() == []
        with pytest.raises(SpecError, match="holds no checkpoint"):
            store.restore_params(abstract(state(0).params), "latest")
    assert not (tmp_path / "absent").exists(), "reading creates nothing"


def test_which(tmp_path):
    store = saved(tmp_path, [1, 2, 3], {1: 2.0, 2: 1.0, 3: 3.0}, keep=9)
    assert [restored(store, w)[0] for w in (1, "best", "latest", 3)] == [1, 2, 3, 3]
    same(restored(store, "best")[1], state(2))
    with pytest.raises(SpecError, match=r"no step 4 \(there are: \[1, 2, 3\]\)"):
        restored(store, 4)


def test_parameters_alone(tmp_path):
    step, params = saved(tmp_path, [7]).restore_params(abstract(state(0).params), "latest")
    assert step == 7
    same(params, state(7).params)


def test_the_arrays_may_be_overwritten_after_save(tmp_path):
    """Training donates its state to the next step while the checkpoint is still being written."""
    store = Checkpoints(tmp_path, CheckpointSpec())
    wide = state(1, width=1 << 14)
    expected = jax.tree.map(lambda x: np.array(x), wide)
    store.save(1, wide, RECORD)
    over = jax.jit(lambda t: jax.tree.map(lambda x: x * 0, t), donate_argnums=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # small leaves may find no use for their memory
        jax.block_until_ready(over(wide))
    store.close()
    found = Checkpoints(tmp_path, CheckpointSpec()).restore(
        abstract(state(0, width=1 << 14)), "latest"
    )
    assert found is not None
    same(found[1], jax.tree.map(jnp.asarray, expected))


def test_another_number_of_devices(tmp_path):
    assert jax.device_count() == 8
    mesh = Mesh(np.array(jax.devices()), ("x",))
    split, whole = (NamedSharding(mesh, p) for p in (PartitionSpec("x"), PartitionSpec()))
    tree = {"params": {"kernel": jnp.arange(64.0).reshape(16, 4)}, "step": jnp.int32(1)}
    tree = {"params": jax.device_put(tree["params"], split), "step": jax.device_put(1, whole)}
    store = Checkpoints(tmp_path, CheckpointSpec())
    store.save(1, tree, RECORD)
    store.close()
    one = jax.sharding.SingleDeviceSharding(jax.devices()[3])
    for sharding in (whole, split, one):
        wanted = {"kernel": jax.ShapeDtypeStruct((16, 4), jnp.float32, sharding=sharding)}
        _, params = Checkpoints(tmp_path, CheckpointSpec()).restore_params(wanted, "latest")
        assert params["kernel"].sharding == sharding
        np.testing.assert_array_equal(params["kernel"], np.arange(64.0).reshape(16, 4))


def test_a_relative_directory(tmp_path, monkeypatch):
    (tmp_path / "a b").mkdir()
    monkeypatch.chdir(tmp_path / "a b")
    store = Checkpoints(Path("../x/./out/"), CheckpointSpec())
    monkeypatch.chdir("/")
    store.save(1, state(1), RECORD)
    store.close()
    monkeypatch.chdir(tmp_path)
    assert restored(Checkpoints(Path("x/out"), CheckpointSpec()))[0] == 1


# ------------------------------------------------------------------------------ what is kept


@pytest.mark.parametrize(
    ("keep", "metrics", "kept"),
    [
        (1, {}, [6]),
        (2, {}, [5, 6]),
        (2, {1: 3.0, 2: 1.0, 3: 2.0, 4: 2.5, 5: 2.0, 6: 2.7}, [2, 5, 6]),
        (1, {1: 1.0, 2: math.nan, 3: math.inf, 4: -math.inf, 5: 2.0}, [1, 6]),
        (1, {2: math.nan}, [6]),
        (1, {6: 1.0, 3: 2.0}, [6]),
    ],
)
def test_kept_by_number_and_by_best(tmp_path, keep, metrics, kept):
    store = saved(tmp_path, range(1, 7), metrics, keep=keep)
    assert store.steps() == kept
    finite = {n: m for n, m in metrics.items() if math.isfinite(m)}
    if finite:
        assert restored(store, "best")[0] == min(finite, key=lambda n: finite[n])
    else:
        with pytest.raises(SpecError, match="no checkpoint has a metric to be best by"):
            restored(store, "best")


def test_the_best_outlives_a_restart(tmp_path):
    metrics = {1: 2.0, 2: 1.0, 3: 3.0, 4: 4.0, 5: 5.0, 6: 0.5}
    for step in range(1, 6):
        store = Checkpoints(tmp_path, CheckpointSpec(keep=1))
        if step > 1:
            assert restored(store)[0] == step - 1
        store.save(step, state(step), RECORD, metrics[step])
        store.close()
    assert store.steps() == [2, 5]
    saved(tmp_path, [6], metrics, keep=1)
    assert store.steps() == [6]


def test_best_is_not_kept_if_not_asked_for(tmp_path):
    assert saved(tmp_path, [1, 2], {1: 1.0, 2: 2.0}, keep=1, best=None).steps() == [2]


def test_last_step_and_no_step_twice(tmp_path):
    """Every 5 and the last: 5, 10, 13; and one save of 10 if 10 is the last."""
    store = saved(tmp_path / "a", [5, 10, 13], keep=9)
    assert store.steps() == [5, 10, 13]
    store = Checkpoints(tmp_path / "b", CheckpointSpec())
    assert [store.save(n, state(n), RECORD) for n in (5, 10, 10)] == [True, True, False]
    store.close()
    assert store.steps() == [5, 10]


def test_at_every_moment_one_can_be_restored(tmp_path):
    """Polled by a second reader while the first writes, with room for one checkpoint only."""
    store = saved(tmp_path, [1], keep=1)
    seen, failures, done = set(), [], threading.Event()

    def poll():
        while not done.is_set():
            complete = [p for p in tmp_path.iterdir() if (p / "record" / "metadata").exists()]
            complete = [p.name for p in complete if p.name.isdigit()]
            seen.update(complete)
            if not complete:
                # a directory was listed while it was renamed: only two misses in a row count
                again = [p.name for p in tmp_path.iterdir() if p.name.isdigit()]
                failures.extend([] if again else [os.listdir(tmp_path)])

    thread = threading.Thread(target=poll)
    thread.start()
    for step in range(2, 6):
        store.save(step, state(step), RECORD)
        time.sleep(0.05)
    store.close()
    done.set()
    thread.join()
    assert not failures and {"1", "5"} <= seen
    assert store.steps() == [5]


def test_a_lower_step_is_refused(tmp_path):
    store = saved(tmp_path, [10])
    with pytest.raises(SpecError, match="step 9 is not above the newest there, 10"):
        store.save(9, state(9), RECORD)


def test_a_restored_step_is_not_written_again(tmp_path):
    store = saved(tmp_path, [10])
    restored(store)
    before = data_file(tmp_path, 10).stat().st_mtime_ns
    assert store.save(10, state(10), RECORD) is False
    store.close()
    assert data_file(tmp_path, 10).stat().st_mtime_ns == before


# ----------------------------------------------------------------------------------- damage


def test_every_flipped_byte_is_found(tmp_path, capsys):
    """Anywhere in the arrays: loaded in silence, it would be a wrong number."""
    saved(tmp_path, [1, 2])
    path = data_file(tmp_path, 2)
    intact = path.read_bytes()
    for at in np.linspace(0, len(intact) - 1, 23).astype(int):
        flip(path, at)
        step, found, _ = restored(Checkpoints(tmp_path, CheckpointSpec()))
        same(found, state(step))
        path.write_bytes(intact)
    flip(path)
    capsys.readouterr()
    assert restored(Checkpoints(tmp_path, CheckpointSpec()))[0] == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "step 2" in line and "skipped" in line


def cut(path: Path):
    os.truncate(path, path.stat().st_size // 2)


def empty(directory: Path):
    for path in sorted(directory.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()


DAMAGE = {
    "flipped": lambda d: flip(data_file(d, 2)),
    "truncated": lambda d: cut(data_file(d, 2)),
    "deleted": lambda d: data_file(d, 2).unlink(),
    "no arrays": lambda d: (d / "2" / "state").rename(d / "elsewhere"),
    "manifest": lambda d: os.truncate(d / "2" / "state" / "manifest.ocdbt", 0),
    "record": lambda d: flip(d / "2" / "record" / "metadata", 30),
    "record cut": lambda d: cut(d / "2" / "record" / "metadata"),
    "empty": lambda d: empty(d / "2"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_falls_back_and_goes_on(tmp_path, capfd, kind):
    """To the newest that is intact, naming what was skipped in one line; and the same step can be
    saved again, the damaged one moved aside, not deleted."""
    saved(tmp_path, [1, 2])
    DAMAGE[kind](tmp_path)
    capfd.readouterr()
    store = Checkpoints(tmp_path, CheckpointSpec())
    step, found, record = restored(store)
    assert step == 1 and record["n"] == 1
    same(found, state(1))
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 1 and "step 2" in lines[0], lines
    assert store.steps() == [1, 2], "reading changes nothing"
    store.save(2, state(2, seed=5), RECORD)
    store.close()
    step, found, _ = restored(Checkpoints(tmp_path, CheckpointSpec()))
    same(found, state(2, seed=5))
    assert step == 2 and (tmp_path / "damaged-2").is_dir()


def test_nothing_readable_is_never_a_fresh_start(tmp_path):
    saved(tmp_path, [1, 2])
    for step in (1, 2):
        flip(data_file(tmp_path, step))
    with pytest.raises(SpecError, match=r"no checkpoint can be read: step 2 \(.*step 1 \("):
        restored(Checkpoints(tmp_path, CheckpointSpec()))
    with pytest.raises(SpecError, match="2: cannot be used"):
        restored(Checkpoints(tmp_path, CheckpointSpec()), 2)


def test_foreign_things_do_not_disturb(tmp_path):
    """An old numbered directory that is no checkpoint is neither kept count of nor removed."""
    (tmp_path / "3").mkdir()
    (tmp_path / "notes").mkdir()
    for name in ("3/mine.txt", "notes.txt", "12", "x.orbax-checkpoint-tmp"):
        (tmp_path / name).write_text("mine")
    store = saved(tmp_path, [5, 6, 7], keep=1)
    assert [n for n in store.steps() if n != 3] == [7]
    assert restored(store)[0] == 7
    assert (tmp_path / "3" / "mine.txt").read_text() == "mine"
    assert (tmp_path / "notes.txt").read_text() == (tmp_path / "12").read_text() == "mine"


def test_remains_of_a_killed_save(tmp_path):
    """A directory that was never completed is no checkpoint, and goes with the next save."""
    saved(tmp_path, [1])
    (tmp_path / "2.orbax-checkpoint-tmp").mkdir()
    store = Checkpoints(tmp_path, CheckpointSpec())
    assert restored(store)[0] == 1
    store.save(2, state(2), RECORD)
    store.close()
    assert sorted(os.listdir(tmp_path)) == ["1", "2"]


def test_another_model_is_refused_by_name(tmp_path):
    store = saved(tmp_path, [1])
    other = abstract(state(0))
    kernel = other.params["block"]["kernel"]
    other.params["block"]["kernel"] = jax.ShapeDtypeStruct(kernel.shape, jnp.float32)
    other.params["embed"]["embedding"] = jax.ShapeDtypeStruct((17, 64), jnp.float32)
    other.params["new"] = {"bias": jax.ShapeDtypeStruct((2,), jnp.float32)}
    with pytest.raises(SpecError) as e:
        store.restore(other, "latest")
    _, *lines = str(e.value).splitlines()
    assert [line.strip() for line in lines] == [
        "params/block/kernel: checkpoint [64, 3] bfloat16, model [64, 3] float32",
        "params/embed/embedding: checkpoint [16, 64] float32, model [17, 64] float32",
        "params/new/bias: checkpoint None None, model [2] float32",
    ]


def test_a_full_disk_is_one_clear_error(tmp_path, capfd):
    """And what was there stays; when there is room again, saving goes on."""
    store = saved(tmp_path, [1])
    restored(store)
    wide = state(2, width=1 << 14)
    old = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    capfd.readouterr()
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, old[0][1]))
        with pytest.raises(OSError) as e:
            store.save(2, wide, RECORD)
            store.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old[0])
        signal.signal(signal.SIGXFSZ, old[1])
    message = str(e.value)
    assert "\n" not in message and f"step 2 in {tmp_path}" in message and "too large" in message
    assert capfd.readouterr().err == ""
    assert store.steps() == [1]
    for _ in range(100):  # what was being written still disappears
        with contextlib.suppress(OSError):
            store.save(3, state(3), RECORD)
            break
        time.sleep(0.1)
    store.close()
    assert restored(Checkpoints(tmp_path, CheckpointSpec()))[0] == 3


def test_saving_and_reading_are_silent(tmp_path, capfd):
    restored(saved(tmp_path, [1, 2, 3]))
    assert capfd.readouterr() == ("", "")


def test_the_record_is_json_with_checksums(tmp_path):
    saved(tmp_path, [1])
    record = json.loads((tmp_path / "1" / "record" / "metadata").read_text())
    shape, dtype, _ = record["manifest"]["params/block/kernel"]
    assert (shape, dtype) == ([64, 3], "bfloat16")
    assert len(record["manifest"]) == len(jax.tree.leaves(state(1)))


# ------------------------------------------------------------------------------ another spec


def test_refuse_changed():
    old = {
        "model": {"depth": 4, "position": "rope(theta=10000.0)", "sizes": [1, 2]},
        "train": {"steps": 10, "seed": 0},
        "trained": 1,
    }
    same_but = {
        "model": {"depth": 4, "position": "rope(theta=10000.0)", "sizes": (1, 2)},
        "train": {"steps": 20, "seed": 0},
        "trained": 1,
    }
    refuse_changed(old, same_but, ignore=["train.steps"])
    other = {
        "model": {"depth": 6, "position": "rope(theta=10000.0)", "sizes": [1, 3], "new": 1},
        "train": {"steps": 20, "seed": 0},
        "trained": 2,
    }
    with pytest.raises(SpecError) as e:
        refuse_changed(old, other, ignore=["train"])
    assert [line.strip() for line in str(e.value).splitlines()[1:]] == [
        "model.depth: 4 -> 6",
        "model.sizes: [1, 2] -> [1, 3]",
        "trained: 1 -> 2",
        "model.new: None -> 1",
    ]
