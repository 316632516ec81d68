from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tutorec.fx import symbolic_trace
from tutorec.modules.crossnet import (
    CrossNet,
    LowRankCrossNet,
    LowRankMixtureCrossNet,
    VectorCrossNet,
)

NETS: dict[str, Callable[[], nn.Module]] = {
    "full": lambda: CrossNet(5, 3),
    "low rank": lambda: LowRankCrossNet(5, 3, low_rank=2),
    "vector": lambda: VectorCrossNet(5, 3),
    "mixture": lambda: LowRankMixtureCrossNet(5, 3, num_experts=4, low_rank=2),
    "one expert": lambda: LowRankMixtureCrossNet(5, 3, low_rank=2, activation=nn.PReLU()),
}


def _with_random_weights(name: str) -> nn.Module:
    net = NETS[name]().double()
    for parameter in net.parameters():
        nn.init.normal_(parameter)
    return net


def _sample_by_sample(net: nn.Module, sample: Tensor) -> Tensor:
    """The formula of the module's table, for one sample [N]."""
    x = sample
    for layer in range(3):
        bias = net.bias[layer].flatten()
        if isinstance(net, CrossNet):
            x = sample * (net.kernels[layer] @ x + bias) + x
        elif isinstance(net, LowRankCrossNet):
            x = sample * (net.W_kernels[layer] @ (net.V_kernels[layer] @ x) + bias) + x
        elif isinstance(net, VectorCrossNet):
            x = sample * (net.kernels[layer].flatten() @ x) + bias + x
        else:
            experts = zip(
                net.U_kernels[layer], net.C_kernels[layer], net.V_kernels[layer], strict=True
            )
            g = net._activation
            crossed = [sample * (u @ g(c @ g(v @ x)) + bias) for u, c, v in experts]
            gates = (
                [1.0]
                if net.gates is None
                else torch.cat([gate(x) for gate in net.gates]).softmax(0)
            )
            x = sum(gate * each for gate, each in zip(gates, crossed, strict=True)) + x
    return x


@pytest.mark.parametrize("name", NETS)
def test_every_net_is_its_formula(name: str) -> None:
    net, batch = _with_random_weights(name), torch.randn(6, 5, dtype=torch.float64)
    torch.testing.assert_close(
        net(batch), torch.stack([_sample_by_sample(net, sample) for sample in batch])
    )
    assert net(batch[:0]).shape == (0, 5)


@pytest.mark.parametrize("name", NETS)
def test_every_net_is_the_same_scripted_traced_and_exported(name: str) -> None:
    net, batch = _with_random_weights(name), torch.randn(6, 5, dtype=torch.float64)
    traced = symbolic_trace(net)
    exported = torch.export.export(net, (batch,)).module()
    for other in (torch.jit.script(net), traced, torch.jit.script(traced), exported):
        torch.testing.assert_close(other(batch), net(batch))


@pytest.mark.parametrize("name", NETS)
def test_every_weight_gets_a_gradient(name: str) -> None:
    net = _with_random_weights(name)
    net(torch.randn(6, 5, dtype=torch.float64)).square().sum().backward()
    for weight, parameter in net.named_parameters():
        assert parameter.grad is not None and bool(parameter.grad.abs().sum() > 0), weight


def test_without_layers_the_output_is_the_input() -> None:
    batch = torch.randn(2, 5)
    assert torch.equal(CrossNet(5, 0)(batch), batch)


def test_a_rank_and_a_number_of_experts_of_none_are_refused() -> None:
    with pytest.raises(ValueError, match=r"LowRankCrossNet: low_rank=0.*least 1"):
        LowRankCrossNet(5, 1, low_rank=0)
    with pytest.raises(ValueError, match="LowRankMixtureCrossNet: num_experts=0"):
        LowRankMixtureCrossNet(5, 1, num_experts=0)
