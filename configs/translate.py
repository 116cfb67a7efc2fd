"""Translation with the original architecture (Vaswani et al. 2017): post-norm, sinusoidal positions,
ReLU, one embedding for both languages and the head, label smoothing, warm-up and inverse square root.

    python train.py --config=configs/translate.py --workdir=runs/translate            # Bible, en-es
    python train.py --config=configs/translate.py:multi30k/en-de --workdir=runs/m30k  # files of yours
    python eval.py --workdir=runs/m30k --split=test --step=best
    python scripts/generate.py --workdir=runs/m30k --prompt='A dog runs.' --beams=4

The argument DIR/SOURCE-TARGET names line-aligned files DIR/train.SOURCE, DIR/val.TARGET and so on
(also .gz and .xz; validation is val, valid, validation or dev, a test set is test or test_…).
"""

from pathlib import Path

from transformer import defaults


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

    c.data.source = _pairs(data) if data else "bible"
    c.data.tokenizer = "bpe(vocab_size=6000)"
    c.data.packing = "buckets"
    c.data.batch_size = 48
    c.data.seq_len = 64

    c.objective = "seq2seq(label_smoothing=0.1)"
    c.optimizer = "adamw(b1=0.9, b2=0.98, eps=1e-9, weight_decay=0.0)"
    c.schedule = "inverse_sqrt(warmup=1000)"
    c.train.steps = None
    c.train.epochs = 27
    c.train.clip = None

    c.eval.every = 1000
    c.eval.decode = "bleu(beams=4, length_penalty=0.6)"
    c.checkpoint.every = 1000
    c.checkpoint.best = "nll"
    return c


def _pairs(data: str) -> str:
    folder, languages = Path(data).parent, Path(data).name.split("-")
    found = {}
    for file in sorted(folder.iterdir()):
        name = file.name.removesuffix(".gz").removesuffix(".xz")
        for language in languages:
            if name.endswith(f".{language}"):
                found.setdefault(name.removesuffix(f".{language}"), {})[language] = str(file)
    splits = {}
    for stem, files in found.items():
        kind = "validation" if stem in ("val", "valid", "dev") else stem.split("_")[0]
        if len(files) == 2 and kind in ("train", "validation", "test"):
            splits.setdefault(kind, tuple(files[language] for language in languages))
    return f"pairs({', '.join(f'{kind}={files!r}' for kind, files in splits.items())})"
