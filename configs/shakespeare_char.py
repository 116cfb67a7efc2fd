"""The classic small character model: Tiny Shakespeare, 6 layers of width 384, dropout 0.2.

    python train.py --config=configs/shakespeare_char.py:input.txt --workdir=runs/char

The argument is the text file (1,115,394 characters, known as tinyshakespeare; the last tenth is the
validation split). Expected: validation loss 1.47 at the best step, reached around step 1750 of
5000 (published for nanoGPT, whose settings these are: github.com/karpathy/nanoGPT, README); the
best checkpoint is kept. Minutes on one GPU, half a day on two CPU cores.

The same source publishes 1.88 for a smaller run, which took four minutes on two CPU cores and
ended at 1.891 (2.42, 2.29, 2.16, 2.08, 2.00, 1.94, 1.90 at every 250 steps before):

    python train.py --config=configs/shakespeare_char.py:input.txt --workdir=runs/char-small \\
        --config.model.depth=4 --config.model.heads=4 --config.model.dim=128 \\
        --config.model.dropout=0.0 --config.data.batch_size=12 --config.data.seq_len=64 \\
        --config.train.steps=2000
"""

from transformer import defaults


def get_config(path: str = "input.txt"):
    c = defaults()
    c.model.dim = 384
    c.model.depth = 6
    c.model.heads = 6
    c.model.dropout = 0.2
    c.model.position = "learned"
    c.model.norm = "layer(bias=False)"
    c.model.placement = "pre"
    c.model.ffn = "mlp(act='gelu')"
    c.model.tie = True
    c.model.init = "normal(std=0.02, depth_scaled=True)"

    c.data.source = f"text(path={path!r})"
    c.data.tokenizer = "chars"
    c.data.batch_size = 64
    c.data.seq_len = 256

    c.optimizer = "adamw(b1=0.9, b2=0.99, weight_decay=0.1)"
    c.schedule = "cosine(peak=1e-3, warmup=100, end=0.1)"
    c.train.steps = 5000
    c.train.clip = 1.0

    c.eval.every = 250
    c.eval.sample = 200
    c.checkpoint.every = 250
    return c
