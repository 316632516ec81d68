"""A model, its batches, and a run of it in the plain loop or in a pipeline: what the tests of
pipelines share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from distributed import cases, row_cases
from distributed.cases import batch, on_rank, optimizer_words, word
from torch import Tensor, nn

from tutorec.distributed.core.env import ShardingEnv
from tutorec.distributed.embedding import EmbeddingCollectionSharder
from tutorec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from tutorec.distributed.model_parallel import DistributedModelParallel
from tutorec.distributed.plan.plan import ShardingPlan
from tutorec.distributed.sharding_plan import construct_module_sharding_plan
from tutorec.distributed.train_pipeline import (
    PrefetchTrainPipelineSparseDist,
    TrainPipelineBase,
    TrainPipelineFusedSparseDist,
    TrainPipelineSemiSync,
    TrainPipelineSparseDist,
    TrainPipelineSparseDistLite,
)
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor
from tutorec.sparse.tensor_dict import kjt_to_td
from tutorec.spmd import device

STEPS = 5
# Those that train what the plain loop trains; SemiSync does so until its `start_batch`.
PIPELINES: dict[str, Callable[..., Any]] = {
    "base": TrainPipelineBase,
    "sparse dist": TrainPipelineSparseDist,
    "lite": TrainPipelineSparseDistLite,
    "fused": TrainPipelineFusedSparseDist,
    "semi-sync": TrainPipelineSemiSync,
    "prefetch": PrefetchTrainPipelineSparseDist,
}
INPUTS = ("bags", "weighted bags", "rows", "variable bags", "tensor dict")
AS_TENSOR_DICT = "tensor dict of "  # one of the other inputs in this form


@dataclass
class Sample:
    """A batch of the model."""

    ids: Any
    labels: Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> Sample:
        return Sample(
            self.ids.to(device, non_blocking=non_blocking),
            self.labels.to(device, non_blocking=non_blocking),
        )

    def record_stream(self, stream: torch.Stream) -> None:
        if not isinstance(self.ids, Mapping):  # a TensorDict takes one stream in its life
            self.ids.record_stream(stream)
        self.labels.record_stream(stream)


class Bags(nn.Module):
    """Pooled rows under a dense layer; the loss has every sample, and none where the batch is
    empty.
    """

    def __init__(self, weighted: bool = False) -> None:
        super().__init__()
        self.tables = cases.collection(weighted=weighted)
        torch.manual_seed(5)
        self.over = nn.Linear(
            sum(c.embedding_dim * len(c.feature_names) for c in cases.tables()), 1
        )

    def forward(self, batch: Sample) -> tuple[Tensor, Tensor]:
        logits = self.over(self.tables(batch.ids).values()).squeeze(1)
        loss = (logits - batch.labels).square().sum() / 4
        return loss, logits.detach()


class Rows(nn.Module):
    """Rows, not pooled, under a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = row_cases.collection()
        torch.manual_seed(5)
        self.over = nn.ModuleList(nn.Linear(width, 1) for width in (8, 8, 4, 4, 6))

    def forward(self, batch: Sample) -> tuple[Tensor, Tensor]:
        found = self.tables(batch.ids)
        logits = [
            over(found[key].values()).sum()
            for key, over in zip(row_cases.KEYS, self.over, strict=True)
        ]
        loss = (torch.stack(logits).sum() - batch.labels.sum()).square() / 100
        return loss, loss.detach()


def samples_of(rank: int, step: int) -> int:
    """Ranks bring different numbers of samples, and the last batch is small."""
    return 1 if step == STEPS - 1 else 3 + rank + step % 2


def sample(what: str, rank: int, step: int) -> Sample:
    seed, samples = 100 * step + rank, samples_of(rank, step)
    draw = torch.Generator().manual_seed(seed)
    labels = on_rank(torch.rand(samples, generator=draw))
    if what.startswith(AS_TENSOR_DICT):
        made = sample(what.removeprefix(AS_TENSOR_DICT), rank, step)
        return Sample(kjt_to_td(made.ids), made.labels)
    if what.startswith("variable"):
        return Sample(row_cases.lists(seed, samples), labels)
    ids = batch(seed, samples, weighted=what == "weighted bags")
    return Sample(as_tensor_dict(ids, samples) if what == "tensor dict" else ids, labels)


def as_tensor_dict(ids: KeyedJaggedTensor, samples: int) -> Any:
    from tensordict import TensorDict

    lists = {
        key: torch.nested.nested_tensor_from_jagged(one.values(), one.offsets())
        for key, one in ids.to_dict().items()
    }
    return TensorDict(lists, batch_size=[samples], device=ids.device())


def samples(what: str, rank: int, steps: int = STEPS, first: int = 0) -> Iterator[Sample]:
    return (sample(what, rank, step) for step in range(first, first + steps))


def parallel(
    what: str,
    kind: str = "table_wise",
    optimizer: str = "exact_row_wise_adagrad",
    kernel: str = "fused",
    **fused_params: Any,
) -> DistributedModelParallel:
    what = what.removeprefix(AS_TENSOR_DICT)
    model = Rows() if what.endswith("rows") else Bags(what == "weighted bags")
    return distribute(model, {"tables": model.tables}, kind, optimizer, kernel, **fused_params)


def distribute(
    model: nn.Module,
    collections: dict[str, Any],
    kind: str = "table_wise",
    optimizer: str = "exact_row_wise_adagrad",
    kernel: str = "fused",
    **fused_params: Any,
) -> DistributedModelParallel:
    """The model over the ranks of the pool: the collections at these paths sharded, the rest in
    DDP.
    """
    env = ShardingEnv.from_process_group(cases.group())
    plans = {}
    for path, collection in collections.items():
        configs = getattr(collection, "embedding_bag_configs", None) or collection.embedding_configs
        words = {
            config.name: word(kind, index, env.world_size, env.local_size, kernel)
            for index, config in enumerate(configs())
        }
        plans[path] = construct_module_sharding_plan(collection, words, local_size=env.local_size)
    params = {**optimizer_words(optimizer), **fused_params}
    sharders = [EmbeddingBagCollectionSharder(params), EmbeddingCollectionSharder(params)]
    return DistributedModelParallel(model, env, plan=ShardingPlan(plans), sharders=sharders)


def dense_optimizer(model: DistributedModelParallel) -> torch.optim.Optimizer:
    """Adam for what backward does not update."""
    fused = set(model.fused_optimizer.params)
    return torch.optim.Adam(
        [value for name, value in model.named_parameters() if name not in fused], lr=0.01
    )


def plain_loop(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterator[Any]
) -> list[Tensor]:
    """The outputs of all batches, trained one after the other."""
    outputs = []
    for each in batches:
        optimizer.zero_grad()
        loss, output = model(each)
        loss.backward()
        optimizer.step()
        outputs.append(output)
    return outputs


def pipelined(pipeline: Any, batches: Iterator[Any]) -> list[Tensor]:
    """The outputs of all batches that an iterator gives."""
    outputs = []
    while True:
        try:
            outputs.append(pipeline.progress(batches))
        except StopIteration:
            return outputs


def state(model: DistributedModelParallel, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Copies of weights, of fused optimizer state and of the dense optimizer's, on the CPU."""
    for part in model.modules():
        if hasattr(part, "flush"):
            part.flush()
    names = {value: name for name, value in model.named_parameters()}
    fused = {
        f"{names[value]}.{key}": kept
        for value in names
        for of_table in getattr(value, "_in_backward_optimizers", ())
        for key, kept in of_table.state[value].items()
    }
    dense = {
        f"{names[value]}.{key}": kept
        for value, of in optimizer.state.items()
        for key, kept in of.items()
    }
    everything = {**{name: value for value, name in names.items()}, **fused, **dense}
    return {name: value.detach().cpu().clone() for name, value in everything.items()}


def assert_same(one: dict[str, Any], other: dict[str, Any], where: str) -> None:
    """Bit for bit."""
    assert one.keys() == other.keys(), where
    for name, value in one.items():
        assert torch.equal(value, other[name]), f"{name} {where}"


@torch.fx.wrap
def moved_on(ids: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Not traced: a graph does not show that it writes in place."""
    ids.values().add_(1).remainder_(cases.ROWS)
    return ids


def here() -> torch.device:
    return device()
