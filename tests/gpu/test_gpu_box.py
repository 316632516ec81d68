"""A box with GPUs: NCCL on all of them, every sharding type, backends, quantized tables,
checkpoints, whole models.

The runs are those of other tests, on the ranks' own devices, and their references are computed on
the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator

import distributed.checkpoint.test_any_plan as checkpoints
import distributed.sharding.test_parity as parity
import distributed.sharding.test_sequence_parity as sequence_parity
import distributed.test_model_parallel as model_parallel
import pytest
import quant.equals
import test_readme
import torch
import torch.distributed as dist
from distributed.cases import FEATURES, KINDS, MIXES, batch, tables

from tutorec._kernels.backend import use_backend
from tutorec.distributed.plan.plan import ShardingPlan
from tutorec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    row_wise,
    table_wise,
)
from tutorec.inference.modules import shard_quant_model
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor
from tutorec.spmd import Ranks, device

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not GPUS, reason="no CUDA device on this machine"),
    pytest.mark.skipif(not dist.is_nccl_available(), reason="this torch has no NCCL"),
]
BACKENDS = ("fbgemm", "torch")
TYPES = (*KINDS, *MIXES)


@pytest.fixture(scope="module")
def box() -> Iterator[Ranks]:
    """A rank on every GPU; of four and more on two simulated hosts."""
    with Ranks(
        GPUS, hosts=2 if GPUS >= 4 and GPUS % 2 == 0 else 1, backend="nccl", timeout=600
    ) as world:
        yield world


def place(rank: int) -> tuple[str, list[float]]:
    """This rank's device, and what all ranks' tensors on theirs add up to, on the GPU and on the
    CPU.
    """
    totals = []
    for where in (device(), torch.device("cpu")):
        total = torch.full((1,), float(rank), device=where)
        dist.all_reduce(total)
        totals.append(total.item())
    return str(device()), totals


def test_each_rank_has_its_gpu_and_one_group_carries_tensors_of_both_kinds(box):
    total = GPUS * (GPUS - 1) / 2
    assert box.run(place) == [(f"cuda:{rank}", [total, total]) for rank in range(GPUS)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", TYPES)
def test_every_sharding_type_on_all_gpus_equals_unsharded(box, kind, backend):
    parity.skip_without(backend)
    for pooling, optimizer in (
        ("mean", "exact_row_wise_adagrad"),
        ("weighted", "exact_sgd"),
        ("sqrtn", "adam"),
    ):
        parity.assert_equal_to_unsharded(box, kind, pooling, optimizer, backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", TYPES)
def test_every_sharding_type_of_rows_on_all_gpus_equals_unsharded(box, kind, backend):
    parity.skip_without(backend)
    for batches, optimizer in (("samples", "exact_row_wise_adagrad"), ("lists", "adam")):
        sequence_parity.assert_equal_to_unsharded(box, kind, batches, optimizer, backend)


@pytest.mark.parametrize("kind", ["table_wise", "row_wise", "data_parallel"])
def test_more_ranks_than_gpus_stay_on_the_cpu_and_equal_unsharded(kind):
    with Ranks(GPUS + 1, timeout=600) as world:
        assert world.run(lambda: str(device())) == ["cpu"] * (GPUS + 1)
        parity.assert_equal_to_unsharded(world, kind, "sum", "exact_adagrad", "auto")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("weighted", [False, True])
def test_unsharded_tables_on_cuda_equal_those_on_the_cpu(backend, weighted):
    parity.skip_without(backend)
    features = batch(seed=1, samples=5, weighted=weighted)
    found = []
    with use_backend(backend):
        for where in (torch.device("cpu"), device()):
            collection = parity.collection(weighted=weighted).to(where)
            pooled = collection(features.to(where)).values()
            pooled.square().sum().backward()
            found.append(
                [pooled.detach().cpu(), *(weight.grad.cpu() for weight in collection.parameters())]
            )
    for on_gpu, on_cpu in zip(*reversed(found), strict=True):
        torch.testing.assert_close(on_gpu, on_cpu)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", quant.equals.DTYPES)
def test_quantized_tables_on_cuda_equal_those_on_the_cpu(backend, dtype):
    parity.skip_without(backend)
    features = batch(seed=1, samples=5)
    with use_backend(backend):
        _, on_cpu = quant.equals.bags(tables(), dtype)
        expected = on_cpu(features).values()
        moved = on_cpu.to(device())
        quant.equals.assert_close_in_half(moved(features.to(device())).values().cpu(), expected)
        packed = [moved.packed_rows(name).cpu() for name in moved.table_names()]
        ebc, _ = quant.equals.bags(tables(), dtype)
        there = type(moved).from_float(_with_formats(ebc.to(device()), ebc.qconfig))
        assert [rows.is_cuda for rows in map(there.packed_rows, there.table_names())] == [
            True
        ] * len(packed)


def _with_formats(collection, qconfig):
    collection.qconfig = qconfig
    return collection


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "word", [table_wise(rank=GPUS - 1), row_wise(), column_wise(ranks=[GPUS - 1, 0])]
)
def test_quantized_tables_over_all_gpus_equal_those_on_the_cpu(backend, word):
    parity.skip_without(backend)
    features = batch(seed=2, samples=6)
    with use_backend(backend):
        _, whole = quant.equals.bags(tables(), torch.int8)
        expected = whole(features).values()
        entries = {name: word for name in whole.table_names()}
        plan = ShardingPlan(
            {
                "": construct_module_sharding_plan(
                    whole, entries, world_size=GPUS, device_type="cuda"
                )
            }
        )
        sharded, _ = shard_quant_model(whole, GPUS, "cuda", sharding_plan=plan)
        for given in (features, features.to(device())):
            found = sharded(given).values()
            assert found.is_cuda
            quant.equals.assert_close_in_half(found.cpu(), expected)


@pytest.mark.parametrize("shift", [0, 3])
def test_ranks_on_gpus_and_on_the_cpu_load_what_the_others_saved(box, tmp_path, shift):
    path, back = str(tmp_path / "gpus"), str(tmp_path / "cpu")
    before = box.run(lambda rank: checkpoints.saved(path, shift, rank))
    checkpoints.check_pair(
        before, box.run(lambda rank: checkpoints.resumed(path, shift, rank)), (shift, shift)
    )
    with Ranks(2, backend="gloo", timeout=600) as world:
        checkpoints.check_pair(
            before, world.run(lambda rank: checkpoints.resumed(path, 5, rank)), (shift, 5)
        )
        before = world.run(lambda rank: checkpoints.saved(back, shift, rank))
    checkpoints.check_pair(
        before, box.run(lambda rank: checkpoints.resumed(back, 5, rank)), (shift, 5)
    )


def test_a_whole_model_in_distributed_model_parallel_equals_one_process(box):
    model_parallel.test_training_equals_one_process_with_the_global_batch(
        lambda world_size: box, GPUS
    )


def test_the_readmes_quick_start_runs_as_it_is(tmp_path):
    test_readme.test_quick_start_prints_what_the_readme_shows(tmp_path)


def test_a_batch_is_moved_pinned_and_read_back():
    features = KeyedJaggedTensor(list(FEATURES), torch.arange(8), lengths=torch.full((8,), 1))
    for moved in (features.to(device()), features.pin_memory().to(device(), non_blocking=True)):
        assert moved.device() == device()
        assert moved["f1"].values().tolist() == [2, 3] and str(moved) == str(features)
        assert torch.equal(moved.to(torch.device("cpu")).values(), features.values())
