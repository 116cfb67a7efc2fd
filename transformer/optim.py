"""Optimizers and schedules, as optax transformations.

A schedule maps the number of updates done before (0 for the first) to the learning rate, an
optimizer takes a schedule. To add one, write a function whose context comes first and whose options
have defaults, and give it a line in SCHEDULES or OPTIMIZERS. Weight decay is decoupled (Loshchilov
& Hutter 2019), multiplied with the learning rate, and falls on matrices and embeddings only.
"""

from collections.abc import Callable, Iterator
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from optax import contrib

from transformer.spec import Choice, Fraction, Natural, NonNegative, Positive, Rate, SpecError

Schedule = Callable[[Any], Any]
# Of a parameter by its name. Axes before those count its copies: layers of a scan, experts.
RANKS = {"kernel": 2, "embedding": 2, "bias": 1, "scale": 1}


# ---------------------------------------------------------------------------------- schedules


def constant(steps: int, dim: int, peak: Positive = 1e-3, warmup: Natural = 0) -> Schedule:
    """`peak` throughout."""
    return _warmed(warmup, peak, lambda count: jnp.full_like(count, peak, jnp.float32))


def linear(
    steps: int, dim: int, peak: Positive = 1e-3, warmup: Natural = 0, end: NonNegative = 0.0
) -> Schedule:
    """From `peak` in a straight line to `end` times the peak."""
    return _warmed(warmup, peak, lambda n: peak * (1 - (1 - end) * _progress(n, warmup, steps)))


def cosine(
    steps: int, dim: int, peak: Positive = 1e-3, warmup: Natural = 0, end: NonNegative = 0.1
) -> Schedule:
    """From `peak` along half a cosine to `end` times the peak (Loshchilov & Hutter 2017)."""

    def decay(count):
        wave = 0.5 * (1 + jnp.cos(jnp.pi * _progress(count, warmup, steps)))
        return peak * (end + (1 - end) * wave)

    return _warmed(warmup, peak, decay)


def inverse_sqrt(
    steps: int, dim: int, peak: Positive | None = None, warmup: Natural = 4000
) -> Schedule:
    """Vaswani et al. 2017, §5.3: dim^-0.5 * min(n^-0.5, n * warmup^-1.5) for update n; the same
    shape scaled to `peak` if that is given."""
    start = max(warmup, 1)
    highest = (dim * start) ** -0.5 if peak is None else peak
    return _warmed(warmup, highest, lambda count: highest * jnp.sqrt(start / (_float(count) + 1)))


def wsd(
    steps: int,
    dim: int,
    peak: Positive = 1e-3,
    warmup: Natural = 0,
    decay: Fraction = 0.2,
    end: NonNegative = 0.0,
    shape: Literal["linear", "sqrt"] = "linear",
) -> Schedule:
    """Warm up, stay at `peak`, decay over the last share `decay` of the run (Hu et al. 2024,
    MiniCPM); `sqrt` falls as 1 - sqrt (Hägele et al. 2024)."""
    start = steps - max(1, round(decay * steps))
    if warmup > start:
        raise SpecError(
            f"config.schedule=wsd: warm-up and decay take {warmup + steps - start} updates, "
            f"the run has {steps}"
        )

    def fall(count):
        progress = _progress(count, start, steps)
        progress = jnp.sqrt(progress) if shape == "sqrt" else progress
        return peak * (1 - (1 - end) * progress)

    return _warmed(warmup, peak, fall)


def _warmed(warmup: int, peak: float, after: Schedule) -> Schedule:
    """peak / warmup at the first update, `peak` at update `warmup`, then `after`."""

    def schedule(count):
        rising = peak * (_float(count) + 1) / max(warmup, 1)
        return jnp.where(count < warmup, rising, after(count))

    return schedule


def _progress(count, start: int, end: int):
    """0 at count `start`, 1 at count `end`, which is after the last update."""
    return jnp.clip((_float(count) - start) / max(end - start, 1), 0.0, 1.0)


def _float(count):
    return jnp.asarray(count).astype(jnp.float32)


SCHEDULES = {
    "constant": constant,
    "linear": linear,
    "cosine": cosine,
    "inverse_sqrt": inverse_sqrt,
    "wsd": wsd,
}


# --------------------------------------------------------------------------------- optimizers


def adamw(
    schedule: Schedule,
    b1: Rate = 0.9,
    b2: Rate = 0.999,
    eps: Positive = 1e-8,
    weight_decay: NonNegative = 0.01,
) -> optax.GradientTransformation:
    """Adam with decoupled weight decay (Kingma & Ba 2015; Loshchilov & Hutter 2019)."""
    return _descend(optax.scale_by_adam(b1, b2, eps), weight_decay, schedule)


def adafactor(
    schedule: Schedule,
    decay_rate: Positive = 0.8,
    clip: Positive | None = 1.0,
    scale_by_parameter: bool = True,
    min_dim: Natural = 128,
    weight_decay: NonNegative = 0.0,
) -> optax.GradientTransformation:
    """Adafactor (Shazeer & Stern 2018): second moments of a matrix kept as a row and a column,
    updates clipped to a root mean square of `clip`, and scaled by that of the parameter. The
    learning rate is the schedule's; the paper's relative steps, min(1e-6 n, 1 / sqrt(n)) for update
    n, are the schedule inverse_sqrt(peak=1e-2, warmup=10000). Matrices with a side below `min_dim`
    are not factored."""
    parts = [
        optax.scale_by_factored_rms(decay_rate=decay_rate, min_dim_size_to_factor=min_dim),
        optax.clip_by_block_rms(clip) if clip else optax.identity(),
        optax.scale_by_param_block_rms() if scale_by_parameter else optax.identity(),
    ]
    return _descend(_per_matrix(optax.chain(*parts)), weight_decay, schedule)


def lion(
    schedule: Schedule, b1: Rate = 0.9, b2: Rate = 0.99, weight_decay: NonNegative = 0.1
) -> optax.GradientTransformation:
    """The sign of an interpolated momentum (Chen et al. 2023): wants a learning rate 3 to 10 times
    smaller, and a weight decay as much larger, than AdamW."""
    return _descend(optax.scale_by_lion(b1, b2), weight_decay, schedule)


def muon(
    schedule: Schedule,
    beta: Rate = 0.95,
    nesterov: bool = True,
    ns_steps: Natural = 5,
    adam_ratio: Positive = 0.1,
    adam_b1: Rate = 0.9,
    adam_b2: Rate = 0.95,
    weight_decay: NonNegative = 0.01,
) -> optax.GradientTransformation:
    """Momentum made orthogonal by Newton-Schulz steps (Jordan et al. 2024), scaled by
    sqrt(max(1, out / in)), for the matrices of the layers; Adam (with Nesterov momentum too) at
    `adam_ratio` times the learning rate for embeddings, output head, biases and norms."""
    direction = contrib.muon(
        1.0,
        beta=beta,
        nesterov=nesterov,
        ns_steps=ns_steps,
        adam_b1=adam_b1,
        adam_b2=adam_b2,
        adam_learning_rate=adam_ratio,
        muon_weight_dimension_numbers=_layer_matrices,
    )
    return _descend(optax.chain(direction, optax.scale(-1.0)), weight_decay, schedule)


def _ruled(rules: Callable[..., Iterator[str]]) -> Callable[[Any], Any]:
    """Gives an entry its rules across options."""

    def attach(entry):
        entry.rules = rules
        return entry

    return attach


def _needs_momentum(run: Any, momentum: float, nesterov: bool, **_) -> Iterator[str]:
    if nesterov and not momentum:
        yield "nesterov needs momentum above 0"


@_ruled(_needs_momentum)
def sgd(
    schedule: Schedule,
    momentum: Rate = 0.0,
    nesterov: bool = False,
    weight_decay: NonNegative = 0.0,
) -> optax.GradientTransformation:
    """Gradient descent, with (Nesterov) momentum if it is above 0."""
    trace = optax.trace(momentum, nesterov) if momentum else optax.identity()
    return _descend(trace, weight_decay, schedule)


OPTIMIZERS = {"adamw": adamw, "adafactor": adafactor, "lion": lion, "muon": muon, "sgd": sgd}


def build(
    optimizer: Choice, schedule: Choice, steps: int, dim: int, clip: float | None
) -> tuple[optax.GradientTransformation, Schedule]:
    """Clipping of the global norm, if asked for, then the optimizer on its schedule. SpecError if
    the run is too short for the schedule's warm-up."""
    warmup = schedule.options.get("warmup", 0)
    if warmup > steps:
        raise SpecError(
            f"config.schedule={schedule}: its warm-up would take {warmup} updates, "
            f"the run has {steps}"
        )
    rate = schedule(steps, dim)
    tx = optimizer(rate)
    return (tx if clip is None else optax.chain(optax.clip_by_global_norm(clip), tx)), rate


_HEADS = {"head", "classifier"}  # the modules that turn vectors into scores


def decayed(params: Any) -> Any:
    """True for the parameters that weight decay falls on."""
    return jax.tree.map_with_path(lambda path, _: _rank(path) == 2, params)


def _descend(direction, weight_decay: float, schedule: Schedule) -> optax.GradientTransformation:
    """-learning rate * (direction + weight decay * parameter)."""
    decay = optax.add_decayed_weights(weight_decay, decayed) if weight_decay else optax.identity()
    return optax.chain(direction, decay, optax.scale_by_learning_rate(schedule))


def _layer_matrices(params: Any) -> Any:
    """For Muon: which axes of which parameters are a matrix; leading axes count copies of it."""

    def axes(path, leaf):
        if _name(path) != "kernel" or any(_key(k) in _HEADS for k in path):
            return None
        return contrib.MuonDimensionNumbers(leaf.ndim - 2, leaf.ndim - 1)

    return jax.tree.map_with_path(axes, params)


def _per_matrix(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """Applies `tx` to each parameter alone, and to each layer and expert of a stacked parameter
    alone, so that statistics over a whole array are those of one matrix in every layout."""

    def along(path, leaf, function):
        for _ in range(leaf.ndim - _rank(path)):
            function = jax.vmap(function)
        return function

    def init(params):
        return jax.tree.map_with_path(lambda path, p: along(path, p, tx.init)(p), params)

    def update(updates, state, params=None):
        assert params is not None
        paths, treedef = jax.tree.flatten_with_path(params)
        results = [
            along(path, p, tx.update)(u, s, p)
            for (path, p), u, s in zip(
                paths, treedef.flatten_up_to(updates), treedef.flatten_up_to(state), strict=True
            )
        ]
        return tuple(treedef.unflatten(part) for part in zip(*results, strict=True))

    return optax.GradientTransformation(init, update)


def _rank(path) -> int:
    if _name(path) not in RANKS:
        where = jax.tree_util.keystr(path, simple=True, separator="/")
        raise SpecError(
            f"{where}: optimizers know parameters named {', '.join(sorted(RANKS))}; "
            "take one of these names"
        )
    return RANKS[_name(path)]


def _name(path) -> str:
    return _key(path[-1])


def _key(entry) -> str:
    return str(getattr(entry, "key", getattr(entry, "name", entry)))
