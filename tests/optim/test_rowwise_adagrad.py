import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernels.oracles import rowwise_adagrad_update

from tutorec.optim.rowwise_adagrad import RowWiseAdagrad


@given(rows=st.integers(1, 5), columns=st.integers(1, 5), seed=st.integers(0, 99))
def test_steps_follow_the_formula(rows: int, columns: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.nn.Parameter(torch.randn(rows, columns, generator=generator))
    expected, state = weight.detach().clone(), torch.zeros(rows)
    optimizer = RowWiseAdagrad([weight], lr=0.5, eps=1e-3)
    for _ in range(3):
        weight.grad = torch.randn(rows, columns, generator=generator)
        expected, state = rowwise_adagrad_update(
            expected, state, torch.arange(rows), weight.grad, 0.5, 1e-3
        )
        optimizer.step()
    torch.testing.assert_close(weight.detach(), expected)
    torch.testing.assert_close(optimizer.state[weight]["sum"], state.view(-1, 1))


def test_rates_decay_with_the_steps_and_weights_with_the_gradient() -> None:
    weight = torch.nn.Parameter(torch.full((1, 2), 4.0))
    optimizer = RowWiseAdagrad(
        [weight], lr=1.0, lr_decay=1.0, weight_decay=0.5, eps=0.0, maximize=True
    )
    weight.grad = torch.full((1, 2), -1.0)
    optimizer.step()  # gradient 1 + 0.5 * 4 = 3, state 9, moved by 3 / 3
    assert weight.tolist() == [[3.0, 3.0]]
    optimizer.step()  # gradient 1 + 0.5 * 3 = 2.5, state 15.25, half the rate
    torch.testing.assert_close(weight.detach(), torch.full((1, 2), 3.0 - 0.5 * 2.5 / 15.25**0.5))


def test_the_state_is_stored_shared_and_loaded() -> None:
    weight = torch.nn.Parameter(torch.ones(3, 2))
    optimizer = RowWiseAdagrad([weight], initial_accumulator_value=0.25)
    assert optimizer.state[weight]["sum"].tolist() == [[0.25]] * 3
    weight.grad = torch.ones(3, 2)
    assert optimizer.step(lambda: torch.tensor(7.0)) == 7.0
    twin = RowWiseAdagrad([torch.nn.Parameter(torch.ones(3, 2))])
    twin.load_state_dict(optimizer.state_dict())
    [state] = twin.state.values()
    assert (state["sum"].tolist(), float(state["step"])) == ([[1.25]] * 3, 1.0)
    twin.share_memory()
    assert state["sum"].is_shared()


def test_rows_of_16_bits_have_a_state_of_32() -> None:
    weight = torch.nn.Parameter(torch.ones(3, 2, dtype=torch.bfloat16))
    optimizer = RowWiseAdagrad([weight], lr=1.0)
    weight.grad = torch.full_like(weight, 2.0)
    optimizer.step()
    assert optimizer.state[weight]["sum"].dtype == torch.float32
    assert weight.tolist() == [[0.0, 0.0]] * 3


@pytest.mark.parametrize(
    "name", ["lr", "lr_decay", "weight_decay", "initial_accumulator_value", "eps"]
)
@pytest.mark.parametrize("value", [-1.0, float("nan")])
def test_a_negative_number_is_refused(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name}={value} must be a number of at least 0"):
        RowWiseAdagrad([torch.nn.Parameter(torch.ones(1, 1))], **{name: value})
