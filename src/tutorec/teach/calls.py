"""How much calling a call does: operators of PyTorch that run, functions of Python entered."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, NamedTuple

from torch.utils._python_dispatch import TorchDispatchMode


class Calls(NamedTuple):
    """What ran in one call.

    Args:
        operators: Operators of PyTorch, those that TorchScript's interpreter calls among them.
        functions: Functions written in Python that were entered.
    """

    operators: int
    functions: int


class _Operators(TorchDispatchMode):
    """Counts the operators that run."""

    seen = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.seen += 1
        return func(*args, **(kwargs or {}))


def count_calls(call: Callable[[], object]) -> Calls:
    """Counts operators and functions of Python in one call; neither depends on the machine's speed.

    The call is made three times: once to warm up, and once for each count, so that the counting
    of operators, which is written in Python itself, does not count as functions.

    Args:
        call: What is counted; a function of Python counts as one itself.

    Example:
        >>> import torch
        >>> two = torch.ones(2)
        >>> count_calls(lambda: two.add(two).mul(two))
        Calls(operators=2, functions=1)
    """
    call()
    entered = 0

    def at_event(frame: FrameType, event: str, _: Any) -> None:
        nonlocal entered
        entered += event == "call"

    before = sys.getprofile()
    sys.setprofile(at_event)
    try:
        call()
    finally:
        sys.setprofile(before)
    with _Operators() as operators:
        call()
    return Calls(operators.seen, entered)
