"""A working directory from outside: load its model, or evaluate it on a split."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from transformer import result, spec
from transformer.checkpoint import Checkpoints, refuse_changed
from transformer.data import feed
from transformer.data.tokens import Vocabulary
from transformer.evaluate import evaluate
from transformer.experiment import RunSpec, eval_batches, judge, refuse_fields, resolve, tell_cut
from transformer.mesh import Mesh, MeshSpec
from transformer.run import Run, lexicon
from transformer.spec import SpecError
from transformer.state import abstract_params
from transformer.step import eval_step

MAY_DIFFER = (  # in an evaluation
    *("data.source", "data.batch_size", "data.seq_len", "data.source_len", "data.packing"),
    *("data.shuffle", "data.prefetch", "train.accumulate"),  # have no say in it
    *("objective", "eval"),
)


def stored(workdir: str | Path) -> dict[str, Any]:
    """The config that a working directory was trained with."""
    config = result.read_json(result.folder(workdir) / "config.json")
    run = spec.parse(RunSpec, config)
    if run.model.vocab is None:
        raise SpecError(f"{workdir}/config.json: model.vocab is missing")
    return spec.as_dict(run)


def load(workdir: str | Path, step: int | str = "latest", average: int = 1) -> Run:
    """The model of a working directory; `step` is a number, "latest" or "best". The parameters are
    the mean of those of so many checkpoints up to it (Vaswani et al. 2017, §6.1)."""
    workdir = result.folder(workdir)
    run = spec.parse(RunSpec, stored(workdir))
    return _restored(run, workdir, step, average, Vocabulary.load(workdir))


def evaluate_run(
    workdir: str | Path, step: int | str, split: str, run: RunSpec, average: int = 1
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Metrics of a run on a whole split, on all devices, and what it wrote, if `eval.decode` says
    so. `run` may differ from the stored one in what MAY_DIFFER names; another source is tokenised
    beside that of the training."""
    workdir = result.folder(workdir)
    was = spec.parse(RunSpec, stored(workdir))
    refuse_changed(spec.as_dict(was), spec.as_dict(run), ignore=MAY_DIFFER)
    vocabulary = Vocabulary.load(workdir)
    run = resolve(run, vocabulary)  # refuses what the model has no room for
    found = _restored(run, workdir, step, average, vocabulary)
    place = workdir if run.data.source == was.data.source else workdir / "evaluation"
    data = feed.prepare(run.data, place, vocabulary)
    refuse_fields(run, data.stream(split))
    tell_cut(run.data, run.data.pack(data.stream(split)), split)
    mesh = Mesh(MeshSpec())
    batches = eval_batches(run, data, split, mesh)
    known = lexicon(vocabulary.tokenizer)
    compiled = eval_step(run.model, run.objective(), mesh, mesh.replicated, known)
    metrics = evaluate(compiled, found.params, mesh, batches)
    assert metrics is not None
    out = {"step": found.step, "split": split, **result.finite(metrics)}
    if run.eval.decode is None:
        return out, []
    judged = judge(found, split)
    assert judged is not None
    return out | judged.metrics | judged.notes, judged.texts


def _restored(
    run: RunSpec, workdir: Path, step: int | str, average: int, vocabulary: Vocabulary
) -> Run:
    which = int(step) if str(step).isdecimal() else step
    if which not in ("latest", "best") and not isinstance(which, int):
        raise SpecError(f"--step={step}: must be a number, latest or best")
    store = Checkpoints(workdir / "checkpoints", run.checkpoint)
    abstract = abstract_params(run.model)
    found, params = store.restore_params(abstract, which)
    before = [n for n in store.steps() if n < found]
    if len(before) < average - 1:
        raise SpecError(
            f"--average={average}: {workdir} has {len(before) + 1} checkpoints up to step {found}; "
            "checkpoint.keep says how many are kept"
        )
    for earlier in before[len(before) - average + 1 :]:
        params = jax.tree.map(jnp.add, params, store.restore_params(abstract, earlier)[1])
    if average > 1:
        params = jax.tree.map(lambda a: a / average, params)
    return Run(run, params, vocabulary, found)
