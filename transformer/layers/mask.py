"""Who may look at whom: predicates on (query position, key position), for arrays or numbers.

Padding and segments are no concern of a mask; attention ANDs them in one place. To add a mask,
write a function (query, key, options with defaults) -> bool and give it a line in MASKS.
"""

import itertools
from typing import Any

from transformer.spec import Choice, Count, Natural

Place = Any  # an integer, or an integer array that broadcasts against the other


def full(query: Place, key: Place):
    """Everyone sees everyone."""
    return (query == query) & (key == key)


def causal(query: Place, key: Place):
    """A query sees itself and what is before it."""
    return key <= query


def prefix(query: Place, key: Place, length: Count = 32):
    """The first `length` positions are seen by all, the rest is causal (Raffel et al. 2020)."""
    return (key <= query) | (key < length)


def window(query: Place, key: Place, size: Count = 256, ahead: Natural = 0):
    """A query sees `size` positions up to and with itself, and `ahead` after it (Beltagy et al.
    2020); `window(size=65, ahead=64)` is symmetric."""
    return (query - key < size) & (key - query <= ahead)


MASKS = {"full": full, "causal": causal, "prefix": prefix, "window": window}


def looks_ahead(mask: Choice, query: int = 0) -> bool:
    """Whether this query may see the key after it."""
    return bool(mask(query, query + 1))


def always_looks_ahead(mask: Choice) -> bool:
    """Whether queries look ahead however far they stand from the start."""
    return looks_ahead(mask, query=2**24)


def horizon(mask: Choice) -> int:
    """How many first positions see each other: what a decoder must be given at once."""
    return next(n for n in itertools.count(1) if not looks_ahead(mask, n - 1))
