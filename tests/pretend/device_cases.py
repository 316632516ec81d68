"""Places where a tensor of the CPU once met one of a GPU; each case runs under pretended GPUs."""

from __future__ import annotations

import json
import sys
import traceback
from typing import Any

import pytest
import torch
from torch import nn

from tutorec._kernels.backend import use_backend
from tutorec.distributed import comm
from tutorec.distributed.core.env import ShardingEnv
from tutorec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from tutorec.distributed.gradient_norm import NormOverRanks
from tutorec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from tutorec.distributed.train_pipeline import (
    PrefetchTrainPipelineSparseDist,
    TrainPipelineBase,
    TrainPipelineFusedSparseDist,
    TrainPipelineSemiSync,
    TrainPipelineSparseDist,
)
from tutorec.models.dlrm import InteractionArch
from tutorec.models.retrieval import CandidateIndex
from tutorec.modules.embedding_configs import EmbeddingBagConfig
from tutorec.modules.embedding_modules import EmbeddingBagCollection
from tutorec.optim.clipping import GradientClipping, GradientClippingOptimizer
from tutorec.optim.keyed import KeyedOptimizerWrapper
from tutorec.optim.row_update import _bring_state
from tutorec.optim.rowwise_adagrad import RowWiseAdagrad
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor
from tutorec.sparse.layout import ints_on_device

GPU = torch.device("cuda", 1)


def _collection() -> EmbeddingBagCollection:
    return EmbeddingBagCollection([EmbeddingBagConfig(8, 4, "item", feature_names=["item"])])


def _batch(device: torch.device) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(["item"], torch.tensor([1, 2, 1]), lengths=torch.tensor([2, 1])).to(
        device
    )


def case_interaction_made_on_a_gpu_or_moved_there() -> None:
    dense, sparse = torch.rand(3, 4), torch.rand(3, 2, 4)
    expected = InteractionArch(2)(dense, sparse)
    for arch in (InteractionArch(2, device=torch.device(GPU)), InteractionArch(2).to(GPU)):
        torch.testing.assert_close(arch(dense.to(GPU), sparse.to(GPU)).cpu(), expected)


def case_strides_of_a_batch_stay_on_the_host() -> None:
    strides = torch.tensor([[1], [2]], dtype=torch.int32).to(GPU)
    batch = KeyedJaggedTensor(
        ["a", "b"],
        torch.arange(3).to(GPU),
        lengths=torch.ones(3).long().to(GPU),
        stride_per_key_per_rank=strides,
    )
    assert batch.stride_per_key() == [1, 2] and batch["b"].values().tolist() == [1, 2]


class _Group:
    """A process group that notes on which device it is asked to add."""

    def __init__(self) -> None:
        self.devices: list[torch.device] = []

    def size(self) -> int:
        return 2

    def allreduce(self, tensors: list[torch.Tensor], op: Any) -> _Group:
        self.devices += [tensor.device for tensor in tensors]
        return self

    def wait(self) -> None:
        pass


def case_a_norm_without_gradients_travels_from_the_device_of_the_parameters() -> None:
    weight, group = nn.Parameter(torch.ones(2).to(GPU)), _Group()
    dense = KeyedOptimizerWrapper(
        {"weight": weight}, lambda params: torch.optim.SGD(params, lr=1.0)
    )
    GradientClippingOptimizer(
        dense,
        GradientClipping.NORM,
        1.0,
        enable_global_grad_clip=True,
        param_to_pgs={weight: [group]},
    ).step()
    assert group.devices == [GPU]


def case_a_part_of_a_norm_travels_from_the_device_of_the_model() -> None:
    reduce, sent = NormOverRanks(nn.Linear(2, 1).to(GPU), ShardingEnv.from_local(1, 0)), []
    reduce._group = _Group()
    gather = comm.all_gather

    def noted(mine: torch.Tensor, *_: Any) -> Any:
        sent.append(mine.device)
        return gather(mine, [1], reduce._group, "")

    comm.all_gather = noted
    try:
        reduce(torch.zeros(()), largest=False)
    finally:
        comm.all_gather = gather
    assert sent == [GPU]


def case_state_that_was_made_before_its_table_was_moved_follows_it() -> None:
    table = nn.Parameter(torch.ones(8, 4))
    optimizer = RowWiseAdagrad([table], lr=0.1)
    moved = table.detach().to(GPU)
    optimizer.state[moved] = optimizer.state.pop(table)
    _bring_state(optimizer, moved)
    state = optimizer.state[moved]
    assert (state["sum"].device, state["step"].device) == (GPU, torch.device("cpu"))


def _sharded(device: torch.device) -> Any:
    collection = _collection()
    plan = construct_module_sharding_plan(
        collection, {"item": table_wise(rank=0)}, world_size=1, local_size=1
    )
    return EmbeddingBagCollectionSharder().shard(
        collection, plan, ShardingEnv.from_local(1, 0), device
    )


def case_a_batch_on_another_device_than_the_tables_is_refused() -> None:
    sharded = _sharded(GPU)
    for elsewhere in (torch.device("cpu"), torch.device("cuda", 0)):
        place = f"is on {elsewhere} and the tables are on cuda:1: move the batch"
        with pytest.raises(ValueError, match=place):
            sharded(_batch(elsewhere)).wait()


def case_a_sharded_collection_that_is_moved_takes_batches_there() -> None:
    with use_backend("torch"):  # fbgemm's operators are made for one device
        sharded = _sharded(torch.device("cpu")).to(GPU)
        assert sharded(_batch(GPU)).wait().values().device == GPU


def case_candidates_may_be_named_by_ids_of_the_host() -> None:
    index = CandidateIndex(torch.tensor([70, 71]), torch.eye(2).to(GPU))
    ids, _ = index.retrieve(torch.tensor([[0.0, 1.0]]).to(GPU), k=1)
    assert ids.device == GPU and ids.tolist() == [[71]]


def case_numbers_of_the_host_reach_a_device() -> None:
    for device in (torch.device("cpu"), GPU):
        found = ints_on_device([[1, 2], [3, 4]], torch.int32, device)
        assert (found.device, found.dtype, found.tolist()) == (
            device,
            torch.int32,
            [[1, 2], [3, 4]],
        )


class _Clicks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = _sharded(GPU)
        torch.manual_seed(0)
        self.over = nn.Linear(4, 1, device=GPU)

    def forward(self, batch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        loss = (self.over(self.tables(batch["ids"]).values()) - batch["labels"]).square().mean()
        return loss, loss.detach()


def case_pipelines_copy_batches_of_the_host_and_train_on_the_device() -> None:
    kinds: list[Any] = [TrainPipelineBase, TrainPipelineSparseDist, TrainPipelineFusedSparseDist]
    kinds += [TrainPipelineSemiSync, PrefetchTrainPipelineSparseDist]
    found = []
    for kind in kinds:
        torch.manual_seed(0)
        model = _Clicks()
        pipeline = kind(model, torch.optim.SGD(model.over.parameters(), lr=0.1), GPU)
        host = torch.device("cpu")
        batches = iter([{"ids": _batch(host), "labels": torch.rand(2, 1)} for _ in range(4)])
        losses = [pipeline.progress(batches) for _ in range(4)]
        assert {loss.device for loss in losses} == {GPU}
        found.append([float(loss) for loss in losses])
    assert all(losses == found[0] for losses in found), found


CASES = {name: value for name, value in dict(globals()).items() if name.startswith("case_")}


def main() -> None:
    """Run all cases; a line of JSON says what each ended with."""
    results = {}
    for name, case in CASES.items():
        try:
            case()
            results[name] = ""
        except Exception:
            results[name] = traceback.format_exc()
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
