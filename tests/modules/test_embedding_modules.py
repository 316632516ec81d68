import copy
import inspect

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reference import pool_collection
from strategies import jagged_batches, rows_of, table_sets

from tutorec._kernels.backend import backend, use_backend
from tutorec._validation import validation
from tutorec.modules.compressed_collection import CompressedEmbeddingBagCollection
from tutorec.modules.embedding_collection import EmbeddingCollection
from tutorec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from tutorec.modules.embedding_modules import (
    EmbeddingBagCollection,
    get_embedding_names_by_table,
    process_pooled_embeddings,
    reorder_inverse_indices,
)
from tutorec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from tutorec.quant.whole_model import quantize
from tutorec.sparse.keyed import KeyedTensor
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor
from tutorec.types import DataType

BACKENDS = [
    "torch",
    pytest.param(
        "fbgemm", marks=pytest.mark.skipif(backend().name != "fbgemm", reason="no fbgemm")
    ),
]


def two_tables() -> list[EmbeddingBagConfig]:
    return [
        EmbeddingBagConfig(
            name="product_table", embedding_dim=64, num_embeddings=4096, feature_names=["product"]
        ),
        EmbeddingBagConfig(
            name="user_table", embedding_dim=64, num_embeddings=4096, feature_names=["user"]
        ),
    ]


def documents_batch() -> KeyedJaggedTensor:
    return KeyedJaggedTensor(
        ["product", "user"],
        torch.tensor([1, 2, 3, 1, 5, 7, 9, 2, 3, 4, 1]),
        lengths=torch.tensor([3, 4, 2, 2]),
    )


@pytest.mark.parametrize("name", BACKENDS)
@given(data=st.data(), weighted=st.booleans())
def test_pooled_rows_and_gradients_equal_plain_loops(
    name: str, data: st.DataObject, weighted: bool
) -> None:
    tables = data.draw(table_sets(pooling=PoolingType.SUM if weighted else None))
    drawn = data.draw(jagged_batches(rows_of(tables), weighted=weighted))
    with use_backend(name):
        ebc = EmbeddingBagCollection(tables, is_weighted=weighted)
        pooled = ebc(drawn.kjt())
    weights = {
        key: table.weight.detach().clone().requires_grad_()
        for key, table in ebc.embedding_bags.items()
    }
    expected = pool_collection(tables, weights, drawn.ids, drawn.weights, drawn.samples)
    torch.testing.assert_close(pooled.values(), expected, rtol=1e-5, atol=1e-6)
    assert pooled.keys() == [key for keys in get_embedding_names_by_table(tables) for key in keys]
    assert pooled.length_per_key() == [
        table.embedding_dim for table in tables for _ in table.feature_names
    ]
    scale = torch.arange(1.0, expected.numel() + 1).view(expected.shape)
    if not drawn.flat_ids:
        return
    (pooled.values() * scale).sum().backward()
    (expected * scale).sum().backward()
    for key, table in ebc.embedding_bags.items():
        wanted = weights[key].grad
        wanted = torch.zeros_like(weights[key]) if wanted is None else wanted
        torch.testing.assert_close(table.weight.grad, wanted, rtol=1e-5, atol=1e-4)


def test_the_documents_collection_prints_its_tables() -> None:
    ebc = EmbeddingBagCollection(device=torch.device("cpu"), tables=two_tables())
    assert str(ebc.embedding_bags) == (
        "ModuleDict(\n  (product_table): EmbeddingBag(4096, 64, mode='sum')\n"
        "  (user_table): EmbeddingBag(4096, 64, mode='sum')\n)"
    )


def test_the_documents_batch_gives_its_shapes() -> None:
    pooled = EmbeddingBagCollection(two_tables())(documents_batch())
    assert isinstance(pooled, KeyedTensor)
    assert pooled.keys() == ["product", "user"]
    assert pooled.values().shape == (2, 128)
    assert {key: value.shape for key, value in pooled.to_dict().items()} == {
        "product": (2, 64),
        "user": (2, 64),
    }


def test_forward_is_short_enough_to_be_printed() -> None:
    source = inspect.getsource(EmbeddingBagCollection.forward)
    assert len(source.splitlines()) <= 25
    assert "per feature and table" in source


def test_a_feature_of_two_tables_gets_two_names() -> None:
    tables = [
        EmbeddingBagConfig(10, 2, "t1", feature_names=["item", "user"]),
        EmbeddingBagConfig(10, 3, "t2", feature_names=["item"]),
    ]
    batch = KeyedJaggedTensor(["user", "item"], torch.tensor([1, 2]), lengths=torch.tensor([1, 1]))
    ebc = EmbeddingBagCollection(tables)
    pooled = ebc(batch)
    assert pooled.keys() == ["item@t1", "user", "item@t2"]
    assert torch.equal(pooled["item@t2"][0], ebc.embedding_bags["t2"].weight[2])
    assert torch.equal(pooled["user"][0], ebc.embedding_bags["t1"].weight[1])


@pytest.mark.parametrize("pooling", [PoolingType.SUM, PoolingType.MEAN])
def test_a_bag_without_ids_is_zeros(pooling: PoolingType) -> None:
    ebc = EmbeddingBagCollection(
        [EmbeddingBagConfig(10, 4, "t", feature_names=["item"], pooling=pooling)]
    )
    pooled = ebc(
        KeyedJaggedTensor(
            ["item"], torch.tensor([], dtype=torch.int64), lengths=torch.tensor([0, 0])
        )
    )
    assert pooled.values().tolist() == [[0.0] * 4] * 2


def test_no_tables_give_no_columns() -> None:
    pooled = EmbeddingBagCollection([])(documents_batch())
    assert (pooled.keys(), pooled.values().shape) == ([], (2, 0))


def test_state_dict_has_torchrecs_names() -> None:
    ebc = EmbeddingBagCollection(two_tables())
    names = ["embedding_bags.product_table.weight", "embedding_bags.user_table.weight"]
    assert list(ebc.state_dict()) == names
    assert [name for name, _ in ebc.named_parameters()] == names
    assert ebc.state_dict()[names[0]].shape == (4096, 64)
    other = EmbeddingBagCollection(two_tables())
    other.load_state_dict(ebc.state_dict())
    assert torch.equal(other(documents_batch()).values(), ebc(documents_batch()).values())
    assert torch.equal(
        copy.deepcopy(ebc)(documents_batch()).values(), ebc(documents_batch()).values()
    )


def test_the_meta_device_allocates_nothing_and_is_filled_later() -> None:
    tables = [
        EmbeddingBagConfig(
            10**12, 64, "huge", feature_names=["item"], init_fn=lambda weight: weight.fill_(2.0)
        )
    ]
    ebc = EmbeddingBagCollection(tables, device=torch.device("meta"))
    assert ebc.embedding_bags["huge"].weight.is_meta
    assert ebc.device.type == "meta"
    small = EmbeddingBagCollection(
        [EmbeddingBagConfig(4, 2, "t")], device=torch.device("meta")
    ).to_empty(device="cpu")
    small.reset_parameters()
    assert float(small.embedding_bags["t"].weight.detach().abs().max()) <= 0.5


def test_initial_values_follow_the_config() -> None:
    table = EmbeddingBagConfig(
        10, 4, "t", feature_names=["item"], init_fn=lambda weight: weight.fill_(2.0)
    )
    assert bool((EmbeddingBagCollection([table]).embedding_bags["t"].weight == 2.0).all())
    torch.manual_seed(3)
    one = EmbeddingBagCollection(two_tables()).embedding_bags["user_table"].weight
    torch.manual_seed(3)
    assert torch.equal(
        one, EmbeddingBagCollection(two_tables()).embedding_bags["user_table"].weight
    )


@pytest.mark.parametrize("data_type", [DataType.FP16, DataType.BF16])
def test_half_precision_tables_return_single_precision(data_type: DataType) -> None:
    table = EmbeddingBagConfig(10, 4, "t", feature_names=["item"], data_type=data_type)
    ebc = EmbeddingBagCollection([table])
    pooled = ebc(KeyedJaggedTensor(["item"], torch.tensor([3]), lengths=torch.tensor([1])))
    assert pooled.values().dtype == torch.float32
    assert torch.equal(pooled["item"][0], ebc.embedding_bags["t"].weight[3].float())


def table(name: str = "t", **parts: object) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(
        num_embeddings=10, embedding_dim=4, name=name, feature_names=["item"], **parts
    )  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("tables", "weighted", "message"),
    [
        ([table(), table()], False, r"tables \['t'\] are named more than once in \['t', 't'\]"),
        ([table("")], False, "table name '' must not be empty"),
        ([table("a.b")], False, "table name 'a.b' must not .* contain a dot"),
        (
            [table("items")],
            False,
            "table name 'items' is taken by an attribute .* call it 'items_table'",
        ),
        (
            [table(pooling=PoolingType.NONE)],
            False,
            "table 't': a bag is pooled by SUM, MEAN or SQRTN",
        ),
        ([table(pooling=PoolingType.MEAN)], True, "table 't': weights go with SUM, not MEAN"),
        ([table(data_type=DataType.INT8)], False, "table 't': data_type INT8 cannot be trained"),
        ([table(data_type=DataType.NFP8)], False, "table 't': data_type NFP8 cannot be trained"),
    ],
)
def test_tables_that_do_not_go_together_are_refused(
    tables: list[EmbeddingBagConfig], weighted: bool, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        EmbeddingBagCollection(tables, is_weighted=weighted)


@pytest.mark.parametrize("bad", [10, -1, 2**40])
def test_an_id_outside_its_table_is_named_before_any_result(bad: int) -> None:
    ebc = EmbeddingBagCollection([table()])
    batch = KeyedJaggedTensor(["item"], torch.tensor([3, bad]), lengths=torch.tensor([1, 0, 1]))
    with pytest.raises(
        ValueError,
        match=rf"table 't' has 10 rows \(ids 0 to 9\).*'item', sample 2, holds id {bad};",
    ):
        ebc(batch)


def test_an_id_is_checked_against_every_table_of_its_feature() -> None:
    small = EmbeddingBagConfig(5, 4, "small", feature_names=["item"])
    batch = KeyedJaggedTensor(["item"], torch.tensor([7]), lengths=torch.tensor([1]))
    with pytest.raises(ValueError, match=r"table 'small'.*5 rows.*holds id 7"):
        EmbeddingBagCollection([table(), small])(batch)


def test_a_missing_feature_is_named() -> None:
    with pytest.raises(KeyError, match=r"no feature 'item'.*table 't'.*\['product'"):
        EmbeddingBagCollection([table()])(documents_batch())
    with validation(False), pytest.raises(KeyError, match="no feature 'item'"):
        EmbeddingBagCollection([table()])(documents_batch())


def test_features_of_no_table_are_left_alone() -> None:
    batch = KeyedJaggedTensor(
        ["item", "other"], torch.tensor([3, 999]), lengths=torch.tensor([1, 1])
    )
    assert EmbeddingBagCollection([table()])(batch).keys() == ["item"]


def test_a_weighted_collection_wants_weights() -> None:
    ebc = EmbeddingBagCollection([table()], is_weighted=True)
    assert ebc.is_weighted()
    with pytest.raises(ValueError, match=r"weighted collection.*no weights"):
        ebc(KeyedJaggedTensor(["item"], torch.tensor([3]), lengths=torch.tensor([1])))


def test_weights_for_a_collection_without_weights_are_not_used_and_named_once() -> None:
    batch = KeyedJaggedTensor(
        ["item"], torch.tensor([3]), torch.tensor([2.0]), lengths=torch.tensor([1])
    )
    for made in (
        lambda: EmbeddingBagCollection([table()]),
        lambda: CompressedEmbeddingBagCollection([table()], {}),
    ):
        ebc = made()
        with pytest.warns(
            UserWarning, match=r"EmbeddingBagCollection.*\['item'\]\) has weights"
        ) as said:
            found = [ebc(batch).values() for _ in range(3)]
        assert [str(one.message) for one in said] == [str(said[0].message)]
        assert torch.equal(
            found[0],
            ebc(KeyedJaggedTensor(["item"], torch.tensor([3]), lengths=torch.tensor([1]))).values(),
        )
        with pytest.warns(UserWarning, match="is said once"):
            made()(batch)


def test_weights_of_rows_that_are_not_pooled_are_the_callers() -> None:
    batch = KeyedJaggedTensor(
        ["item"], torch.tensor([3]), torch.tensor([2.0]), lengths=torch.tensor([1])
    )
    ec = EmbeddingCollection([EmbeddingConfig(10, 4, "t", feature_names=["item"])])
    assert torch.equal(ec(batch)["item"].values(), ec.embeddings["t"].weight[[3]])


def test_a_batch_on_meta_is_refused_where_the_tables_are_not() -> None:
    ids, lengths = (torch.empty(2, dtype=torch.int64, device="meta") for _ in range(2))
    batch = KeyedJaggedTensor(["item"], ids, lengths=lengths)
    bags, rows = [table()], [EmbeddingConfig(10, 4, "t", feature_names=["item"])]
    modules = [EmbeddingBagCollection(bags), EmbeddingCollection(rows)]
    for module in (*modules, *map(quantize, modules), CompressedEmbeddingBagCollection(bags, {})):
        with pytest.raises(ValueError, match=r"keys \['item'\]\) is on meta.* on cpu"):
            module(batch)
    meta = torch.device("meta")
    assert EmbeddingBagCollection(bags, device=meta)(batch).values().shape == (2, 4)
    assert EmbeddingCollection(rows, device=meta)(batch)["item"].values().is_meta


def test_what_is_no_batch_is_refused() -> None:
    with pytest.raises(TypeError, match="a KeyedJaggedTensor, got dict"):
        EmbeddingBagCollection([table()])({"item": [1]})


def test_float_ids_are_refused() -> None:
    batch = KeyedJaggedTensor(["item"], torch.tensor([3.0]), lengths=torch.tensor([1]))
    with pytest.raises(ValueError, match=r"batch's values are torch\.float32"):
        EmbeddingBagCollection([table()])(batch)


def test_inverse_indices_follow_the_results_as_in_torchrec() -> None:
    inverse = (["a", "b", "c"], torch.tensor([[0, 1, 1], [2, 0, 1], [0, 0, 0]]))
    rows = reorder_inverse_indices(inverse, ["c", "a@t0", "b", "a@t1"])
    assert rows.tolist() == [[0, 0, 0], [0, 1, 1], [2, 0, 1], [0, 1, 1]]
    assert reorder_inverse_indices(None, ["a"]).numel() == 0
    with pytest.raises(KeyError, match=r"features \['d'\].*\['a', 'b', 'c'\]"):
        reorder_inverse_indices(inverse, ["d", "a"])


def test_pooled_embeddings_of_lists_become_rows_of_samples_as_in_torchrec() -> None:
    pooled = [torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[5.0], [6.0], [7.0]])]
    rows = process_pooled_embeddings(pooled, torch.tensor([[1, 0, 1], [2, 2, 0]]))
    assert rows.tolist() == [[3.0, 4.0, 7.0], [1.0, 2.0, 7.0], [3.0, 4.0, 5.0]]
    plain = process_pooled_embeddings([pooled[0], pooled[1][:2]], torch.empty(0))
    assert plain.tolist() == [[1.0, 2.0, 5.0], [3.0, 4.0, 6.0]]


@pytest.mark.parametrize("in_backward", [True, False])
@pytest.mark.parametrize("name", BACKENDS)
def test_a_batch_that_was_looked_up_in_inference_mode_trains(name: str, in_backward: bool):
    """The batch keeps the offsets that the lookup in inference mode has made."""
    with use_backend(name):
        model, batch = EmbeddingBagCollection(two_tables()), documents_batch()
        if in_backward:
            apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.5})
        with torch.inference_mode():
            expected = model(batch).values().clone()
        pooled = model(batch).values()
        assert torch.equal(pooled, expected)
        pooled.sum().backward()
