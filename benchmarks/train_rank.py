"""What ``bench train`` runs on each rank: the loop of a small DLRM in both libraries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness import Sample, interleave
from benchmarks.peer import Library, Sizes, bag_configs, fuse_optimizer, random_bags, time_each
from benchmarks.sharded_rank import (
    TOLERANCE,
    Found,
    everywhere,
    fill_tables,
    module_plan,
    quiet,
    rank_group,
    table_pieces,
)
from tutorec._validation import validation
from tutorec.datasets.utils import Batch
from tutorec.distributed.core.cache_params import CacheParams
from tutorec.distributed.plan.plan import EmbeddingComputeKernel
from tutorec.models.dlrm import InteractionArch
from tutorec.spmd.devices import device

DENSE_RATE = 0.01
_TABLES = "model.sparse_arch.embedding_bag_collection"


@dataclass(frozen=True)
class TrainCase:
    """One training loop.

    Args:
        name: Its name.
        sharding: A `ShardingType` value, of all tables.
        dense: ``"sgd"`` or ``"adam"``: what steps the dense parts.
        own_interaction: Each library's DLRM takes inner products in its own way; otherwise both
            take ours, which does without the slow backward of an index of two lists.
        cache: Of our tables, where they are in files and a part of the rows in memory.
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
        tables: Its tables.
        samples: B of each rank.
        dense_columns: D_in.
        dense_layers: Of the dense MLP, without the last, which is as wide as the tables.
        over_layers: Of the last MLP.
        steps: Steps in one measurement, each on a fresh batch.
    """

    tables: Sizes = field(
        default_factory=lambda: Sizes(tables=26, rows=10_000, columns=32, pooling=1)
    )
    samples: int = 512
    dense_columns: int = 13
    dense_layers: tuple[int, ...] = (64,)
    over_layers: tuple[int, ...] = (128, 64, 1)
    steps: int = 10


Lists = tuple[Tensor, Tensor, Tensor, Tensor]
# One step: gives the loss and the logits [B].
Step = Callable[[Lists], tuple[float, Tensor]]
Weights = Callable[[], dict[object, Tensor]]


def measure_training(
    case: TrainCase, shape: Shape, roots: Sequence[str], rounds: int, rank: int
) -> Found:
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
    made = {root: _loop(Library(root), case, shape) for root in roots}
    measured = Found(_distance(list(made.values()), shape, rank))
    if not everywhere(measured.distance <= TOLERANCE):
        return measured

    def variant(step: Step) -> Callable[[int], Sample]:
        def sample(number: int) -> Sample:
            batches = draw_batches(shape, rank, number, shape.steps)
            with validation(True):
                everywhere(True)  # all ranks begin together
                return time_each(step, batches)

        return sample

    variants = {f"{case.name}: {root}": variant(step) for root, (step, _) in made.items()}
    measured.samples = interleave(variants, rounds, warmup=2)
    return measured


def draw_batches(shape: Shape, rank: int, number: int, count: int) -> list[Lists]:
    """Dense columns, ids, lengths and labels of a round, the same for both libraries.

    Args:
        shape: Sizes.
        rank: This rank.
        number: Of the round.
        count: How many batches.
    """
    tables = shape.tables
    batches = []
    for i in range(count):
        draw = torch.Generator().manual_seed(100_000_000 * rank + 10_000_000 + 1000 * number + i)
        dense = torch.randn(shape.samples, shape.dense_columns, generator=draw)
        bags = tables.tables * shape.samples
        ids, lengths = random_bags(draw, bags, tables.pooling, tables.rows)
        labels = torch.randint(0, 2, (shape.samples,), generator=draw).float()
        batches.append(
            (dense.to(device()), ids.to(device()), lengths.to(device()), labels.to(device()))
        )
    return batches


def _loop(library: Library, case: TrainCase, shape: Shape) -> tuple[Step, Weights]:
    """A library's plain training loop, as its documents write it, and this rank's weights."""
    batch_of = library.get("sparse.jagged_tensor.KeyedJaggedTensor")
    keys = [f"f{i}" for i in range(shape.tables.tables)]
    model = parallel_model(library, case, shape)
    optimizer = dense_and_fused(library, model, case.dense)

    def step(lists: Lists) -> tuple[float, Tensor]:
        dense, ids, lengths, labels = lists
        batch = Batch(dense, batch_of(keys, ids, lengths=lengths), labels)
        optimizer.zero_grad()
        loss, (_, logits, _) = model(batch)
        loss.backward()
        optimizer.step()
        return loss.item(), logits

    def weights() -> dict[object, Tensor]:
        tables = _part(model.module, _TABLES)
        parameters: dict[object, Tensor] = {
            (name, row, at): piece for name, row, at, piece in table_pieces(tables)
        }
        return parameters | dict(_dense_parameters(library, model))

    return step, weights


def parallel_model(library: Library, case: TrainCase, shape: Shape) -> Any:
    """The model over all ranks, with the same weights in both libraries."""
    made = library.get("modules.embedding_modules.EmbeddingBagCollection")
    collection = made(tables=bag_configs(library, shape.tables), device=device())
    fuse_optimizer(library, "rowwise_adagrad", collection)
    models = library.module("models.dlrm")
    dense_layers = [*shape.dense_layers, shape.tables.columns]
    dlrm = models.DLRM(collection, shape.dense_columns, dense_layers, list(shape.over_layers))
    if not case.own_interaction:
        dlrm.inter_arch = InteractionArch(shape.tables.tables)
    model = models.DLRMTrain(dlrm)
    plan = module_plan(library, shape.tables, case.sharding, rank_group().size())
    for entry in plan.values() if case.cache else ():
        entry.compute_kernel, entry.cache_params = (
            EmbeddingComputeKernel.FUSED_UVM_CACHING.value,
            case.cache,
        )
    parallel = in_parallel(library, model, {_TABLES: plan})
    pieces = table_pieces(_part(parallel.module, _TABLES))
    fill_tables({(name, row, column): piece for name, row, column, piece in pieces}, shape.tables)
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _, parameter in sorted(_dense_parameters(library, parallel)):
            parameter.copy_(
                (torch.rand(parameter.shape, generator=draw) - 0.5) / max(parameter.shape) ** 0.5
            )
    return parallel


def in_parallel(library: Library, model: Any, plan: dict[str, Any]) -> Any:
    """A model whose collections are sharded as planned: path -> plan of the collection."""
    return library.get("distributed.model_parallel.DistributedModelParallel")(
        module=model,
        env=library.get("distributed.types.ShardingEnv").from_process_group(rank_group()),
        device=device(),
        plan=library.get("distributed.types.ShardingPlan")(plan),
        sharders=[library.get("distributed.embeddingbag.EmbeddingBagCollectionSharder")()],
    )


def dense_and_fused(library: Library, model: Any, dense: str) -> Any:
    """The tables' fused optimizer and a dense one, combined as the documents combine them."""
    keyed = library.module("optim.keyed")
    kind = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[dense]
    wrapped = keyed.KeyedOptimizerWrapper(
        dict(_dense_parameters(library, model)), lambda parameters: kind(parameters, lr=DENSE_RATE)
    )
    return keyed.CombinedOptimizer([model.fused_optimizer, wrapped])


def _dense_parameters(library: Library, model: Any) -> list[tuple[str, nn.Parameter]]:
    """(name, parameter) of what is not updated during backward."""
    keep = library.get("optim.optimizers.in_backward_optimizer_filter")
    return list(keep(model.named_parameters()))


def _part(module: nn.Module, path: str) -> nn.Module:
    """The part of a model at a path, whatever the library wrapped around the model."""
    while hasattr(module, "module") and isinstance(module.module, nn.Module):
        module = module.module
    return module.get_submodule(path)


def _distance(made: Sequence[tuple[Step, Weights]], shape: Shape, rank: int) -> float:
    """How far the libraries are apart after two steps: losses, logits, tables, dense weights."""
    batches = draw_batches(shape, rank, -1000, 2)
    results = [[step(lists) for lists in batches] for step, _ in made]
    ours, *others = results
    my_weights, *other_weights = [weights() for _, weights in made]
    distance = 0.0
    for theirs, their_weights in zip(others, other_weights, strict=True):
        if my_weights.keys() != their_weights.keys():
            return float("inf")
        pairs = [(a[1], b[1]) for a, b in zip(ours, theirs, strict=True)]
        pairs += [(my_weights[key], their_weights[key]) for key in my_weights]
        losses = [abs(a[0] - b[0]) for a, b in zip(ours, theirs, strict=True)]
        distance = max(
            [
                distance,
                *losses,
                *(float((a - b).detach().abs().max()) for a, b in pairs if a.numel()),
            ]
        )
    return distance
