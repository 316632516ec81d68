"""A small set of cases in which every two values of two parameters meet."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any


def pairwise_cover(values: Sequence[Sequence[Any]]) -> set[tuple[Any, ...]]:
    """Cases out of the product of ``values`` that cover all pairs; greedy, and the same at each call."""
    everything = list(product(*values))
    places = list(combinations(range(len(values)), 2))
    open_pairs = {(a, b, case[a], case[b]) for case in everything for a, b in places}
    chosen: set[tuple[Any, ...]] = set()
    while open_pairs:
        best = max(everything, key=lambda case: sum((a, b, case[a], case[b]) in open_pairs for a, b in places))
        chosen.add(best)
        open_pairs -= {(a, b, best[a], best[b]) for a, b in places}
    return chosen
