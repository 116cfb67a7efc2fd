"""Every file in configs/: it parses, its run traces, and its resolved text is the one on file, so
that a changed default shows in the diff."""

import contextlib
import gzip
import json
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from transformer import cli, optim, spec
from transformer.data.probes import PROBES
from transformer.data.tokens import CharTokenizer, Vocabulary
from transformer.experiment import RunSpec, resolve
from transformer.mesh import Mesh
from transformer.run import Run, lexicon
from transformer.state import Birth
from transformer.step import train_step

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden" / "configs"
ARGUMENTS = {"classify": ["", "runs/mlm"], "probe": [*PROBES]}  # of others none is needed
CONFIGS = [
    f"{path}:{argument}" if argument else str(path)
    for path in sorted((ROOT / "configs").rglob("*.py"))
    for argument in ARGUMENTS.get(path.stem, [""])
]
VOCABULARY = Vocabulary(  # in place of what the data would say
    CharTokenizer("\n" + "".join(map(chr, range(32, 127)))), None, tuple("abcdefghij")
)
UPDATE = "UPDATE_GOLDEN"


def name(config: str) -> str:
    """The path in dots, and the argument."""
    path, *argument = config.split(":")
    parts = Path(path).relative_to(ROOT / "configs").with_suffix("").parts
    return "-".join([".".join(parts), *(a.replace("/", ".") for a in argument)])


@pytest.fixture(params=CONFIGS, ids=name)
def config(request) -> tuple[str, RunSpec]:
    config: Any = cli.load(request.param)
    return name(request.param), spec.parse(RunSpec, config.to_dict())


def test_there_are_configs():
    assert CONFIGS


def test_the_resolved_text(config):
    title, run = config
    text = "".join(f"config.{path} = {value!r}\n" for path, value in spec.flat(spec.as_dict(run)))
    file = GOLDEN / f"{title}.txt"
    if os.environ.get(UPDATE):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    assert file.exists() and file.read_text() == text, (
        f"configs/{title} now means something else than tests/golden/configs/{title}.txt says. "
        f"If that is meant, write it anew: {UPDATE}=1 pytest {Path(__file__).relative_to(ROOT)}"
    )


def test_the_stored_form_is_read_back(config):
    _, run = config
    assert spec.parse(RunSpec, json.loads(json.dumps(spec.as_dict(run)))) == run


@pytest.mark.slow
def test_an_update_traces(config, monkeypatch):
    """With the whole model, on one device, without computing anything."""
    _, run = config
    run = resolve(run, VOCABULARY)
    if run.eval.sample:
        made = Run(run, None, VOCABULARY)
        made.refuse_lengths([made.prompt(run.eval.prompt)], run.eval.sample)
    mesh = Mesh(run.mesh, jax.devices()[:1])
    steps = run.train.steps or 10**5
    tx, _ = optim.build(run.optimizer, run.schedule, steps, run.model.dim, run.train.clip)
    birth = Birth(run.model, tx, mesh, run.train.seed)
    update = train_step(
        *(run.model, run.objective(), tx, mesh, birth.shardings),
        lexicon(VOCABULARY.tokenizer),
        *(run.train.seed, run.train.accumulate),
    )
    with mesh.on():
        monkeypatch.setattr(mesh, "on", contextlib.nullcontext)  # it may not be entered in a trace
        state, sums = jax.eval_shape(update, birth.abstract, batch(run))
    assert jax.tree.map(lambda a: (a.shape, a.dtype), state) == jax.tree.map(
        lambda a: (a.shape, a.dtype), birth.abstract
    )
    for value, weight in sums.values():
        assert value.shape == weight.shape in {(), (run.model.classes,)}


def batch(run: RunSpec) -> dict[str, jax.ShapeDtypeStruct]:
    """One with the longest rows that there may be."""

    def ints(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((run.data.batch_size, *shape), jnp.int32)

    T, S = run.data.longest
    out = {"rows": ints()} | dict.fromkeys(("tokens", "segments", "positions"), ints(T + 1))
    if run.objective.factory.needs == "source":
        out |= {f"source_{name}": ints(S) for name in ("tokens", "segments", "positions")}
    return out | ({"labels": ints()} if run.objective.factory.needs == "label" else {})


def test_a_folder_of_translations(tmp_path):
    """configs/translate.py:DIR/en-de finds the files of each split by their names."""
    (tmp_path / "test_2015.en").write_text("another file than its translation\n")
    for stem in ("train", "val_2016", "test_2016_flickr", "test_2017"):
        for language in ("en", "de", "fr"):
            (tmp_path / f"{stem}.{language}.gz").write_bytes(gzip.compress(b"a\n"))
    config: Any = cli.load(f"{ROOT / 'configs' / 'translate.py'}:{tmp_path}/en-de")
    source: Any = spec.parse(RunSpec, config.to_dict()).data.source
    made = source()
    assert made.languages == ("en", "de")
    assert made.splits == ("train", "validation", "test")
    assert [Path(file).name for file in source.options["test"]] == [
        *("test_2016_flickr.en.gz", "test_2016_flickr.de.gz")
    ]
    assert list(made.documents("validation", "source")) == ["a"]
