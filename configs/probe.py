"""Ten probes of what a Transformer can do; each is a task with questions of growing length.

    python train.py --config=configs/probe.py:reverse --workdir=runs/reverse
    python eval.py --workdir=runs/reverse --split=test

The argument is one of copy, reverse, sort, recall, induction, modular_addition, dyck, addition,
needle and listops (transformer/data/probes). A small decoder reads the question and writes the
answer; for listops a small encoder names the value. The validation split has questions as long as
those in training, the test split has longer ones too (modular_addition has none): `exact_match` is
the share of right answers, `exact_match_by_length` the same for every length.

Expected, exact matches of the validation and the test split after one to four minutes of training
on two CPU cores: copy 0.99 / 0.51, reverse 0.98 / 0.48, sort 0.97 / 0.57, dyck 1.00 / 0.96,
listops 0.44 / 0.32, addition 0.80 / 0.40, recall 1.00 / 0.86, induction 1.00 / 0.79. Of
words longer than those in training, reverse turns none.
"""

from transformer import defaults, spec

LONGEST = {  # characters of a question and of an answer, those of the test split included
    "copy": (40, 40),
    "reverse": (40, 40),
    "sort": (40, 40),
    "recall": (20, 3),
    "induction": (20, 1),
    "modular_addition": (4, 1),
    "dyck": (40, 4),
    "addition": (22, 11),
    "needle": (205, 3),
    "listops": (100, 1),
}
SOURCES = {  # where more or easier questions are needed than the task has by itself
    "recall": "recall(symbols=8, length=4, test_length=8, size=200000)",
    "induction": "induction(symbols=8, length=10, test_length=20, size=200000)",
    "addition": "addition(size=100000)",
}


def get_config(task: str = "reverse"):
    if task not in LONGEST:
        raise spec.SpecError(spec.unknown(task, LONGEST, "task"))
    question, answer = LONGEST[task]
    c = defaults()
    c.model.dim = 64
    c.model.depth = 2
    c.model.heads = 4

    c.data.source = SOURCES.get(task, task)
    c.data.tokenizer = "chars"
    c.data.packing = "buckets(buckets=2)"
    c.data.batch_size = 32
    c.data.seq_len = answer + 1  # and its end
    c.data.source_len = question + 2  # and its beginning and its end

    c.objective = "seq2seq"
    c.optimizer = "muon"
    c.schedule = "cosine(peak=2e-2, warmup=50)"
    c.train.steps = 1000

    c.eval.every = 500
    c.eval.decode = "exact"
    c.checkpoint.every = 500
    if task in ("recall", "induction", "needle"):
        # A key is found where it matches: with the small initial weights that are the default the
        # scores of a narrow model stay flat for thousands of updates.
        c.model.init = "lecun"
        c.data.batch_size = 128 if question < 100 else 32
        c.optimizer = "adamw"
        c.schedule = "constant(peak=3e-3, warmup=100)"
        c.train.steps = 2000
    elif task == "modular_addition":  # Power et al. 2022
        c.model.dim = 128
        c.data.batch_size = 512
        c.optimizer = "adamw(b2=0.98, weight_decay=1.0)"
        c.schedule = "constant(peak=1e-3, warmup=10)"
        c.train.steps = 4000
    elif task == "listops":
        c.model.family = "encoder"
        c.objective = "classify"
        c.data.seq_len = question + 1
        c.data.source_len = None
    return c
