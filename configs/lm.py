"""Language modelling on Shakespeare's works: the first experiment.

    python train.py --config=configs/lm.py --workdir=runs/lm

Expected: validation loss 3.91 nats per token (unigrams: 6.10), 2.14 bits per byte, after 700 steps;
two to three minutes on two CPU cores.
"""

from transformer import defaults


def get_config():
    c = defaults()
    c.model.dim = 128
    c.model.depth = 4
    c.model.heads = 4

    c.data.source = "shakespeare"
    c.data.tokenizer = "bpe(vocab_size=2048)"
    c.data.batch_size = 16
    c.data.seq_len = 128

    c.optimizer = "muon"
    c.schedule = "cosine(peak=2e-2, warmup=20)"
    c.train.steps = 700

    c.eval.every = 350
    c.eval.sample = 120
    c.eval.prompt = "ROMEO.\n"
    c.checkpoint.every = 350
    return c
