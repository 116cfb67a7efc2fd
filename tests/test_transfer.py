"""Parameters of another run as a beginning: which are taken, which are not, and what is said."""

import shutil
from pathlib import Path
from typing import Any

import common
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_run
from jax.sharding import NamedSharding, PartitionSpec

from transformer import experiment, result, spec
from transformer.checkpoint import Checkpoints, CheckpointSpec
from transformer.data.tokens import CharTokenizer, Vocabulary
from transformer.mesh import Mesh, MeshSpec
from transformer.model import ModelSpec, unstack
from transformer.spec import SpecError
from transformer.transfer import transferred

CHARACTERS = CharTokenizer("".join(map(chr, range(97, 97 + common.VOCAB - 4))))
VOCABULARY = Vocabulary(CHARACTERS)


@pytest.fixture
def donor(tmp_path):
    """The working directory of a run with random parameters, and those."""

    def donor(vocabulary: Vocabulary = VOCABULARY, **options: Any) -> tuple[Any, str]:
        model, folder = common.spec(**options), tmp_path / "donor"
        folder.mkdir()
        result.write_json(folder / "config.json", {"model": spec.as_dict(model)})
        vocabulary.save(folder)
        params = common.params(model, seed=1)
        store = Checkpoints(folder / "checkpoints", CheckpointSpec())
        store.save(7, {"step": jnp.int32(7), "params": params}, {})
        store.close()
        return params, str(folder)

    return donor


def begun(folder: str, vocabulary: Vocabulary = VOCABULARY, **options: Any) -> tuple[Any, Any]:
    """The parameters that a new run begins with, and those it would have begun with."""
    model = common.spec(**options)
    fresh = common.params(model, seed=2)
    return transferred(fresh, model, vocabulary, folder), fresh


def flat(params: Any) -> dict[str, np.ndarray]:
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf)
        for path, leaf in jax.tree.leaves_with_path(unstack(params))
    }


def assert_taken(got: Any, theirs: Any, fresh: Any, new: set[str]) -> None:
    """All are theirs but the new ones, which are fresh."""
    got, theirs, fresh = flat(got), flat(theirs), flat(fresh)
    assert got.keys() == fresh.keys()
    for path, leaf in got.items():
        expected = fresh if any(path.startswith(name) for name in new) else theirs
        np.testing.assert_array_equal(leaf, expected[path], err_msg=path)
        if path in theirs and theirs[path].shape == fresh[path].shape:
            assert (theirs[path] != fresh[path]).any(), "else nothing is shown"


def test_the_same_model(donor, capsys):
    theirs, folder = donor()
    got, fresh = begun(folder)
    assert_taken(got, theirs, fresh, set())
    count = len(flat(theirs))
    values = sum(leaf.size for leaf in flat(theirs).values())
    assert capsys.readouterr().err == (
        f"train.init_from: {folder}, step 7\n"
        f"  taken: {count} of {count} parameters, {values:,} values\n"
    )


def test_what_is_new_and_what_is_left_is_said(donor, capsys):
    theirs, folder = donor(depth=3, norm="layer", position="alibi", dropout=0.5, vocab=23)
    got, fresh = begun(folder, depth=2, tie=False, norm="rms")
    assert_taken(got, theirs, fresh, {"head/"})
    first, taken, *lines = capsys.readouterr().err.splitlines()
    assert first == f"train.init_from: {folder}, step 7"
    assert taken.startswith(f"  taken: {len(flat(fresh)) - 1} of {len(flat(fresh))} parameters, ")
    new = [line for line in lines if line.startswith("  new: ")]
    left = {line.split()[2] for line in lines if line.startswith("  left there: ")}
    assert new == ["  new: head/kernel 16x23"]
    assert left == set(flat(theirs)) - set(flat(fresh))
    assert {path for path in left if "block_2" in path} and any(p.endswith("bias") for p in left)
    differs = dict(
        line.removeprefix("  differs: ").split("=", 1) for line in lines if "differs" in line
    )
    assert differs.keys() == {"model.position", "model.norm", "model.depth", "model.tie"}
    assert (differs["model.depth"], differs["model.tie"]) == (
        "3 there, 2 here",
        "True there, False here",
    )
    assert differs["model.position"].startswith("alibi there, rope(theta=10000.0, ")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("there", "here"),
    [
        ({"scan": True}, {"scan": False}),
        ({"scan": False}, {"scan": True}),
        ({"scan": True, "mask": "window(size=3) | causal"}, {"scan": True, "mask": "causal"}),
    ],
    ids=["unscanned", "scanned", "period"],
)
@pytest.mark.parametrize("family", common.DECODING)
def test_scanned_layers_and_single_ones(donor, family, there, here):
    """The layers keep their order: where nothing else differs, the new model computes the same."""
    theirs, folder = donor(family=family, depth=5, **there)
    got, fresh = begun(folder, family=family, depth=5, **here)
    assert_taken(got, theirs, fresh, set())
    was, now = (common.spec(family=family, depth=5, **o) for o in (there, here))
    if "mask" not in there:
        text, source = common.text(), common.source_for(was)
        np.testing.assert_allclose(
            common.logits(was, theirs, text, source),
            common.logits(now, got, text, source),
            atol=1e-5,
        )


def test_a_deeper_scanned_model_has_the_first_layers_of_the_other(donor):
    theirs, folder = donor(depth=2, scan=True)
    got, fresh = begun(folder, depth=3, scan=True)
    assert_taken(got, theirs, fresh, {"decoder/block_2"})


def test_an_encoder_becomes_that_of_an_encoder_decoder(donor, capsys):
    theirs, folder = donor(family="encoder", placement="post")
    got, fresh = begun(folder, family="encoder_decoder", placement="post")
    assert {path.split("/")[0] for path in flat(fresh)} == {"embed", "encoder", "decoder"}
    assert_taken(got, theirs, fresh, {"decoder/"})
    said = capsys.readouterr().err
    assert "  differs: model.family=encoder there, encoder_decoder here\n" in said
    assert said.count("  new: decoder/") == sum("decoder/" in path for path in flat(fresh))
    assert "left there" not in said


def test_each_stays_where_it_was(donor):
    """On its devices, split as the layout says."""
    _, folder = donor()
    mesh = Mesh(spec.parse(MeshSpec, {"layout": "fsdp"}))
    split = jax.tree.map(
        lambda a: jax.device_put(
            a, NamedSharding(mesh.mesh, PartitionSpec(*[None] * (a.ndim - 1), "fsdp"))
        ),
        common.params(common.spec()),
    )
    got = transferred(split, common.spec(), VOCABULARY, folder)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(split), strict=True):
        assert a.sharding == b.sharding and a.dtype == b.dtype


# ------------------------------------------------------------------------------- what is refused


def refused(folder: str, vocabulary: Vocabulary = VOCABULARY, **options: Any) -> list[str]:
    with pytest.raises(SpecError) as e:
        begun(folder, vocabulary, **options)
    return str(e.value).splitlines()


def test_other_shapes_are_named(donor):
    _, folder = donor(depth=1, ffn_dim=32, vocab=25)
    first, *rest = refused(folder, depth=1, ffn_dim=24)
    assert first == f"train.init_from={folder}: parameters of another shape"
    assert set(rest) == {
        "  embed/embedding: 25x16 there, 23x16 here",
        "  decoder/block_0/ffn/up/kernel: 16x32 there, 16x24 here",
        "  decoder/block_0/ffn/up/bias: 32 there, 24 here",
        "  decoder/block_0/ffn/down/kernel: 32x16 there, 24x16 here",
        "  set model.vocab=25",
    }


def test_a_longer_table_of_positions_is_made_room_for(donor):
    theirs, folder = donor(position="learned", max_len=48)
    *_, last = refused(folder, position="learned", max_len=40)
    assert last == "  set model.max_len=48"
    got, fresh = begun(folder, position="learned", max_len=48)
    assert_taken(got, theirs, fresh, set())


def test_another_tokenizer_is_refused_with_what_to_do(donor):
    _, folder = donor()
    other = Vocabulary(CharTokenizer(CHARACTERS.characters[::-1]))
    assert refused(folder, other) == [
        f"train.init_from={folder}: was trained with another tokenizer; set data.tokenizer to "
        f"saved(path='{folder}')"
    ]


def test_the_tokenizer_of_the_source_counts_where_its_embedding_is_taken(donor):
    pair, other = (CharTokenizer(characters) for characters in ("xyz", "zyx"))
    was = Vocabulary(CHARACTERS, pair)
    sizes = {"family": "encoder_decoder", "source_vocab": 7}
    theirs, folder = donor(was, **sizes)
    assert refused(folder, Vocabulary(CHARACTERS, other), **sizes) == [
        f"train.init_from={folder}: was trained with another tokenizer; set data.source_tokenizer "
        f"to saved(path='{folder}/source_tokenizer.json')"
    ]
    got, fresh = begun(folder, Vocabulary(CHARACTERS, pair), **sizes)
    assert_taken(got, theirs, fresh, set())
    begun(folder, family="decoder")  # which has no source


def test_a_classifier_of_other_labels_stays_fresh(donor, capsys):
    was = Vocabulary(CHARACTERS, None, ("no", "yes"))
    theirs, folder = donor(was, family="encoder", classes=2)
    got, fresh = begun(folder, was, family="encoder", classes=2)
    assert_taken(got, theirs, fresh, set())
    for labels in (("nein", "ja"), ("a", "b", "c")):
        capsys.readouterr()
        other = Vocabulary(CHARACTERS, None, labels)
        got, fresh = begun(folder, other, family="encoder", classes=len(labels))
        assert_taken(got, theirs, fresh, {"classifier/"})
        said = capsys.readouterr().err
        assert f"  new: classifier/kernel 16x{len(labels)}\n" in said
        assert "  left there: classifier/kernel 16x2\n" in said


def test_nothing_in_common_is_refused(donor):
    _, folder = donor()
    foreign = {"attic": {"kernel": jnp.ones((2, 2))}}
    with pytest.raises(SpecError, match="no parameter of that run is found in this one"):
        transferred(foreign, ModelSpec(), VOCABULARY, folder)


def test_what_is_no_finished_run_is_refused(donor, tmp_path):
    nowhere = str(tmp_path / "nowhere")
    assert refused(nowhere) == [
        f"train.init_from={nowhere}: {nowhere} is no working directory: it has no config.json"
    ]
    assert refused("") == ["train.init_from=: --workdir: must not be empty"]
    _, folder = donor()
    shutil.rmtree(Path(folder) / "checkpoints")
    assert refused(folder) == [
        f"train.init_from={folder}: {folder}/checkpoints: holds no checkpoint"
    ]
    (Path(folder) / "tokenizer.json").unlink()
    (line,) = refused(folder)
    assert line == f"train.init_from={folder}: there is no tokenizer at {folder}/tokenizer.json"


# --------------------------------------------------------------------------- as part of a training

STILL = {"schedule": "inverse_sqrt(peak=1e-12, warmup=1)", "train__steps": 1}


def test_a_run_begins_with_what_another_has_learnt(trained, tmp_path, capsys):
    """And with the moments of the optimizer, the data and the step of a new one."""
    done = tiny_run.run(tmp_path, train__init_from=str(trained), **STILL)
    expected = result.read_json(trained / "result.json")["validation"]
    assert done["validation"]["loss"] == pytest.approx(expected["loss"], abs=1e-5)
    assert done["steps"] == 1
    assert f"train.init_from: {trained}, step 12\n" in capsys.readouterr().err


def test_a_directory_that_does_not_exist_is_refused_before_the_first_update(tmp_path, monkeypatch):
    monkeypatch.setattr(experiment._Session, "_loop", None)
    options = {"train__init_from": "/nowhere", "train__steps": 1}
    with pytest.raises(SpecError) as e:
        tiny_run.run(tmp_path, **options)
    assert str(e.value) == (
        "train.init_from=/nowhere: /nowhere is no working directory: it has no config.json"
    )
    assert not (tmp_path / "config.json").exists()


@pytest.mark.slow
def test_fine_tuning_goes_on_without_the_other_directory(trained, tmp_path, monkeypatch):
    """On other text, of which the tokenizer of the other run knows all: the remedy."""
    (tmp_path / "b.txt").write_text("green wall\n\nten bottles\n\nfall\n\n" * 40)
    donor = shutil.copytree(trained, tmp_path / "donor")
    options = {
        "data__source": f"text(path={str(tmp_path / 'b.txt')!r}, documents='paragraph')",
        "train__init_from": str(donor),
        "train__steps": 3,
    }
    with pytest.raises(SpecError, match="set data.tokenizer to saved") as e:
        tiny_run.run(tmp_path / "w", **options)
    options["data__tokenizer"] = str(e.value).split(" to ")[-1]
    whole = tiny_run.run(tmp_path / "whole", **options)
    with tiny_run.stopped(monkeypatch, 2):
        assert tiny_run.run(tmp_path / "parts", **options)["exit_reason"] == "signal"
    shutil.rmtree(donor)
    done = tiny_run.run(tmp_path / "parts", **options)
    assert done["params_sha256"] == whole["params_sha256"]
    assert done["validation"] == whole["validation"]
