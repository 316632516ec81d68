"""Dense layers: a perceptron is a linear layer with an activation, an MLP a sequence of them."""

from collections.abc import Callable
from inspect import isfunction, signature
from typing import Any, cast

import torch
from torch import Tensor, nn

from tutorec.modules.activation import SwishLayerNorm

Activation = Callable[[Tensor], Tensor]
_NAMED: dict[str, Activation] = {"relu": torch.relu, "sigmoid": torch.sigmoid}
_SWISH = "swish_layernorm"


class Perceptron(nn.Module):
    """A linear layer with activation: ``[B, in_size]`` -> ``[B, out_size]``.

    Args:
        in_size: Input columns.
        out_size: Output columns.
        bias: Whether there is a bias.
        activation: Elementwise activation, a function or a module.
        device: Device of the weights.
        dtype: Dtype of the weights.

    Example:
        >>> import torch
        >>> Perceptron(3, 2)(torch.zeros(5, 3)).shape
        torch.Size([5, 2])
    """

    def __init__(
        self,
        in_size: int,
        out_size: int,
        bias: bool = True,
        activation: Activation = torch.relu,
        device: torch.device | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self._linear = nn.Linear(in_size, out_size, bias=bias, device=device, dtype=dtype)
        self._activation_fn = activation

    def forward(self, input: Tensor) -> Tensor:
        """Apply the layer, ``[B, out_size]``."""
        return self._activation_fn(self._linear(input))


class MLP(nn.Module):
    """A sequence of perceptrons: ``[B, in_size]`` to ``[B, layer_sizes[-1]]``; TorchRec's ``MLP``.

    Args:
        in_size: Input columns.
        layer_sizes: Output columns of each layer, at least one.
        bias: Whether each layer has a bias.
        activation: ``"relu"``, ``"sigmoid"``, ``"swish_layernorm"`` (one ``SwishLayerNorm`` per
            layer), a function, a module, or a class or function without arguments that makes a
            module, called once per layer.
        device: Device of the weights.
        dtype: Dtype of the weights.
        activation_on_last: Whether the last layer has an activation; without it the output is
            logits.

    Raises:
        ValueError: The activation's name is unknown.

    Example:
        >>> import torch
        >>> MLP(3, [4, 1], activation_on_last=False)(torch.zeros(5, 3)).shape
        torch.Size([5, 1])
    """

    def __init__(
        self,
        in_size: int,
        layer_sizes: list[int],
        bias: bool = True,
        activation: str | Activation | Callable[[], nn.Module] = torch.relu,
        device: torch.device | None = None,
        dtype: torch.dtype = torch.float32,
        activation_on_last: bool = True,
    ) -> None:
        super().__init__()
        if isinstance(activation, str) and activation not in (*_NAMED, _SWISH):
            known = sorted((*_NAMED, _SWISH))
            raise ValueError(
                f"MLP: activation {activation!r} is not known; use one of {known} or a function"
            )

        layers: list[nn.Module] = []
        for position, (size_in, size_out) in enumerate(
            zip([in_size, *layer_sizes[:-1]], layer_sizes, strict=True)
        ):
            if position == len(layer_sizes) - 1 and not activation_on_last:
                layer_activation = nn.Identity()
            elif activation == _SWISH:
                layer_activation = SwishLayerNorm(size_out, device).to(dtype)
            else:
                layer_activation = _make(activation)

            layers.append(Perceptron(size_in, size_out, bias, layer_activation, device, dtype))
        self._mlp = nn.Sequential(*layers)

    def forward(self, input: Tensor) -> Tensor:
        """Return the last layer's output, ``[B, layer_sizes[-1]]``."""
        return self._mlp(input)


def _make(activation: str | Activation | Callable[[], nn.Module]) -> Activation:
    """The activation of one layer; a class or factory is called once per layer."""
    if isinstance(activation, str):
        return _NAMED[activation]

    maker = cast(Callable[..., Any], activation)
    # Modules and torch's built-in functions take an input; only a class or a plain Python function
    # may be a factory.
    makes = isfunction(activation) and not signature(activation).parameters
    return maker() if isinstance(activation, type) or makes else maker
