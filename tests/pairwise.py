"""A small set of cases in which every two values of two parameters meet."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any


def pairwise_cover(values: Sequence[Sequence[Any]]) -> set[tuple[Any, ...]]:
    """Cases out of the product of ``values`` that cover all pairs; greedy, and the same at each
    call.
    """
    places = list(combinations(range(len(values)), 2))
    pairs = {case: {(a, b, case[a], case[b]) for a, b in places} for case in product(*values)}
    still_open = set().union(*pairs.values())
    chosen: set[tuple[Any, ...]] = set()
    while still_open:
        best = max(pairs, key=lambda case: len(pairs[case] & still_open))
        chosen.add(best)
        still_open -= pairs[best]
    return chosen
