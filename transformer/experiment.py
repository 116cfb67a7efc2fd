"""One experiment: RunSpec (all sections), its assembly, and the loop. The only file that knows all
others.

`train(config, workdir)` is what train.py calls. `_loop` is the loop: one update, then what is due
in a fixed order (log, evaluate, sample, checkpoint), then a look at whether a signal asked to stop.
"""

import dataclasses
import fcntl
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Annotated, Any

import numpy as np
from ml_collections import ConfigDict

from transformer import optim, result, spec
from transformer.checkpoint import Checkpoints, CheckpointSpec, refuse_changed
from transformer.data import feed
from transformer.data.store import Data, Stream
from transformer.data.tokens import Vocabulary
from transformer.evaluate import evaluate
from transformer.log import LogSpec, Writers
from transformer.mesh import Mesh, MeshSpec
from transformer.meter import Meter, NumericalFailure
from transformer.model import ModelSpec
from transformer.objective import OBJECTIVES
from transformer.quality import QUALITIES, Judged, refuse_lengths
from transformer.run import Run, lexicon
from transformer.spec import Choice, Count, Must, Natural, Positive, Spec, SpecError, choice
from transformer.state import Birth, State
from transformer.step import eval_step, train_step
from transformer.stop import Stop
from transformer.transfer import transferred

MAY_CHANGE = (  # between the parts of one run; everything else would make it another run
    *("train.steps", "train.tokens", "train.epochs", "data.prefetch"),
    *("eval", "checkpoint", "log", "mesh"),
)
DECIDED = ("model.vocab", "model.source_vocab", "model.classes", "model.max_len")  # by the data

Many = Annotated[int, Must("lie in [1, 2**62)", lambda n: 1 <= n < 2**62)]


@dataclasses.dataclass(frozen=True)
class TrainSpec(Spec):
    """How long and how carefully to train. Exactly one of the first three is given."""

    steps: Count | None = None  # updates
    tokens: Many | None = None  # tokens in training batches, rounded up to whole updates
    epochs: Positive | None = None  # passes over the training split
    seed: Natural = 0  # of initialisation, dropout and data order
    init_from: str | None = None  # a working directory whose parameters to begin with, by name
    accumulate: Count = 1  # micro-batches an update is summed over
    clip: Positive | None = 1.0  # global gradient norm; None: no clipping

    def rules(self) -> Iterator[str]:
        given = {n: v for n in ("steps", "tokens", "epochs") if (v := getattr(self, n)) is not None}
        if len(given) != 1:
            what = " and ".join(f"{n}={v}" for n, v in given.items()) or "none"
            yield f"steps, tokens, epochs: give exactly one (the others None), got {what}"

    def updates(self, batches: float, data: feed.DataSpec) -> int:
        """The number of updates, where so many batches make a pass over the training split."""
        if self.steps is not None:
            return self.steps
        if self.tokens is not None:
            return -(-self.tokens // (data.batch_size * data.seq_len))
        assert self.epochs is not None
        return max(1, int(np.ceil(self.epochs * batches)))


@dataclasses.dataclass(frozen=True)
class EvalSpec(Spec):
    """Evaluation on the way; the last step is always evaluated."""

    every: Count = 250
    split: str = "validation"
    batch_size: Count | None = None  # None: data.batch_size; changes no result
    decode: Choice | None = choice(QUALITIES, None)  # what the model writes for the whole split,
    # and how it is judged; None: losses alone
    sample: Natural = 0  # tokens of sample text after each evaluation
    prompt: str = ""  # what the sample continues

    def rules(self) -> Iterator[str]:
        if self.split == "train":
            yield "split=train: is what updates report; use eval.py --split=train afterwards"


@dataclasses.dataclass(frozen=True)
class RunSpec(Spec):
    """Everything that makes a run."""

    model: ModelSpec = dataclasses.field(default_factory=ModelSpec)
    data: feed.DataSpec = dataclasses.field(default_factory=feed.DataSpec)
    objective: Choice = choice(OBJECTIVES, "causal_lm")
    optimizer: Choice = choice(optim.OPTIMIZERS, "adamw")
    schedule: Choice = choice(optim.SCHEDULES, "cosine")
    train: TrainSpec = dataclasses.field(default_factory=lambda: TrainSpec(steps=1000))
    eval: EvalSpec = dataclasses.field(default_factory=EvalSpec)
    checkpoint: CheckpointSpec = dataclasses.field(default_factory=CheckpointSpec)
    mesh: MeshSpec = dataclasses.field(default_factory=MeshSpec)
    log: LogSpec = dataclasses.field(default_factory=LogSpec)

    def rules(self) -> Iterator[str]:
        if self.model.max_len is not None and self.length > self.model.max_len:
            yield (
                f"data.seq_len={self.data.seq_len}: {self.length} positions exceed "
                f"model.max_len={self.model.max_len}"
            )
        needs, limit = self.objective.factory.needs, self.data.source_len
        if limit is not None and needs != "source":
            yield f"data.source_len={limit}: objective={self.objective} reads no source"
        if (of_source := self.data.source_tokenizer) and needs != "source":
            yield f"data.source_tokenizer={of_source}: objective={self.objective} reads no source"
        if needs != "label":
            for name in ("classes", "pool"):
                if (value := getattr(self.model, name)) is not None:
                    yield f"model.{name}={value}: objective={self.objective} predicts tokens"
        if self.eval.decode:
            for problem in self.eval.decode.factory.refusals(self):
                yield f"eval.decode={self.eval.decode}: {problem}"
        if self.data.batch_size % self.train.accumulate:
            yield (
                f"data.batch_size={self.data.batch_size}: not a multiple of "
                f"train.accumulate={self.train.accumulate}"
            )
        best, known = self.checkpoint.best, self.objective.factory.lower_is_better
        if best is not None and best not in known:
            yield f"checkpoint.best={best}: {spec.unknown(best, known, 'metric')}"
        warmup, steps = self.schedule.options.get("warmup", 0), self.train.steps
        if steps is not None and warmup > steps:
            yield f"schedule={self.schedule}: warmup={warmup} is longer than train.steps={steps}"

    @property
    def length(self) -> int:
        """The most positions that one side of the model is given."""
        return self.objective().length(self.model, *self.data.longest)


def defaults() -> ConfigDict:
    """What a config file starts from: every option with its default, locked against misspelling.

    Values of any type may be assigned; `spec.parse` judges them all at once.
    """
    return ConfigDict(spec.defaults(RunSpec), type_safe=False).lock()


class Experiment:
    """A run, assembled: everything that is fixed before the first update. SpecError for whatever
    does not fit together."""

    def __init__(self, run: RunSpec, workdir: Path):
        self.workdir = workdir
        self.data = feed.prepare(run.data, workdir)
        self.run = run = resolve(run, self.data.vocabulary)
        refuse_fields(run, self.data.stream("train"))
        self.updates = run.train.updates(self._batches(), run.data)
        if self.updates >= 2**31:
            raise SpecError(f"config.train: {self.updates:.3g} updates; must be below 2**31")
        self.feed = feed.train_feed(self.data, run.data, run.train.seed)
        self.mesh = Mesh(run.mesh)
        self._refuse_batch()
        self._refuse_evaluation()
        self.tx, self.schedule = optim.build(
            run.optimizer, run.schedule, self.updates, run.model.dim, run.train.clip
        )
        self.birth = Birth(run.model, self.tx, self.mesh, run.train.seed)
        objective, known = run.objective(), lexicon(self.data.tokenizer)
        self.train_step = train_step(
            run.model,
            objective,
            self.tx,
            self.mesh,
            self.birth.shardings,
            known,
            run.train.seed,
            run.train.accumulate,
        )
        self.eval_step = eval_step(
            run.model, objective, self.mesh, self.birth.shardings.params, known
        )

    def fresh(self) -> State:
        """The state before the first update."""
        state = self.birth.fresh()
        if (other := self.run.train.init_from) is None:
            return state
        params = transferred(state.params, self.run.model, self.data.vocabulary, other)
        return dataclasses.replace(state, params=params)

    def evaluate(self, params: Any, stop: Stop) -> dict[str, float] | None:
        """Losses on the whole split and, where texts are judged, what they come to."""
        split = self.run.eval.split
        batches = eval_batches(self.run, self.data, split, self.mesh)
        metrics = evaluate(self.eval_step, params, self.mesh, batches, lambda: stop.requested)
        if metrics is None or self.run.eval.decode is None:
            return metrics
        judged = judge(Run(self.run, params, self.data.vocabulary), split, lambda: stop.requested)
        return None if judged is None else metrics | judged.metrics

    def sample(self, params: Any, step: int) -> str:
        run = Run(self.run, params, self.data.vocabulary)
        prompt, length = self.run.eval.prompt, self.run.eval.sample
        written = run.generate([prompt], max_new_tokens=length, seed=step)[0]
        return f"{prompt} => {written}" if run.objective.needs else prompt + written

    def _batches(self) -> float:
        """How many make a pass over the training split."""
        stream = self.data.stream("train")
        packing = self.run.data.pack(stream)
        tell_cut(self.run.data, packing, "train")
        order = feed.train_order(stream, packing, self.run.data, self.run.train.seed)
        return order.batches

    def _refuse_batch(self):
        run, parts = self.run, self.run.train.accumulate * self.mesh.batch_shards
        packing = run.data.pack(self.data.stream("train"))
        for size in run.data.batch_rows(packing, run.data.batch_size, packing.multiple):
            if size % parts:
                what = f"data.batch_size={size}"
                if len(packing.shapes) > 1:
                    what = f"data.packing={run.data.packing}: a batch of {size} rows"
                raise SpecError(
                    f"config.{what}: not a multiple of {parts} "
                    f"(train.accumulate={run.train.accumulate} times {self.mesh.batch_shards} "
                    "devices that split the batch)"
                )

    def _refuse_evaluation(self):
        """What else would come to light at the first evaluation only."""
        run = self.run
        try:
            stream, made = self.data.stream(run.eval.split), Run(run, None, self.data.vocabulary)
            if run.eval.sample:
                made.refuse_lengths([made.prompt(run.eval.prompt)], run.eval.sample)
            if run.eval.decode:
                refuse_lengths(made, stream)
        except SpecError as e:
            raise SpecError(f"config.eval: {e}") from None


def eval_batches(run: RunSpec, data: Data, split: str, mesh: Mesh) -> Iterator[feed.Batch]:
    """The split once, in batches of a size that the devices divide."""
    size = run.eval.batch_size or run.data.batch_size
    return feed.eval_batches(data, run.data, split, size, mesh.batch_shards)


def tell_cut(data: feed.DataSpec, packing: feed.Packing, split: str) -> None:
    """Says how many texts do not fit their rows."""
    if packing.cut:
        text, source = data.longest
        print(
            f"data: {packing.cut:,} of {packing.rows:,} rows of the {split} split are longer than "
            f"data.seq_len={text}, or their source than data.source_len={source}, and are cut",
            file=sys.stderr,
        )


def refuse_fields(run: RunSpec, stream: Stream) -> None:
    """SpecError where the data lacks what the objective needs."""
    needs = run.objective.factory.needs
    if needs and (stream.source if needs == "source" else stream.labels) is None:
        raise SpecError(
            f"config.objective={run.objective}: needs the {needs} of each text, which "
            f"data.source={run.data.source} does not have"
        )


def judge(run: Run, split: str, stopped: Callable[[], bool] = lambda: False) -> Judged | None:
    """What the run writes for a whole split, judged as `eval.decode` says; None if stopped."""
    judging: Any = run.spec.eval.decode()
    return judging(run, run.spec.data.source(), split, stopped)


def resolve(run: RunSpec, vocabulary: Vocabulary) -> RunSpec:
    """The run with what the data decides filled in: the sizes of the vocabularies, the number of
    labels and, for positions that need it, model.max_len."""
    model = run.model
    sentinels = run.objective().sentinels(run.data.seq_len)
    sizes = {"vocab": vocabulary.tokenizer.size + sentinels}
    if vocabulary.source_tokenizer or model.source_vocab is not None:
        of_source = vocabulary.source_tokenizer or vocabulary.tokenizer
        sizes["source_vocab"] = of_source.size + sentinels
    if run.objective.factory.needs == "label":
        sizes["classes"] = len(vocabulary.labels)
    for name, size in sizes.items():
        if (given := getattr(model, name)) is not None and given < size:
            what = f"{size} {'tokens' if name.endswith('vocab') else 'labels'}"
            if sentinels and name.endswith("vocab"):
                what = f"{size - sentinels} tokens and the objective {sentinels} sentinels"
            raise SpecError(f"config.model.{name}={given}: the data has {what}")
        sizes[name] = given or size
    if model.max_len is None and model.needs_max_len:
        sizes["max_len"] = run.length
    try:
        return dataclasses.replace(run, model=dataclasses.replace(model, **sizes))
    except SpecError as e:
        raise SpecError(f"config.model: {e}") from None


def train(config: Mapping[str, Any] | RunSpec, workdir: str | Path) -> dict[str, Any]:
    """Trains, or goes on with what `workdir` holds, and returns the contents of result.json.

    Raises SpecError before the first update for whatever the user got wrong. `exit_reason` is
    "done", "signal" (a checkpoint is saved, the same call goes on) or "non-finite".
    """
    run = config if isinstance(config, RunSpec) else spec.parse(RunSpec, config)
    workdir = result.folder(workdir)
    with _alone_in(workdir), Stop() as stop:
        _refuse_other_run(workdir, run)
        x = Experiment(run, workdir)
        return _Session(x, stop).go()


def _alone_in(workdir: Path) -> IO:
    """The lock of the working directory, as long as it is open. SpecError if it cannot be written
    to, or another process trains there. (The system frees the lock of a process that dies.)"""
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        lock = (workdir / ".lock").open("w")
    except OSError as e:
        raise SpecError(f"--workdir={workdir}: cannot be written to ({e.strerror})") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise SpecError(f"--workdir={workdir}: another process is training there") from None
    return lock


def _refuse_other_run(workdir: Path, run: RunSpec) -> None:
    """SpecError if the directory holds another run: before its data and tokenizer are touched.
    What the data decides is compared later, with the checkpoint."""
    if not Checkpoints(workdir / "checkpoints", run.checkpoint).steps():
        return
    try:
        was = result.read_json(workdir / "config.json")
    except SpecError:
        return  # the checkpoint knows as well, and the file will be written anew
    refuse_changed(was, spec.as_dict(run), ignore=(*MAY_CHANGE, *DECIDED))


class _Session:
    """One process's part of a run: from the newest checkpoint, or a fresh state, to its end."""

    def __init__(self, x: Experiment, stop: Stop):
        self.x, self.stop = x, stop
        self.checkpoints = Checkpoints(x.workdir / "checkpoints", x.run.checkpoint)
        self.validation: dict[str, float] = {}
        self.evaluated = -1  # the step of the last evaluation

    def go(self) -> dict[str, Any]:
        state, start = self._begin()
        if start == self.x.updates and (done := self._finished()):
            return done
        result.write_json(self.x.workdir / "config.json", spec.as_dict(self.x.run))
        self.x.data.vocabulary.save(self.x.workdir)
        self.writer = Writers(self.x.run.log, self.x.workdir, start, self.x.updates)
        try:
            state, reason = self._loop(state, start)
        except NumericalFailure as e:
            reason, state = f"non-finite {e}", None
        finally:
            self.checkpoints.close()
            self.writer.close()
        return self._conclude(state, reason)

    def _begin(self) -> tuple[State, int]:
        x = self.x
        found = self.checkpoints.restore(x.birth.abstract, "latest", self._agree)
        if found is None:
            self.meter = Meter(x.run.log.every)
            return x.fresh(), 0
        step, state, record = found
        if step > x.updates:
            raise SpecError(
                f"config.train: {x.updates} updates are asked for, {x.workdir} has done {step}"
            )
        x.feed.set_state(record["data"])
        self.meter = Meter(x.run.log.every, record["tokens"], record["seconds"], step)
        self.meter.last, self.validation = record["metrics"]
        self.evaluated = record["evaluated"]
        return state, step

    def _agree(self, record: dict[str, Any]) -> None:
        """SpecError if a checkpoint is of another run."""
        refuse_changed(record["spec"], spec.as_dict(self.x.run), ignore=MAY_CHANGE)
        if record["data_fingerprint"] != self.x.data.fingerprint:
            raise SpecError(f"the data of {self.x.workdir} has changed since its last checkpoint")

    def _loop(self, state: State, start: int) -> tuple[State, str]:
        x, meter, last = self.x, self.meter, self.x.updates
        if start and self._due(start) and self.evaluated != start:
            self._evaluate(state, start)  # a signal came in between
        for step in range(start + 1, last + 1):
            batch = next(x.feed)
            state, sums = x.train_step(state, x.mesh.put_rows(batch))
            meter.add(step, sums)
            self._write(meter.due(before=step))  # a step late, so that nothing waits for it
            if self._due(step):
                self._evaluate(state, step)
            stopping = self.stop.requested
            if stopping or step == last or step % x.run.checkpoint.every == 0:
                self._save(state, step)
            if stopping:
                return state, "done" if step == last and self.evaluated == last else "signal"
        return state, "done" if self.evaluated == last else "signal"

    def _due(self, step: int) -> bool:
        return step == self.x.updates or step % self.x.run.eval.every == 0

    def _write(self, lines: Iterable[tuple[int, dict[str, float]]]) -> None:
        for step, metrics in lines:
            metrics["learning_rate"] = float(self.x.schedule(step - 1))
            self.writer.write(step, "train", metrics)

    def _evaluate(self, state: State, step: int) -> None:
        self._write(self.meter.due())
        with self.meter.paused():
            metrics = self.x.evaluate(state.params, self.stop)
            if metrics is None:
                return
            self.validation, self.evaluated = metrics, step
            self.writer.write(step, self.x.run.eval.split, metrics)
            if self.x.run.eval.sample:
                self.writer.text(step, "sample", self.x.sample(state.params, step))

    def _save(self, state: State, step: int) -> None:
        self._write(self.meter.due())
        with self.meter.paused():
            best = self.x.run.checkpoint.best
            metric = self.validation.get(best) if best and self.evaluated == step else None
            record = {
                "spec": spec.as_dict(self.x.run),
                "data": self.x.feed.get_state(),
                "data_fingerprint": self.x.data.fingerprint,
                "tokens": self.meter.tokens,
                "seconds": self.meter.seconds,
                "evaluated": self.evaluated,
                "metrics": [result.finite(self.meter.last), result.finite(self.validation)],
                **result.provenance(),
            }
            self.checkpoints.save(step, state, record, metric)

    def _finished(self) -> dict[str, Any] | None:
        """The result of a run that has nothing left to do."""
        try:
            done = result.read_json(self.x.workdir / "result.json")
        except SpecError:
            return None  # it is written anew
        complete = (done.get("exit_reason"), done.get("steps")) == ("done", self.x.updates)
        return done if complete else None

    def _conclude(self, state: State | None, reason: str) -> dict[str, Any]:
        meter, x = self.meter, self.x
        content = {
            "exit_reason": reason,
            "steps": meter.step,
            "tokens": meter.tokens,
            "seconds": round(meter.seconds, 3),
            "tokens_per_second": round(meter.tokens / max(meter.seconds, 1e-9), 1),
            "parameters": x.birth.parameters,
            "params_sha256": None if state is None else result.params_sha256(state.params),
            "train": result.finite(meter.last),
            x.run.eval.split: result.finite(self.validation),
            "seed": x.run.train.seed,
            "data_fingerprint": x.data.fingerprint,
            **result.provenance(),
        }
        result.write_json(x.workdir / "result.json", content)
        return content
