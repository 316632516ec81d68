"""The pooling SQRTN of EmbeddingBagCollection on every road: with and without grad, trained in
backward, 16 bits.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reference import pool_collection
from strategies import jagged_batches, rows_of, table_sets
from torch.testing import assert_close

from tutorec._kernels.backend import backend, use_backend
from tutorec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from tutorec.modules.embedding_modules import EmbeddingBagCollection
from tutorec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor
from tutorec.types import DataType

BACKENDS = [
    "torch",
    pytest.param(
        "fbgemm", marks=pytest.mark.skipif(backend().name != "fbgemm", reason="no fbgemm")
    ),
]
both = pytest.mark.parametrize("name", BACKENDS)


def table(**parts: object) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(  # type: ignore[arg-type]
        **{
            "num_embeddings": 10,
            "embedding_dim": 4,
            "name": "t",
            "feature_names": ["item"],
            "pooling": PoolingType.SQRTN,
            **parts,
        }
    )


def ones(weight: torch.Tensor) -> None:
    weight.fill_(1.0)


@both
@pytest.mark.parametrize("trains", [False, True])
def test_a_sum_is_divided_by_the_root_of_the_number(name: str, trains: bool) -> None:
    batch = KeyedJaggedTensor(
        ["item"], torch.tensor([1, 2, 3, 4, 5]), lengths=torch.tensor([4, 0, 1])
    )
    with use_backend(name), torch.set_grad_enabled(trains):
        pooled = EmbeddingBagCollection([table(init_fn=ones)])(batch)
    assert pooled.values()[:, 0].tolist() == [2.0, 0.0, 1.0]


@both
@pytest.mark.parametrize("trains", [False, True])
def test_weights_enter_the_root(name: str, trains: bool) -> None:
    batch = KeyedJaggedTensor(
        ["item"],
        torch.tensor([1, 2, 3, 4]),
        torch.tensor([3.0, 4.0, 0.0, 0.0]),
        lengths=torch.tensor([2, 2]),
    )
    with use_backend(name), torch.set_grad_enabled(trains):
        pooled = EmbeddingBagCollection([table(init_fn=ones)], is_weighted=True)(batch)
    assert_close(pooled.values()[:, 0], torch.tensor([7.0 / 5.0, 0.0]))


@both
@given(data=st.data(), weighted=st.booleans())
def test_every_road_equals_plain_loops(name: str, data: st.DataObject, weighted: bool) -> None:
    tables = data.draw(table_sets(pooling=PoolingType.SQRTN))
    drawn = data.draw(jagged_batches(rows_of(tables), weighted=weighted))
    with use_backend(name):
        ebc = EmbeddingBagCollection(tables, is_weighted=weighted)
        weights = {
            key: bag.weight.detach().clone().requires_grad_()
            for key, bag in ebc.embedding_bags.items()
        }
        with torch.no_grad():
            at_once = ebc(drawn.kjt()).values()
        pooled = ebc(drawn.kjt()).values()
        expected = pool_collection(tables, weights, drawn.ids, drawn.weights, drawn.samples)
        assert_close(at_once, expected.detach(), rtol=1e-5, atol=1e-6)
        assert_close(pooled, expected, rtol=1e-5, atol=1e-6)
        if not drawn.flat_ids:
            return
        scale = torch.arange(1.0, expected.numel() + 1).view(expected.shape)
        (expected * scale).sum().backward()
        apply_optimizer_in_backward(torch.optim.SGD, ebc.parameters(), {"lr": 0.5})
        (ebc(drawn.kjt()).values() * scale).sum().backward()
    for key, bag in ebc.embedding_bags.items():
        gradient = weights[key].grad
        moved = weights[key].detach() - 0.5 * (0.0 if gradient is None else gradient)
        assert_close(bag.weight.detach(), moved, rtol=1e-4, atol=1e-4)
        assert bag.weight.grad is None


@both
@pytest.mark.parametrize(
    ("pooling", "weighted"),
    [
        (PoolingType.SUM, False),
        (PoolingType.SUM, True),
        (PoolingType.MEAN, False),
        (PoolingType.SQRTN, False),
        (PoolingType.SQRTN, True),
    ],
)
@pytest.mark.parametrize("data_type", [DataType.FP16, DataType.BF16])
def test_tables_of_16_bits_pool_to_float32(
    name: str, data_type: DataType, pooling: PoolingType, weighted: bool
) -> None:
    batch = KeyedJaggedTensor(
        ["item"],
        torch.tensor([1, 2, 3, 4, 5]),
        torch.tensor([0.5, 1.0, 1.5, 2.0, 2.5]) if weighted else None,
        lengths=torch.tensor([4, 0, 1]),
    )
    with use_backend(name):
        ebc = EmbeddingBagCollection(
            [table(pooling=pooling, data_type=data_type)], is_weighted=weighted
        )
        single = EmbeddingBagCollection([table(pooling=pooling)], is_weighted=weighted)
        single.load_state_dict({key: weight.float() for key, weight in ebc.state_dict().items()})
        with torch.no_grad():
            at_once, wanted = ebc(batch).values(), single(batch).values()
        pooled = ebc(batch).values()
        pooled.sum().backward()
    close = 2e-3 if data_type is DataType.FP16 else 2e-2
    for found in (at_once, pooled):
        assert found.dtype is torch.float32
        assert_close(found, wanted, rtol=close, atol=close)
    assert ebc.embedding_bags["t"].weight.grad is not None
