"""Cross networks: each layer multiplies its input by the first one and so learns products.

With x_0 the input, x_l the input of layer l, and ``*`` elementwise, a layer computes

======================  ========================================================  =================
class                   x_{l+1}                                                   weights per layer
======================  ========================================================  =================
CrossNet                ``x_0 * (W x_l + b) + x_l``                               N^2 + N
LowRankCrossNet         ``x_0 * (W (V x_l) + b) + x_l``                           2 N r + N
VectorCrossNet          ``x_0 (w . x_l) + b + x_l``                               2 N
LowRankMixtureCrossNet  ``sum_k gate_k x_0 * (U_k g(C_k g(V_k x_l)) + b) + x_l``  K r (2 N + r) + N
======================  ========================================================  =================

The gates are functions of x_l. ``VectorCrossNet`` is DCN (Wang et al., 2017,
https://arxiv.org/abs/1708.05123); the others are DCN-V2 (Wang et al., 2020,
https://arxiv.org/abs/2008.13535). Names, weights and their order are those of
``torchrec.modules.crossnet``: state dicts are interchangeable, and the same seed gives the same
weights.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class CrossNet(nn.Module):
    """Layers with one full matrix each: ``[B, N]`` to ``[B, N]``.

    Args:
        in_features: N.
        num_layers: Number of layers; each raises the degree of the products by one.

    Example:
        >>> import torch
        >>> from tutorec.modules.crossnet import CrossNet
        >>> net = CrossNet(in_features=2, num_layers=1)
        >>> _ = net.kernels[0].data.copy_(torch.tensor([[0.0, 1.0], [1.0, 0.0]]))
        >>> net(torch.tensor([[2.0, 5.0]])).tolist()  # 2 * 5 + 2, 5 * 2 + 5
        [[12.0, 15.0]]
    """

    def __init__(self, in_features: int, num_layers: int) -> None:
        super().__init__()
        self.kernels = _matrices(num_layers, in_features, in_features)
        self.bias = _zeros(num_layers, in_features, 1)

    def forward(self, input: Tensor) -> Tensor:
        """All layers, ``[B, N]``."""
        crossed = input
        for kernel, bias in zip(self.kernels, self.bias):  # noqa: B905  TorchScript knows no `strict`
            crossed = input * F.linear(crossed, kernel, bias.squeeze(1)) + crossed
        return crossed


class LowRankCrossNet(nn.Module):
    """Layers whose matrix is a product of two thin ones, N x r and r x N: ``[B, N]`` to ``[B, N]``.

    It has fewer operations than `CrossNet` if r < N / 2.

    Args:
        in_features: N.
        num_layers: Number of layers.
        low_rank: r.

    Raises:
        ValueError: ``low_rank`` is less than 1.

    Example:
        >>> import torch
        >>> from tutorec.modules.crossnet import LowRankCrossNet
        >>> net = LowRankCrossNet(in_features=10, num_layers=2, low_rank=3)
        >>> net(torch.randn(4, 10)).shape, net.V_kernels[0].shape
        (torch.Size([4, 10]), torch.Size([3, 10]))
    """

    def __init__(self, in_features: int, num_layers: int, low_rank: int = 1) -> None:
        super().__init__()
        _check_at_least_one("LowRankCrossNet", "low_rank", low_rank)
        self.W_kernels = _matrices(num_layers, in_features, low_rank)
        self.V_kernels = _matrices(num_layers, low_rank, in_features)
        self.bias = _zeros(num_layers, in_features)

    def forward(self, input: Tensor) -> Tensor:
        """All layers, ``[B, N]``."""
        crossed = input
        for out, into, bias in zip(self.W_kernels, self.V_kernels, self.bias):  # noqa: B905
            crossed = input * F.linear(F.linear(crossed, into), out, bias) + crossed
        return crossed


class VectorCrossNet(nn.Module):
    """Layers with one vector each: ``[B, N]`` to ``[B, N]``.

    Args:
        in_features: N.
        num_layers: Number of layers.

    Example:
        >>> import torch
        >>> from tutorec.modules.crossnet import VectorCrossNet
        >>> net = VectorCrossNet(in_features=2, num_layers=1)
        >>> _ = net.kernels[0].data.fill_(1.0)
        >>> net(torch.tensor([[2.0, 5.0]])).tolist()  # 2 * 7 + 2, 5 * 7 + 5
        [[16.0, 40.0]]
    """

    def __init__(self, in_features: int, num_layers: int) -> None:
        super().__init__()
        self.kernels = _matrices(num_layers, in_features, 1)
        self.bias = _zeros(num_layers, in_features, 1)

    def forward(self, input: Tensor) -> Tensor:
        """All layers, ``[B, N]``."""
        crossed = input
        for kernel, bias in zip(self.kernels, self.bias):  # noqa: B905
            crossed = input * (crossed @ kernel) + bias.squeeze(1) + crossed
        return crossed


class LowRankMixtureCrossNet(nn.Module):
    """Layers of K low-rank experts, mixed by a softmax of K gates: ``[B, N]`` to ``[B, N]``.

    All layers share the gates. One expert needs none.

    Args:
        in_features: N.
        num_layers: Number of layers.
        num_experts: K.
        low_rank: r.
        activation: g, a function or a module.

    Raises:
        ValueError: ``num_experts`` or ``low_rank`` is less than 1.

    Example:
        >>> import torch
        >>> from tutorec.modules.crossnet import LowRankMixtureCrossNet
        >>> net = LowRankMixtureCrossNet(
        ...     in_features=10, num_layers=2, num_experts=5, low_rank=3
        ... )
        >>> net(torch.randn(4, 10)).shape, net.U_kernels[0].shape
        (torch.Size([4, 10]), torch.Size([5, 10, 3]))
    """

    def __init__(
        self,
        in_features: int,
        num_layers: int,
        num_experts: int = 1,
        low_rank: int = 1,
        activation: nn.Module | Callable[[Tensor], Tensor] = torch.relu,
    ) -> None:
        super().__init__()
        _check_at_least_one("LowRankMixtureCrossNet", "num_experts", num_experts)
        _check_at_least_one("LowRankMixtureCrossNet", "low_rank", low_rank)
        self.U_kernels = _matrices(num_layers, num_experts, in_features, low_rank)
        self.V_kernels = _matrices(num_layers, num_experts, low_rank, in_features)
        self.bias = _zeros(num_layers, in_features, 1)

        self.gates = None
        if num_experts > 1:
            self.gates = nn.ModuleList(
                [nn.Linear(in_features, 1, bias=False) for _ in range(num_experts)]
            )
        self._activation = activation
        self.C_kernels = _matrices(num_layers, num_experts, low_rank, low_rank)

    def forward(self, input: Tensor) -> Tensor:
        """All layers, ``[B, N]``."""
        crossed = input
        for out, core, into, bias in zip(self.U_kernels, self.C_kernels, self.V_kernels, self.bias):  # noqa: B905
            inner = self._activation(torch.einsum("krn,bn->bkr", into, crossed))
            inner = self._activation(torch.einsum("kqr,bkr->bkq", core, inner))

            # [B, K, N]
            experts = input.unsqueeze(1) * (
                torch.einsum("knr,bkr->bkn", out, inner) + bias.squeeze(1)
            )
            if self.gates is not None:
                shares = torch.cat([gate(crossed) for gate in self.gates], dim=1).softmax(dim=1)
                experts = experts * shares.unsqueeze(2)
            crossed = experts.sum(dim=1) + crossed
        return crossed


def _matrices(layers: int, *shape: int) -> nn.ParameterList:
    """One initialized weight of this shape per layer."""
    return nn.ParameterList(
        [nn.Parameter(nn.init.xavier_normal_(torch.empty(shape))) for _ in range(layers)]
    )


def _zeros(layers: int, *shape: int) -> nn.ParameterList:
    """One zero bias of this shape per layer."""
    return nn.ParameterList([nn.Parameter(torch.zeros(shape)) for _ in range(layers)])


def _check_at_least_one(net: str, name: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{net}: {name}={value}, and it must be at least 1")
