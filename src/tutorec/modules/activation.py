"""Activations that torch does not have."""

import torch
from torch import Tensor, nn


class SwishLayerNorm(nn.Module):
    """The activation ``x * sigmoid(layer_norm(x))``, of x's shape.

    Args:
        input_dims: Sizes of the last dimensions, which are normalized; an int for one dimension.
        device: Device of the weights.

    Example:
        >>> import torch
        >>> SwishLayerNorm(2)(torch.tensor([[-1.0, 1.0]]))  # normalized it is itself
        tensor([[-0.2689,  0.7311]], grad_fn=<MulBackward0>)

    See Also:
        TorchRec's ``torchrec.modules.activation.SwishLayerNorm``, whose names in ``state_dict`` are
        the same.
    """

    def __init__(
        self, input_dims: int | list[int] | torch.Size, device: torch.device | None = None
    ) -> None:
        super().__init__()
        self.norm: nn.Module = nn.Sequential(nn.LayerNorm(input_dims, device=device), nn.Sigmoid())

    def forward(self, input: Tensor) -> Tensor:
        """``[..., *input_dims]`` -> the same shape."""
        return input * self.norm(input)
