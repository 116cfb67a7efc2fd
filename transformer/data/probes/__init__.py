"""Ten synthetic tasks, each of which probes one ability of a Transformer: PROBES.

A probe is a source of questions and answers in which every symbol is one character, so the
tokenizer is `chars`. It writes a question of a given length (`ask`), answers it (`solve`), and says
by which length to report accuracy (`length_of`). To add one, subclass `Drawn` with these three
methods; its fields are its options.
"""

from transformer.data.probes.formal import Addition, Dyck, ListOps, ModularAddition
from transformer.data.probes.words import Copy, Induction, Needle, Recall, Reverse, Sort

PROBES = {
    "copy": Copy,
    "reverse": Reverse,
    "sort": Sort,
    "recall": Recall,
    "induction": Induction,
    "modular_addition": ModularAddition,
    "dyck": Dyck,
    "addition": Addition,
    "needle": Needle,
    "listops": ListOps,
}
