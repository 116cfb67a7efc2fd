"""What a user is told: wrong configs of a whole run, and the exact message for each.

The names that end a message, `(known: …)`, are left out: they grow with the tables.
"""

from typing import Any

import pytest

from transformer import spec
from transformer.experiment import RunSpec, defaults
from transformer.spec import SpecError

# path of the option, its value, the message without its path
ONE = [
    ("model.depht", 3, "unknown option 'depht'; did you mean 'depth'?"),
    ("model.Depth", 3, "unknown option 'Depth'; did you mean 'depth'?"),
    ("model.depth", "six", "expected a whole number, got 'six'"),
    ("model.depth", 2.5, "expected a whole number, got 2.5"),
    ("model.depth", 0, "must be at least 1, got 0"),
    ("model.depth", None, "expected a whole number, got None"),
    ("model.depth", True, "expected a whole number, got True"),
    ("model.dropout", 1, "must lie in [0, 1), got 1.0"),
    ("model.dropout", "some", "expected a number, got 'some'"),
    ("model.tie", 1, "expected true or false, got 1"),
    ("model.dtype", "float3", "unknown name 'float3'; did you mean 'float32'?"),
    ("model.position", "ropee", "unknown name 'ropee'; did you mean 'rope'?"),
    ("model.position", 3, "expected a name such as 'none', got 3"),
    ("model.position.thetta", "rope(thetta=3)", "unknown option of rope: 'thetta'; did you"),
    ("model.position.theta", "rope(theta=0)", "must be above 0, got 0.0"),
    ("model.position.theta", "rope(theta='big')", "expected a number, got 'big'"),
    ("model.position", "rope(5e5)", "cannot read 'rope(5e5)'; write name, name(option=value)"),
    ("model.position", "2*rope | nope", "unknown name 'nope'"),
    ("model.kernel", "2*einsum | blocked", "'2*einsum | blocked' is a cycle, and this choice"),
    ("model.position", "__import__('os')", "cannot read \"__import__('os')\"; write name, name("),
    ("model.ffn.act", "mlp(act='swish')", "unknown name 'swish'"),
    ("data.seq_len", "256 tokens", "expected a whole number, got '256 tokens'"),
    ("data.batchsize", 3, "unknown option 'batchsize'; did you mean 'batch_size'?"),
    ("data.source.path", "text(path=3)", "expected text or values such as (1, 2), got 3"),
    ("train.clip", -1, "must be above 0, got -1.0"),
    ("train.seed", -1, "must be at least 0, got -1"),
    ("optimizer", "adamm", "unknown name 'adamm'; did you mean 'adamw'?"),
    ("optimizer.learning_rate", "adamw(learning_rate=1)", "unknown option of adamw: 'learning_r"),
    ("schedule", "cosin", "unknown name 'cosin'; did you mean 'cosine'?"),
    ("objective", "causal", "unknown name 'causal'; did you mean 'causal_lm'?"),
    ("optimiser", "adamw", "unknown option 'optimiser'; did you mean 'optimizer'?"),
    ("model", "small", "expected a section with options, got 'small'"),
]

# options, and what is said of them together
TOGETHER = [
    (
        {"model.dim": 100},
        "config.model: dim=100: not a multiple of heads=8; set head_dim to decouple",
    ),
    ({"model.kv_heads": 3}, "config.model: kv_heads=3: must divide heads=8"),
    (
        {"model.dim": 24, "model.position": "rope"},
        "config.model: position=rope: turns channels in pairs; head_dim=3 * fraction=1.0 is "
        "not even",
    ),
    (
        {"model.mask": "full"},
        "config.model: mask=full: lets a decoder see the tokens it is to predict",
    ),
    (
        {"model.encoder_depth": 3},
        "config.model: encoder_depth=3: only family=encoder_decoder has it",
    ),
    (
        {"train.tokens": 10_000, "train.steps": 10},
        "config.train: steps, tokens, epochs: give exactly one (the others None), got steps=10 "
        "and tokens=10000",
    ),
    (
        {"train.steps": None},
        "config.train: steps, tokens, epochs: give exactly one (the others None), got none",
    ),
    (
        {"data.batch_size": 10, "train.accumulate": 3},
        "config: data.batch_size=10: not a multiple of train.accumulate=3",
    ),
    (
        {"model.max_len": 64, "data.seq_len": 65},
        "config: data.seq_len=65: exceeds model.max_len=64",
    ),
    (
        {"mesh.fsdp": 2},
        "config.mesh: fsdp=2: layout=data has no such axis",
    ),
]


def config(options: dict[str, Any]) -> dict[str, Any]:
    """The defaults as a nested dict, with options set by path."""
    out = defaults().to_dict()
    for path, value in options.items():
        *sections, name = path.split(".")
        section = out
        for key in sections:
            section = section[key]
        section[name] = value
    return out


def messages(options: dict[str, Any]) -> list[str]:
    with pytest.raises(SpecError) as e:
        spec.parse(RunSpec, config(options))
    return str(e.value).splitlines()


def option(path: str, value: Any) -> str:
    """The option that `value` is given to: `path` may go on into the options of a choice."""
    called = isinstance(value, str) and f"({path.rsplit('.', 1)[-1]}=" in value
    return path.rsplit(".", 1)[0] if called else path


def test_the_defaults_are_right():
    assert spec.parse(RunSpec, config({})) == RunSpec()


@pytest.mark.parametrize(("path", "value", "message"), ONE)
def test_one_wrong_option(path, value, message):
    (line,) = messages({option(path, value): value})
    assert line.startswith(f"config.{path}: {message}")
    if "unknown" in message:
        assert " (known: " in line


@pytest.mark.parametrize(("options", "message"), TOGETHER)
def test_options_that_do_not_go_together(options, message):
    assert messages(options) == [message]


def test_every_problem_at_once():
    lines = messages({"model.depht": 3, "model.dropout": 2, "data.seq_len": 0, "log": 3})
    assert {line.split(": ")[0] for line in lines} == {
        "config.data.seq_len",
        "config.log",
        "config.model.depht",
        "config.model.dropout",
    }
    assert len(lines) == 4
