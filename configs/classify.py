"""Classification of short texts: which of 45 kinds of word a gloss of WordNet explains.

    python train.py --config=configs/mlm.py --workdir=runs/mlm
    for seed in 0 1 2 3 4; do
      python train.py --config=configs/classify.py:runs/mlm --workdir=runs/tuned-$seed \\
          --config.train.seed=$seed
      python train.py --config=configs/classify.py --workdir=runs/scratch-$seed \\
          --config.train.seed=$seed
    done
    python scripts/compare.py runs/tuned-* runs/scratch-*

The argument is a working directory of configs/mlm.py whose parameters and tokenizer to begin with;
without it, the same model is trained from scratch.

Expected on the validation split (45 classes; the most frequent is 12 % of the texts), mean and 95 %
interval, a minute a run on two CPU cores:

    seeds       fine-tuned         from scratch       difference, paired by seed
    0 1 2       0.600 ± 0.017      0.530 ± 0.054      0.069 ± 0.069, p = 0.049    accuracy
                1.467 ± 0.031      1.726 ± 0.161     -0.259 ± 0.192, p = 0.028    loss
    0 1 2 3 4   0.601 ± 0.006      0.533 ± 0.020      0.067 ± 0.025, p = 0.002    accuracy
                1.464 ± 0.012      1.723 ± 0.059     -0.259 ± 0.070, p = 0.0005   loss
"""

from transformer import defaults


def get_config(init_from: str = ""):
    c = defaults()
    c.model.family = "encoder"
    c.model.dim = 128
    c.model.depth = 4
    c.model.heads = 4
    c.model.position = "learned"
    c.model.placement = "pre"
    c.model.norm = "layer"
    c.model.bias = True
    c.model.dropout = 0.1
    c.model.pool = "mean"
    c.model.max_len = 64

    c.data.source = "wordnet"
    c.data.tokenizer = "bpe(vocab_size=4096)"
    c.data.packing = "buckets(buckets=4)"
    c.data.batch_size = 32
    c.data.seq_len = 63

    c.objective = "classify"
    c.optimizer = "adamw(b2=0.98, weight_decay=0.01)"
    c.schedule = "linear(peak=1e-3, warmup=50)"
    c.train.steps = 400

    c.eval.every = 200
    c.checkpoint.every = 200
    c.checkpoint.best = "loss"
    if init_from:
        c.train.init_from = init_from
        c.data.tokenizer = f"saved(path={init_from!r})"
    return c
