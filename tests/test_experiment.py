"""A run as a whole, in this process: what it leaves, what it refuses and how it ends."""

import dataclasses
import json
import logging
import math
import shutil
import signal
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_run

import transformer
from transformer import experiment, result, spec
from transformer.checkpoint import Checkpoints, CheckpointSpec
from transformer.data import feed
from transformer.data.tokens import CharTokenizer, Vocabulary
from transformer.experiment import Experiment, RunSpec, TrainSpec
from transformer.spec import SpecError


def contents(folder: Path):
    """Every file with its bytes and when it was written, but the lock of the data."""
    return {
        p: (p.read_bytes(), p.stat().st_mtime_ns)
        for p in folder.rglob("*")
        if p.is_file() and p.name != ".lock"
    }


def steps(workdir):
    return Checkpoints(workdir / "checkpoints", CheckpointSpec()).steps()


@pytest.fixture
def copy(trained, tmp_path) -> Path:
    """A finished run that may be changed."""
    return shutil.copytree(trained, tmp_path / "copy")


# ---------------------------------------------------------------------------- what it leaves


def test_what_a_run_leaves(trained):
    found = {p.name for p in trained.iterdir()}
    assert found == {
        *("config.json", "tokenizer.json", "metrics.jsonl", "result.json"),
        *("checkpoints", "data", ".lock"),
    }
    stored = spec.parse(RunSpec, json.loads((trained / "config.json").read_text()))
    assert stored == experiment.resolve(tiny_run.run_spec(), Vocabulary.load(trained))
    assert stored.model.vocab == 4 + len(set(tiny_run.TEXT.read_text()))
    train, validation = (tiny_run.lines(trained, split) for split in ("train", "validation"))
    assert [line["step"] for line in train] == list(range(1, 13))
    assert [line["step"] for line in validation] == [4, 8, 12]
    assert steps(trained) == [9, 12]


def test_the_result(trained):
    done = result.read_json(trained / "result.json")
    assert (done["exit_reason"], done["steps"], done["seed"]) == ("done", 12, 0)
    for split in ("train", "validation"):
        *_, last = tiny_run.lines(trained, split)
        assert done[split]["loss"] == last["loss"] and done[split]["tokens"] == last["tokens"]
    run = transformer.load(trained)
    assert done["params_sha256"] == result.params_sha256(run.params)
    assert done["parameters"] == sum(p.size for p in jax.tree.leaves(run.params))
    assert done["versions"]["jax"] == jax.__version__


def test_tokens_are_the_targets_of_the_batches(trained):
    """Counted here from the batches, one by one."""
    run = tiny_run.run_spec()
    make = feed.train_batches(feed.prepare(run.data, trained), run.data, run.train.seed)
    counted = 0
    for i in range(12):
        s = make(i)["segments"]
        counted += int(((s[:, 1:] == s[:, :-1]) & (s[:, 1:] > 0)).sum())
    assert result.read_json(trained / "result.json")["tokens"] == counted


def test_the_learning_rate_is_that_of_the_update(trained):
    rates = [line["learning_rate"] for line in tiny_run.lines(trained, "train")]
    np.testing.assert_allclose(rates, [1e-2 / math.sqrt(n) for n in range(1, 13)], rtol=1e-6)


@pytest.mark.parametrize(("asked", "updates"), [({"tokens": 1000}, 4), ({"epochs": 0.5}, None)])
def test_durations(trained, asked, updates):
    run = tiny_run.run_spec()
    stream = feed.prepare(run.data, trained).stream("train")
    rows = math.ceil(len(stream.tokens) / 16)
    train = spec.parse(TrainSpec, asked)
    # 1000 tokens are 3.9 batches of 16 rows of 16.
    assert train.updates(rows / 16, run.data) == (updates or math.ceil(rows / 2 / 16))
    assert Experiment(dataclasses.replace(run, train=train), trained).updates == (
        updates or math.ceil(rows / 2 / 16)
    )


def test_an_epoch_of_buckets_has_each_row_once(translated):
    """Batches of different shapes are not filled up evenly: they are counted."""
    run = tiny_run.run_spec(**tiny_run.PAIRS | {"train.steps": None, "train.epochs": 2.0})
    updates = Experiment(run, translated).updates
    data = feed.prepare(run.data, translated)
    make = feed.train_batches(data, run.data, run.train.seed)
    rows = np.concatenate([make(i)["rows"] for i in range(updates)])
    assert sorted(rows[rows >= 0]) == sorted(2 * list(range(data.stream("train").documents)))


def test_what_is_cut_is_said(tmp_path, capsys):
    options = {"data.seq_len": 6, "data.source_len": 5, "train.steps": 1}
    run = tiny_run.run_spec(**tiny_run.PAIRS | options)
    stream = Experiment(run, tmp_path).data.stream("train")
    assert stream.source is not None
    # The end of a text is predicted, its beginning is not; a source has both.
    cut = (np.diff(stream.starts) - 1 > 6) | (np.diff(stream.source.starts) > 5)
    assert 0 < cut.sum() < stream.documents
    assert capsys.readouterr().err == (
        f"data: {cut.sum()} of {stream.documents} rows of the train split are longer than "
        "data.seq_len=6, or their source than data.source_len=5, and are cut\n"
    )


def test_the_data_decides_the_sizes_of_the_model():
    """Vocabularies, labels, sentinels and positions; a larger size may be asked for."""
    chars = CharTokenizer("abc")

    def sizes(vocabulary, **options):
        model = experiment.resolve(tiny_run.run_spec(**options), vocabulary).model
        return model.vocab, model.source_vocab, model.classes, model.max_len

    pairs, labels = tiny_run.PAIRS, tiny_run.LABELS
    two = Vocabulary(chars, CharTokenizer("xy"))
    three = Vocabulary(chars, None, ("a", "b", "c"))
    assert sizes(Vocabulary(chars), **pairs) == (7, None, None, None)
    assert sizes(two, **pairs) == (7, 6, None, None)
    assert sizes(three, **labels) == (7, None, 3, None)
    assert sizes(three, **labels | {"model.classes": 4, "model.vocab": 9}) == (9, None, 4, None)
    learned, nine = {"model.position": "learned"}, {"data.source_len": 9}
    assert sizes(two, **pairs | learned | nine) == (7, 6, None, 12)
    decoder = {"model.family": "decoder"}
    assert sizes(Vocabulary(chars), **pairs | learned | nine | decoder) == (7, None, None, 12 + 9)
    assert sizes(three, **labels | learned) == (7, None, 3, 16)
    spans = {"objective": "span_corruption(rate=0.5)", "model.family": "encoder_decoder"}
    # Of 16 tokens 8 are hidden, in round(8 / 3) spans.
    assert sizes(Vocabulary(chars), **spans, **{"model.position": "learned"}) == (
        10,
        None,
        None,
        16,
    )
    for options, message in [
        (labels | {"model.classes": 2}, "config.model.classes=2: the data has 3 labels"),
        (pairs | {"model.source_vocab": 5}, "config.model.source_vocab=5: the data has 6 tokens"),
        (spans | {"model.vocab": 9}, "config.model.vocab=9: the data has 7 tokens and the objecti"),
    ]:
        with pytest.raises(SpecError, match=message):
            sizes(three if "model.classes" in options else two, **options)
    with pytest.raises(SpecError, match="source_vocab=9: the data has 7 tokens and the objective"):
        sizes(Vocabulary(chars), **spans | {"model.source_vocab": 9})


@pytest.mark.slow
def test_checkpoints_every_few_steps_and_at_the_end(tmp_path, monkeypatch):
    saved = []

    def save(self, step, *args, original=Checkpoints.save):
        saved.append(step)
        return original(self, step, *args)

    monkeypatch.setattr(Checkpoints, "save", save)
    options = {"checkpoint__every": 5, "eval__every": 100}
    tiny_run.run(tmp_path / "a", train__steps=13, **options)
    assert saved == [5, 10, 13]
    saved.clear()
    tiny_run.run(tmp_path / "b", train__steps=10, **options)
    assert saved == [5, 10]


# ------------------------------------------------------------------------ starting it again


def test_a_finished_run_started_again_changes_nothing(copy, monkeypatch):
    before = contents(copy)
    monkeypatch.setattr(experiment._Session, "_loop", None)
    again = tiny_run.run(copy)
    assert again == result.read_json(copy / "result.json")
    assert contents(copy) == before


def test_a_longer_run_goes_on(copy):
    done = tiny_run.run(copy, train__steps=14)
    assert (done["exit_reason"], done["steps"]) == ("done", 14)
    lines = tiny_run.lines(copy, "train")
    assert [line["step"] for line in lines] == list(range(1, 15))
    assert lines[-1]["tokens"] == done["tokens"]


def test_a_shorter_run_is_refused(copy):
    with pytest.raises(SpecError, match="config.train: 6 updates are asked for, .* has done 12"):
        tiny_run.run(copy, train__steps=6)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"model__depth": 3}, "model.depth: 2 -> 3"),
        ({"model__position": "alibi"}, "model.position: 'rope(theta=10000.0, "),
        ({"data__seq_len": 8}, "data.seq_len: 16 -> 8"),
        ({"data__tokenizer": "bytes"}, "data.tokenizer: 'chars' -> 'bytes'"),
        ({"data__source": "shakespeare"}, "data.source: "),
        ({"optimizer": "adamw(b1=0.8)"}, "optimizer: 'adamw(b1=0.9, "),
        ({"schedule": "constant"}, "schedule: 'inverse_sqrt(peak=0.01, warmup=1)' -> 'constant(pe"),
        ({"objective": "causal_lm(z_loss=0.1)"}, "objective: "),
        ({"train__seed": 1}, "train.seed: 0 -> 1"),
        ({"train__accumulate": 1}, "train.accumulate: 2 -> 1"),
        ({"model__vocab": 300}, "model.vocab: "),
    ],
)
def test_another_run_is_refused_and_nothing_touched(trained, options, line):
    before = contents(trained)
    with pytest.raises(SpecError) as e:
        tiny_run.run(trained, **options)
    first, *rest = str(e.value).splitlines()
    assert first.startswith("the checkpoint is of another run")
    assert len(rest) == 1 and rest[0].strip().startswith(line)
    assert contents(trained) == before


def test_what_may_change(copy):
    """Where and how often it is looked at, saved and written; not what is computed."""
    done = tiny_run.run(
        copy,
        **{"train__steps": 13, "eval__every": 5, "checkpoint__keep": 1, "checkpoint__best": None},
        **{"log__every": 3, "data__prefetch": 0, "mesh__layout": "fsdp"},
    )
    assert done["exit_reason"] == "done" and steps(copy) == [13]


def test_changed_text_is_refused_and_the_model_keeps_its_tokenizer(tmp_path):
    source = tmp_path / "text.txt"
    source.write_text(tiny_run.TEXT.read_text())
    options = {"data__source": f"text(path={str(source)!r}, documents='paragraph')"}
    tiny_run.run(tmp_path / "w", train__steps=1, **options)
    before = transformer.load(tmp_path / "w").generate(["ten"], max_new_tokens=5, seed=1)
    source.write_text(source.read_text().replace("g", "ß"))
    with pytest.raises(SpecError, match="the data of .* has changed since its last checkpoint"):
        tiny_run.run(tmp_path / "w", train__steps=2, **options)
    after = transformer.load(tmp_path / "w").generate(["ten"], max_new_tokens=5, seed=1)
    assert after == before


def test_damaged_config_is_written_again(copy):
    text = (copy / "config.json").read_text()
    (copy / "config.json").write_text(text[: len(text) // 2])
    tiny_run.run(copy, train__steps=13)
    json.loads((copy / "config.json").read_text())


# ------------------------------------------------------------- refused before the first step

LEARNED = tiny_run.PAIRS | {"model.position": "learned", "eval.decode": "bleu"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"eval__split": "valid"}, "config.eval: no split 'valid'"),
        ({"eval__split": "train"}, "config.eval: split=train: "),
        ({"eval__sample": 3, "eval__prompt": "Ω"}, "config.eval: .*Ω"),
        (
            {"eval__sample": 16, "model__position": "learned"},
            "config.eval: prompt 0 has 1 tokens and 16 new .* exceed model.max_len=16",
        ),
        ({"checkpoint__best": "los"}, "config: checkpoint.best=los: unknown metric 'los'; did you"),
        ({"checkpoint__best": "accuracy"}, "config: checkpoint.best=accuracy: unknown metric"),
        ({"checkpoint__best": "bleu"}, "config: checkpoint.best=bleu: unknown metric 'bleu'"),
        ({"model__vocab": 5}, "config.model.vocab=5: the data has 36 tokens"),
        ({"data__batch_size": 24, "train__accumulate": 2}, "config.data.batch_size=24: not a mult"),
        ({"data__batch_size": 4000, "train__accumulate": 1}, "the training split has .* tokens"),
        ({"mesh__data": 3}, "config.mesh: data=3 .* not the number of devices, 8"),
        ({"schedule": "constant(warmup=13)"}, "warmup=13"),
        (
            {"objective": "seq2seq", "data__packing": "documents"},
            "config.objective=seq2seq: needs the source of each text, which data.source=text.* doe",
        ),
        (
            {"objective": "classify", "data__packing": "documents", "data__source": "reverse"},
            "config.objective=classify: needs the label of each text, which data.source=reverse do",
        ),
        (
            tiny_run.PAIRS | {"eval.sample": 3, "eval.prompt": "Ω"},
            "config.eval: .*Ω",
        ),
        (
            tiny_run.LABELS | {"eval.sample": 3},
            "config.eval: this run .objective=classify, model.family=encoder. gives labels",
        ),
        (
            {"objective": "masked_lm", "model__family": "encoder", "eval__sample": 3},
            "config.eval: this run .objective=masked_lm, model.family=encoder. writes no texts",
        ),
        (
            LEARNED | {"data.source_len": 10, "data.seq_len": 10, "model.max_len": 10},
            "config.eval: decode=bleu: the longest source of the split: prompt 0 has 11 tokens, "
            "which exceed model.max_len=10",
        ),
        (
            LEARNED | {"eval.decode": "exact(max_new_tokens=12)"},
            "config.eval: decode=exact.*: prompt 0 has 1 tokens and 12 new .* model.max_len=12",
        ),
        (
            tiny_run.PAIRS | {"data.batch_size": 10, "train.accumulate": 2},
            "config.data.packing=buckets.buckets=2.: a batch of .* rows: not a multiple of 16",
        ),
    ],
)
def test_refused(tmp_path, monkeypatch, options, message):
    monkeypatch.setattr(experiment._Session, "go", None)
    with pytest.raises(SpecError, match=message):
        tiny_run.run(tmp_path, **options)


@pytest.mark.parametrize("place", ["file", "file/below", "/proc", "/proc/below"])
def test_a_workdir_that_cannot_be_written_to(tmp_path, place):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(SpecError, match=f"--workdir={tmp_path / place}: cannot be written to"):
        tiny_run.run(tmp_path / place)


# --------------------------------------------------------------------------- how it can end


def test_a_numerical_failure_ends_the_run(tmp_path, monkeypatch):
    """Update 5 breaks the parameters while its loss, of the old ones, is fine: 5 is named, 4 stays
    the newest checkpoint and the best."""
    monkeypatch.setitem(experiment.optim.SCHEDULES, "blast", _blast)
    options = {"checkpoint__every": 2, "eval__every": 2, "log__every": 10}
    done = tiny_run.run(tmp_path, schedule="blast", **options)
    assert done["exit_reason"] == "non-finite update_norm at step 5"
    assert done["steps"] == 4 and done["params_sha256"] is None
    assert steps(tmp_path) == [2, 4]
    for line in (tmp_path / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda word: pytest.fail(word))
    stored = transformer.load(tmp_path, "best")
    assert stored.step == 4 and all(np.isfinite(p).all() for p in jax.tree.leaves(stored.params))


def _blast(steps: int, dim: int):
    return lambda count: jnp.where(jnp.asarray(count) < 4, 1e-3, 1e30)


def test_signals_of_the_process(tmp_path, monkeypatch):
    """A real one, during the preparation of the data: one step is made and saved."""
    before = [signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)]

    def prepare(*args, original=feed.prepare):
        signal.raise_signal(signal.SIGTERM)
        return original(*args)

    monkeypatch.setattr(feed, "prepare", prepare)
    done = tiny_run.run(tmp_path)
    assert (done["exit_reason"], done["steps"], steps(tmp_path)) == ("signal", 1, [1])
    assert [signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)] == before


def test_train_in_another_thread(tmp_path):
    """As a sweep may do it: it watches no signals, which is the main thread's business."""
    done = []
    thread = threading.Thread(target=lambda: done.append(tiny_run.run(tmp_path, train__steps=2)))
    thread.start()
    thread.join()
    assert done[0]["exit_reason"] == "done"


# ------------------------------------------------------------------------------ what it costs


def test_one_compilation_each(tmp_path, caplog):
    """Of the update and of the evaluation, whose last batch is not full."""
    caplog.set_level(logging.WARNING)
    with jax.log_compiles():
        tiny_run.run(tmp_path, train__steps=30, log__every=7)
    compiled = [r.getMessage() for r in caplog.records if r.getMessage().startswith("Compiling ")]
    names = [message.split()[1] for message in compiled]
    assert names.count("jit(update)") == names.count("jit(evaluate)") == 1, names
    run = tiny_run.run_spec()
    data = feed.prepare(run.data, tmp_path)
    last = list(feed.eval_batches(data, run.data, "validation", run.data.batch_size))[-1]
    assert not last["segments"].any(1).all(), "rows of padding in the last batch"


def test_bfloat16_keeps_float32_parameters_and_moments(tmp_path):
    """A step of 1e-3 is lost on a bfloat16 1.0, whose neighbours are 0.008 apart."""
    options = {"model__dtype": "bfloat16", "schedule": "constant(peak=1e-3)"}
    tiny_run.run(tmp_path, **options)
    run = transformer.load(tmp_path)
    assert {p.dtype for p in jax.tree.leaves(run.params)} == {jnp.dtype("float32")}
    scales = [p for path, p in jax.tree.leaves_with_path(run.params) if path[-1].key == "scale"]
    assert len(scales) == 5 and all(np.abs(s - 1).max() > 2e-3 for s in scales)
    record = json.loads((tmp_path / "checkpoints" / "12" / "record" / "metadata").read_text())
    dtypes = {path: dtype for path, (_, dtype, _) in record["manifest"].items()}
    assert set(dtypes.values()) == {"float32", "int32"}
    assert {path for path in dtypes if dtypes[path] == "int32"} == {
        *("step", "opt_state/1/0/count", "opt_state/1/2/count")
    }


def test_two_processes_cannot_train_in_one_directory(tmp_path):
    with (
        experiment._alone_in(tmp_path),
        pytest.raises(SpecError, match="another process is training there"),
    ):
        experiment.train(tiny_run.run_spec(), tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == [".lock"]
