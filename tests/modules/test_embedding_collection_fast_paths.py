"""EmbeddingCollection where a graph is captured, where features have samples of their own, and
where it is trained.
"""

import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.testing import assert_close

from tutorec._kernels.backend import backend, use_backend
from tutorec.modules.embedding_collection import EmbeddingCollection
from tutorec.modules.embedding_configs import EmbeddingConfig
from tutorec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from tutorec.optim.rowwise_adagrad import RowWiseAdagrad
from tutorec.sparse.jagged import JaggedTensor
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor
from tutorec.types import DataType

BACKENDS = [
    "torch",
    pytest.param(
        "fbgemm", marks=pytest.mark.skipif(backend().name != "fbgemm", reason="no fbgemm")
    ),
]
both = pytest.mark.parametrize("name", BACKENDS)
TABLES = [
    EmbeddingConfig(10, 4, "t1", feature_names=["f1", "f2"]),
    EmbeddingConfig(10, 4, "t2", feature_names=["f2"]),
]
NAMES = ["f1", "f2@t1", "f2@t2"]


@pytest.fixture(autouse=True)
def _torchscript_is_deprecated() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message=r".torch\.jit\.\w+. is deprecated", category=DeprecationWarning
        )
        # torch.jit.script of torch's own GraphModule, about annotations in its __init__.
        warnings.filterwarnings(
            "ignore",
            message="The TorchScript type system doesn't support instance-level annotations",
        )
        yield


def batch(values: Tensor | None = None, lengths: Tensor | None = None) -> KeyedJaggedTensor:
    values = torch.tensor([0, 1, 2, 3]) if values is None else values
    return KeyedJaggedTensor(
        ["f1", "f2"], values, lengths=torch.tensor([2, 1, 0, 1]) if lengths is None else lengths
    )


def same(one: dict[str, JaggedTensor], other: dict[str, JaggedTensor]) -> bool:
    return list(one) == list(other) and all(
        torch.equal(one[key].values(), other[key].values())
        and torch.equal(one[key].lengths(), other[key].lengths())
        for key in one
    )


# --- captured graphs

CAPTURES: dict[str, Callable[[nn.Module], Callable[..., dict[str, JaggedTensor]]]] = {
    "fx": torch.fx.symbolic_trace,
    "script": torch.jit.script,
    "fx, script": lambda module: torch.jit.script(torch.fx.symbolic_trace(module)),
}


@pytest.mark.parametrize("capture", CAPTURES)
@pytest.mark.parametrize("need_indices", [False, True])
def test_a_captured_collection_is_bit_equal(capture: str, need_indices: bool) -> None:
    ec = EmbeddingCollection(TABLES, need_indices=need_indices)
    captured = CAPTURES[capture](ec)
    for features in (batch(), batch(torch.tensor([5, 6]), torch.tensor([0, 1, 1, 0]))):
        found, wanted = captured(features), ec(features)
        assert same({key: found[key] for key in wanted}, wanted)
        if need_indices:
            assert torch.equal(found["f1"].weights(), wanted["f1"].weights())


class Rows(nn.Module):
    """Tensors in, tensors out."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = EmbeddingCollection(TABLES)

    def forward(self, values: Tensor, lengths: Tensor) -> list[Tensor]:
        found = self.tables(batch(values, lengths))
        return [found[name].values() for name in NAMES]


def test_an_exported_collection_is_equal_and_checks_bounds() -> None:
    module, features = Rows(), batch()
    dynamic = {"values": {0: torch.export.Dim.AUTO}, "lengths": None}
    exported = torch.export.export(
        module, (features.values(), features.lengths()), dynamic_shapes=dynamic
    ).module()
    longer = torch.tensor([4, 5, 6, 7, 8, 9]), torch.tensor([2, 1, 1, 2])
    for found, wanted in zip(exported(*longer), module(*longer), strict=True):
        assert torch.equal(found, wanted)
    with pytest.raises((IndexError, RuntimeError)):
        exported(torch.tensor([4, 5, 6, 7, 8, 10]), torch.tensor([2, 1, 1, 2]))


def test_a_collection_on_the_meta_device_gives_shapes() -> None:
    ec = EmbeddingCollection(
        [EmbeddingConfig(10, 4, "t", feature_names=["f1"])], device=torch.device("meta")
    )
    parts = torch.tensor([1, 2, 3], device="meta"), torch.tensor([2, 1], device="meta")
    features = KeyedJaggedTensor(["f1"], parts[0], lengths=parts[1], length_per_key=[3])
    found = ec(features)["f1"]
    assert (found.values().shape, found.values().device.type) == ((3, 4), "meta")


# --- features with samples of their own


def variable(inverse: list[list[int]] | None = None) -> KeyedJaggedTensor:
    """f1 has the lists [0, 1], [2]; f2 has the lists [3], [], [4]."""
    return KeyedJaggedTensor(
        ["f1", "f2"],
        torch.tensor([0, 1, 2, 3, 4]),
        lengths=torch.tensor([2, 1, 1, 0, 1]),
        stride_per_key_per_rank=[[2], [3]],
        inverse_indices=None if inverse is None else (["f1", "f2"], torch.tensor(inverse)),
    )


@both
@pytest.mark.parametrize("trains", [False, True])
def test_each_feature_has_its_own_samples(name: str, trains: bool) -> None:
    with use_backend(name), torch.set_grad_enabled(trains):
        ec = EmbeddingCollection(TABLES)
        found = ec(variable())
    assert [found[key].lengths().tolist() for key in NAMES] == [[2, 1], [1, 0, 1], [1, 0, 1]]
    assert torch.equal(found["f2@t2"].values(), ec.embeddings["t2"].weight[[3, 4]])


@both
@pytest.mark.parametrize("trains", [False, True])
def test_inverse_indices_give_the_samples_of_the_batch(name: str, trains: bool) -> None:
    with use_backend(name), torch.set_grad_enabled(trains):
        ec = EmbeddingCollection(TABLES, need_indices=True)
        found = ec(variable([[0, 1, 0, 1], [2, 1, 0, 2]]))
    assert found["f1"].lengths().tolist() == [2, 1, 2, 1]
    assert found["f1"].weights().tolist() == [0, 1, 2, 0, 1, 2]
    assert torch.equal(found["f1"].values(), ec.embeddings["t1"].weight[[0, 1, 2, 0, 1, 2]])
    assert [rows.tolist() for rows in found["f2@t1"].offsets()] == [0, 1, 1, 2, 3]
    assert torch.equal(found["f2@t1"].values(), ec.embeddings["t1"].weight[[4, 3, 4]])
    if trains:
        found["f1"].values().sum().backward()
        assert ec.embeddings["t1"].weight.grad[:3, 0].tolist() == [2.0, 2.0, 2.0]


def test_inverse_indices_that_lack_a_feature_are_named() -> None:
    ec = EmbeddingCollection([EmbeddingConfig(10, 4, "t", feature_names=["f1"])])
    parts = torch.tensor([0, 1]), torch.tensor([1, 1])
    features = KeyedJaggedTensor(
        ["f1"],
        parts[0],
        lengths=parts[1],
        stride_per_key_per_rank=[[2]],
        inverse_indices=([], torch.zeros(0, 2).long()),
    )
    with pytest.raises(KeyError, match=r"inverse_indices.*features \['f1'\].*\[\]"):
        ec(features)


@given(
    lists=st.lists(st.lists(st.integers(0, 9), max_size=3), min_size=1, max_size=4),
    data=st.data(),
)
def test_a_stored_list_stands_for_every_sample_that_means_it(
    lists: list[list[int]], data: st.DataObject
) -> None:
    means = data.draw(st.lists(st.integers(0, len(lists) - 1), max_size=6))
    flat = [number for one in lists for number in one]
    stored = KeyedJaggedTensor(
        ["f1"],
        torch.tensor(flat, dtype=torch.int64),
        lengths=torch.tensor([len(one) for one in lists]),
        stride_per_key_per_rank=[[len(lists)]],
        inverse_indices=(["f1"], torch.tensor([means], dtype=torch.int64)),
    )
    ec = EmbeddingCollection([EmbeddingConfig(10, 4, "t", feature_names=["f1"])])
    found = ec(stored)["f1"]
    assert found.lengths().tolist() == [len(lists[index]) for index in means]
    wanted = [number for index in means for number in lists[index]]
    assert torch.equal(found.values(), ec.embeddings["t"].weight.detach()[wanted])


def test_a_tensor_dict_is_a_batch() -> None:
    tensordict = pytest.importorskip("tensordict", reason="the extra tensordict is not installed")
    nested = {
        key: torch.nested.nested_tensor(
            [torch.tensor(ids, dtype=torch.int64) for ids in lists], layout=torch.jagged
        )
        for key, lists in {"f1": [[0, 1], [2]], "f2": [[], [3]]}.items()
    }
    ec = EmbeddingCollection(TABLES)
    assert same(
        ec(tensordict.TensorDict(nested | {"label": torch.ones(2)}, batch_size=[2])), ec(batch())
    )
    with pytest.raises(KeyError, match="f2"):
        ec(tensordict.TensorDict({"f1": nested["f1"]}, batch_size=[2]))


# --- trained through its backward


@both
@pytest.mark.parametrize("rule", [torch.optim.SGD, RowWiseAdagrad, torch.optim.Adagrad])
@pytest.mark.parametrize("data_type", [DataType.FP32, DataType.FP16])
def test_tables_move_in_backward_without_a_gradient(
    name: str, rule: type[torch.optim.Optimizer], data_type: DataType
) -> None:
    tables = [EmbeddingConfig(10, 4, one.name, data_type, one.feature_names) for one in TABLES]
    features = batch(torch.tensor([0, 1, 0, 3, 0]), torch.tensor([2, 1, 1, 1]))
    with use_backend(name):
        trained, plain = EmbeddingCollection(tables), EmbeddingCollection(tables)
        plain.load_state_dict(trained.state_dict())
        before = {key: weight.clone() for key, weight in trained.state_dict().items()}
        # An eps that float16 can hold: the dense optimizer divides by it where a row is not in the
        # batch.
        options = {"lr": 0.25} if rule is torch.optim.SGD else {"lr": 0.25, "eps": 1e-3}
        apply_optimizer_in_backward(rule, trained.parameters(), options)
        optimizer = rule(plain.parameters(), **options)  # type: ignore[call-arg]
        for _ in range(2):
            for one in (trained, plain):
                found = one(features)
                torch.stack(
                    [(rows.values() * rows.values()).sum() for rows in found.values()]
                ).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    for key, weight in trained.state_dict().items():
        close = 1e-5 if data_type is DataType.FP32 else 2e-3
        assert_close(weight, plain.state_dict()[key], rtol=close, atol=close)
        assert torch.equal(weight[4:], before[key][4:]) and not torch.equal(
            weight[0], before[key][0]
        )
    assert all(weight.grad is None for weight in trained.parameters())


def test_results_of_a_trained_collection_carry_lengths_and_indices() -> None:
    ec = EmbeddingCollection(TABLES, need_indices=True)
    wanted = ec(batch())
    apply_optimizer_in_backward(torch.optim.SGD, ec.parameters(), {"lr": 0.1})
    found = ec(batch())
    assert same(found, wanted)
    assert torch.equal(found["f1"].weights(), wanted["f1"].weights())
