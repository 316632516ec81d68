"""What ``train`` runs on each rank: the loop of a small DLRM in both libraries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.library import Library, Sizes, bag_configs, fuse_optimizer, random_bags
from benchmarks.rows import Row, Timed, time_row
from benchmarks.sharded_rank import (
    everywhere,
    fill_tables,
    module_plan,
    quiet,
    rank_group,
    shards_of,
)
from tutorec.datasets.utils import Batch
from tutorec.distributed.core.cache_params import CacheParams
from tutorec.distributed.plan.plan import EmbeddingComputeKernel
from tutorec.models.dlrm import InteractionArch
from tutorec.spmd.rank import device

DENSE_RATE = 0.01
_TABLES = "model.sparse_arch.embedding_bag_collection"


@dataclass(frozen=True)
class TrainCase:
    """One training loop.

    Args:
        name: Its name.
        sharding: A `ShardingType` value, of all tables.
        dense: ``"sgd"`` or ``"adam"``: what steps the dense layers.
        own_interaction: Each library's DLRM takes inner products in its own way; otherwise both
            take ours, which does without the slow backward of an index of two lists.
        cache: Of our tables, where they are in files and a share of the rows in memory.
    """

    name: str
    sharding: str = "table_wise"
    dense: str = "sgd"
    own_interaction: bool = True
    cache: CacheParams | None = None


@dataclass(frozen=True)
class Shape:
    """A small DLRM and its batches.

    Args:
        tables: Its tables, B of each rank, and steps in one measurement, each on a fresh batch.
        dense_columns: D_in.
        dense_layers: Of the dense MLP, without the last, which is as wide as the tables.
        over_layers: Of the last MLP.
    """

    tables: Sizes = field(
        default_factory=lambda: Sizes(rows=10_000, columns=32, pooling=1, samples=512, calls=10)
    )
    dense_columns: int = 13
    dense_layers: tuple[int, ...] = (64,)
    over_layers: tuple[int, ...] = (128, 64, 1)


# Dense columns, ids, lengths and labels.
Lists = tuple[Tensor, Tensor, Tensor, Tensor]
Step = Callable[[Lists], tuple[float, Tensor]]
Weights = Callable[[], dict[Any, Tensor]]


def measure_training(
    case: TrainCase, shape: Shape, roots: Sequence[str], rounds: int, rank: int
) -> Timed:
    """Run a loop on this rank, the libraries in turn; every rank calls it at the same time.

    Args:
        case: What to run.
        shape: On which model.
        roots: Libraries; ours first.
        rounds: Rounds that count.
        rank: This rank.

    Returns:
        Its samples; without them where results differ on some rank.
    """
    quiet(roots)
    steps: dict[str, Step] = {}
    states: dict[str, Weights] = {}
    for root in roots:
        steps[root], states[root] = _loop(Library(root), case, shape)

    def inputs(_: str, number: int) -> list[Lists]:
        calls = range(shape.tables.calls)
        return [draw_lists(shape, rank, 1000 * number + index) for index in calls]

    row = Row(case.name, steps, inputs, states, checked=True)
    return time_row(row, rounds, everywhere)


def draw_lists(shape: Shape, rank: int, number: int) -> Lists:
    """Dense columns, ids, lengths and labels of a batch, the same for both libraries.

    Args:
        shape: Sizes.
        rank: This rank.
        number: Of the batch.
    """
    sizes = shape.tables
    draw = torch.Generator().manual_seed(100_000_000 * rank + 10_000_000 + number)
    dense = torch.randn(sizes.samples, shape.dense_columns, generator=draw)
    ids, lengths = random_bags(draw, sizes.tables * sizes.samples, sizes.pooling, sizes.rows)
    labels = torch.randint(0, 2, (sizes.samples,), generator=draw).float()
    return dense.to(device()), ids.to(device()), lengths.to(device()), labels.to(device())


def _loop(library: Library, case: TrainCase, shape: Shape) -> tuple[Step, Weights]:
    """A library's plain training loop, as its documents write it, and this rank's weights."""
    keys = shape.tables.keys()
    model = parallel_model(library, case, shape)
    optimizer = dense_and_fused(library, model, case.dense)

    def step(lists: Lists) -> tuple[float, Tensor]:
        dense, ids, lengths, labels = lists
        batch = Batch(dense, library.batch((keys, ids, lengths)), labels)
        optimizer.zero_grad()
        loss, (_, logits, _) = model(batch)
        loss.backward()
        optimizer.step()
        return loss.item(), logits

    def weights() -> dict[Any, Tensor]:
        shards = shards_of(_submodule(model.module, _TABLES))
        tables = {f"{name} {row} {column}": rows for (name, row, column), rows in shards.items()}
        dense = _dense_parameters(library, model)
        return tables | {name: parameter.detach() for name, parameter in dense}

    return step, weights


def parallel_model(library: Library, case: TrainCase, shape: Shape) -> Any:
    """The model over all ranks, with the same weights in both libraries."""
    plan = module_plan(library, shape.tables, case.sharding, rank_group().size())
    if case.cache is not None:
        for entry in plan.values():
            entry.compute_kernel = EmbeddingComputeKernel.FUSED_UVM_CACHING.value
            entry.cache_params = case.cache

    model = library.get("distributed.model_parallel.DistributedModelParallel")(
        module=_model(library, case, shape),
        env=library.get("distributed.types.ShardingEnv").from_process_group(rank_group()),
        device=device(),
        plan=library.get("distributed.types.ShardingPlan")({_TABLES: plan}),
        sharders=[library.get("distributed.embeddingbag.EmbeddingBagCollectionSharder")()],
    )
    fill_tables(shards_of(_submodule(model.module, _TABLES)), shape.tables)
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _, parameter in sorted(_dense_parameters(library, model)):
            values = torch.rand(parameter.shape, generator=draw) - 0.5
            parameter.copy_(values / max(parameter.shape) ** 0.5)
    return model


def _model(library: Library, case: TrainCase, shape: Shape) -> nn.Module:
    collection = library.get("modules.embedding_modules.EmbeddingBagCollection")(
        tables=bag_configs(library, shape.tables), device=device()
    )
    fuse_optimizer(library, "rowwise_adagrad", collection)
    models = library.module("models.dlrm")
    dense_layers = [*shape.dense_layers, shape.tables.columns]
    dlrm = models.DLRM(collection, shape.dense_columns, dense_layers, list(shape.over_layers))
    if not case.own_interaction:
        dlrm.inter_arch = InteractionArch(shape.tables.tables)
    return models.DLRMTrain(dlrm)


def dense_and_fused(library: Library, model: Any, dense: str) -> Any:
    """The tables' fused optimizer and a dense one, combined as the documents combine them."""
    keyed = library.module("optim.keyed")
    optimizer = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[dense]
    wrapped = keyed.KeyedOptimizerWrapper(
        dict(_dense_parameters(library, model)),
        lambda parameters: optimizer(parameters, lr=DENSE_RATE),
    )
    return keyed.CombinedOptimizer([model.fused_optimizer, wrapped])


def _dense_parameters(library: Library, model: Any) -> list[tuple[str, nn.Parameter]]:
    """(name, parameter) of what is not updated during backward."""
    keep = library.get("optim.optimizers.in_backward_optimizer_filter")
    return list(keep(model.named_parameters()))


def _submodule(module: nn.Module, path: str) -> nn.Module:
    """The submodule of a model at a path, whatever the library wrapped around the model."""
    while hasattr(module, "module") and isinstance(module.module, nn.Module):
        module = module.module
    return module.get_submodule(path)
