import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tutorec.sparse.keyed import KeyedTensor


def keyed(prefix: str, widths: list[int], samples: int, start: int = 0) -> KeyedTensor:
    values = torch.arange(start, start + samples * sum(widths), dtype=torch.float32).view(
        samples, sum(widths)
    )
    return KeyedTensor([f"{prefix}{index}" for index in range(len(widths))], widths, values)


widths = st.lists(st.integers(0, 3), min_size=1, max_size=4)


@given(widths, st.integers(0, 3))
def test_slices_are_the_columns(sizes: list[int], samples: int) -> None:
    pooled = keyed("k", sizes, samples)
    columns = pooled.values().t().tolist()
    start = 0
    for key, size in zip(pooled.keys(), sizes, strict=True):
        assert pooled[key].t().tolist() == columns[start : start + size]
        assert torch.equal(pooled.to_dict()[key], pooled[key])
        start += size
    assert pooled.offset_per_key()[-1] == start


@given(widths, widths, st.integers(0, 3), st.data())
def test_regroup_puts_columns_side_by_side(
    one: list[int], two: list[int], samples: int, data: st.DataObject
) -> None:
    parts = [keyed("a", one, samples), keyed("b", two, samples, start=1000)]
    keys = [key for part in parts for key in part.keys()]
    groups = data.draw(
        st.lists(st.lists(st.sampled_from(keys), min_size=1, max_size=4), max_size=3)
    )
    columns = {key: value for part in parts for key, value in part.to_dict().items()}
    for group, result in zip(groups, KeyedTensor.regroup(parts, groups), strict=True):
        expected = [row for key in group for row in columns[key].t().tolist()]
        assert result.t().tolist() == expected
        assert result.shape[0] == samples
    names = [f"g{index}" for index in range(len(groups))]
    assert list(KeyedTensor.regroup_as_dict(parts, groups, names)) == names


def test_regroup_of_an_unknown_key_names_it_and_the_others() -> None:
    with pytest.raises(KeyError, match=r"wants key 'x'.*\['a0', 'a1'\]"):
        KeyedTensor.regroup([keyed("a", [1, 1], 2)], [["a0"], ["a1", "x"]])


def test_regroup_of_a_key_in_two_tensors_is_refused() -> None:
    with pytest.raises(ValueError, match=r"more than one.*\['a0', 'a0'\]"):
        KeyedTensor.regroup([keyed("a", [1], 2), keyed("a", [1], 2)], [["a0"]])


def test_regroup_of_an_empty_group_has_no_columns() -> None:
    first, none = KeyedTensor.regroup([keyed("a", [1], 2), keyed("b", [3], 2)], [["a0"], []])
    assert (first.shape, none.shape, none.dtype) == ((2, 1), (2, 0), first.dtype)
    assert torch.cat([first, none], dim=1).equal(first)


def test_regroup_of_an_empty_group_without_tensors_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no key.* what B is"):
        KeyedTensor.regroup([], [[]])


def test_regroup_sends_gradients_home() -> None:
    values = torch.ones(2, 3, requires_grad=True)
    pooled = KeyedTensor(["a", "b"], [1, 2], values)
    KeyedTensor.regroup([pooled], [["b"], ["b", "a"]])[1].sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [[1.0, 1.0, 1.0]] * 2


def test_from_tensor_list_joins_columns() -> None:
    pooled = KeyedTensor.from_tensor_list(["a", "b"], [torch.zeros(2, 1), torch.ones(2, 3)])
    assert (pooled.length_per_key(), pooled.values().shape, pooled.key_dim()) == (
        [1, 3],
        torch.Size([2, 4]),
        1,
    )


def test_from_tensor_list_counts_keys() -> None:
    with pytest.raises(ValueError, match=r"2 keys .* 1 tensors"):
        KeyedTensor.from_tensor_list(["a", "b"], [torch.zeros(2, 1)])


def test_keys_may_cut_another_dimension() -> None:
    stacked = KeyedTensor(["a", "b"], [1, 2], torch.arange(6).view(3, 2), key_dim=0)
    assert stacked["b"].tolist() == [[2, 3], [4, 5]]
    assert stacked.to(torch.device("meta"))["b"].shape == (2, 2)
    assert stacked.size_in_bytes() == 48


@pytest.mark.parametrize(
    ("keys", "lengths", "message"),
    [
        (["a", "b"], [1, 1], r"\[1, 1\] adds up to 2, and values has 3 columns"),
        (["a", "b"], [3], r"1 lengths \[3\] for 2 keys"),
        (["a", "a"], [1, 2], r"occur twice: \['a'\]"),
    ],
)
def test_lengths_that_do_not_fit_are_refused(
    keys: list[str], lengths: list[int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        KeyedTensor(keys, lengths, torch.zeros(2, 3))


def test_a_missing_key_is_named_with_the_keys_there() -> None:
    with pytest.raises(KeyError, match=r"no key 'x'.*\['a0'\]"):
        keyed("a", [1], 2)["x"]


@given(widths, st.integers(0, 3), st.data())
def test_permute_puts_keys_into_another_order(
    sizes: list[int], samples: int, data: st.DataObject
) -> None:
    pooled = keyed("k", sizes, samples)
    indices = data.draw(st.lists(st.integers(0, len(sizes) - 1), unique=True))
    permuted = pooled.permute(indices)
    assert permuted.keys() == [f"k{index}" for index in indices]
    assert permuted.length_per_key() == [sizes[index] for index in indices]
    for key in permuted.keys():
        assert torch.equal(permuted[key], pooled[key])
    assert permuted.values().shape == (samples, sum(sizes[index] for index in indices))


def test_permute_to_a_position_without_a_key_is_refused() -> None:
    with pytest.raises(ValueError, match=r"KeyedTensor.permute.*2.*0 to 1"):
        keyed("a", [1, 1], 2).permute([0, 2])
    with pytest.raises(ValueError, match=r"occur twice: \['a0'\]"):
        keyed("a", [1, 1], 2).permute([0, 0])


def test_without_keys_nothing_is_printed_and_nothing_refused() -> None:
    assert str(KeyedTensor([], [], torch.Tensor())) == "KeyedTensor()\n"
    with pytest.raises(ValueError, match="0 keys"):
        KeyedTensor.from_tensor_list([], [])


def test_key_dim_and_cat_dim_may_differ_as_in_torchrec() -> None:
    assert str(KeyedTensor.from_tensor_list(["key"], [torch.tensor([[1.0]])], key_dim=0)) == (
        'KeyedTensor({\n    "key": [[1.0]]\n})\n'
    )


def test_regroup_of_tensors_that_cut_different_dimensions_is_refused() -> None:
    rows = KeyedTensor(["b"], [2], torch.zeros(2, 1), key_dim=0)
    with pytest.raises(ValueError, match=r"cut different dimensions \[1, 0\]"):
        KeyedTensor.regroup([keyed("a", [1], 2), rows], [["a0", "b"]])


def test_regroup_as_dict_counts_names() -> None:
    with pytest.raises(ValueError, match=r"1 groups for 2 keys \['g', 'h'\]"):
        KeyedTensor.regroup_as_dict([keyed("a", [1], 2)], [["a0"]], ["g", "h"])


class Regroups(torch.nn.Module):
    def forward(self, inputs: list[KeyedTensor]) -> dict[str, torch.Tensor]:
        return KeyedTensor.regroup_as_dict(inputs, [["a0", "b1"], ["b0"]], ["one", "two"])


def test_regroup_is_traced_and_compiled() -> None:
    parts = [keyed("a", [1, 2], 2), keyed("b", [3, 1], 2, start=100)]
    expected = Regroups()(parts)
    traced = torch.fx.symbolic_trace(Regroups())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        scripted = torch.jit.script(Regroups())
    for module in (traced, scripted):
        got = module(parts)
        assert list(got) == ["one", "two"]
        assert all(torch.equal(got[name], expected[name]) for name in got)


class MovesAndPermutes(torch.nn.Module):
    def forward(self, inputs: KeyedTensor) -> KeyedTensor:
        swapped = inputs.to(torch.device("cpu"), False).permute([1, 0])
        return KeyedTensor.from_tensor_list(["x", "y"], [swapped["a1"], swapped["a0"]], 1, 1)


def test_moving_and_permuting_run_in_torchscript() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        scripted = torch.jit.script(MovesAndPermutes())
    source = keyed("a", [1, 2], 2)
    got = scripted(source)
    assert (got.keys(), got.length_per_key()) == (["x", "y"], [2, 1])
    assert torch.equal(got.values(), source.permute([1, 0]).values())


def test_regroup_of_other_dtypes_and_devices_keeps_them() -> None:
    half = KeyedTensor(["a", "b"], [1, 2], torch.ones(2, 3, dtype=torch.float16))
    assert KeyedTensor.regroup([half], [["b"]])[0].dtype == torch.float16
    assert KeyedTensor.regroup([half.to(torch.device("meta"))], [["b", "a"]])[0].shape == (2, 3)
    assert half.to(torch.device("cpu")).values() is half.values()
