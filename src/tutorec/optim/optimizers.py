"""Small helpers around optimizers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch


def in_backward_optimizer_filter(
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]], include: bool = False
) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """The parameters that are *not* updated during backward, which therefore need an optimizer of their own.

    Args:
        named_parameters: As ``model.named_parameters()`` yields them.
        include: Yield the others instead: those that backward updates.

    Yields:
        (name, parameter).

    Example:
        >>> import torch
        >>> [name for name, _ in in_backward_optimizer_filter(torch.nn.Linear(2, 1).named_parameters())]
        ['weight', 'bias']

    Source:
        TorchRec's ``torchrec.optim.optimizers.in_backward_optimizer_filter``.
    """
    for name, parameter in named_parameters:
        if hasattr(parameter, "_in_backward_optimizers") == include:
            yield name, parameter
