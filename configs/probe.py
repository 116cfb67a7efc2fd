"""Ten probes of what a Transformer can do; each is a task with questions of growing length.

    python train.py --config=configs/probe.py:reverse --workdir=runs/reverse
    python eval.py --workdir=runs/reverse --split=test

The argument is one of copy, reverse, sort, recall, induction, modular_addition, dyck, addition,
needle and listops (transformer/data/probes). A small decoder reads the question and writes the
answer; for listops a small encoder names its value. The validation split has questions as long as
those in training, the test split has longer ones too (modular_addition has none): `exact_match` is
the share of right answers, `exact_match_by_length` the same for every length.
"""

from transformer import defaults, spec

# Of each task, the characters of the longest question and answer in the test split.
LONGEST = {
    "copy": (40, 40),
    "reverse": (40, 40),
    "sort": (40, 40),
    "recall": (36, 3),
    "induction": (40, 1),
    "modular_addition": (4, 1),
    "dyck": (40, 4),
    "addition": (22, 11),
    "needle": (205, 3),
    "listops": (0, 100),
}


def get_config(task: str = "reverse"):
    if task not in LONGEST:
        raise spec.SpecError(spec.unknown(task, LONGEST, "task"))
    question, answer = LONGEST[task]
    c = defaults()
    c.model.dim = 64
    c.model.depth = 2
    c.model.heads = 4

    c.data.source = task
    c.data.tokenizer = "chars"
    c.data.packing = "buckets(buckets=2)"
    c.data.batch_size = 32
    c.data.seq_len = answer + 1  # and the end of the text
    c.data.source_len = question + 2  # and its beginning and its end

    c.objective = "seq2seq"
    c.optimizer = "muon"
    c.schedule = "cosine(peak=2e-2, warmup=50)"
    c.train.steps = 1000

    c.eval.every = 500
    c.eval.decode = "exact"
    c.checkpoint.every = 500
    if task == "listops":
        c.model.family, c.objective = "encoder", "classify"
    return c
