"""A keyed optimizer that does nothing, for tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tutorec.optim.keyed import KeyedOptimizer


class DummyKeyedOptimizer(KeyedOptimizer):
    """A keyed optimizer whose step changes nothing.

    Source:
        TorchRec's ``torchrec.optim.test_utils.DummyKeyedOptimizer``.
    """

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Do nothing."""


__all__ = ["DummyKeyedOptimizer"]
