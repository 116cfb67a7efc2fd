"""What a run leaves for other programs."""

import hashlib
import json
import math
import subprocess

import jax.numpy as jnp
import numpy as np
import pytest

from transformer import result
from transformer.spec import SpecError


def test_params_sha256_is_over_leaves_in_the_order_of_their_paths():
    a, b, c = (np.array(v, np.float32) for v in ([[1, 2], [3, 4]], [5], [6, 7]))
    params = {"x": {"kernel": a.T, "bias": b}, "embed": {"embedding": c}}
    params = {k: {n: jnp.asarray(v) for n, v in part.items()} for k, part in params.items()}
    expected = hashlib.sha256()
    for leaf in (c, b, np.array([[1, 3], [2, 4]], np.float32)):  # embed/embedding, x/bias, x/kernel
        expected.update(leaf.tobytes())
    assert result.params_sha256(params) == expected.hexdigest()


def test_finite():
    metrics = {"a": 1.0, "b": math.nan, "c": -math.inf, "d": None, "e": 0, "f": np.float32(2)}
    assert result.finite(metrics) == {"a": 1, "b": None, "c": None, "d": None, "e": 0, "f": 2}


def test_json_is_strict_and_written_as_a_whole(tmp_path):
    path = tmp_path / "result.json"
    result.write_json(path, {"a": 1, "ß": [None]})
    with pytest.raises(ValueError):
        result.write_json(path, {"a": math.nan})
    assert result.read_json(path) == {"a": 1, "ß": [None]}
    assert list(tmp_path.iterdir()) == [path], "nothing is left behind"


def test_what_cannot_be_read(tmp_path):
    with pytest.raises(SpecError, match="is no working directory: it has no config.json"):
        result.read_json(tmp_path / "config.json")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(SpecError, match="config.json: cannot be read"):
        result.read_json(tmp_path / "config.json")


def test_provenance():
    found = result.provenance()
    assert found["versions"]["numpy"] == np.__version__
    assert found["devices"].startswith("8 x ")
    head = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True)
    if head.returncode == 0:
        assert found["git_commit"] == head.stdout.strip()
    json.dumps(found, allow_nan=False)
