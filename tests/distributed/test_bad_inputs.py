"""Every bad input of a sharded collection: a clear error before any result."""

from __future__ import annotations

import copy
import logging
import pickle
import warnings
from typing import Any

import pytest
import torch
from distributed.cases import batch, collection, shard

from tutorec import _validation
from tutorec.distributed.core.env import ShardingEnv
from tutorec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from tutorec.distributed.plan.geometry import table_wise_sharding
from tutorec.distributed.plan.plan import EmbeddingModuleShardingPlan, ParameterSharding
from tutorec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from tutorec.errors import RankError
from tutorec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from tutorec.modules.embedding_modules import EmbeddingBagCollection
from tutorec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from tutorec.optim.optimizers import in_backward_optimizer_filter
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor
from tutorec.spmd import device

ALONE = ShardingEnv.from_local(1, 0)
CPU = torch.device("cpu")
META_LENGTHS = torch.empty(2, dtype=torch.int64, device="meta")


def one_table(**changes: Any) -> EmbeddingBagCollection:
    spec = {
        "num_embeddings": 8,
        "embedding_dim": 4,
        "name": "products",
        "feature_names": ["item"],
        **changes,
    }
    return EmbeddingBagCollection([EmbeddingBagConfig(**spec)])


def entry(**changes: Any) -> ParameterSharding:
    sharding = table_wise_sharding((8, 4), changes.pop("rank", 0), "cpu")
    for name, value in changes.items():
        setattr(sharding, name, value)
    return sharding


def plan(**changes: Any) -> EmbeddingModuleShardingPlan:
    return EmbeddingModuleShardingPlan(products=entry(**changes))


def sharded(
    ebc: EmbeddingBagCollection | None = None,
    place: torch.device | None = None,
    **fused_params: Any,
):
    return EmbeddingBagCollectionSharder(fused_params).shard(
        ebc or one_table(), plan(), ALONE, place
    )


def ids(*values: int, key: str = "item", **options: Any) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(
        [key], torch.tensor(values), lengths=torch.tensor([1] * len(values)), **options
    ).to(device())


@pytest.mark.parametrize(
    ("bad", "kind", "words"),
    [
        (
            plan(rank=5),
            ValueError,
            r"table 'products' on rank 5, and the world has 1 ranks: 0 to 0",
        ),
        (
            EmbeddingModuleShardingPlan(),
            ValueError,
            r"says nothing about table 'products'; it names \[\]",
        ),
        (
            plan() | {"user": entry()},
            ValueError,
            r"names table 'user', which the module does not have: \['products'\]",
        ),
        (
            plan(sharding_type="sideways"),
            ValueError,
            r"sharding type 'sideways'; supported now: table_wise",
        ),
        (
            plan(compute_kernel="quant_uvm"),
            ValueError,
            r"compute kernel 'quant_uvm'; supported now: fused, fused_uvm",
        ),
        (
            plan(sharding_spec=table_wise_sharding((8, 2), 0, "cpu").sharding_spec),
            ValueError,
            r"do not cover its 8 x 4",
        ),
        (
            plan(sharding_spec=None),
            ValueError,
            r"do not cover its 8 x 4 rows and columns once: .* \[\]",
        ),
        (
            {"products": table_wise(rank=0)},
            TypeError,
            (
                r"table 'products' a ParameterShardingGenerator, table_wise\(rank=0\), where a "
                r"ParameterSharding is expected"
            ),
        ),
    ],
    ids=lambda value: "" if not isinstance(value, str) else value[:20],
)
def test_plan_that_cannot_be_carried_out_is_refused(bad, kind, words):
    with pytest.raises(kind, match=words):
        EmbeddingBagCollectionSharder().shard(one_table(), bad, ALONE)


def test_several_ranks_without_a_process_group_are_refused():
    with pytest.raises(ValueError, match=r"2 ranks.*group.*from_process_group"):
        EmbeddingBagCollectionSharder().shard(one_table(), plan(), ShardingEnv.from_local(2, 0))
    with pytest.raises(ValueError, match=r"rank 2.*ranks 0 to 1"):
        ShardingEnv.from_local(2, 2)


@pytest.mark.parametrize(
    ("fused_params", "words"),
    [
        ({"learning_rate": -0.1}, r"learning_rate=-0\.1 must be a finite number, at least 0"),
        ({"lr": float("nan")}, "learning_rate=nan must be a finite number"),
        ({"learning_rate": 0.1, "lr": 0.2}, r"learning rate twice: learning_rate=0\.1 and lr=0\.2"),
        (
            {"learningrate": 0.1},
            r"unknown keys \['learningrate'\]: known are optimizer, learning_rate, lr, eps",
        ),
        (
            {"optimizer": "lamb"},
            "'lamb', which has no fused form here: use one of 'sgd', .*, 'rowwise_adagrad', ",
        ),
        ({"optimizer": 3}, "the optimizer 3, which has no fused form here"),
        ({"weight_decay": 0.1}, r"weight_decay=0\.1"),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_fused_params_that_make_no_sense_are_refused_when_the_sharder_is_made(fused_params, words):
    with pytest.raises(ValueError, match=words):
        EmbeddingBagCollectionSharder(fused_params)


def test_missing_feature_is_named_with_its_table():
    with pytest.raises(KeyError, match=r"no feature 'item'.*table 'products'.*\['itme'\]"):
        sharded()(ids(1, key="itme"))


@pytest.mark.parametrize("when", ["first", "later"])
@pytest.mark.parametrize("value", [8, -1])
def test_id_outside_of_the_table_is_named_at_any_batch_on_the_cpu(when, value):
    """On a GPU at the first batch only, and later at the next sync point: tests/gpu."""
    place = CPU if when == "later" else device()
    module = sharded(place=place)
    if when == "later":
        module(ids(1, 2).to(place))
    with pytest.raises(
        ValueError, match=rf"'products' has 8 rows .*'item', sample 1, holds id {value}"
    ):
        module(ids(3, value).to(place))


def test_ids_are_not_checked_where_validation_is_off():
    module = sharded()
    module(ids(1))
    with _validation.validation(False):
        module._arrange(ids(8), module.create_context())


def test_float_ids_are_refused():
    with pytest.raises(ValueError, match=r"values are torch\.float32.*values\.long\(\)"):
        sharded()(
            KeyedJaggedTensor(["item"], torch.tensor([1.0]), lengths=torch.tensor([1])).to(device())
        )


def test_a_batch_that_is_no_keyed_jagged_tensor_is_refused():
    batch: Any = {"item": torch.tensor([1])}
    with pytest.raises(TypeError, match="takes a KeyedJaggedTensor, got dict"):
        sharded()(batch)


def test_weighted_collection_without_weights_is_refused():
    weighted = EmbeddingBagCollection(one_table().embedding_bag_configs(), is_weighted=True)
    module = EmbeddingBagCollectionSharder().shard(weighted, plan(), ALONE)
    module(ids(1, weights=torch.tensor([2.0])))
    with pytest.raises(ValueError, match=r"one weight per id.*no weights"):
        module(ids(1))


def weights_with_gradient(rank: int, world_size: int) -> str:
    module = shard(collection(weighted=True))
    features = batch(rank, 3, weighted=True)
    features.weights().requires_grad_()
    try:
        module(features)
    except ValueError as error:
        return str(error)
    return ""


def test_weights_whose_gradient_would_be_lost_are_refused(ranks):
    assert all(
        "detach them, weights.detach()" in message
        for message in ranks(2).run(weights_with_gradient)
    )


def weights_of_type(rank: int, world_size: int, kind: str, dtype: torch.dtype) -> bool:
    module = shard(collection(weighted=True), kind=kind)
    features = batch(rank, 3, weighted=True)
    # Twice the weight is a whole number, which every type holds.
    cast = KeyedJaggedTensor(
        features.keys(),
        features.values(),
        (2 * features.weights()).to(dtype),
        lengths=features.lengths(),
    )
    return torch.allclose(
        module(cast).values(), collection(weighted=True).to(device())(cast).values(), atol=1e-5
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.int64], ids=str)
@pytest.mark.parametrize("kind", ["row_wise", "table_wise", "data_parallel"])
def test_weights_of_any_type_pool_as_unsharded(ranks, kind, dtype):
    assert all(ranks(2).run(weights_of_type, kind=kind, dtype=dtype))


def test_copying_or_pickling_is_refused_with_a_way_that_works():
    module = sharded()
    for attempt in (copy.deepcopy, pickle.dumps):
        with pytest.raises(
            TypeError,
            match="shard the unsharded EmbeddingBagCollection",
        ):
            attempt(module)
    again = sharded()
    again.load_state_dict(module.state_dict())


def test_a_batch_on_meta_is_refused_where_the_tables_are_not():
    on_meta = KeyedJaggedTensor(
        ["item"], torch.empty(2, dtype=torch.int64, device="meta"), lengths=META_LENGTHS
    )
    with pytest.raises(ValueError, match=r"keys \['item'\]\) is on meta.* tables are on"):
        sharded()(on_meta)


def test_weights_for_a_collection_without_weights_are_named_once():
    module, other = sharded(), sharded()
    weighted = ids(1, 2, weights=torch.ones(2))
    named = (
        r"ShardedEmbeddingBagCollection: the batch \(keys \['item'\]\) has weights, and the "
        r"collection is not weighted"
    )
    with pytest.warns(UserWarning, match=named):
        found = module(weighted).values()
    assert torch.equal(found, module(weighted).values())  # said once
    assert torch.equal(found, module(ids(1, 2)).values())
    with pytest.warns(UserWarning, match="is said once"):
        other(weighted)


def under_float64(
    rank: int, world_size: int, kind: str, optimizer: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pooled rows after a step, made under either default dtype."""
    results = []
    for dtype in (torch.float32, torch.float64):
        torch.set_default_dtype(dtype)
        try:
            torch.manual_seed(0)
            module = shard(collection(PoolingType.MEAN), kind=kind, optimizer=optimizer)
            module(batch(rank, 3)).values().sum().backward()
            results.append(module(batch(rank, 3)).values().detach().cpu())
        finally:
            torch.set_default_dtype(torch.float32)
    return results[0], results[1]


@pytest.mark.parametrize("optimizer", ["exact_row_wise_adagrad", "adam"])
@pytest.mark.parametrize("kind", ["table_wise", "row_wise", "column_wise", "data_parallel"])
def test_tables_are_float32_under_a_default_of_float64(ranks, kind: str, optimizer: str):
    for expected, found in ranks(2).run(under_float64, kind=kind, optimizer=optimizer):
        assert found.dtype == torch.float32
        assert torch.equal(expected, found)


def bad_id_on_one_rank(rank: int, world_size: int) -> None:
    module = shard(collection())
    module(batch(rank, 3))
    features = batch(10 + rank, 3)
    module(
        features
        if rank == 0
        else KeyedJaggedTensor(features.keys(), features.values() + 50, lengths=features.lengths())
    )


def test_bad_id_on_one_rank_ends_all_ranks_and_names_the_id(ranks):
    with pytest.raises(
        RankError, match=r"rank 1[\s\S]*table 't\d' has \d+ rows[\s\S]*sample \d"
    ) as caught:
        ranks(2).run(bad_id_on_one_rank)
    assert caught.value.rank == 1


def test_optimizer_left_by_apply_optimizer_in_backward_is_honoured():
    from torch.distributed.optim import _apply_optimizer_in_backward

    ebc = one_table()
    _apply_optimizer_in_backward(torch.optim.SGD, ebc.parameters(), {"lr": 0.5})
    module = sharded(ebc, learning_rate=0.01)
    assert (
        repr(module.fused_optimizer)
        == ": EmbeddingFusedOptimizer (\nParameter Group 0\n    lr: 0.5\n)"
    )
    _apply_optimizer_in_backward(torch.optim.SGD, ebc.parameters(), {"lr": 0.5})
    with pytest.raises(ValueError, match=r"table 'products'.*several.*\['SGD', 'SGD'\]"):
        sharded(ebc)
    momentum = one_table()
    _apply_optimizer_in_backward(
        torch.optim.SGD, momentum.parameters(), {"lr": 0.5, "momentum": 0.9}
    )
    with pytest.raises(ValueError, match=r"'products': SGD\(momentum=0.9\).* no fused form"):
        sharded(momentum)
    other = one_table()
    _apply_optimizer_in_backward(torch.optim.RMSprop, other.parameters(), {"lr": 0.5})
    with pytest.raises(ValueError, match=r"'products': RMSprop.* no fused form"):
        sharded(other)


def test_plan_made_for_cuda_is_placed_on_cpu_with_one_warning():
    ebc = one_table()
    cuda = construct_module_sharding_plan(
        ebc, {"products": table_wise(rank=0)}, world_size=1, device_type="cuda"
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default", RuntimeWarning)
        modules = [EmbeddingBagCollectionSharder().shard(ebc, cuda, ALONE, CPU) for _ in range(3)]
    [warning] = caught
    assert "plan was made for cuda: its tables are placed on cpu" in str(warning.message)
    assert warning.filename == __file__
    assert modules[0].get_parameter("embedding_bags.products.weight").device == CPU
    if not torch.cuda.is_available():
        with pytest.warns(RuntimeWarning, match="cuda are placed on cpu"):
            EmbeddingBagCollectionSharder().shard(ebc, cuda, ALONE, torch.device("cuda"))


def test_what_was_sharded_is_a_line_of_the_log(caplog):
    with caplog.at_level(logging.INFO, logger="tutorec.distributed"):
        EmbeddingBagCollectionSharder({"learning_rate": 0.1}).shard(one_table(), plan(), ALONE)
    [record] = caplog.records
    assert record.name == "tutorec.distributed"
    line = record.getMessage()
    assert "1 table on 1 rank: 1 table_wise (fused); rank 0 holds 128 bytes" in line


def test_a_dense_table_leaves_its_optimizer_in_backward_to_the_caller_who_is_told():
    ebc = one_table()
    apply_optimizer_in_backward(torch.optim.SGD, ebc.parameters(), {"lr": 0.5})
    with pytest.warns(
        UserWarning,
        match=r"'products' is not used.*kernel 'dense'",
    ):
        sharded = EmbeddingBagCollectionSharder().shard(ebc, plan(compute_kernel="dense"), ALONE)
    assert [name for name, _ in in_backward_optimizer_filter(sharded.named_parameters())] == [
        "embedding_bags.products.weight"
    ]
