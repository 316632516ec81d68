"""Tables of 16 bits: sums are in float32, and only the rows that are stored are rounded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import pytest
import torch
from distributed import cases
from distributed.cases import KINDS, MIXES, OPTIMIZERS, batch, coefficients, samples_of, seed_of
from pairwise import pairwise_cover
from torch import Tensor
from torch.testing import assert_close

from tutorec._kernels.backend import use_backend
from tutorec.distributed.checkpoint import full_state_dict, load_checkpoint, save_checkpoint
from tutorec.distributed.embedding import EmbeddingCollectionSharder
from tutorec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from tutorec.distributed.shard import shard
from tutorec.distributed.sharding_plan import data_parallel, row_wise, table_wise
from tutorec.inference.modules import quantize_embeddings
from tutorec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from tutorec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from tutorec.optim import apply_optimizer_in_backward
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor
from tutorec.spmd import Ranks, device
from tutorec.types import DataType, data_type_to_dtype

STEPS = 3
HALVES = (DataType.FP16, DataType.BF16)
MATRIX = (
    HALVES,
    (*KINDS, *MIXES),
    ("sum", "mean"),
    OPTIMIZERS,
    (1, 2),
    ("fused", "fused_uvm", "fused_uvm_caching"),
    ("fbgemm", "torch"),
)


def ulp(data_type: DataType) -> float:
    """The distance between neighbours, as a part of the number."""
    return torch.finfo(data_type_to_dtype(data_type)).eps


@dataclass
class RoundedReference(cases.Reference):
    """The unsharded tables in float32, whose rows are rounded after each update."""

    data_type: DataType = DataType.FP16

    def __post_init__(self) -> None:
        # Sums in another order may round to the neighbour.
        self.weights_rtol = ulp(self.data_type)
        self._round()

    @torch.no_grad()
    def _round(self) -> None:
        for weight in self.weights().values():
            weight.copy_(weight.to(data_type_to_dtype(self.data_type)))

    def update(
        self, gradients: dict[str, Tensor], rows: dict[str, list[int]] | None = None
    ) -> None:
        super().update(gradients, rows)
        self._round()


def half_collection(data_type: DataType, pooling: str) -> EmbeddingBagCollection:
    """The tables of the other tests, rounded to 16 bits."""
    wide = cases.collection(PoolingType[pooling.upper()])
    configs = [replace(config, data_type=data_type) for config in wide.embedding_bag_configs()]
    made = EmbeddingBagCollection(configs)
    made.load_state_dict(
        {name: rows.to(data_type_to_dtype(data_type)) for name, rows in wide.state_dict().items()}
    )
    return made


def train(
    rank: int,
    world_size: int,
    data_type: DataType,
    kind: str,
    pooling: str,
    optimizer: str,
    kernel: str,
    backend: str,
) -> dict[str, Any]:
    with use_backend(backend):
        caching = {"cache_load_factor": 0.3} if kernel == "fused_uvm_caching" else {}
        collection = half_collection(data_type, pooling)
        sharded = cases.shard(collection, optimizer, kernel, kind, **caching)
        outputs = []
        for step in range(STEPS):
            seed = seed_of(rank, step)
            out = sharded(batch(seed, samples_of(rank, step))).wait().values()
            outputs.append(out.detach())
            (out * coefficients(out, seed)).sum().backward()
        sharded.flush()
        return {"outputs": outputs, "held": cases.held(sharded)}


def drawn_cases() -> list[tuple[Any, ...]]:
    """Each two values of two parameters meet; replicated tables are not in files."""
    cover = pairwise_cover(MATRIX)
    in_memory = ("data_parallel", *MIXES)
    return [
        case
        for case in product(*MATRIX)
        if case in cover and (case[5] == "fused" or case[1] not in in_memory)
    ]


@pytest.mark.parametrize(
    ("data_type", "kind", "pooling", "optimizer", "world_size", "kernel", "backend"), drawn_cases()
)
def test_training_equals_float32_with_rounded_rows(
    ranks: Callable[..., Ranks],
    data_type: DataType,
    kind: str,
    pooling: str,
    optimizer: str,
    world_size: int,
    kernel: str,
    backend: str,
) -> None:
    if kernel != "fused" and torch.cuda.is_available():
        pytest.skip("tables in files are on the CPU")
    of_ranks = ranks(world_size).run(
        train,
        data_type=data_type,
        kind=kind,
        pooling=pooling,
        optimizer=optimizer,
        kernel=kernel,
        backend=backend,
    )
    wide = cases.collection(PoolingType[pooling.upper()])
    reference = RoundedReference(wide, optimizer, world_size, kind, data_type=data_type)
    for step in range(STEPS):
        batches = [batch(seed_of(r, step), samples_of(r, step)) for r in range(world_size)]
        for result, expected in zip(of_ranks, reference.step(batches, step), strict=True):
            output = result["outputs"][step]
            assert output.dtype == torch.float32
            assert_close(output, expected, rtol=4 * ulp(data_type), atol=4 * ulp(data_type))
    for result in of_ranks:
        for name, pieces in result["held"].items():
            for place, rows, states in pieces:
                assert rows.dtype == data_type_to_dtype(data_type)
                assert all(state.dtype == torch.float32 for state in states.values())
                reference.check_piece(name, (place, rows.float(), states), kind)


def one_table(data_type: DataType, rows: int = 64, value: float = 1.0) -> EmbeddingBagCollection:
    made = EmbeddingBagCollection(
        [EmbeddingBagConfig(rows, 8, "item", feature_names=["item"], data_type=data_type)]
    )
    made.embedding_bags["item"].weight.data.fill_(value)
    return made


def small_steps(
    rank: int, world_size: int, data_type: DataType, rounding: bool, replicated: bool
) -> Tensor:
    """Rows of ones after 32 steps of an eighth of the distance to the next number."""
    rate = ulp(data_type) / 2 / 8  # below 1 the distance is half of that above 1
    fused_params = {
        "optimizer": "exact_sgd",
        "learning_rate": rate,
        "stochastic_rounding": rounding,
    }
    way = data_parallel("fused") if replicated else table_wise(world_size - 1)
    sharded = shard(
        one_table(data_type),
        {"item": way},
        sharder=EmbeddingBagCollectionSharder(fused_params),
    )
    every_row = KeyedJaggedTensor(
        ["item"], torch.arange(64), lengths=torch.ones(64, dtype=torch.long)
    ).to(device())
    for _ in range(32):
        sharded(every_row).wait().values().sum().backward()
    return next(sharded.parameters()).detach().float().cpu()


@pytest.mark.parametrize("data_type", HALVES)
def test_nearest_rounding_loses_small_updates_and_stochastic_rounding_keeps_their_mean(
    ranks: Callable[..., Ranks], data_type: DataType
) -> None:
    [lost] = ranks(1).run(small_steps, data_type=data_type, rounding=False, replicated=False)
    assert torch.equal(lost, torch.ones(64, 8))

    [kept] = ranks(1).run(small_steps, data_type=data_type, rounding=True, replicated=False)
    distance = ulp(data_type) / 2
    moved = (1 - kept) / distance
    assert torch.equal(moved, moved.round())  # each row is a number of the format
    assert len(moved.unique()) > 3
    # 32 steps of an eighth are 4 distances; the mean of 512 numbers varies by about 0.1.
    assert abs(moved.mean().item() - 4) < 0.5


@pytest.mark.parametrize("data_type", HALVES)
def test_replicas_round_alike(ranks: Callable[..., Ranks], data_type: DataType) -> None:
    one, other = ranks(2).run(small_steps, data_type=data_type, rounding=True, replicated=True)
    assert torch.equal(one, other)
    assert len(one.unique()) > 3


def saved_and_loaded(rank: int, world_size: int, folder: str) -> list[Tensor]:
    sharder = EmbeddingBagCollectionSharder(
        {"optimizer": "exact_row_wise_adagrad", "learning_rate": 0.1}
    )
    ids = KeyedJaggedTensor(["item"], torch.tensor([rank, 7]), lengths=torch.tensor([1, 1]))
    first = shard(one_table(DataType.BF16), {"item": row_wise()}, sharder=sharder)
    first(ids.to(device())).wait().values().square().sum().backward()
    save_checkpoint(folder, first)

    other = one_table(DataType.BF16, value=0.0)
    second = shard(other, {"item": table_wise(1)}, sharder=sharder)
    load_checkpoint(folder, second)
    states = [full_state_dict(each) for each in (first, second)]
    return [state["embedding_bags.item.weight"] for state in states if state]


def test_a_checkpoint_of_half_tables_loads_under_another_plan(
    ranks: Callable[..., Ranks], tmp_path: Any
) -> None:
    saved, loaded = ranks(2).run(saved_and_loaded, folder=str(tmp_path / "saved"))[0]
    assert saved.dtype == loaded.dtype == torch.bfloat16
    assert torch.equal(saved, loaded)
    assert saved.unique().numel() > 1


def sequence(rank: int, world_size: int, data_type: DataType) -> tuple[Tensor, Tensor]:
    config = EmbeddingConfig(16, 8, "item", feature_names=["item"], data_type=data_type)
    torch.manual_seed(3)
    plain = EmbeddingCollection([config])
    expected = plain.embeddings["item"].weight.detach().clone()
    sharded = shard(
        plain,
        {"item": row_wise()},
        sharder=EmbeddingCollectionSharder({"learning_rate": 1.0}),
    )
    ids = KeyedJaggedTensor(["item"], torch.tensor([9, 2, 9]), lengths=torch.tensor([3]))
    rows = sharded(ids.to(device()))["item"].values()
    assert_close(rows.cpu(), expected[[9, 2, 9]].float(), rtol=0, atol=0)
    rows.sum().backward()
    # Each rank looks up row 9 twice and row 2 once; the gradient is the mean over ranks.
    after = expected.float()
    after[9] -= 2
    after[2] -= 1
    return full_state_dict(sharded).get("embeddings.item.weight", after), after.to(expected.dtype)


@pytest.mark.parametrize("data_type", HALVES)
@pytest.mark.parametrize("backend", ["fbgemm", "torch"])
def test_rows_without_pooling_train(
    ranks: Callable[..., Ranks], data_type: DataType, backend: str
) -> None:
    with use_backend(backend):
        trained, expected = ranks(2).run(sequence, data_type=data_type)[0]
    assert torch.equal(trained, expected)


@pytest.mark.parametrize("data_type", HALVES)
def test_half_tables_are_quantized(data_type: DataType) -> None:
    model = torch.nn.Sequential(one_table(data_type))
    model[0].embedding_bags["item"].weight.data.copy_(torch.linspace(-1, 1, 512).view(64, 8))
    ids = KeyedJaggedTensor(["item"], torch.tensor([3, 5]), lengths=torch.tensor([2]))
    before = model(ids).values()
    quantized = quantize_embeddings(model, torch.int8, inplace=False)
    assert_close(quantized(ids).values(), before, rtol=0, atol=0.02)


def rounded_for_a_named_optimizer(rank: int, world_size: int) -> Tensor:
    collection = one_table(DataType.BF16)
    rate = ulp(DataType.BF16) / 2 / 8
    apply_optimizer_in_backward(torch.optim.SGD, collection.parameters(), {"lr": rate})
    sharder = EmbeddingBagCollectionSharder({"stochastic_rounding": True})
    sharded = shard(collection, {"item": table_wise(0)}, sharder=sharder)
    ids = KeyedJaggedTensor(["item"], torch.arange(64), lengths=torch.ones(64, dtype=torch.long))
    for _ in range(8):
        sharded(ids.to(device())).wait().values().sum().backward()
    return next(sharded.parameters()).detach().float().cpu()


def test_stochastic_rounding_serves_a_table_whose_optimizer_was_named(
    ranks: Callable[..., Ranks],
) -> None:
    [rows] = ranks(1).run(rounded_for_a_named_optimizer)
    assert rows.min() < 1


def converted(rank: int, world_size: int, folder: str, saved: DataType, wanted: DataType) -> Tensor:
    first = shard(one_table(saved, value=1 / 3), {"item": row_wise()})
    save_checkpoint(folder, first)
    second = shard(one_table(wanted, value=0.0), {"item": row_wise()})
    load_checkpoint(folder, second)
    return next(second.parameters()).detach().float().cpu()


@pytest.mark.parametrize("types", [(DataType.FP32, DataType.BF16), (DataType.BF16, DataType.FP32)])
def test_a_checkpoint_loads_into_tables_of_another_type(
    ranks: Callable[..., Ranks], tmp_path: Any, types: tuple[DataType, DataType]
) -> None:
    saved, wanted = types
    [rows, _] = ranks(2).run(converted, folder=str(tmp_path / "saved"), saved=saved, wanted=wanted)
    assert torch.equal(rows, torch.tensor(1 / 3).bfloat16().float().expand_as(rows))
