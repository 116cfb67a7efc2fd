"""No dead option outside of the model: changing any of them changes what a run does, or is refused.

A new option fails here until its change is shown.
"""

import dataclasses
import time
import typing
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_run

from transformer import experiment, spec
from transformer.data import feed, source, tokens
from transformer.experiment import RunSpec
from transformer.layers.base import Tokens
from transformer.log import WRITERS
from transformer.mesh import Mesh, MeshSpec
from transformer.objective import OBJECTIVES, Example
from transformer.optim import OPTIMIZERS, SCHEDULES
from transformer.spec import SpecError

# ------------------------------------------------------------------------- options of choices


def other(option: spec.Option) -> Any:
    """Another value than the default, far from it."""
    kind = option.type
    while typing.get_origin(kind) is Annotated:
        kind = typing.get_args(kind)[0]
    if typing.get_origin(kind) is typing.Literal:
        return next(v for v in typing.get_args(kind) if v != option.default)
    if isinstance(option.default, bool):
        return not option.default
    return 2 if isinstance(option.default, int) else 0.25


def options(table):
    return [(name, o) for name, entry in table.items() for o in spec.options(entry)]


def pair(table, name, option, **needed) -> tuple[Any, Any]:
    """The entry with its defaults, and with one option changed."""
    plain = spec.pick(table, spec._call(name, needed))
    changed = needed | {option: other(spec.options(table[name])[option])}
    return plain, spec.pick(table, spec._call(name, changed))


def updates(choice):
    """Three updates of a tree in which every kind of parameter occurs."""
    draw = np.random.default_rng(0)
    shapes = {"mlp": {"kernel": (4, 6), "bias": (6,)}, "norm": {"scale": (4,)}}
    shapes |= {"embed": {"embedding": (5, 4)}, "head": {"kernel": (4, 5)}}
    params, *grads = (
        jax.tree.map(
            lambda s: jnp.asarray(draw.normal(size=s), jnp.float32),
            shapes,
            is_leaf=lambda s: isinstance(s, tuple),
        )
        for _ in range(4)
    )
    tx = choice(lambda count: 0.1)
    state, out = tx.init(params), []
    for g in grads:
        update, state = tx.update(g, state, params)
        out.append(np.concatenate([np.ravel(u) for u in jax.tree.leaves(update)]))
    return np.stack(out)


@pytest.mark.parametrize(("name", "option"), options(OPTIMIZERS))
def test_optimizers(name, option):
    needed = {"momentum": 0.5} if option == "nesterov" and name == "sgd" else {}
    plain, changed = pair(OPTIMIZERS, name, option, **needed)
    assert np.abs(updates(plain) - updates(changed)).max() > 1e-4


@pytest.mark.parametrize(("name", "option"), options(SCHEDULES))
def test_schedules(name, option):
    plain, changed = pair(SCHEDULES, name, option)
    count = jnp.arange(40)
    assert np.abs(plain(40, 64)(count) - changed(40, 64)(count)).max() > 1e-6


@pytest.mark.parametrize(("name", "option"), options(OBJECTIVES))
def test_objectives(name, option):
    plain, changed = pair(OBJECTIVES, name, option)
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(1, 3, 5)), jnp.float32)
    text = Tokens.of(jnp.arange(3, dtype=jnp.int32)[None])
    example = Example(text, None, text.ids_BT, jnp.ones((1, 3)))
    a, b = (c().sums(logits, example, jnp.ones(5, jnp.int32))["loss"][0] for c in (plain, changed))
    assert abs(float(a - b)) > 1e-3


@pytest.mark.parametrize(
    ("table", "name", "option", "value"),
    [
        (source.SOURCES, "text", "path", "'{b}'"),
        (source.SOURCES, "text", "validation", "0.5"),
        (source.SOURCES, "text", "documents", "'line'"),
        (tokens.TOKENIZERS, "bpe", "vocab_size", "280"),
        (tokens.TOKENIZERS, "bpe", "min_frequency", "1000"),
    ],
)
def test_sources_and_tokenizers(tmp_path, table, name, option, value):
    (tmp_path / "b.txt").write_text("ten green walls\n" * 20)
    value = value.format(b=tmp_path / "b.txt")
    place = f"path={str(tiny_run.TEXT)!r}"
    if name == "text":
        given = [place, *([f"{option}={value}"] if option != "path" else [])]
        choices = [{}, {"source": f"text({', '.join(given)})"}]
        if option == "path":
            choices[1] = {"source": f"text(path={value})"}
    else:
        choices = [{"tokenizer": name}, {"tokenizer": f"{name}({option}={value})"}]
    found = []
    for i, changed in enumerate(choices):
        data = spec.parse(feed.DataSpec, {"source": f"text({place})"} | changed)
        made = feed.prepare(data, tmp_path / str(i))
        found.append(
            [np.asarray(made.stream("train").tokens).tolist(), made.stream("train").starts.tolist()]
        )
    assert found[0] != found[1]


def test_every_source_and_tokenizer_option_is_known():
    """The options of tfds need a prepared dataset: tests/data/test_source.py."""
    of_tfds = set(spec.options(source.SOURCES["tfds"]))
    assert of_tfds >= {"name", "split", "validation", "text_key", "data_dir"}
    rest = {f"{n}.{o}" for n, o in options(source.SOURCES | tokens.TOKENIZERS) if n != "tfds"}
    assert rest >= {
        *("text.path", "text.validation", "text.documents"),
        *("bpe.vocab_size", "bpe.min_frequency"),
    }
    assert not options(feed.PACKINGS), "no packing has options yet"


# ------------------------------------------------------------------------ options of sections

BASE = {
    "model__depth": 1,
    "optimizer": "sgd",
    "schedule": "constant(peak=0.1)",
    "train__steps": 3,
    "train__accumulate": 1,
    "eval__every": 2,
    "eval__sample": 2,
    "eval__prompt": "te",
    "checkpoint__every": 1,
    "checkpoint__keep": 9,
    "log__writers": tuple(name for name in WRITERS if name != "console"),
}
CHANGES: dict[str, dict[str, Any]] = {
    "data.source": {"data__source": f"text(path={str(tiny_run.TEXT)!r})"},
    "data.tokenizer": {"data__tokenizer": "bytes"},
    "data.batch_size": {"data__batch_size": 8},
    "data.seq_len": {"data__seq_len": 8},
    "data.packing": {"data__packing": "documents"},
    "data.shuffle": {"data__shuffle": False},
    "objective": {"objective": "causal_lm(z_loss=0.1)"},
    "optimizer": {"optimizer": "lion"},
    "schedule": {"schedule": "constant(peak=0.2)"},
    "train.steps": {"train__steps": 2},
    "train.tokens": {"train__steps": None, "train__tokens": 500},
    "train.epochs": {"train__steps": None, "train__epochs": 0.2},
    "train.seed": {"train__seed": 1},
    "train.accumulate": {"train__accumulate": 2},  # other dropout
    "train.clip": {"train__clip": 0.1},
    "eval.every": {"eval__every": 1},
    "eval.split": {"eval__split": "test"},
    "eval.batch_size": {"eval__batch_size": 24},
    "eval.sample": {"eval__sample": 0},
    "eval.prompt": {"eval__prompt": "green"},
    "checkpoint.every": {"checkpoint__every": 2},
    "checkpoint.keep": {"checkpoint__keep": 1},
    "log.every": {"log__every": 3},
    "log.writers": {"log__writers": ("jsonl",)},
}
ELSEWHERE = {
    "data.prefetch",
    "checkpoint.best",
    *(f"mesh.{f.name}" for f in dataclasses.fields(MeshSpec)),
}


def trace(workdir, monkeypatch, changed) -> Any:
    """What a run does, as far as it can be seen from outside: the sizes of its batches, what it
    writes, which checkpoints it keeps, its parameters; or how it is refused."""
    sizes = []

    def put_rows(self, batch, original=Mesh.put_rows):
        sizes.append(batch["tokens"].shape)
        return original(self, batch)

    with monkeypatch.context() as patch:
        patch.setattr(Mesh, "put_rows", put_rows)
        try:
            done = tiny_run.run(workdir, **BASE | changed)
        except SpecError as e:
            return str(e)
    files = sorted(p.relative_to(workdir).parts[0] for p in workdir.iterdir())
    samples = [p.read_text() for p in sorted(workdir.glob("samples/*"))]
    steps = sorted(p.name for p in (workdir / "checkpoints").iterdir())
    return sizes, files, samples, steps, tiny_run.lines(workdir), done["params_sha256"]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        found = trace(tmp_path_factory.mktemp("base"), patch, {})
        assert found == trace(tmp_path_factory.mktemp("base"), patch, {}), "else all would differ"
        return found


@pytest.mark.parametrize("path", CHANGES)
def test_sections(tmp_path, monkeypatch, base, path):
    found = trace(tmp_path, monkeypatch, CHANGES[path])
    assert found != base
    assert isinstance(found, str) == (path == "eval.split"), found  # there is no other split
    if path == "eval.batch_size":  # the only one that must not change a result
        *_, sha = found
        assert (24, 17) in found[0] and (found[1:4], sha) == (base[1:4], base[-1])


def test_every_option_of_the_sections_is_known():
    found = set()
    for section, content in spec.defaults(RunSpec).items():
        names = [f"{section}.{n}" for n in content] if isinstance(content, dict) else [section]
        found |= set(names if section != "model" else [])
    assert found == set(CHANGES) | ELSEWHERE


def test_prefetch(monkeypatch, trained):
    made = []

    def train_batches(*args, original=feed.train_batches):
        make = original(*args)
        return lambda index: made.append(int(index)) or make(index)

    monkeypatch.setattr(feed, "train_batches", train_batches)
    ahead = {}
    for prefetch in (0, 1, 4):
        data = tiny_run.run_spec(data__prefetch=prefetch).data
        batches = feed.train_feed(feed.prepare(data, trained), data, 0)
        made.clear()
        next(batches)
        time.sleep(0.2)
        ahead[prefetch] = len(made)
        batches.close()
    assert ahead[0] == 1 < ahead[1] < ahead[4]


def test_best(tmp_path, monkeypatch):
    """Of evaluations whose loss rises and whose nll falls; one checkpoint is kept besides."""
    kept = {}
    for best in ("loss", "nll", None):
        values = iter(range(1, 9))

        def scripted(*_, values=values):
            n = next(values)
            return {"loss": float(n), "nll": -float(n)}

        monkeypatch.setattr(experiment.Experiment, "evaluate", scripted)
        changed = {
            "eval__every": 1,
            "checkpoint__keep": 1,
            "checkpoint__best": best,
            "eval__sample": 0,
        }
        tiny_run.run(tmp_path / str(best), **BASE | changed)
        kept[best] = sorted(p.name for p in (tmp_path / str(best) / "checkpoints").iterdir())
    assert kept == {"loss": ["1", "3"], "nll": ["3"], None: ["3"]}


@pytest.mark.parametrize(
    ("option", "plain", "changed"),
    [
        ("layout", {}, {"layout": "fsdp"}),
        ("data", {"layout": "fsdp"}, {"layout": "fsdp", "data": 2}),
        ("fsdp", {"layout": "tensor"}, {"layout": "tensor", "fsdp": 2}),
        ("tensor", {"layout": "tensor"}, {"layout": "tensor", "tensor": 4, "data": 2}),
    ],
)
def test_mesh(option, plain, changed):
    a, b = (Mesh(spec.parse(MeshSpec, o)) for o in (plain, changed))
    assert f"mesh.{option}" in ELSEWHERE and (a.sizes, a.rules) != (b.sizes, b.rules)
