import builtins
import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import DrawnBatch, halves, jagged_batches
from torch import Tensor

from tutorec.sparse.equality import jt_is_equal, kjt_is_equal
from tutorec.sparse.jagged import JaggedTensor
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor
from tutorec.sparse.lists import kjt_from_lists, kjt_to_lists, kjt_weights_to_lists
from tutorec.sparse.tensor_dict import (
    jt_to_nested,
    jt_weights_to_nested,
    kjt_to_td,
    maybe_td_to_kjt,
    nested_to_jt,
    td_to_kjt,
)


def tensordict() -> Any:
    return pytest.importorskip(
        "tensordict", reason="tensordict is not installed: pip install 'tutorec[tensordict]'"
    )


def ragged(*bags: list[int]) -> Tensor:
    values = torch.tensor([number for bag in bags for number in bag])
    return torch.nested.nested_tensor_from_jagged(
        values, lengths=torch.tensor([len(bag) for bag in bags])
    )


@given(jagged_batches())
def test_a_batch_becomes_a_tensor_dict_and_comes_back(drawn: DrawnBatch) -> None:
    tensordict()
    batch = drawn.kjt()
    td = kjt_to_td(batch)
    assert list(td.keys()) == drawn.keys
    assert td.batch_size == torch.Size([drawn.samples])
    for key, bags in drawn.ids.items():
        nested = td[key] if drawn.weights is None else td[key, "values"]
        assert [row.tolist() for row in nested.unbind()] == bags
    again = td_to_kjt(td)
    assert kjt_is_equal(again, batch)
    assert (again.values().dtype, again.lengths().dtype) == (
        batch.values().dtype,
        batch.lengths().dtype,
    )
    backwards = list(reversed(drawn.keys))
    assert kjt_to_lists(td_to_kjt(td, backwards)) == {key: drawn.ids[key] for key in backwards}


@pytest.mark.parametrize("samples", [3, 400])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_few_and_many_lists_become_the_same_batch(samples: int, dtype: torch.dtype) -> None:
    counts = [index % 3 for index in range(samples)]
    offsets = torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=dtype)
    nested = torch.nested.nested_tensor_from_jagged(torch.arange(sum(counts)), offsets=offsets)
    batch = td_to_kjt({"a": nested, "b": nested})
    assert batch.lengths().tolist() == counts * 2
    assert (batch.lengths().dtype, batch.offsets().dtype, batch.stride()) == (dtype, dtype, samples)
    assert batch.offsets().tolist() == [0, *torch.tensor(counts * 2).cumsum(0).tolist()]
    assert batch.length_per_key() == [sum(counts)] * 2


def test_offsets_that_do_not_describe_the_ids_are_refused_on_either_road() -> None:
    for offsets in ([0, 2, 4], [1, 2, 3], [0, 4, 3]):
        nested = torch.nested.nested_tensor_from_jagged(
            torch.arange(3), offsets=torch.tensor(offsets)
        )
        with pytest.raises(ValueError, match="KeyedJaggedTensor: l"):
            td_to_kjt({"a": nested})
    with pytest.raises(ValueError, match=r"occur twice: \['a'\]"):
        td_to_kjt({"a": ragged([1])}, ["a", "a"])


BAGS = st.lists(st.lists(st.integers(0, 9), max_size=3), max_size=4)


@given(st.dictionaries(st.sampled_from("abc"), BAGS, min_size=2), st.booleans(), st.data())
def test_variable_batches_keep_their_samples_and_weights(
    ids: dict, weighted: bool, data: st.DataObject
) -> None:
    tensordict()
    weights = (
        {k: [[data.draw(halves) for _ in bag] for bag in bags] for k, bags in ids.items()}
        if weighted
        else None
    )
    again = td_to_kjt(kjt_to_td(kjt_from_lists(ids, weights)))
    assert again.stride_per_key() == [len(bags) for bags in ids.values()]
    assert kjt_to_lists(again) == ids
    assert kjt_weights_to_lists(again) == weights


@pytest.mark.parametrize("weights", [None, torch.tensor([0.5, 1.0, 2.0])])
def test_inverse_indices_survive(weights: Tensor | None) -> None:
    tensordict()
    batch = KeyedJaggedTensor(
        ["a", "b"],
        torch.tensor([5, 7, 1]),
        weights,
        lengths=torch.tensor([1, 0, 0, 2]),
        stride_per_key_per_rank=[[1], [3]],
        inverse_indices=(["b", "a"], torch.tensor([[0, 2, 1], [0, 0, 0]])),
    )
    again = td_to_kjt(kjt_to_td(batch))
    assert again.inverse_indices()[0] == ["a", "b"]
    assert again.inverse_indices()[1].tolist() == [[0, 0, 0], [0, 2, 1]]
    assert again.stride_per_key() == [1, 3]
    assert again.stride() == 3
    assert kjt_weights_to_lists(again) == kjt_weights_to_lists(batch)


@given(jagged_batches(max_features=1))
def test_a_jagged_tensor_becomes_nested_and_comes_back(drawn: DrawnBatch) -> None:
    key = drawn.keys[0]
    jagged = drawn.kjt()[key]
    nested, weights = jt_to_nested(jagged), jt_weights_to_nested(jagged)
    assert [row.tolist() for row in nested.unbind()] == drawn.ids[key]
    assert jt_is_equal(nested_to_jt(nested, weights), jagged)
    assert jt_is_equal(nested_to_jt(nested, jagged.weights_or_none()), jagged)
    assert nested_to_jt(nested).values().data_ptr() == jagged.values().data_ptr()


def test_gradients_flow_through_both_directions() -> None:
    rows = torch.arange(6.0).view(3, 2).requires_grad_()
    jagged = JaggedTensor(rows, lengths=torch.tensor([1, 2]))
    (nested_to_jt(jt_to_nested(jagged) * 3).values()[1] * 2).sum().backward()
    assert rows.grad is not None
    assert rows.grad.tolist() == [[0.0, 0.0], [6.0, 6.0], [0.0, 0.0]]


def test_values_between_the_lists_of_a_nested_tensor_are_left_out() -> None:
    holes = torch.nested.nested_tensor_from_jagged(
        torch.arange(10), offsets=torch.tensor([0, 4, 4, 10]), lengths=torch.tensor([2, 0, 3])
    )
    jagged = nested_to_jt(holes)
    assert [row.tolist() for row in jagged.to_dense()] == [row.tolist() for row in holes.unbind()]
    assert jagged.values().tolist() == [0, 1, 4, 5, 6]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_a_nested_tensor_of_the_older_layout_is_taken() -> None:
    older = torch.nested.nested_tensor([torch.tensor([1, 2]), torch.tensor([3])])
    assert older.layout == torch.strided
    assert [row.tolist() for row in nested_to_jt(older).to_dense()] == [[1, 2], [3]]


def test_a_nested_tensor_that_varies_elsewhere_is_refused() -> None:
    rows = torch.nested.nested_tensor_from_jagged(torch.rand(5, 4), offsets=torch.tensor([0, 2, 5]))
    with pytest.raises(ValueError, match=r"its dimension 2 varies.*nested.transpose\(1, 2\)"):
        nested_to_jt(rows.transpose(1, 2))


def test_a_batch_passes_through_untouched() -> None:
    batch = kjt_from_lists({"item": [[1]]})
    assert maybe_td_to_kjt(batch) is batch
    assert maybe_td_to_kjt(batch, ["item"]) is batch
    assert maybe_td_to_kjt("anything else") == "anything else"  # pyright: ignore[reportArgumentType]


def test_a_tensor_dict_in_another_order_is_read_by_name() -> None:
    td = tensordict().TensorDict({"f2": ragged([2], [3]), "f1": ragged([0, 1], [])}, batch_size=[2])
    batch = maybe_td_to_kjt(td, ["f1", "f2"])
    assert kjt_to_lists(batch) == {"f1": [[0, 1], []], "f2": [[2], [3]]}
    assert maybe_td_to_kjt(td).keys() == ["f2", "f1"]
    lazy = tensordict().LazyStackedTensorDict
    assert issubclass(lazy, tensordict().TensorDictBase)


def test_a_traced_module_passes_its_batch_on() -> None:
    class Takes(torch.nn.Module):
        def forward(self, features: KeyedJaggedTensor) -> Tensor:
            return maybe_td_to_kjt(features).values()

    batch = kjt_from_lists({"item": [[1, 2]]})
    assert torch.fx.symbolic_trace(Takes())(batch).tolist() == [1, 2]


def test_a_missing_key_is_named_with_the_keys_there() -> None:
    with pytest.raises(KeyError, match=r"TensorDict.*no key 'shop'.*\['item', 'user'\]"):
        td_to_kjt({"item": ragged([1]), "user": ragged([2])}, ["item", "shop"])


WEIGHTS = torch.nested.nested_tensor_from_jagged(torch.ones(3), lengths=torch.tensor([2, 1]))
BAD = {
    "dense": (
        {"item": torch.ones(2, 3)},
        r"feature 'item' is a tensor of shape \[2, 3\].*nested_tensor_from_jagged",
    ),
    "list": ({"item": [1, 2]}, r"feature 'item' holds \['list'\]; .*ids are a nested tensor"),
    "parts": (
        {"item": {"ids": ragged([1])}},
        r"feature 'item' holds \['ids'\]; a weighted feature",
    ),
    "some weighted": (
        {"item": {"values": ragged([1, 2], [3]), "weights": WEIGHTS}, "user": ragged([1], [2])},
        r"of the features \['item', 'user'\] only \['item'\] have 'weights'",
    ),
    "lengths of weights": (
        {"item": {"values": ragged([1], [2, 3]), "weights": WEIGHTS}},
        "feature 'item', sample 0, has 1 values and 2 weights",
    ),
    "samples of weights": (
        {"item": {"values": ragged([1, 2, 3]), "weights": WEIGHTS}},
        "feature 'item': values have 1 samples, and weights have 2",
    ),
    "dense weights": (
        {"item": {"values": ragged([1], [2, 3]), "weights": torch.ones(3)}},
        r"feature 'item, weights' is a tensor of shape \[3\]",
    ),
}


@pytest.mark.parametrize(("td", "message"), BAD.values(), ids=BAD.keys())
def test_an_entry_of_another_form_is_refused_by_name(td: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        td_to_kjt(td)


def test_an_empty_tensor_dict_is_a_batch_without_keys() -> None:
    assert td_to_kjt({}).keys() == []


def test_without_the_package_the_way_to_get_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    original = builtins.__import__

    def without(name: str, *args: Any, **options: Any) -> Any:
        if name == "tensordict":
            raise ImportError("No module named 'tensordict'")
        return original(name, *args, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(
        ImportError,
        match=r"kjt_to_td.*install 'tutorec\[tensordict\]'",
    ):
        kjt_to_td(kjt_from_lists({"item": [[1]]}))


def test_meta_tensors_convert_without_their_numbers() -> None:
    nested = torch.nested.nested_tensor_from_jagged(
        torch.arange(3, device="meta"), offsets=torch.tensor([0, 2, 3], device="meta")
    )
    assert td_to_kjt({"item": nested}).lengths().shape == (2,)


@pytest.mark.slow
def test_making_a_nested_tensor_says_nothing() -> None:
    code = "\n".join(
        [
            "import torch",
            "from tutorec.sparse.jagged import JaggedTensor",
            "from tutorec.sparse.tensor_dict import jt_to_nested",
            "jt_to_nested(JaggedTensor(torch.tensor([1, 2]), lengths=torch.tensor([1, 1])))",
        ]
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")
