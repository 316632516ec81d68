"""Base class of modules that change a batch before its collection looks rows up."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import nn

from tutorec.sparse.keyed_jagged import KeyedJaggedTensor


class BaseGroupedFeatureProcessor(nn.Module, ABC):
    """A module that sets weights or other ids for a whole batch; to be subclassed.

    A model calls it before its collection, which needs ``is_weighted=True`` if the processor sets
    weights.

    Example:
        >>> import torch
        >>> class Halves(BaseGroupedFeatureProcessor):
        ...     def forward(self, features):
        ...         weights = torch.full_like(features.values(), 0.5, dtype=torch.float)
        ...         return KeyedJaggedTensor(
        ...             features.keys(), features.values(), weights, features.lengths()
        ...         )
        >>> batch = KeyedJaggedTensor(
        ...     ["item"], torch.tensor([3, 1]), lengths=torch.tensor([1, 1])
        ... )
        >>> Halves()(batch).weights().tolist()
        [0.5, 0.5]

    Source:
        TorchRec's ``torchrec.modules.feature_processor.BaseGroupedFeatureProcessor``.
    """

    @abstractmethod
    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Return the changed batch."""
