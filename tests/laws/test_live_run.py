"""No dead option outside of the model: changing any of them changes what a run does, or is refused.

A new option fails here until its change is shown.
"""

import ast
import dataclasses
import itertools
import time
import typing
from typing import Annotated, Any

import common
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_run

from transformer import experiment, spec
from transformer.data import feed, source, tokens
from transformer.data.corpus import PAIR, Rows
from transformer.data.probes import PROBES
from transformer.data.store import Stream
from transformer.experiment import RunSpec
from transformer.log import WRITERS
from transformer.mesh import Mesh, MeshSpec
from transformer.objective import OBJECTIVES
from transformer.optim import OPTIMIZERS, SCHEDULES
from transformer.quality import QUALITIES
from transformer.spec import SpecError

pytestmark = pytest.mark.slow

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
    if option.default is None or isinstance(option.default, int):
        return 2
    return 0.25 if option.default < 1 else 1.5


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
    """What the model is shown, or what is made of its logits."""
    needed = {"mean_span": {"rate": 0.5}, "random": {"rate": 0.9}}.get(option, {})
    plain, changed = pair(OBJECTIVES, name, option, **needed)
    (text, *shown), (other_text, *others) = (outcome(c) for c in (plain, changed))
    assert text != other_text or np.abs(np.subtract(shown, others)).max() > 1e-3


def outcome(choice) -> tuple[bytes, float]:
    """The example made of a batch, and its loss for some logits."""
    model = common.learner(choice.name, choice.factory.families[-1])
    # Each text is one word, so that a word is more than a token.
    lexicon = common.lexicon(inside_2V=np.ones((2, common.VOCAB)))
    example = choice().example(common.everything(), model, jax.random.key(0), lexicon)
    draw = np.random.default_rng(0)
    logits = draw.normal(size=(*example.targets_BT.shape, model.classes or common.VOCAB + 9))
    loss, _ = choice().sums(jnp.asarray(logits, jnp.float32), example, lexicon)["loss"]
    return b"".join(np.asarray(a).tobytes() for a in jax.tree.leaves(example)), float(loss)


@pytest.mark.parametrize(("name", "option"), options(QUALITIES))
def test_qualities(monkeypatch, name, option):
    """How the texts are asked for, or what they are found to be worth."""
    needed = {"beams": 2} if option == "length_penalty" else {}
    plain, changed = pair(QUALITIES, name, option, **needed)
    if option in needed:
        plain = spec.pick(QUALITIES, name)
    asked: list[dict[str, Any]] = []

    def generate(self, prompts, **how):
        asked.append(how)
        return ["„So“ it is, or what?"] * len(prompts)

    monkeypatch.setattr(experiment.Run, "generate", generate)
    run = experiment.Run(tiny_run.run_spec(**tiny_run.PAIRS), None, tokens.Vocabulary(None))
    texts = Rows({"test": lambda: iter([("a", "So it is, or what?")])}, lambda: 0, PAIR)
    found = [c()(run, texts, "test", lambda: False).metrics for c in (plain, changed)]
    assert (asked[0], found[0]) != (asked[1], found[1])


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


FILES = {
    "a.tsv": "sun\tSonne\nmoon\tMond\n" * 10,
    "b.tsv": "star\tStern\nsky\tHimmel\n" * 10,
    "a.en": "sun\n" * 20,
    "a.de": "Sonne\n" * 20,
    "a.txt": "x;a\ttext; of some\nx;b\tothers; of more\n" * 10,
    "b.txt": "x;a\ttext; of others\nx;b\tsome; of none\n" * 10,
}
OF_SOURCES = [
    ("bible", "", "reverse", "True"),
    ("wordnet", "", "lemma", "True"),
    ("pairs", "train='{}/a.tsv'", "train", "'{}/b.tsv'"),
    ("pairs", "train='{}/a.tsv'", "validation", "0.5"),
    ("pairs", "train='{}/a.tsv'", "test", "'{}/b.tsv'"),
    ("pairs", "train=('{0}/a.en', '{0}/a.de')", "direction", "'eng-deu'"),
    ("labelled", "train='{}/a.txt'", "train", "'{}/b.txt'"),
    ("labelled", "train='{}/a.txt'", "validation", "0.5"),
    ("labelled", "train='{}/a.txt'", "test", "'{}/b.txt'"),
    ("labelled", "train='{}/a.txt'", "separator", "';'"),
    ("mixture", "sources=('copy', 'sort'), weights=(1, 2)", "sources", "('copy', 'reverse')"),
    ("mixture", "sources=('copy', 'sort'), weights=(1, 2)", "weights", "(1, 3)"),
]


@pytest.mark.parametrize(("name", "given", "option", "value"), OF_SOURCES)
def test_sources(tmp_path, name, given, option, value):
    for file, text in FILES.items():
        (tmp_path / file).write_text(text)
    plain, value = read(given.format(tmp_path)), ast.literal_eval(value.format(tmp_path))
    assert contents(spec._call(name, plain)) != contents(spec._call(name, plain | {option: value}))


def read(given: str) -> dict[str, Any]:
    """Options as they stand between the brackets of a choice."""
    call: Any = ast.parse(f"f({given})", mode="eval").body
    return {k.arg: ast.literal_eval(k.value) for k in call.keywords}


def contents(text: str) -> Any:
    """What a source is asked for, of the documents those of every part."""
    made = spec.pick(source.SOURCES, text)()
    texts = [
        list(itertools.islice(part.documents(split, field), 100))
        for split in made.splits
        for field in made.fields
        for part in made.parts
    ]
    return texts, made.languages, made.weights


@pytest.mark.parametrize(("name", "option"), options(PROBES))
def test_probes(name, option):
    small = {"length": 12, "test_length": 14, "size": 60, "held_out": 30, "depth": 2, "p": 11}
    known = spec.options(PROBES[name])
    plain = {n: v for n, v in small.items() if n in known}
    value = plain.get(option, known[option].default)
    changed = not value if isinstance(value, bool) else value + (1 if value >= 1 else 0.2)
    changed = 1 if option == "seed" else changed
    a, b = (contents(spec._call(name, o)) for o in (plain, plain | {option: changed}))
    assert a != b


def test_saved_tokenizers(tmp_path):
    """Those of a directory, or one of its files."""
    one, other = tokens.CharTokenizer("abc"), tokens.CharTokenizer("xyz")
    tokens.Vocabulary(one, other).save(tmp_path)
    for path, expected in [(tmp_path, one), (tmp_path / "source_tokenizer.json", other)]:
        read = spec.pick(tokens.TOKENIZERS, f"saved(path={str(path)!r})")
        assert read(lambda: iter([])).fingerprint == expected.fingerprint


@pytest.mark.parametrize(
    ("option", "shapes", "rows"),
    [("", 4, 8), ("buckets=2", 2, 8), ("multiple=4", 4, 4)],
)
def test_packings(option, shapes, rows):
    """Documents of two to five tokens, in batches of about twenty."""
    lengths = np.array([2, 3, 4, 5] * 5)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    stream = Stream(np.ones(starts[-1], np.uint16), starts)
    data = spec.parse(
        feed.DataSpec, {"packing": f"buckets({option})", "seq_len": 5, "batch_size": 4}
    )
    packing = data.pack(stream)
    assert len(packing.shapes) == shapes
    sizes = data.batch_rows(packing, data.batch_size, packing.multiple)
    assert min(sizes) == rows and all(size % rows == 0 for size in sizes)


def test_every_option_of_the_data_is_known():
    """The options of tfds need a prepared dataset: tests/data/test_prepared.py."""
    of_tfds = {"name", "split", "validation", "data_dir", "text_key", "source_key", "label_key"}
    assert set(spec.options(source.SOURCES["tfds"])) == of_tfds
    elsewhere = {"tfds", *PROBES}
    rest = {
        f"{n}.{o}" for n, o in options(source.SOURCES | tokens.TOKENIZERS) if n not in elsewhere
    }
    assert rest == {f"{name}.{option}" for name, _, option, _ in OF_SOURCES} | {
        *("text.path", "text.validation", "text.documents"),
        *("bpe.vocab_size", "bpe.min_frequency", "saved.path"),
    }
    packings = {f"{name}.{option}" for name, option in options(feed.PACKINGS)}
    assert packings == {"buckets.buckets", "buckets.multiple"}


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
# Of these the base is a run of pairs.
PAIRED = BASE | {"eval__prompt": "ab"} | tiny_run.PAIRS | {"data__packing": "documents"}
CHANGES_OF_PAIRS: dict[str, dict[str, Any]] = {
    "data.source_tokenizer": {"data__source_tokenizer": "chars"},
    "data.source_len": {"data__source_len": 5},
    "eval.decode": {"eval__decode": "exact"},
}
ELSEWHERE = {
    "train.init_from",  # tests/test_transfer.py
    "data.prefetch",
    "checkpoint.best",
    *(f"mesh.{f.name}" for f in dataclasses.fields(MeshSpec)),
}


def trace(workdir, monkeypatch, changed, base=BASE) -> Any:
    """What a run does, as far as it can be seen from outside: the sizes of its batches, what it
    writes, which checkpoints it keeps, its parameters; or how it is refused."""
    sizes = []

    def put_rows(self, batch, original=Mesh.put_rows):
        sizes.append(batch["tokens"].shape)
        sizes.extend(a.shape for name, a in batch.items() if name == "source_tokens")
        return original(self, batch)

    with monkeypatch.context() as patch:
        patch.setattr(Mesh, "put_rows", put_rows)
        try:
            done = tiny_run.run(workdir, **base | changed)
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


@pytest.fixture(scope="module")
def base_of_pairs(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        return trace(tmp_path_factory.mktemp("base"), patch, {}, PAIRED)


@pytest.mark.parametrize("path", CHANGES_OF_PAIRS)
def test_sections_of_pairs(tmp_path, monkeypatch, base_of_pairs, path):
    found = trace(tmp_path, monkeypatch, CHANGES_OF_PAIRS[path], PAIRED)
    assert found != base_of_pairs and not isinstance(found, str), found
    files = {p.name for p in tmp_path.iterdir()}
    assert ("source_tokenizer.json" in files) == (path == "data.source_tokenizer")
    assert ((16, 5) in found[0]) == (path == "data.source_len")
    assert ("exact_match" in found[4][-1]) == (path == "eval.decode")


def test_a_tokenizer_of_what_is_not_there_is_refused(tmp_path):
    with pytest.raises(SpecError, match="source_tokenizer=chars: the data has one side only"):
        pairs = {"objective": "seq2seq", "data.packing": "documents"}
        tiny_run.run(tmp_path, data__source_tokenizer="chars", **pairs)


def test_every_option_of_the_sections_is_known():
    found = set()
    for section, content in spec.defaults(RunSpec).items():
        names = [f"{section}.{n}" for n in content] if isinstance(content, dict) else [section]
        found |= set(names if section != "model" else [])
    assert found == set(CHANGES) | set(CHANGES_OF_PAIRS) | ELSEWHERE


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
