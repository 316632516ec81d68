"""A keyed optimizer whose step changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tutorec.optim.keyed import KeyedOptimizer


class IdleOptimizer(KeyedOptimizer):
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        pass
