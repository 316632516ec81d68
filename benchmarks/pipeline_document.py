"""The benchmark of TorchRec's pull request 2581: TensorDict input beside KJT input.

Tables have ``max(i + 1, 100) * 1000`` rows, times a factor; half of them are plain, ``table_i``
with ``feature_i``, half weighted, ``weighted_table_i`` with ``weighted_feature_i``. A TensorDict
holds the features of the plain tables; ids with weights stay in a KeyedJaggedTensor, as in the
document. Each pipeline gives a line in the document's form::

    TrainPipelineSparseDist             | Runtime (P90): 26.737 s | Memory (P90): 34.801 GB (TD)

Runtime is that of one step of the slowest rank, memory the highest point of a few steps above the
same process at rest. The document concludes four things from its traces. Each is measured on its
own: the conversion of a TensorDict beside the permutation of a KeyedJaggedTensor, the copies of a
batch, whether their cost is on a step's critical path, and the whole step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from importlib.util import find_spec
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.harness import Report, Sample, compare, interleave, time_call
from benchmarks.memory import measurable, peak_during, resident
from benchmarks.peer import OURS, Library, finish, fuse_optimizer
from benchmarks.pipeline_rank import (
    Feed,
    Pipeline,
    read,
    steps_of,
    trainer,
    trim,
)
from benchmarks.sharded_rank import in_library, quiet, rank_group, slowest
from benchmarks.train_rank import dense_and_fused, in_parallel
from tutorec._validation import validation
from tutorec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from tutorec.modules.embedding_modules import EmbeddingBagCollection
from tutorec.spmd.devices import device
from tutorec.spmd.pool import Ranks

# The document's names; TorchRec calls the last one PrefetchTrainPipelineSparseDist.
PIPELINES = (
    "TrainPipelineBase",
    "TrainPipelineSparseDist",
    "TrainPipelineSemiSync",
    "TrainPipelinePrefetch",
)
_CLASSES = {"TrainPipelinePrefetch": "PrefetchTrainPipelineSparseDist"}
_PEER_RUNS_ON_CPU = PIPELINES[:2]
INPUTS = ("TD", "KJT")
_MEMORY_RUNS = 5
_TIMEOUT = 1800.0

Form = Literal["TD", "KJT"]


@dataclass(frozen=True)
class DocumentShape:
    """The document's model, made smaller.

    Args:
        tables: Plain ones, and as many weighted ones.
        columns: D of each.
        samples: B of a rank.
        pooling: Mean number of ids in a bag.
        dense_columns: Columns of floats.
        steps: Steps in one measurement.
        scale: How many times the document's rows.
    """

    tables: int = 10
    columns: int = 32
    samples: int = 256
    pooling: int = 10
    dense_columns: int = 10
    steps: int = 5
    scale: float = 0.1

    def configs(self, weighted: bool, root: str = OURS) -> list[Any]:
        """The document's tables, in the class of a library."""
        prefix = "weighted_" if weighted else ""
        config = Library(root).get("modules.embedding_configs.EmbeddingBagConfig")
        return [
            config(
                num_embeddings=self.rows(i),
                embedding_dim=self.columns,
                name=f"{prefix}table_{i}",
                feature_names=[f"{prefix}feature_{i}"],
            )
            for i in range(self.tables)
        ]

    def rows(self, table: int) -> int:
        """R of a table."""
        return max(1, round(max(table + 1, 100) * 1000 * self.scale))


SHAPE = DocumentShape()


@dataclass
class DocumentBatch:
    """A batch with the document's fields."""

    float_features: Tensor
    idlist_features: Any
    idscore_features: Any
    label: Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> DocumentBatch:
        """The batch on a device."""
        moved = {
            part.name: getattr(self, part.name).to(device=device, non_blocking=non_blocking)
            for part in fields(self)
        }
        return DocumentBatch(**moved)

    def record_stream(self, stream: torch.Stream) -> None:
        """Tell the allocator that a stream reads the batch."""
        for part in fields(self):
            value = getattr(self, part.name)
            for tensor in (
                [value] if hasattr(value, "record_stream") else _values_and_offsets(value)
            ):
                tensor.record_stream(stream)


class DocumentModel(nn.Module):
    """Plain and weighted tables, floats, and a layer over all of them: a loss and logits.

    Args:
        library: Whose collections.
        shape: Sizes.
    """

    def __init__(self, library: Library, shape: DocumentShape) -> None:
        super().__init__()
        made = library.get("modules.embedding_modules.EmbeddingBagCollection")

        def collection(weighted: bool) -> nn.Module:
            tables = shape.configs(weighted, library.root)
            return made(tables=tables, is_weighted=weighted, device=device())

        self.ebc, self.weighted_ebc = collection(weighted=False), collection(weighted=True)
        self.dense = nn.Sequential(nn.Linear(shape.dense_columns, shape.columns), nn.ReLU())
        width = (1 + 2 * shape.tables) * shape.columns
        self.over = nn.Sequential(nn.Linear(width, 128), nn.ReLU(), nn.Linear(128, 1))

    def forward(self, batch: DocumentBatch) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """The loss, and (loss, logits [B])."""
        pooled, weighted = (
            self.ebc(batch.idlist_features),
            self.weighted_ebc(batch.idscore_features),
        )
        stacked = torch.cat(
            [self.dense(batch.float_features), pooled.values(), weighted.values()], dim=1
        )
        logits = self.over(stacked).squeeze(1)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, batch.label)
        return loss, (loss.detach(), logits.detach())


@dataclass
class DocumentFound:
    """What a rank measured.

    Args:
        samples: What was measured -> one measurement for each round.
        memory: Pipeline -> bytes of each run, on Linux.
        copies: Form of a batch -> how many tensors are copied.
    """

    samples: dict[str, list[Sample]] = field(default_factory=dict)
    memory: dict[str, list[int]] = field(default_factory=dict)
    copies: dict[str, int] = field(default_factory=dict)


def run_document(
    report: Report, roots: Sequence[str], world: int, rounds: int, scale: float
) -> None:
    """Add the document's lines and conclusions to a report.

    Args:
        report: What they are added to.
        roots: Libraries; ours first.
        world: W.
        rounds: Rounds that count.
        scale: How many times the document's rows.
    """
    if find_spec("tensordict") is None:
        report.notes.append("document: left out, tensordict is not installed")
        return
    shape = replace(SHAPE, scale=scale)
    with Ranks(world, backend="gloo", timeout=_TIMEOUT) as ranks:
        of_ranks: list[DocumentFound] = ranks.run(measure_document, shape, roots, rounds)
    samples = slowest([of_rank.samples for of_rank in of_ranks])
    report.samples |= samples
    width = max(map(len, PIPELINES)) + 12
    for name in (each for each in samples if each.partition(" ")[2].startswith("Train")):
        root, pipeline, form = name.split()
        runtime = float(np.percentile([sample.wall for sample in samples[name]], 90)) * 1e3
        sizes = [size for of_rank in of_ranks for size in of_rank.memory.get(name, [])]
        memory = f"{float(np.percentile(sizes, 90)) / 1e6:.3f} MB" if sizes else "not measured"
        library = "" if root == OURS else f" of {root}"
        report.notes.append(
            f"{pipeline + library:<{width}} | Runtime (P90): {runtime:.3f} ms | Memory (P90): "
            f"{memory} {form}"
        )
    _conclude(report, samples, of_ranks[0].copies)


def _conclude(report: Report, samples: dict[str, list[Sample]], copies: dict[str, int]) -> None:
    """The document's four conclusions, each with its own number."""
    pairs = {
        "conversion": ("td_to_kjt", "KJT.permute"),
        "copies": ("copies of a batch (TD)", "copies of a batch (KJT)"),
        "base": tuple(f"{OURS} {PIPELINES[0]} ({form})" for form in INPUTS),
        "total": tuple(f"{OURS} {PIPELINES[1]} ({form})" for form in INPUTS),
    }
    ratios, more = {}, {}
    for part, (td, kjt) in pairs.items():
        comparison = compare(samples, td, kjt, "wall")
        report.comparisons.append(comparison)
        ratios[part] = comparison.ratio
        differences = [a.wall - b.wall for a, b in zip(samples[td], samples[kjt], strict=True)]
        more[part] = float(np.median(differences)) * 1e3
    step = float(np.median([sample.wall for sample in samples[pairs["total"][0]]])) * 1e3
    shares = {part: 100 * more[part] / step for part in ("conversion", "copies")}
    hidden = more["conversion"] + more["copies"] - more["total"]
    conclusions = {
        "1. conversion": f"td_to_kjt takes {more['conversion']:+.3f} ms beside KJT.permute, x "
        f"{ratios['conversion']}; "
        f"{shares['conversion']:.1f} % of a step",
        "2. copies": f"{copies['TD']} tensors of a TD and {copies['KJT']} of a KJT are copied to a "
        "device; "
        f"{more['copies']:+.3f} ms, x {ratios['copies']}; {shares['copies']:.1f} % of a step",
        "3. critical path": f"with a TD a step of {PIPELINES[0]} takes {more['base']:+.3f} ms, one "
        f"of {PIPELINES[1]} "
        f"{more['total']:+.3f} ms; of conversion and copies {hidden:+.3f} ms are not on its "
        "critical path",
        "4. total": (
            f"a step of {PIPELINES[1]} with a TD takes x {ratios['total']} of one with a KJT"
        ),
    }
    report.notes += [f"{what}: {text}" for what, text in conclusions.items()]


def measure_document(
    shape: DocumentShape, roots: Sequence[str], rounds: int, rank: int
) -> DocumentFound:
    """Every pipeline with both forms of a batch, then conversion and copies alone; collective.

    Args:
        shape: The model.
        roots: Libraries; ours first.
        rounds: Rounds that count.
        rank: This rank.
    """
    quiet(roots)
    result = DocumentFound()
    running: dict[str, tuple[Pipeline, Feed]] = {}
    for root in roots:
        for pipeline in PIPELINES if root == OURS else _PEER_RUNS_ON_CPU:
            for form in INPUTS:
                running[f"{root} {pipeline} ({form})"] = _start(
                    Library(root), pipeline, form, shape, rank
                )
    variants = {name: steps_of(*parts, shape.steps) for name, parts in running.items()}
    result.samples = interleave(variants, rounds, warmup=2)
    if measurable():
        result.memory = {
            name: [_peak(*parts, shape.steps) for _ in range(_MEMORY_RUNS)]
            for name, parts in running.items()
        }
    result.samples |= interleave(_parts(shape, rank), rounds)
    result.copies = {
        form: count_copies(draw(Library(OURS), form, shape, rank, 0).idlist_features)
        for form in INPUTS
    }
    return result


def _start(
    library: Library, pipeline: str, form: Form, shape: DocumentShape, rank: int
) -> tuple[Pipeline, Feed]:
    """A sharded model of its own, what trains it, and its batches."""
    torch.manual_seed(0)
    model = DocumentModel(library, shape)
    world, plan = rank_group().size(), {}
    for path, weighted in (("ebc", False), ("weighted_ebc", True)):
        fuse_optimizer(library, "rowwise_adagrad", model.get_submodule(path))
        configs = shape.configs(weighted)
        ours = construct_module_sharding_plan(
            EmbeddingBagCollection(configs, is_weighted=weighted, device=torch.device("meta")),
            {config.name: table_wise(rank=i % world) for i, config in enumerate(configs)},
            local_size=world,
            world_size=world,
            device_type=device().type,
        )
        plan[path] = in_library(library, ours, "fused")
    parallel = in_parallel(library, model, plan)
    optimizer = dense_and_fused(library, parallel, "sgd")
    early = {"start_batch": 0} if pipeline == "TrainPipelineSemiSync" else {}
    made = trainer(library, _CLASSES.get(pipeline, pipeline))(
        parallel, optimizer, device(), **early
    )
    return made, Feed(lambda number: draw(library, form, shape, rank, number))


def draw(library: Library, form: Form, shape: DocumentShape, rank: int, number: int) -> Any:
    """A batch that both libraries take; floats and ids are functions of the rank and the number.

    Args:
        library: Whose KeyedJaggedTensor.
        form: Of the features of the plain tables.
        shape: Sizes.
        rank: This rank.
        number: Of the batch.
    """
    generator = torch.Generator().manual_seed(100_000_000 * rank + number)

    def features(weighted: bool) -> Any:
        keys = [name for config in shape.configs(weighted) for name in config.feature_names]
        lengths = torch.randint(
            0, 2 * shape.pooling + 1, (len(keys), shape.samples), generator=generator
        )
        rows = torch.tensor([shape.rows(i) for i in range(shape.tables)]).repeat_interleave(
            lengths.sum(1)
        )
        ids = (torch.rand(rows.numel(), generator=generator, dtype=torch.float64) * rows).long()
        if form == "TD" and not weighted:
            return _tensor_dict(keys, ids, lengths)
        weights = torch.rand(rows.numel(), generator=generator) if weighted else None
        made = library.get("sparse.jagged_tensor.KeyedJaggedTensor")
        return made(keys, ids, lengths=lengths.view(-1), weights=weights)

    floats = torch.randn(shape.samples, shape.dense_columns, generator=generator)
    label = torch.randint(0, 2, (shape.samples,), generator=generator).float()
    plain, weighted = features(weighted=False), features(weighted=True)
    return _batch_class(library)(floats, plain, weighted, label)


def _batch_class(library: Library) -> type[DocumentBatch]:
    """The class of batches; the peer's pipelines take instances of its own base class only."""
    if library.root == OURS:
        return DocumentBatch
    base = library.get("streamable.Pipelineable")
    return type("DocumentBatch", (DocumentBatch, base), {})


def _tensor_dict(keys: Sequence[str], ids: Tensor, lengths: Tensor) -> Any:
    """One nested tensor ``[B, *]`` for each feature."""
    from tensordict import TensorDict

    nested = {}
    for key, part, of_key in zip(keys, ids.split(lengths.sum(1).tolist()), lengths, strict=True):
        offsets = nn.functional.pad(of_key.cumsum(0), (1, 0))
        nested[key] = torch.nested.nested_tensor_from_jagged(part.clone(), offsets=offsets)
    return TensorDict(nested, batch_size=[lengths.shape[1]])


def _peak(pipeline: Pipeline, feed: Feed, steps: int) -> int:
    """Bytes at the highest point of some steps above this process at rest."""
    feed.refill(2 * steps)
    trim()
    before = resident()
    return max(
        0, peak_during(lambda: [read(pipeline.progress(feed)) for _ in range(steps)]) - before
    )


def _parts(shape: DocumentShape, rank: int) -> dict[str, Callable[[int], Sample]]:
    """Conversion, permutation and copies of a batch's features, each measured alone."""
    library = Library(OURS)
    convert = library.get("sparse.tensor_dict.td_to_kjt")
    order = list(reversed(range(shape.tables)))
    keys = [shape.configs(weighted=False)[i].feature_names[0] for i in order]

    def timed(
        form: Form, take: Callable[[Any], Any], call: Callable[[Any], Tensor]
    ) -> Callable[[int], Sample]:
        def sample(number: int) -> Sample:
            fresh = iter(
                [
                    take(draw(library, form, shape, rank, number + i).idlist_features)
                    for i in range(20)
                ]
            )
            with validation(True):
                return time_call(lambda: finish(call(next(fresh))), 20)

        return sample

    def whole(features: Any) -> Any:
        return features

    return {
        "td_to_kjt": timed("TD", whole, lambda td: convert(td, keys).values()),
        "KJT.permute": timed("KJT", whole, lambda kjt: kjt.permute(order).values()),
        "copies of a batch (TD)": timed("TD", _values_and_offsets, copied),
        "copies of a batch (KJT)": timed("KJT", lambda kjt: [kjt.values(), kjt.lengths()], copied),
    }


def copied(parts: Sequence[Tensor]) -> Tensor:
    """Copy every tensor to this rank's device; on the CPU to new memory. Returns the last copy."""
    return [part.to(device(), copy=True) for part in parts][-1]


def _of_nested(nested: Any) -> list[Tensor]:
    return [nested.values(), nested.offsets()]


def _values_and_offsets(features: Any) -> list[Tensor]:
    return [part for nested in features.values() for part in _of_nested(nested)]


class _Copies(TorchDispatchMode):
    """Counts operators that copy a tensor to a device."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, Tensor) and kind is not Tensor for kind in types):
            return NotImplemented  # a nested tensor copies its parts, each of which comes here
        result = func(*args, **kwargs or {})
        copies = func.overloadpacket in (torch.ops.aten._to_copy, torch.ops.aten.to)
        self.counts["copies"] += copies and result is not args[0]
        return result


def count_copies(features: Any) -> int:
    """How many tensors ``.to`` copies, counted while the features are moved to a meta device."""
    with validation(False), _Copies() as copies:
        features.to(torch.device("meta"))
    return copies.counts["copies"]
