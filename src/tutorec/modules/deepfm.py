"""The two parts of DeepFM (Guo et al., 2017, https://arxiv.org/abs/1703.04247)."""

import torch
from torch import Tensor, nn


class DeepFM(nn.Module):
    """The deep part: a module on the concatenated embeddings of a sample.

    Args:
        dense_module: Module with the input [B, sum of N D].

    Example:
        >>> import torch
        >>> from tutorec.modules.deepfm import DeepFM
        >>> DeepFM(torch.nn.Linear(2 * 3 + 4, 5))(
        ...     [torch.zeros(6, 2, 3), torch.zeros(6, 4)]
        ... ).shape
        torch.Size([6, 5])

    Source:
        TorchRec's ``torchrec.modules.deepfm.DeepFM``.
    """

    def __init__(self, dense_module: nn.Module) -> None:
        super().__init__()
        self.dense_module = dense_module

    def forward(self, embeddings: list[Tensor]) -> Tensor:
        """Concatenate tensors [B, N, D], with any N and D each, and apply the module."""
        return self.dense_module(_side_by_side(embeddings))


class FactorizationMachine(nn.Module):
    """Factorization machine: for each sample the sum of the products of all pairs of elements.

    Example:
        >>> import torch
        >>> from tutorec.modules.deepfm import FactorizationMachine
        >>> FactorizationMachine()(
        ...     [torch.tensor([[2.0, 3.0]]), torch.tensor([[5.0]])]
        ... )  # 2*3 + 2*5 + 3*5
        tensor([[31.]])

    Source:
        TorchRec's ``torchrec.modules.deepfm.FactorizationMachine``.
    """

    def forward(self, embeddings: list[Tensor]) -> Tensor:
        """Tensors [B, N, D], with any N and D each -> [B, 1]."""
        numbers = _side_by_side(embeddings)
        return (numbers.sum(1, keepdim=True).square() - numbers.square().sum(1, keepdim=True)) / 2


@torch.fx.wrap
def _side_by_side(embeddings: list[Tensor]) -> Tensor:
    """All elements of each sample, [B, sum of N D]."""
    return torch.cat([embedding.flatten(1) for embedding in embeddings], dim=1)
