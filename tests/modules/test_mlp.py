import pytest
import torch
from torch import nn

from tutorec.modules.activation import SwishLayerNorm
from tutorec.modules.mlp import MLP, Perceptron


def activations(mlp: MLP) -> list[nn.Module]:
    """Its activations with weights, each once."""
    return [each for each in mlp.modules() if isinstance(each, nn.PReLU)]


def test_perceptron_is_a_linear_layer_and_its_activation() -> None:
    layer, rows = Perceptron(3, 2), torch.randn(5, 3)
    assert torch.equal(layer(rows), torch.relu(nn.functional.linear(rows, *layer.parameters())))
    assert list(Perceptron(3, 2, bias=False).state_dict()) == ["_linear.weight"]


def test_mlp_runs_its_layers_in_a_row() -> None:
    mlp, rows = MLP(3, [4, 2], activation="sigmoid"), torch.randn(5, 3)
    expected = rows
    for index in range(2):
        state = mlp.state_dict()
        weight, bias = state[f"_mlp.{index}._linear.weight"], state[f"_mlp.{index}._linear.bias"]
        expected = torch.sigmoid(nn.functional.linear(expected, weight, bias))
    torch.testing.assert_close(mlp(rows), expected)


def test_the_last_layer_may_give_logits() -> None:
    mlp = MLP(3, [1], activation=torch.sigmoid, activation_on_last=False)
    assert [type(each) for each in mlp.modules()][-1] is nn.Identity


def test_makers_of_activations_are_called_for_each_layer() -> None:
    for maker in (nn.PReLU, lambda: nn.PReLU(1)):
        assert len(activations(MLP(3, [4, 2], activation=maker))) == 2
    shared = nn.PReLU()
    assert activations(MLP(3, [4, 2], activation=shared)) == [shared]
    assert MLP(3, [4], activation=lambda rows: rows * 2)(torch.zeros(1, 3)).shape == (1, 4)


def test_an_unknown_activation_is_named() -> None:
    with pytest.raises(
        ValueError,
        match=r"'tanh'.*not.*\['relu', 'sigmoid', 'swish_layernorm'\]",
    ):
        MLP(3, [4], activation="tanh")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_layers_may_be_normalized_before_they_are_gated(dtype: torch.dtype) -> None:
    mlp, rows = (
        MLP(3, [4, 2], activation="swish_layernorm", dtype=dtype),
        torch.randn(5, 3, dtype=dtype),
    )
    state, expected = mlp.state_dict(), rows
    for index, size in enumerate([4, 2]):
        state[f"_mlp.{index}._activation_fn.norm.0.weight"].normal_()
        linear = (state[f"_mlp.{index}._linear.weight"], state[f"_mlp.{index}._linear.bias"])
        norm = (
            state[f"_mlp.{index}._activation_fn.norm.0.weight"],
            state[f"_mlp.{index}._activation_fn.norm.0.bias"],
        )
        expected = nn.functional.linear(expected, *linear)
        expected = expected * torch.sigmoid(nn.functional.layer_norm(expected, (size,), *norm))
    torch.testing.assert_close(mlp(rows), expected)
    logits = MLP(
        3,
        [4, 1],
        activation="swish_layernorm",
        activation_on_last=False,
        device=torch.device("meta"),
    )
    assert [type(each) for each in logits.modules()][-1] is nn.Identity
    assert {weight.device.type for weight in logits.parameters()} == {"meta"}


def test_a_normalized_gate_is_the_number_times_the_sigmoid_of_its_normal_form() -> None:
    gate, rows = SwishLayerNorm([3, 2]), torch.randn(5, 3, 2)
    normal = (rows - rows.mean((1, 2), keepdim=True)) / (
        rows.var((1, 2), keepdim=True, correction=0) + 1e-5
    ).sqrt()
    torch.testing.assert_close(gate(rows), rows * torch.sigmoid(normal))
    assert list(gate.state_dict()) == ["norm.0.weight", "norm.0.bias"]
