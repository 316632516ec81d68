"""Dense layers: a perceptron is one linear layer and its activation, an MLP is several in a row."""

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
    """One linear layer and its activation: ``[B, in_size]`` to ``[B, out_size]``; TorchRec's ``Perceptron``.

    Args:
        in_size: Columns in.
        out_size: Columns out.
        bias: Whether a constant is added to each column.
        activation: What is applied to each number, a function or a module.
        device: Where the weights live.
        dtype: Format of the weights.

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
        """The activated linear layer, ``[B, out_size]``."""
        return self._activation_fn(self._linear(input))


class MLP(nn.Module):
    """Perceptrons in a row: ``[B, in_size]`` to ``[B, layer_sizes[-1]]``; TorchRec's ``MLP``.

    Args:
        in_size: Columns in.
        layer_sizes: Columns out of each layer, at least one.
        bias: Whether each layer adds a constant to each column.
        activation: ``"relu"``, ``"sigmoid"``, ``"swish_layernorm"`` (a ``SwishLayerNorm`` for each layer), a function,
            a module, or a class or function that makes a module without arguments, called anew for each layer.
        device: Where the weights live.
        dtype: Format of the weights.
        activation_on_last: Whether the last layer is activated too; False leaves logits.

    Raises:
        ValueError: The activation's name is not known.

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
            raise ValueError(f"MLP: activation {activation!r} is not known; use one of {known} or a function")
        layers: list[nn.Module] = []
        for position, (size_in, size_out) in enumerate(zip([in_size, *layer_sizes[:-1]], layer_sizes, strict=True)):
            if activation_on_last or position < len(layer_sizes) - 1:
                made = SwishLayerNorm(size_out, device).to(dtype) if activation == _SWISH else _make(activation)
                layers.append(Perceptron(size_in, size_out, bias, made, device, dtype))
            else:
                layers.append(Perceptron(size_in, size_out, bias, nn.Identity(), device, dtype))
        self._mlp = nn.Sequential(*layers)

    def forward(self, input: Tensor) -> Tensor:
        """The last layer's output, ``[B, layer_sizes[-1]]``."""
        return self._mlp(input)


def _make(activation: str | Activation | Callable[[], nn.Module]) -> Activation:
    """The activation of one layer: a class or maker of modules is called anew, so that layers share no weights."""
    if isinstance(activation, str):
        return _NAMED[activation]
    maker = cast(Callable[..., Any], activation)
    if isinstance(activation, type):
        return maker()
    # Modules and torch's built-in functions take an input; only a plain Python function may take none.
    if isfunction(activation) and not signature(activation).parameters:
        return maker()
    return maker
