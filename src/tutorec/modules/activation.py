"""Activations that torch does not have."""

import torch
from torch import Tensor, nn


class SwishLayerNorm(nn.Module):
    """Each number times the sigmoid of its normalized self: ``x * sigmoid(layer_norm(x))``, of x's shape.

    Args:
        input_dims: Sizes of the last dimensions, over which is normalized; a number for one of them.
        device: Where the weights live.

    Example:
        >>> import torch
        >>> SwishLayerNorm(2)(torch.tensor([[-1.0, 1.0]]))  # normalized it is itself
        tensor([[-0.2689,  0.7311]], grad_fn=<MulBackward0>)

    See Also:
        TorchRec's ``torchrec.modules.activation.SwishLayerNorm``, whose names in ``state_dict`` are the same.
    """

    def __init__(self, input_dims: int | list[int] | torch.Size, device: torch.device | None = None) -> None:
        super().__init__()
        self.norm: nn.Module = nn.Sequential(nn.LayerNorm(input_dims, device=device), nn.Sigmoid())

    def forward(self, input: Tensor) -> Tensor:
        """Numbers ``[..., *input_dims]`` to numbers of the same shape."""
        return input * self.norm(input)
