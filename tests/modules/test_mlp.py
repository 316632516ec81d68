import pytest
import torch
from torch import nn

from tutorec.modules.mlp import MLP, Perceptron


def test_perceptron_is_a_linear_layer_and_its_activation() -> None:
    layer, rows = Perceptron(3, 2), torch.randn(5, 3)
    assert torch.equal(layer(rows), torch.relu(nn.functional.linear(rows, layer._linear.weight, layer._linear.bias)))
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
    assert isinstance(mlp._mlp[0]._activation_fn, nn.Identity)  # type: ignore[index]


def test_makers_of_activations_are_called_for_each_layer() -> None:
    for maker in (nn.PReLU, lambda: nn.PReLU(1)):
        first, second = MLP(3, [4, 2], activation=maker)._mlp
        assert first._activation_fn is not second._activation_fn
    shared = nn.PReLU()
    first, second = MLP(3, [4, 2], activation=shared)._mlp
    assert first._activation_fn is second._activation_fn is shared
    assert MLP(3, [4], activation=lambda rows: rows * 2)(torch.zeros(1, 3)).shape == (1, 4)


def test_bad_layers_are_refused() -> None:
    with pytest.raises(ValueError, match="layer_sizes is empty"):
        MLP(3, [])
    with pytest.raises(ValueError, match=r"activation 'tanh' is not known; use one of \['relu', 'sigmoid'\]"):
        MLP(3, [4], activation="tanh")
