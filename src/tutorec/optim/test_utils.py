"""What tests of optimizers need: one that does nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tutorec.optim.keyed import KeyedOptimizer


class DummyKeyedOptimizer(KeyedOptimizer):
    """A keyed optimizer whose step leaves everything as it is.

    Source:
        TorchRec's ``torchrec.optim.test_utils.DummyKeyedOptimizer``.
    """

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Nothing."""


__all__ = ["DummyKeyedOptimizer"]
