"""EmbeddingCollection against plain lists: rows, gradients, names, every road, and
every bad input.
"""

import copy
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reference import rows_of_collection
from strategies import jagged_batches, rows_of, sequence_tables

from tutorec._kernels.backend import backend, use_backend
from tutorec._validation import validation
from tutorec.modules.embedding_collection import EmbeddingCollection
from tutorec.modules.embedding_configs import (
    EmbeddingBagConfig,
    EmbeddingConfig,
    get_embedding_names_by_table,
)
from tutorec.sparse.jagged import JaggedTensor
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor
from tutorec.types import DataType, data_type_to_dtype

BACKENDS = [
    "torch",
    pytest.param(
        "fbgemm", marks=pytest.mark.skipif(backend().name != "fbgemm", reason="no fbgemm")
    ),
]
both = pytest.mark.parametrize("name", BACKENDS)


def two_tables(**changes: object) -> list[EmbeddingConfig]:
    parts = {"embedding_dim": 4, "num_embeddings": 10, **changes}
    return [
        EmbeddingConfig(name="t1", feature_names=["f1", "f2"], **parts),  # type: ignore[arg-type]
        EmbeddingConfig(name="t2", feature_names=["f2"], **parts),  # type: ignore[arg-type]
    ]


def batch(*keys: str) -> KeyedJaggedTensor:
    """Two samples: f1 0, 1 and 2, f2 none and 3."""
    lists = {"f1": [[0, 1], [2]], "f2": [[], [3]]}
    bags = [bag for key in keys or ("f1", "f2") for bag in lists.get(key, [[9], [9]])]
    values = torch.tensor([number for bag in bags for number in bag])
    return KeyedJaggedTensor(
        list(keys or ("f1", "f2")), values, lengths=torch.tensor([len(bag) for bag in bags])
    )


def check_rows(
    found: dict[str, JaggedTensor], expected: dict[str, torch.Tensor], lengths: dict[str, list[int]]
) -> None:
    assert list(sorted(found)) == sorted(expected)
    for key, rows in expected.items():
        torch.testing.assert_close(found[key].values(), rows, rtol=0, atol=0)
        assert found[key].values().dtype is torch.float32
        assert found[key].lengths().tolist() == lengths[key]
        assert found[key].offsets().tolist() == torch.tensor([0, *lengths[key]]).cumsum(0).tolist()


@both
@given(data=st.data(), trains=st.booleans(), need_indices=st.booleans())
def test_rows_and_gradients_equal_plain_loops(
    name: str, data: st.DataObject, trains: bool, need_indices: bool
) -> None:
    tables = data.draw(sequence_tables())
    drawn = data.draw(
        jagged_batches({**rows_of(tables), **data.draw(st.sampled_from([{}, {"other": 50}]))})
    )
    with use_backend(name), torch.set_grad_enabled(trains):
        ec = EmbeddingCollection(tables, need_indices=need_indices)
        found = ec(drawn.kjt())
    weights = {
        key: table.weight.detach().clone().requires_grad_() for key, table in ec.embeddings.items()
    }
    expected, ids, lengths = rows_of_collection(tables, weights, drawn.ids)
    check_rows(found, {key: rows.detach() for key, rows in expected.items()}, lengths)
    for key, rows in found.items():
        indices = rows.weights_or_none()
        assert (None if indices is None else indices.tolist()) == (
            ids[key] if need_indices else None
        )
    if not trains:
        return
    scale = {
        key: torch.arange(1.0, rows.numel() + 1).view(rows.shape) for key, rows in expected.items()
    }
    torch.stack([(found[key].values() * scale[key]).sum() for key in scale]).sum().backward()
    torch.stack([(expected[key] * scale[key]).sum() for key in scale]).sum().backward()
    for key, table in ec.embeddings.items():
        torch.testing.assert_close(table.weight.grad, weights[key].grad, rtol=1e-5, atol=1e-4)


@both
@pytest.mark.parametrize("data_type", [DataType.FP16, DataType.BF16])
@pytest.mark.parametrize("trains", [False, True])
def test_half_precision_tables_return_single_precision(
    name: str, data_type: DataType, trains: bool
) -> None:
    with use_backend(name), torch.set_grad_enabled(trains):
        ec = EmbeddingCollection(two_tables(data_type=data_type))
        found = ec(batch())
    weight = ec.embeddings["t1"].weight
    assert weight.dtype is data_type_to_dtype(data_type)
    check_rows({"f1": found["f1"]}, {"f1": weight.detach()[[0, 1, 2]].float()}, {"f1": [2, 1]})
    if trains:
        found["f1"].values().sum().backward()
        assert weight.grad is not None and weight.grad.dtype is weight.dtype


@both
@pytest.mark.parametrize("data_type", [DataType.FP32, DataType.FP16, DataType.BF16])
@pytest.mark.parametrize("ids", [torch.int32, torch.int64])
def test_many_ids_give_the_same_rows_as_few(
    name: str, data_type: DataType, ids: torch.dtype
) -> None:
    lengths = torch.tensor([2000, 1000, 3000, 500])
    numbers = torch.randint(0, 10, (6500,)).to(ids)
    with use_backend(name), torch.no_grad():
        ec = EmbeddingCollection(two_tables(data_type=data_type, embedding_dim=64))
        found = ec(KeyedJaggedTensor(["f1", "f2"], numbers, lengths=lengths))
    for key, table_name, own in [("f1", "t1", numbers[:3000]), ("f2@t2", "t2", numbers[3000:])]:
        assert torch.equal(
            found[key].values(), ec.embeddings[table_name].weight.detach()[own].float()
        )
    assert [found[key].lengths().tolist() for key in ("f1", "f2@t2")] == [[2000, 1000], [3000, 500]]


def test_results_are_named_as_torchrec_names_them() -> None:
    found = EmbeddingCollection(two_tables(embedding_dim=5))(batch())
    assert list(found) == ["f1", "f2@t1", "f2@t2"]
    assert isinstance(found["f1"], JaggedTensor)
    assert [found[key].values().shape for key in found] == [(3, 5), (1, 5), (1, 5)]
    assert EmbeddingCollection(
        two_tables()
    ).embedding_names_by_table() == get_embedding_names_by_table(two_tables())


def test_widths_may_differ() -> None:
    tables = [
        EmbeddingConfig(10, 3, "a", feature_names=["f1"]),
        EmbeddingConfig(10, 8, "b", feature_names=["f2"]),
    ]
    ec = EmbeddingCollection(tables)
    with torch.no_grad():
        found = ec(batch())
    assert (found["f1"].values().shape, found["f2"].values().shape) == ((3, 3), (1, 8))
    with pytest.raises(ValueError, match=r"no.*embedding_dim: \{'a': 3, 'b': 8\}"):
        ec.embedding_dim()
    assert (
        EmbeddingCollection(two_tables()).embedding_dim(),
        EmbeddingCollection([]).embedding_dim(),
    ) == (4, -1)


def test_a_table_without_features_is_looked_up_by_its_name() -> None:
    config = EmbeddingConfig(10, 4, "f1")
    ec = EmbeddingCollection([config])
    assert list(ec(batch())) == ["f1"]
    assert (config.feature_names, ec.embedding_configs()[0].feature_names) == ([], ["f1"])


@both
def test_the_order_of_the_batch_may_change_between_batches(name: str) -> None:
    with use_backend(name), torch.no_grad():
        ec = EmbeddingCollection(two_tables())
        one = ec(batch("f1", "f2"))
        for keys in [("f2", "f1"), ("other", "f2", "f1"), ("f1", "other", "f2")]:
            found = ec(batch(*keys))
            assert set(found) == set(one)
            for key, rows in found.items():
                assert torch.equal(rows.values(), one[key].values()) and torch.equal(
                    rows.lengths(), one[key].lengths()
                )


def test_weights_of_the_batch_are_not_used() -> None:
    ec = EmbeddingCollection(two_tables())
    weighted = KeyedJaggedTensor(
        ["f1", "f2"], torch.tensor([1, 2]), torch.tensor([5.0, 6.0]), torch.tensor([1, 1])
    )
    assert torch.equal(ec(weighted)["f1"].values()[0], ec.embeddings["t1"].weight[1])
    assert ec(weighted)["f1"].weights_or_none() is None


def test_no_tables_give_no_results() -> None:
    assert EmbeddingCollection([])(batch()) == {}
    with torch.no_grad():
        assert EmbeddingCollection([])(batch()) == {}


@pytest.mark.parametrize("trains", [False, True])
def test_a_batch_without_samples_gives_rows_of_the_right_width(trains: bool) -> None:
    none = KeyedJaggedTensor(
        ["f1", "f2"],
        torch.tensor([], dtype=torch.int64),
        lengths=torch.tensor([], dtype=torch.int64),
    )
    with torch.set_grad_enabled(trains):
        found = EmbeddingCollection(two_tables())(none)
    assert [(rows.values().shape, rows.lengths().shape) for rows in found.values()] == [
        ((0, 4), (0,))
    ] * 3


# --- what it shares with torch


def test_state_dict_has_torchrecs_names() -> None:
    ec = EmbeddingCollection(two_tables())
    assert list(ec.state_dict()) == ["embeddings.t1.weight", "embeddings.t2.weight"]
    other = EmbeddingCollection(two_tables())
    other.load_state_dict(ec.state_dict())
    for same in (other, copy.deepcopy(ec)):
        assert torch.equal(same(batch())["f1"].values(), ec(batch())["f1"].values())
    assert (
        str(ec.embeddings) == "ModuleDict(\n  (t1): Embedding(10, 4)\n  (t2): Embedding(10, 4)\n)"
    )


def test_tables_that_move_in_memory_are_found_again() -> None:
    ec = EmbeddingCollection(two_tables())
    with torch.no_grad():
        ec(batch())
        ec.load_state_dict({key: torch.full((10, 4), 7.0) for key in ec.state_dict()}, assign=True)
        assert bool((ec(batch())["f1"].values() == 7.0).all())
        ec.embeddings["t1"].weight.data = torch.full((10, 4), 8.0)
        assert bool((ec(batch())["f1"].values() == 8.0).all())


def test_a_table_that_does_more_is_called() -> None:
    ec = EmbeddingCollection(two_tables())
    ec.embeddings["t1"].register_forward_hook(lambda table, ids, rows: rows * 0 + 3.0)
    with torch.no_grad():
        assert bool((ec(batch())["f1"].values() == 3.0).all())
    ec.embeddings["t2"] = torch.nn.Sequential(ec.embeddings["t2"], torch.nn.Linear(4, 2))
    with torch.no_grad():
        assert ec(batch())["f2@t2"].values().shape == (1, 2)


def test_initial_values_follow_the_config() -> None:
    ec = EmbeddingCollection(two_tables(init_fn=partial(torch.nn.init.constant_, val=2.0)))
    assert all(bool((table.weight == 2.0).all()) for table in ec.embeddings.values())
    with torch.no_grad():
        ec.embeddings["t1"].weight.zero_()
    ec.reset_parameters()
    assert bool((ec.embeddings["t1"].weight == 2.0).all())
    bound = 10**-0.5
    assert (
        0
        < float(EmbeddingCollection(two_tables()).embeddings["t1"].weight.detach().abs().max())
        <= bound
    )


def test_the_meta_device_allocates_nothing_and_is_filled_later() -> None:
    huge = EmbeddingConfig(10**12, 64, "huge", feature_names=["f1"])
    assert (
        EmbeddingCollection([huge], device=torch.device("meta")).embeddings["huge"].weight.is_meta
    )
    with torch.device("meta"):
        small = EmbeddingCollection(two_tables())
    assert small.device == torch.device("meta") and small.embeddings["t1"].weight.is_meta
    small = small.to_empty(device="cpu")
    small.reset_parameters()
    assert float(small.embeddings["t1"].weight.detach().abs().max()) <= 10**-0.5
    assert EmbeddingCollection(two_tables()).device == torch.device("cpu")


def test_accessors_say_what_was_asked_for() -> None:
    ec = EmbeddingCollection(two_tables(), None, True, True, {"row_wise": False})
    assert (ec.need_indices(), ec.use_gather_select(), ec.use_gather_select_per_sharding()) == (
        True,
        True,
        {"row_wise": False},
    )
    assert [config.name for config in ec.embedding_configs()] == ["t1", "t2"]
    assert not ec.use_sorted_select()
    ec.set_use_sorted_select(True)
    assert ec.use_sorted_select()


# --- bad input


def table(name: str = "t", **parts: object) -> EmbeddingConfig:
    return EmbeddingConfig(
        num_embeddings=10, embedding_dim=4, name=name, feature_names=["f1"], **parts
    )  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ([table(), table()], r"tables \['t'\] are named more than once in \['t', 't'\]"),
        ([table("")], "table name '' must not be empty"),
        ([table("a.b")], "table name 'a.b' must not .* contain a dot"),
        ([table("items")], "table name 'items' is taken by an attribute .* call it 'items_table'"),
        ([table(data_type=DataType.INT8)], "table 't': data_type INT8 cannot be trained"),
    ],
)
def test_tables_that_do_not_go_together_are_refused(
    tables: list[EmbeddingConfig], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        EmbeddingCollection(tables)


def test_pooled_tables_are_refused() -> None:
    with pytest.raises(
        TypeError, match="takes tables of EmbeddingConfig, got EmbeddingBagConfig: "
    ):
        EmbeddingCollection([EmbeddingBagConfig(10, 4, "t")])  # type: ignore[list-item]


@pytest.mark.parametrize("bad", [10, -1, 2**40])
@pytest.mark.parametrize("trains", [False, True])
def test_an_id_outside_its_table_is_named_before_any_result(bad: int, trains: bool) -> None:
    features = KeyedJaggedTensor(["f1"], torch.tensor([3, bad]), lengths=torch.tensor([1, 0, 1]))
    with (
        torch.set_grad_enabled(trains),
        pytest.raises(ValueError, match=rf"'f1', sample 2, holds id {bad};"),
    ):
        EmbeddingCollection([table()])(features)


@both
def test_without_checks_an_id_outside_its_table_is_still_an_error(name: str) -> None:
    features = KeyedJaggedTensor(["f1"], torch.tensor([3, 10]), lengths=torch.tensor([1, 1]))
    for trains in (False, True):
        quiet = use_backend(name), validation(False), torch.set_grad_enabled(trains)
        with quiet[0], quiet[1], quiet[2], pytest.raises((IndexError, RuntimeError)):
            EmbeddingCollection([table()])(features)


def test_a_missing_feature_is_named() -> None:
    with pytest.raises(KeyError, match=r"no feature 'f2'.*table 't1'.*\['f1'\]"):
        EmbeddingCollection(two_tables())(batch("f1"))


def test_what_is_no_batch_is_refused() -> None:
    with pytest.raises(TypeError, match="a KeyedJaggedTensor, got dict"):
        EmbeddingCollection([table()])({"f1": [1]})
    with pytest.raises(ValueError, match=r"batch's values are torch\.float32"):
        EmbeddingCollection([table()])(
            KeyedJaggedTensor(["f1"], torch.tensor([3.0]), lengths=torch.tensor([1]))
        )
