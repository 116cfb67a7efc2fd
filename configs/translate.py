"""Translation with the original architecture (Vaswani et al. 2017): post-norm, sinusoidal
positions, ReLU, one embedding for both languages and the head, label smoothing 0.1, warm-up and
then the inverse square root.

    python train.py --config=configs/translate.py --workdir=runs/bible                # en-es
    python train.py --config=configs/translate.py:multi30k/en-de --workdir=runs/m30k  # your files
    python eval.py --workdir=runs/m30k --split=test --average=5
    python scripts/generate.py --workdir=runs/m30k --prompt='A dog runs.' --average=5

Expected on Multi30k, en-de (29,000 pairs): BLEU 37.5 on test_2016_flickr (36.2 without averaging,
chrF 60.9; nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:2.6.0; beams=4, length_penalty=0.6)
after 36 epochs, 6,876 updates, 2.6 million parameters: 52 minutes on two CPU cores. BLEU on the
validation split at every 1000 updates: 9.3, 25.6, 31.1, 33.2, 35.8, 36.5.

Without an argument, verses of the Bible that come with the package. The argument
DIR/SOURCE-TARGET names line-aligned files: DIR/train.SOURCE and DIR/train.TARGET, and so on for
validation (val, valid, validation or dev) and test, each also with more behind it (test_2016; the
first in order that has both languages is taken), and as .gz or .xz. A set of
TFDS that is prepared on this machine:

    --config.data.source="tfds(name='wmt14_translate/de-en', source_key='en', text_key='de')"
"""

from pathlib import Path

from transformer import defaults
from transformer.spec import SpecError

SPLITS = {"train": "train", "test": "test"} | dict.fromkeys(
    ("val", "valid", "validation", "dev"), "validation"
)


def get_config(data: str = ""):
    c = defaults()
    c.model.family = "encoder_decoder"
    c.model.dim = 128
    c.model.depth = 4
    c.model.heads = 4
    c.model.ffn_dim = 512
    c.model.position = "sinusoidal"
    c.model.placement = "post"
    c.model.norm = "layer"
    c.model.ffn = "mlp(act='relu')"
    c.model.bias = True
    c.model.dropout = 0.2
    c.model.init = "xavier"
    c.model.tie = True
    c.model.embed_scale = True
    c.model.scan = True

    c.data.source = _pairs(Path(data)) if data else "bible"
    c.data.tokenizer = "bpe(vocab_size=6000)"
    c.data.packing = "buckets"
    c.data.batch_size = 48
    c.data.seq_len = 64

    c.objective = "seq2seq(label_smoothing=0.1)"
    c.optimizer = "adamw(b1=0.9, b2=0.98, eps=1e-9, weight_decay=0.0)"
    c.schedule = "inverse_sqrt(warmup=1000)"
    c.train.steps = None
    c.train.epochs = 36
    c.train.clip = None

    c.eval.every = 1000
    c.eval.decode = "bleu(beams=4, length_penalty=0.6)"
    c.checkpoint.every = 250
    c.checkpoint.keep = 5  # to be averaged
    c.checkpoint.best = "nll"
    return c


def _pairs(data: Path) -> str:
    """The files DIR/SPLIT.LANGUAGE of both languages, as a source."""
    languages = data.name.split("-")
    if not data.parent.is_dir() or len(languages) != 2:
        raise SpecError(f"{data}: must be DIR/SOURCE-TARGET, such as multi30k/en-de")
    found: dict[str, dict[str, str]] = {}
    for file in sorted(data.parent.iterdir()):
        name = file.name.removesuffix(".gz").removesuffix(".xz")
        stem, _, language = name.rpartition(".")
        found.setdefault(stem, {}).setdefault(language, str(file))
    splits: dict[str, tuple[str, ...]] = {}
    for stem, files in found.items():
        split = SPLITS.get(stem.split("_")[0])
        if split and all(name in files for name in languages):
            splits.setdefault(split, tuple(files[name] for name in languages))
    if "train" not in splits:
        raise SpecError(f"{data.parent}: has no train.{languages[0]} and train.{languages[1]}")
    return f"pairs({', '.join(f'{split}={files!r}' for split, files in splits.items())})"
