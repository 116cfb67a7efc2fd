"""A small decoder on Shakespeare's works, byte by byte.

    python train.py --config=configs/lm.py --workdir=runs/lm

Expected: 
"""

from transformer import defaults


def get_config():
    c = defaults()
    c.model.dim = 128
    c.model.depth = 4
    c.model.heads = 4
    c.data.source = "shakespeare"
    c.data.tokenizer = "bytes"
    c.data.batch_size = 16
    c.data.seq_len = 128
    c.optimizer = "adamw(b2=0.99, weight_decay=0.1)"
    c.schedule = "cosine(peak=2e-3, warmup=100)"
    c.train.steps = 1000
    c.eval.every = 250
    c.eval.sample = 200
    c.eval.prompt = "ROMEO.\n"
    c.checkpoint.every = 250
    return c
