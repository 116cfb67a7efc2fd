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
    ("data.source_len", 0, "must be at least 1, got 0"),
    ("data.packing", "bucket", "unknown name 'bucket'; did you mean 'buckets'?"),
    ("data.packing.buckets", "buckets(buckets=0)", "must be at least 1, got 0"),
    ("data.source.direction", "pairs(direction='ende')", "must be two languages such as 'en-de'"),
    ("data.source.train", "labelled(train=3)", "expected text, got 3"),
    ("data.source.weights", "mixture(weights=3)", "expected values such as (1, 2), got 3"),
    ("data.source.length", "reverse(length=0)", "must be at least 1, got 0"),
    ("data.source.p", "modular_addition(p=1)", "must be from 2 to 336, got 1"),
    ("data.source_tokenizer", "byte", "unknown name 'byte'; did you mean 'bytes'?"),
    ("model.pool", "means", "unknown name 'means'; did you mean 'mean'?"),
    ("objective.mean_span", "span_corruption(mean_span=0.5)", "must be at least 1, got 0.5"),
    ("objective.rate", "masked_lm(rate=2)", "must lie in [0, 1], got 2.0"),
    ("eval.decode", "blue", "unknown name 'blue'; did you mean 'bleu'?"),
    ("eval.decode.beams", "bleu(beams=0)", "must be at least 1, got 0"),
    ("eval.decode.tokenize", "bleu(tokenize='14a')", "unknown name '14a'; did you mean '13a'?"),
    ("train.init_from", 3, "expected text, got 3"),
    ("train.clip", -1, "must be above 0, got -1.0"),
    ("train.seed", -1, "must be at least 0, got -1"),
    ("optimizer", "adamm", "unknown name 'adamm'; did you mean 'adamw'?"),
    ("optimizer.learning_rate", "adamw(learning_rate=1)", "unknown option of adamw: 'learning_r"),
    ("schedule", "cosin", "unknown name 'cosin'; did you mean 'cosine'?"),
    ("objective", "causal", "unknown name 'causal'; did you mean 'causal_lm'?"),
    ("optimiser", "adamw", "unknown option 'optimiser'; did you mean 'optimizer'?"),
    ("model", "small", "expected a section with options, got 'small'"),
]

PAIRS = {"objective": "seq2seq", "data.packing": "buckets", "model.family": "encoder_decoder"}
LABELS = {"objective": "classify", "data.packing": "buckets", "model.family": "encoder"}

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
        "config: data.seq_len=65: 65 positions exceed model.max_len=64",
    ),
    (
        PAIRS | {"model.family": "decoder", "model.max_len": 64, "data.seq_len": 40},
        "config: data.seq_len=40: 80 positions exceed model.max_len=64",
    ),
    (
        LABELS | {"model.max_len": 64, "data.seq_len": 64},
        "config: data.seq_len=64: 65 positions exceed model.max_len=64",
    ),
    (
        {"model.family": "encoder"},
        "config: objective=causal_lm: trains model.family=decoder, not encoder",
    ),
    (
        {"objective": "masked_lm"},
        "config: objective=masked_lm: trains model.family=encoder, not decoder",
    ),
    (
        PAIRS | {"model.family": "encoder"},
        "config: objective=seq2seq: trains model.family=encoder_decoder or decoder, not encoder",
    ),
    (
        PAIRS | {"data.packing": "windows"},
        "config: objective=seq2seq: needs the source of each text, which data.packing=windows "
        "does not keep; documents and buckets do",
    ),
    (
        LABELS | {"data.packing": "windows"},
        "config: objective=classify: needs the label of each text, which data.packing=windows "
        "does not keep; documents and buckets do",
    ),
    (
        {"model.family": "encoder", "objective": "masked_lm(mask=0.7, random=0.4)"},
        "config: objective=masked_lm(mask=0.7, random=0.4): mask=0.7 and random=0.4: are shares, "
        "and add up to more than 1",
    ),
    (
        PAIRS | {"objective": "seq2seq(show_source=True)"},
        "config: objective=seq2seq(show_source=True): show_source=True: an encoder sees all of "
        "its source anyway",
    ),
    ({"model.classes": 3}, "config: model.classes=3: objective=causal_lm predicts tokens"),
    ({"data.source_len": 9}, "config: data.source_len=9: objective=causal_lm reads no source"),
    (
        {"data.source_tokenizer": "chars"},
        "config: data.source_tokenizer=chars: objective=causal_lm reads no source",
    ),
    ({"model.pool": "mean"}, "config: model.pool=mean: objective=causal_lm predicts tokens"),
    (
        {"model.source_vocab": 9},
        "config.model: source_vocab=9: only family=encoder_decoder has a source",
    ),
    (
        {"eval.decode": "bleu"},
        "config: eval.decode=bleu: judges translations, which objective=causal_lm does not make",
    ),
    (
        LABELS | {"eval.decode": "bleu"},
        "config: eval.decode=bleu: judges translations, which objective=classify does not make",
    ),
    (
        {"eval.decode": "exact"},
        "config: eval.decode=exact: judges answers, which objective=causal_lm does not give",
    ),
    (
        LABELS | {"eval.decode": "exact(beams=4)"},
        "config: eval.decode=exact(beams=4): beams=4: is for answers that are written, and labels "
        "are not",
    ),
    (
        PAIRS | {"eval.decode": "exact(length_penalty=0.6)"},
        "config.eval: decode=exact(length_penalty=0.6): length_penalty=0.6: is of beams, got "
        "beams=0",
    ),
    (
        LABELS | {"checkpoint.best": "perplexity"},
        "config: checkpoint.best=perplexity: unknown metric 'perplexity' (known: loss, nll)",
    ),
    (
        {"data.source": "recall(length=30)"},
        "config.data: source=recall(length=30): length=30 needs as many keys, got symbols=26",
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
