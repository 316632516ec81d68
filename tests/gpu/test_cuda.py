"""The same code on a GPU: torch's and fbgemm's kernels, one rank on NCCL, two ranks that share one
GPU over gloo.
"""

from __future__ import annotations

import copy
from typing import get_args

import pytest
import quant.equals
import torch

from tutorec._kernels.backend import use_backend
from tutorec._kernels.caches.row_cache import CacheSpec
from tutorec._kernels.packed import PackedTable, PackedTableLookup
from tutorec._kernels.packed_layout import PACKED_TYPES
from tutorec._kernels.scattered_tables import address_tables
from tutorec._kernels.specs import (
    FBGEMM_KINDS,
    GroupSpec,
    OptimizerKind,
    OptimizerSpec,
    TableSpec,
    UpdateStep,
)
from tutorec._kernels.table_steps import step_tables
from tutorec._kernels.tbe_build import build_table_batch
from tutorec._kernels.tbe_layout import PooledBatch
from tutorec.distributed.core.env import ShardingEnv
from tutorec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from tutorec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from tutorec.modules.embedding_configs import EmbeddingBagConfig
from tutorec.modules.embedding_modules import EmbeddingBagCollection
from tutorec.optim import RowWiseAdagrad, apply_optimizer_in_backward
from tutorec.optim.updating_lookup import pool
from tutorec.quant.packing import pack_rows
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor
from tutorec.spmd import Ranks
from tutorec.types import DataType

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]

GROUP = GroupSpec((TableSpec("user", 50, 8), TableSpec("item", 30, 8)), feature_tables=(0, 1))
VALUES = torch.tensor([3, 3, 49, 0, 29, 29])
OFFSETS = torch.tensor([0, 2, 3, 4, 6])


@pytest.mark.parametrize("kind", get_args(OptimizerKind))
def test_torch_kernels_give_the_same_rows_on_cuda(kind):
    weights = [torch.rand(table.rows, table.columns) for table in GROUP.tables]
    rows = {}
    for device in ("cpu", "cuda"):
        with use_backend("torch"):
            op = build_table_batch(
                GROUP,
                optimizer=OptimizerSpec(kind, 0.1),
                device=torch.device(device),
                weights=weights,
            )
        for _ in range(3):
            op(VALUES.to(device), OFFSETS.to(device)).square().sum().backward()
        rows[device] = torch.cat([table.detach().cpu() for table in op.table_weights()])
    torch.testing.assert_close(rows["cuda"], rows["cpu"])


POOLINGS = [
    (pooling, weighted)
    for pooling in ("sum", "mean", "sqrtn", "none")
    for weighted in (False, True)
]
RULES = [None, *(OptimizerSpec(kind, 0.1, max_gradient=2.0) for kind in get_args(OptimizerKind))]
# A table that two features apart read, one of no rows, one that none reads, and widths that are
# padded.
TABLES = (
    TableSpec("user", 50, 8),
    TableSpec("none", 0, 4),
    TableSpec("item", 30, 6),
    TableSpec("unread", 5, 3),
)
LENGTHS = ((2, 0, 1), (3, 1, 0), (0, 0, 0), (1, 1, 2))  # of features 0 to 3, three bags each


@pytest.fixture
def fbgemm_on_cuda():
    with use_backend("auto") as choice:
        if not choice.serves("cuda"):
            pytest.skip(f"no CUDA wheel of fbgemm that fits: {choice.reason}")
        yield


def group_of(pooling: str, weighted: bool) -> GroupSpec:
    tables = TABLES
    if pooling == "none":
        tables = tuple(TableSpec(table.name, table.rows, 6) for table in TABLES)
    return GroupSpec(tables, (0, 2, 1, 0), pooling, weighted)  # type: ignore[arg-type]


@pytest.mark.usefixtures("fbgemm_on_cuda")
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.kind if rule else "dense")
@pytest.mark.parametrize(
    ("pooling", "weighted"), [case for case in POOLINGS if case != ("none", True)]
)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_fbgemm_gives_the_same_rows_and_states_on_cuda(rule, pooling, weighted, dtype):
    group = group_of(pooling, weighted)
    start = [torch.rand(table.rows, table.columns) for table in group.tables]
    lengths = torch.tensor(LENGTHS).view(-1)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).to(dtype)
    ids = torch.randint(0, 5, (int(lengths.sum()),), dtype=dtype)
    factors = torch.rand(ids.numel()) + 0.5
    seen = {}
    for device in ("cpu", "cuda"):
        op = build_table_batch(group, optimizer=rule, device=torch.device(device), weights=start)
        weights = factors.to(device, copy=True).requires_grad_() if weighted else None
        outputs = []
        for _ in range(3):
            outputs.append(op(ids.to(device), offsets.to(device), weights))
            outputs[-1].square().sum().backward()
        seen[device] = (
            [output.detach().cpu() for output in outputs],
            [table.detach().cpu() for table in op.table_weights()],
            [table.grad.cpu() if table.grad is not None else None for table in op.table_weights()],
            [
                {name: state.cpu() for name, state in of_table.items()}
                for of_table in op.optimizer_state()
            ],
            None if weights is None or weights.grad is None else weights.grad.cpu(),
        )
    in_torch = rule is not None and (rule.averages_squares or rule.kind not in FBGEMM_KINDS["cuda"])
    assert op.kernel.startswith("torch" if in_torch else "fbgemm")
    torch.testing.assert_close(seen["cuda"], seen["cpu"], rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("fbgemm_on_cuda")
@pytest.mark.parametrize("kind", FBGEMM_KINDS["cuda"])
def test_fbgemm_gives_the_same_rows_on_cuda_where_no_width_is_padded(kind):
    start = [torch.rand(table.rows, table.columns) for table in GROUP.tables]
    ops = [
        build_table_batch(
            GROUP, optimizer=OptimizerSpec(kind, 0.1), device=torch.device(device), weights=start
        )
        for device in ("cpu", "cuda")
    ]
    assert ops[1].kernel == f"fbgemm.{kind}"
    for op, device in zip(ops, ("cpu", "cuda"), strict=True):
        # rate of the first step
        op(VALUES.to(device), OFFSETS.to(device)).square().sum().backward()
        op.learning_rate = 0.01
        other = copy.deepcopy(op)
        for one in (op, other):
            one(VALUES.to(device), OFFSETS.to(device)).square().sum().backward()
        torch.testing.assert_close(other.table_weights(), op.table_weights())
    rows, states = ([op.table_weights() for op in ops], [op.optimizer_state() for op in ops])
    torch.testing.assert_close([table.cpu() for table in rows[1]], rows[0])
    for own, wanted in zip(states[1], states[0], strict=True):
        torch.testing.assert_close({name: state.cpu() for name, state in own.items()}, wanted)


@pytest.mark.usefixtures("fbgemm_on_cuda")
@pytest.mark.parametrize("kind", get_args(OptimizerKind))
@pytest.mark.parametrize(("mean", "weighted"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_tables_in_separate_memory_move_as_in_torch(kind, mean, weighted, dtype):
    shapes, features = ((50, 8), (30, 12), (9, 4)), (0, 0, 1, 2)
    start = [torch.rand(shape) for shape in shapes]
    rowwise = [state.rowwise for state in OptimizerSpec(kind).states]
    lengths = torch.tensor(LENGTHS).view(-1)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).to(dtype)
    ids = torch.randint(0, 9, (int(lengths.sum()),), dtype=dtype)
    factors = torch.rand(ids.numel()) + 0.5 if weighted else None
    grads = [torch.rand(3, 32) for _ in range(3)]
    seen = []
    for name in ("torch", "fbgemm"):
        with use_backend(name):
            tables = [table.cuda() for table in start]
            states = [
                tuple(
                    torch.zeros(rows if one else (rows, columns), device="cuda") for one in rowwise
                )
                for rows, columns in shapes
            ]
            batch = PooledBatch(
                ids.cuda(),
                offsets.cuda(),
                None if factors is None else factors.cuda(),
                mean,
                features,
            )
            assert (address_tables(tables, features) is not None) == (name == "fbgemm")
            pooled = []
            for number, grad in enumerate(grads, start=1):
                pooled.append(pool(tables, batch))
                step = UpdateStep(OptimizerSpec(kind), rate=0.1, number=number)
                step_tables(tables, states, batch, grad.cuda(), [step] * 3)
        seen.append((pooled, tables, states))
    torch.testing.assert_close(seen[1], seen[0], rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("fbgemm_on_cuda")
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, RowWiseAdagrad, torch.optim.Adam])
@pytest.mark.parametrize("order", [("user", "item"), ("item", "user")])
def test_a_collection_with_optimizers_in_backward_trains_on_cuda_as_on_the_cpu(optimizer, order):
    tables = [
        EmbeddingBagConfig(40, 8, "t1", feature_names=["user", "item"]),
        EmbeddingBagConfig(20, 4, "t2", feature_names=["item"]),
    ]
    ids = KeyedJaggedTensor(
        list(order), torch.tensor([3, 3, 19, 0, 7]), lengths=torch.tensor([2, 1, 0, 2])
    )
    first, seen = EmbeddingBagCollection(tables), []
    for device in ("cpu", "cuda"):
        ebc = copy.deepcopy(first).to(device)
        apply_optimizer_in_backward(optimizer, ebc.parameters(), {"lr": 0.1})
        for _ in range(3):
            pooled = ebc(ids.to(torch.device(device))).values()
            pooled.square().sum().backward()
        seen.append([pooled.detach().cpu(), *(table.detach().cpu() for table in ebc.parameters())])
    torch.testing.assert_close(seen[1], seen[0], rtol=1e-4, atol=1e-5)


CACHES = {
    "managed": CacheSpec(),
    "lru": CacheSpec((8, 5)),
    "lfu": CacheSpec((8, 5), "lfu", reserved_memory=1e6),
    "pipeline": CacheSpec((8, 5), prefetch_pipeline=True),
}


@pytest.mark.usefixtures("fbgemm_on_cuda")
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("pooling", ["mean", "none"])
@pytest.mark.parametrize("kind", FBGEMM_KINDS["cuda"])
def test_tables_in_the_memory_of_the_host_train_as_on_the_gpu(kind, pooling, cache):
    group = GroupSpec(GROUP.tables, (0, 1), pooling)  # type: ignore[arg-type]
    start = [torch.rand(table.rows, table.columns) for table in group.tables]
    cuda, rule = torch.device("cuda"), OptimizerSpec(kind, 0.1)
    plain = build_table_batch(group, optimizer=rule, device=cuda, weights=start)
    managed = build_table_batch(
        group, optimizer=rule, device=cuda, weights=start, cache=CACHES[cache]
    )
    offsets = (
        torch.arange(0, 41, 5, device=cuda)
        if pooling == "mean"
        else torch.tensor([0, 20, 40], device=cuda)
    )
    batches = [
        torch.randint(0, 30, (40,), generator=torch.Generator().manual_seed(step))
        for step in range(8)
    ]
    batches = [batch.to(cuda) for batch in batches]
    for step, ids in enumerate(batches):
        for coming in batches[step + 1 : step + 2] if step else batches[:2]:
            managed.prefetch(coming, offsets)
        if step == 4:  # others write, a state dict that is loaded for example
            for op in (plain, managed):
                op.table_weights()[0][:10] = 0.5
        for op in (plain, managed):
            found = op(ids, offsets)
            (found * torch.linspace(-1, 1, found.shape[1], device=cuda)).sum().backward()
        with torch.no_grad():
            torch.testing.assert_close(managed(ids, offsets), plain(ids, offsets))
    for one, other in ((managed, plain), (copy.deepcopy(managed), plain)):
        torch.testing.assert_close(one.table_weights(), other.table_weights())
        torch.testing.assert_close(one.optimizer_state(), other.optimizer_state())


@pytest.mark.usefixtures("fbgemm_on_cuda")
@pytest.mark.parametrize("pooling", ["sum", "mean", "sqrtn", "none"])
@pytest.mark.parametrize("data_type", PACKED_TYPES, ids=str)
def test_fbgemm_reads_the_same_packed_rows_on_cuda(pooling, data_type):
    widths = [6, 6, 6] if pooling == "none" else [6, 8, 37]
    tables = [PackedTable(f"t{width}", 9, width, data_type) for width in widths]
    op = PackedTableLookup(tables, [0, 1, 2, 0], pooling)
    for index, table in enumerate(tables):
        pack_rows(torch.randn(table.rows, table.columns), data_type, out=op.table_rows(index))
    lengths = torch.tensor(LENGTHS).view(-1)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    ids = torch.randint(0, 9, (int(lengths.sum()),))
    for weights in (None, torch.rand(ids.numel())) if pooling != "none" else (None,):
        expected = op(ids, offsets, weights)
        moved = copy.deepcopy(op).to("cuda")
        assert moved._on_fbgemm == (data_type is not DataType.INT2)
        actual = moved(ids.cuda(), offsets.cuda(), None if weights is None else weights.cuda())
        quant.equals.assert_close_in_half(actual.cpu(), expected)


def one_step(
    rank: int, world_size: int, device_type: str
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """A forward and a fused step table-wise; the pooled rows and this rank's tables."""
    device = torch.device(device_type, 0) if device_type == "cuda" else torch.device("cpu")
    torch.manual_seed(0)
    names = ("user", "item")
    ebc = EmbeddingBagCollection(
        [
            EmbeddingBagConfig(
                num_embeddings=30, embedding_dim=8, name=f"t_{name}", feature_names=[name]
            )
            for name in names
        ]
    )
    placement = {"t_user": table_wise(rank=0), "t_item": table_wise(rank=world_size - 1)}
    plan = construct_module_sharding_plan(
        ebc, placement, world_size=world_size, device_type=device_type
    )
    group = torch.distributed.group.WORLD
    assert group is not None, "a rank has a process group"
    sharder = EmbeddingBagCollectionSharder(
        fused_params={"optimizer": "rowwise_adagrad", "learning_rate": 0.1}
    )
    sharded = sharder.shard(ebc, plan, ShardingEnv.from_process_group(group), device)
    ids = KeyedJaggedTensor(
        list(names), torch.tensor([1, 2, 2, 7, 0, 29]), lengths=torch.tensor([2, 1, 1, 2])
    )
    pooled = sharded(ids.to(device)).wait().values()
    pooled.sum().backward()
    return pooled.detach().cpu(), {
        name: rows.detach().cpu() for name, rows in sharded.named_parameters()
    }


@pytest.mark.parametrize(("world_size", "backend"), [(1, "nccl"), (2, "gloo")])
def test_a_sharded_step_on_cuda_equals_the_cpu(world_size, backend):
    with Ranks(world_size, backend="gloo") as world:
        expected = world.run(one_step, "cpu")
    with Ranks(world_size, backend=backend) as world:
        actual = world.run(one_step, "cuda")
    for mine, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("name", ["fbgemm", "torch"])
def test_a_bad_id_is_told_at_the_next_sync_point_and_harms_no_row(name):
    batch = KeyedJaggedTensor(["item"], torch.tensor([3, 9]), lengths=torch.tensor([1, 1])).to(
        torch.device("cuda")
    )
    with use_backend("auto") as choice:
        if name == "fbgemm" and not choice.serves("cuda"):
            pytest.skip(f"no CUDA wheel of fbgemm that fits: {choice.reason}")
    with use_backend(name):
        ebc = EmbeddingBagCollection(
            [EmbeddingBagConfig(8, 4, "goods", feature_names=["item"])], device=torch.device("cuda")
        )
        apply_optimizer_in_backward(torch.optim.SGD, ebc.parameters(), {"lr": 1.0})
        before = next(ebc.parameters()).detach().clone()
        ebc(batch).values().sum().backward()  # nothing is read from the device here
        with pytest.raises(ValueError, match="feature 'item', sample 1, holds id 9"):
            batch.unsync().sync()
        moved = (next(ebc.parameters()).detach() - before).abs().sum(1) > 0
        assert moved.nonzero().flatten().tolist() == [0, 3]
