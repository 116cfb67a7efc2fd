"""A working directory from outside, wherever it is and whatever became of it."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest
import tiny_run

import transformer
from transformer import result, spec, workdir
from transformer.experiment import RunSpec
from transformer.objective import OBJECTIVES
from transformer.spec import SpecError


def stored(folder):
    return spec.parse(RunSpec, workdir.stored(folder))


def test_which_step(trained):
    assert [transformer.load(trained, s).step for s in (9, "9", "latest", "best")] == [9, 9, 12, 12]
    shas = [result.params_sha256(transformer.load(trained, s).params) for s in (9, 12)]
    assert shas[0] != shas[1] == result.read_json(trained / "result.json")["params_sha256"]
    for step, message in ((3, "has no step 3"), ("newest", "--step=newest: must be a number")):
        with pytest.raises(SpecError, match=message):
            transformer.load(trained, step)


def test_an_average_of_checkpoints(trained):
    """The mean of steps 9 and 12, which are kept; a third there is not."""
    apart = [jax.tree.leaves(transformer.load(trained, step).params) for step in (9, 12)]
    mean = jax.tree.leaves(transformer.load(trained, average=2).params)
    for nine, twelve, both in zip(*apart, mean, strict=True):
        np.testing.assert_allclose(both, (np.asarray(nine) + np.asarray(twelve)) / 2, rtol=1e-6)
    with pytest.raises(SpecError, match="--average=3: .* has 2 checkpoints up to step 12"):
        transformer.load(trained, average=3)


def test_an_evaluation_repeats_that_of_the_training(trained):
    expected = result.read_json(trained / "result.json")["validation"]
    found, texts = workdir.evaluate_run(trained, "latest", "validation", stored(trained))
    assert (found.pop("step"), found.pop("split")) == (12, "validation")
    assert found == pytest.approx(expected, rel=1e-6) and texts == []


@pytest.mark.parametrize("kind", ["translated", "labelled"])
def test_an_evaluation_of_pairs_and_of_labels(request, kind):
    """Of the newest and of the best checkpoint, which is the one with the lowest nll; on splits
    that the training has not seen."""
    folder = request.getfixturevalue(kind)
    done = result.read_json(folder / "result.json")
    for step, split in [("latest", "validation"), ("best", "test")]:
        found, _ = workdir.evaluate_run(folder, step, split, stored(folder))
        assert (found.pop("step"), found.pop("split")) == (12, split)
        if split == "validation":
            assert found == pytest.approx(done["validation"], rel=1e-5)
        assert found["tokens"] > 20 and found["nll"] < 3


def test_an_evaluation_for_which_the_model_has_no_room(trained):
    """Ids beyond the vocabulary would be read as its last one."""
    run = dataclasses.replace(
        stored(trained), objective=spec.pick(OBJECTIVES, "span_corruption(rate=0.5)")
    )
    with pytest.raises(SpecError, match="model.vocab=36: the data has 36 tokens and the objective"):
        workdir.evaluate_run(trained, "latest", "validation", run)


def test_an_evaluation_on_other_data(trained, tmp_path):
    folder = shutil.copytree(trained, tmp_path / "w")
    before = (folder / "data" / "meta.json").read_bytes()
    run = stored(folder)
    run = dataclasses.replace(run, train=dataclasses.replace(run.train, accumulate=1))

    def evaluated(**options):
        data = spec.parse(type(run.data), options, base=run.data)
        found, _ = workdir.evaluate_run(
            folder, "latest", "validation", dataclasses.replace(run, data=data)
        )
        return {name: value for name, value in found.items() if name != "split"}

    plain = evaluated()
    assert evaluated(batch_size=3) == pytest.approx(plain, rel=1e-6)
    by_documents = evaluated(packing="documents", seq_len=200)
    assert by_documents["tokens"] == plain["tokens"] and by_documents["nll"] != plain["nll"]
    assert not (folder / "evaluation").exists()
    (tmp_path / "b.txt").write_text("green wall\n\n" * 20)
    other = evaluated(source=f"text(path={str(tmp_path / 'b.txt')!r}, documents='paragraph')")
    assert other["tokens"] != plain["tokens"]
    assert (folder / "data" / "meta.json").read_bytes() == before
    with pytest.raises(SpecError, match="data.tokenizer: 'chars' -> 'bytes'"):
        evaluated(tokenizer="bytes")


def test_an_evaluation_of_other_pairs(translated, tmp_path):
    """With the vocabularies of the run; a symbol it does not know is refused by its place."""
    folder = shutil.copytree(translated, tmp_path / "w")
    run = stored(folder)

    def evaluated(source):
        data = spec.parse(type(run.data), {"source": source}, base=run.data)
        return workdir.evaluate_run(
            folder, "latest", "validation", dataclasses.replace(run, data=data)
        )

    (tmp_path / "a.tsv").write_text("abcd\tdcba\nab\tba\n" * 10)
    found, _ = evaluated(f"pairs(train={str(tmp_path / 'a.tsv')!r}, validation=0.5)")
    assert found["tokens"] == 5 * (4 + 1) + 5 * (2 + 1)
    (tmp_path / "b.tsv").write_text("abcd\tdcba\nax\tba\n")
    with pytest.raises(SpecError, match="validation split, document 1: .* does not know 'x'"):
        evaluated(f"pairs(train={str(tmp_path / 'b.tsv')!r}, validation=0.5)")
    (tmp_path / "c.txt").write_text("abcd\n" * 20)
    with pytest.raises(SpecError, match="objective=seq2seq: needs the source of each text"):
        evaluated(f"text(path={str(tmp_path / 'c.txt')!r}, documents='line')")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a b", "w/", "./w", "../x/w", "~/w", "link"])
def test_anywhere(tmp_path, monkeypatch, name):
    """Trained under a name, found under another from another place."""
    for folder in ("x", "home"):
        (tmp_path / folder).mkdir()
    (tmp_path / "x" / "link").symlink_to(tmp_path / "home")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "x")
    done = tiny_run.run(name, train__steps=1)
    monkeypatch.chdir(tmp_path)
    place = next(p.parent for p in tmp_path.rglob("result.json"))
    relative = place.relative_to(tmp_path)
    for found in (relative, str(relative), place):
        assert result.params_sha256(transformer.load(found).params) == done["params_sha256"]
    assert tiny_run.run(relative, train__steps=1) == done


def test_what_is_no_working_directory(tmp_path, trained):
    with pytest.raises(SpecError, match="is no working directory: it has no config.json"):
        transformer.load(tmp_path)
    shutil.copy(trained / "config.json", tmp_path)
    with pytest.raises(SpecError, match="there is no tokenizer at"):
        transformer.load(tmp_path)
    shutil.copy(trained / "tokenizer.json", tmp_path)
    with pytest.raises(SpecError, match="holds no checkpoint"):
        transformer.load(tmp_path)


def test_one_device_reads_what_eight_have_written(tmp_path):
    done = tiny_run.run(tmp_path / "w", train__steps=1, mesh__layout="fsdp")
    arguments = [f"--workdir={tmp_path / 'w'}", "--config.data.batch_size=3"]
    ran = tiny_run.command("eval.py", *arguments, devices=1)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert json.loads(ran.stdout.splitlines()[-1])["loss"] == pytest.approx(
        done["validation"]["loss"], rel=1e-6
    )
