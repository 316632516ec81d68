"""Base class of sharded collections: reading the plan, copying weights, preparing batches.

A collection is sharded in three steps. The plan is read and compared with that of the other ranks;
each rank copies the rows of its shards from the unsharded tables; the first batch builds the
exchanges.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar, cast

import torch
from torch import nn

from tutorec._kernels.row_cache import CacheCounts
from tutorec._kernels.tbe_cached import CachedTableBatch
from tutorec._text import several
from tutorec.awaitable import Awaitable, LazyAwaitable, map_awaitable
from tutorec.distributed import comm
from tutorec.distributed.collectives.autograd import division_fact
from tutorec.distributed.collectives.kjt import KJTArrival
from tutorec.distributed.core import messages
from tutorec.distributed.core.agreement import check_agreement
from tutorec.distributed.core.env import ShardingEnv
from tutorec.distributed.core.initial_rows import InitialRows, draw_piece
from tutorec.distributed.core.orders import FeatureOrder
from tutorec.distributed.core.qcomm import QuantizedCommCodecs
from tutorec.distributed.core.sharded_module import CompIn, DistOut, Out, ShardedModule
from tutorec.distributed.core.tables import (
    IN_FILE,
    HeldTable,
    PlacedTable,
    usable_device,
)
from tutorec.distributed.lookup.grouped import EmbeddingLookup
from tutorec.distributed.plan.plan import (
    EmbeddingModuleShardingPlan,
    ParameterSharding,
    ShardingType,
)
from tutorec.distributed.sharding.base import (
    EmbeddingSharding,
    EmbeddingShardingContext,
    SparseFeaturesDist,
)
from tutorec.distributed.source_tables import CollectionSpec, agreed_tables
from tutorec.distributed.state.optimizer_state import ShardedStates
from tutorec.distributed.state.state_dict import (
    copy_when_loading,
    keep_parameters,
    register_state_hooks,
)
from tutorec.optim.fused import FusedOptimizerModule
from tutorec.optim.keyed import CombinedOptimizer
from tutorec.sparse.deferred import report
from tutorec.sparse.id_check import check_ids, check_weights
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor
from tutorec.sparse.refuse import refuse_batch
from tutorec.sparse.tensor_dict import maybe_td_to_kjt
from tutorec.spmd.held import held_bytes

_logger = logging.getLogger("tutorec.distributed")
S = TypeVar("S", bound=EmbeddingSharding)
ShardingBuilder = Callable[
    [Sequence[PlacedTable], ShardingEnv, Mapping[str, QuantizedCommCodecs]], S
]


@dataclass
class BatchContext:
    """State of one batch, shared by ``input_dist``, ``compute`` and ``output_dist``.

    Args:
        sharding_contexts: One context per sharding of the module.
        features: The batch as the caller passed it.
        variable_batch_per_feature: Whether features have different numbers of samples on some rank.
        arranged: The batch in the order in which it is sent, if
            `ShardedEmbeddingModule.prepare_input` has been called.
        reverse_indices: Feature -> which of its distinct ids each of its ids is ``[N]``, if only
            those are sent.
    """

    sharding_contexts: list[Any] = field(default_factory=list)
    features: KeyedJaggedTensor | None = None
    variable_batch_per_feature: bool = False
    arranged: KeyedJaggedTensor | None = None
    reverse_indices: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def batch_size(self) -> int:
        """B, the local batch size."""
        return self.features.stride() if self.features is not None else 0

    @property
    def inverse_indices(self) -> tuple[list[str], torch.Tensor] | None:
        """Inverse indices of the batch, if any: keys, and each sample's stored bag ``[F, B]``."""
        return self.features.inverse_indices_or_none() if self.features is not None else None


C = TypeVar("C", bound=BatchContext)


class ResultAwaitable(LazyAwaitable[Any]):
    """Lazy result of one batch; ``wait()`` joins the outputs of all shardings.

    Args:
        arriving: One awaitable per sharding.
        join: Computes the result from the outputs that have arrived.
        ctx: Context of the batch.
    """

    def __init__(
        self,
        arriving: Sequence[Awaitable[torch.Tensor]],
        join: Callable[..., Any],
        ctx: BatchContext,
    ) -> None:
        super().__init__()
        self._arriving, self._join, self._ctx = arriving, join, ctx
        self._graph_is_recorded = torch.is_grad_enabled()

    def _wait_impl(self) -> Any:
        # Use the grad mode of the forward: a result that is first read under no_grad, for example
        # to print it, must still be trainable.
        with torch.set_grad_enabled(self._graph_is_recorded):
            return self._join([part.wait() for part in self._arriving], self._ctx)


class ShardedEmbeddingModule(
    ShardedModule[C, CompIn, DistOut, Out],
    FusedOptimizerModule,
    Generic[C, CompIn, DistOut, Out, S],
):
    """A collection of tables sharded over the ranks of a process group.

    Args:
        source: The unsharded collection. Its weights are copied; weights on the meta device are
            initialized here.
        plan: Table name -> how it is sharded.
        env: The ranks.
        fused_params: Options of the fused optimizer, see `fused_params.optimizer_spec`.
        device: Device of this rank's shards; :func:`tutorec.spmd.device` by default.
        builders: Sharding type -> class that builds the sharding of its tables.

    Raises:
        ValueError: The plan does not fit the module or the world size.
        AgreementError: Ranks disagree about tables or plan, or another rank failed.

    Source:
        TorchRec's ``torchrec.distributed.embedding_types.ShardedEmbeddingModule``.
    """

    # A leaf of traced graphs: what is sent and received depends on the other ranks and cannot be
    # traced.
    is_traced_whole: ClassVar[bool] = True
    _awaitable: ClassVar[type[ResultAwaitable]] = ResultAwaitable
    _sharding_context: ClassVar[type[EmbeddingShardingContext]] = EmbeddingShardingContext

    def __init__(
        self,
        source: CollectionSpec,
        plan: Mapping[str, ParameterSharding],
        env: ShardingEnv,
        fused_params: Mapping[str, Any] | None,
        device: torch.device | None,
        builders: Mapping[ShardingType, ShardingBuilder[S]],
    ) -> None:
        super().__init__()
        self._env, self._sources = env, {config.name: config for config in source.configs}
        self._kind, self._path, self._is_weighted = source.kind, source.path, source.weighted
        self._device = usable_device(device, plan)
        self._tables = agreed_tables(source, plan, env, fused_params, tuple(builders))
        self.module_sharding_plan = EmbeddingModuleShardingPlan(plan)
        by_type: dict[ShardingType, list[PlacedTable]] = {}
        for table in self._tables:
            by_type.setdefault(table.sharding_type, []).append(table)
        self._shardings: list[S] = [
            builders[kind](members, env, source.codecs) for kind, members in by_type.items()
        ]
        rows_of = InitialRows(source.configs, source.weights)
        self._lookups: list[EmbeddingLookup] = [
            sharding.create_lookup(rows_of, self._device) for sharding in self._shardings
        ]
        self._input_dists: list[SparseFeaturesDist] = []
        self._output_dists: list[Any] = [
            sharding.create_output_dist() for sharding in self._shardings
        ]
        self._dists_are_built = False
        self._prepare_raw_ids: Callable[[KeyedJaggedTensor], KeyedJaggedTensor] | None = None
        self._prepare_features()
        holder = nn.ModuleDict({table.name: nn.Module() for table in self._tables})
        for lookup in self._lookups:
            for name, rows in lookup.named_weights():
                table, _, parameter = name.rpartition(".")
                rows.requires_grad_(source.weights[table].requires_grad)
                holder[table].register_parameter(parameter, rows)
        for name, table in holder.items():
            if not table._parameters:
                table.weight = torch.empty(0)  # to be looked at; the rows lie on other ranks
            copy_when_loading(table)
            keep_parameters(table, name)
        self.add_module(source.path, holder)
        self._fused = [each for lookup in self._lookups for each in lookup.fused_optimizers()]
        for optimizer in self._fused:
            optimizer.store_as(
                ShardedStates(self.held_tables(), list(optimizer.params), env, self._device)
            )
        self._optimizer = CombinedOptimizer([("", optimizer) for optimizer in self._fused])
        register_state_hooks(self)
        self._log_tables()

    def _log_tables(self) -> None:
        """Log how many tables have which sharding type and kernel, and the bytes on this rank."""
        if not _logger.isEnabledFor(logging.INFO):
            return

        counts = Counter(
            f"{table.sharding_type.value} ({table.kernel.value})" for table in self._tables
        )
        _logger.info(
            "%s: %s on %s: %s; rank %d holds %s on %s",
            type(self).__name__,
            several(len(self._tables), "table"),
            several(self._env.world_size, "rank"),
            ", ".join(f"{count} {option}" for option, count in counts.items()),
            self._env.rank,
            several(held_bytes(self), "byte"),
            self._device,
        )

    # --- one batch

    def prepare_input(self, ctx: BatchContext, features: KeyedJaggedTensor) -> None:
        """Convert, reorder and check a batch: the part of ``input_dist`` that needs no other rank.

        With the same context, ``input_dist`` then only sends. A pipeline calls this ahead of time,
        so that a rank reports a bad batch before other ranks wait for it. The first batch is not
        prepared here: ``input_dist`` checks it together with the other ranks.

        Raises:
            KeyError: A feature is missing.
            ValueError: An id is outside its table, or weights are missing.
        """
        if self._dists_are_built:
            ctx.arranged = self._arranged(features, ctx)

    def input_dist(self, ctx: C, features: KeyedJaggedTensor) -> Awaitable[Awaitable[CompIn]]:
        """Send the ids of this rank's samples to the ranks that hold their rows, for each sharding.

        Returns:
            An awaitable of an awaitable: waiting for the first sends the ids, waiting for the
            second returns the received batches.

        Raises:
            KeyError: A feature is missing.
            ValueError: An id is outside its table, or weights are missing.
        """
        contexts = [self._sharding_context() for _ in self._shardings]
        ctx.sharding_contexts = contexts
        arranged, ctx.arranged = ctx.arranged, None
        if arranged is None:
            arranged = (
                self._arranged(features, ctx)
                if self._dists_are_built
                else self._first_arranged(features, ctx)
            )
        parts = (
            [arranged]
            if len(self._input_dists) == 1
            else arranged.split(self._features_per_sharding)
        )

        def second_round(*arrivals: KJTArrival) -> Awaitable[CompIn]:
            for of_sharding, arrival in zip(contexts, arrivals, strict=True):
                of_sharding.batch_size_per_rank = arrival.batch_size_per_rank
                of_sharding.sent_counts = arrival.sent_counts
                of_sharding.batch_size_per_rank_per_feature = (
                    arrival.batch_size_per_rank_per_feature
                )
                if arrival.batch_size_per_rank_per_feature is not None:
                    ctx.variable_batch_per_feature = True
            return self._received(ctx, arrivals)

        moves = zip(self._input_dists, parts, contexts, strict=True)
        return map_awaitable(
            second_round, *[dist(part, of_sharding) for dist, part, of_sharding in moves]
        )

    @abstractmethod
    def _received(self, ctx: C, arrivals: Sequence[KJTArrival]) -> Awaitable[CompIn]:
        """Return the input of ``compute`` from what the second round delivers for each sharding."""

    def compute(self, ctx: C, dist_input: CompIn) -> DistOut:
        """Look up the received ids in this rank's shards, for each sharding."""
        ids = cast(Sequence[Any], dist_input)
        rows = [lookup(of_sharding) for lookup, of_sharding in zip(self._lookups, ids, strict=True)]
        return cast(DistOut, rows)

    def output_dist(self, ctx: C, output: DistOut) -> LazyAwaitable[Out]:
        """Send looked-up rows back to the ranks of their samples."""
        moves = zip(
            self._output_dists, cast(list[torch.Tensor], output), ctx.sharding_contexts, strict=True
        )
        return self._awaitable(
            [dist(rows, of_sharding) for dist, rows, of_sharding in moves], self._join, ctx
        )

    @abstractmethod
    def _join(self, parts: Sequence[torch.Tensor], ctx: C) -> Out:
        """Join the outputs of all shardings into the result."""

    def send_status(self, status: int) -> Awaitable[Any]:
        """Take part in the first round of ``input_dist`` without a batch; not for the first batch.

        Raises:
            RanksWithoutBatch: On every rank, when it waits for that round.
        """
        return map_awaitable(
            lambda *_: None, *[dist.send_status(status) for dist in self._input_dists]
        )

    def prefetch(self, dist_input: CompIn) -> None:
        """Start reading the rows of a coming batch into this rank's caches; returns at once.

        Results do not depend on it. It has no effect without tables of the kernel
        ``fused_uvm_caching``.

        Args:
            dist_input: The result of ``input_dist(...).wait().wait()``, which ``compute`` will
                receive.

        Source:
            TorchRec's ``ShardedEmbeddingModule.prefetch``.
        """
        for lookup, ids in zip(self._lookups, cast(Sequence[Any], dist_input), strict=True):
            lookup.prefetch(ids)

    def take_raw_ids(self, prepare: Callable[[KeyedJaggedTensor], KeyedJaggedTensor]) -> None:
        """Send ids as ``prepare`` returns them; they become rows before ``compute``.

        Args:
            prepare: Checks and hashes a batch, whose features are in the order in which the
                shardings take them.
        """
        self._prepare_raw_ids = prepare

    @property
    def _has_uninitialized_input_dist(self) -> bool:
        """TorchRec's: whether the first batch is still to come, of a module that takes rows."""
        return self._prepare_raw_ids is None and not self._dists_are_built

    @property
    def shardings(self) -> list[S]:
        """One for each sharding type, in the order in which batches are split."""
        return self._shardings

    # --- interface of the unsharded module

    def sharded_parameter_names(self, prefix: str = "") -> Iterator[str]:
        """Names of this rank's parameters, without those of replicated tables."""
        kinds = {table.name: table.sharding_type for table in self._tables}
        for name, _ in self.named_parameters(prefix):
            if kinds[name.split(".")[-2]] is not ShardingType.DATA_PARALLEL:
                yield name

    @property
    def fused_optimizer(self) -> CombinedOptimizer:
        """The optimizers that update this rank's tables in backward, one per group of tables."""
        return self._optimizer

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialize all rows anew, from rank 0's torch seed; keeps optimizer state. Collective.

        Rows of tables in virtual memory are kept.
        """
        if self._device.type == "meta":
            return
        seed = torch.randint(2**31, (1,))
        if (group := self._env.process_group) is not None:
            seed = seed.to(messages.message_device(group))
            messages.broadcast(seed, 0, group, "initial rows")
        for held in self.held_tables():
            for piece, rows in zip(held.pieces, held.rows, strict=True):
                if not held.table.virtual:
                    draw_piece(self._sources[held.table.name], piece, int(seed), rows)

    def flush(self) -> None:
        """Write cached rows back, so that parameters and optimizer state are current.

        State dicts and checkpoints call it. Call it before you read a parameter of a cached table
        directly.
        """
        for optimizer in self._fused:
            optimizer.operator.flush()

    def cache_counts(self) -> list[CacheCounts]:
        """Counters of this rank's CPU caches: lookups, rows read and rows written so far."""
        operators = [optimizer.operator for optimizer in self._fused]
        return [operator.counts for operator in operators if isinstance(operator, CachedTableBatch)]

    def held_tables(self) -> list[HeldTable]:
        """Every table of the collection, with the shards that this rank holds."""
        self.flush()
        parameters, rank = dict(self.named_parameters()), self._env.rank
        held: list[HeldTable] = []
        for table in self._tables:
            pieces = tuple(piece for piece in table.pieces if piece.rank == rank)
            stem = f"{self._path}.{table.name}.weight"
            names = [stem if index == 0 else f"{stem}_{index}" for index in range(len(pieces))]
            held.append(HeldTable(stem, table, pieces, tuple(parameters[name] for name in names)))
        return held

    @property
    def env(self) -> ShardingEnv:
        """The ranks."""
        return self._env

    @property
    def device(self) -> torch.device:
        """Where this rank's tables live."""
        return self._device

    def extra_repr(self) -> str:
        """Lookups and dists, which are in plain lists so that parameters register once."""
        lines: list[str] = []
        for title, parts in (
            ("lookups", self._lookups),
            ("_input_dists", self._input_dists),
            ("_output_dists", self._output_dists),
        ):
            if parts:
                lines += [f"({title}): ", *(repr(part).replace("\n", "\n  ") for part in parts)]
        return "\n ".join(lines)

    def __getstate__(self) -> Any:
        """Refuse ``copy.deepcopy`` and ``pickle``.

        A copy would share the exchanges of the process group and lose its optimizer.
        """
        raise TypeError(
            f"a Sharded{self._kind} belongs to its process group and can be neither copied nor "
            f"pickled: shard the unsharded {self._kind} once more, and give it this one's "
            "state_dict()"
        )

    def _apply(
        self, fn: Any, recurse: bool = True
    ) -> ShardedEmbeddingModule[C, CompIn, DistOut, Out, S]:
        """Move or convert the rows (``.to``); parameters and optimizer state follow.

        Raises:
            ValueError: A table with a ``fused_uvm*`` kernel would move to another device.
        """
        here = torch.empty(0, device=self._device)
        device = fn(here).device
        fixed = [table for table in self._tables if table.kernel in IN_FILE]
        if fixed and device != here.device:
            raise ValueError(
                f"table {fixed[0].name!r} has the compute kernel {fixed[0].kernel.value!r} and "
                f"cannot move from {here.device} to {device}, which has another kind of slower "
                f"memory: shard the unsharded module there, with device=torch.device('{device}')"
            )
        for lookup in self._lookups:
            lookup._apply(fn)
        super()._apply(fn, recurse)
        for lookup in self._lookups:
            lookup.rebind()
        self._device = device
        return self

    # --- construction

    def _prepare_features(self) -> None:
        """Compute what depends on names only: the features of each sharding and their tables."""
        tables_of: dict[str, list[str]] = {}
        for table in self._tables:
            for feature in table.features:
                tables_of.setdefault(feature, []).append(table.name)
        self._feature_names = list(tables_of)
        wanted = [sharding.feature_names() for sharding in self._shardings]
        self._features_per_sharding = [len(names) for names in wanted]
        self._features = FeatureOrder([name for names in wanted for name in names], tables_of)
        self._feature_rows = [
            (feature, table.name, table.rows)
            for table in self._tables
            for feature in table.features
        ]

    def _first_arranged(self, features: KeyedJaggedTensor, ctx: BatchContext) -> KeyedJaggedTensor:
        """Check the first batch together with the other ranks, and build the dists."""
        arranged: KeyedJaggedTensor | None = None
        problem: Exception | None = None
        try:
            arranged = self._arranged(features, ctx)
            report()  # all ranks wait here anyway, so wait for the id check of a GPU, too
        except (ValueError, KeyError, TypeError) as error:
            problem = error
        facts = {"weighted": str(self._is_weighted), "collection": self._title(), **division_fact()}
        check_agreement("the first batch", facts, self._env, problem)
        assert arranged is not None, "check_agreement raises where this rank has a problem"
        self._input_dists = [sharding.create_input_dist() for sharding in self._shardings]
        for dist in self._input_dists:
            if self._env.process_group is not None:
                dist.identify(comm.number_of_next_exchange(self._env.process_group), self._title())
        for dist in self._output_dists:
            dist.build()
        self._dists_are_built = True
        return arranged

    def _title(self) -> str:
        """Class and table names, for messages."""
        names = [table.name for table in self._tables]
        shown = ", ".join(map(repr, names[:3])) + (
            f" and {len(names) - 3} more" if len(names) > 3 else ""
        )
        return f"the {self._kind} of tables {shown}"

    def _arranged(self, features: KeyedJaggedTensor, ctx: BatchContext) -> KeyedJaggedTensor:
        """The batch, checked, with its features in the order of the shardings."""
        if not isinstance(features, KeyedJaggedTensor):
            features = maybe_td_to_kjt(features, self._feature_names)
            if not isinstance(features, KeyedJaggedTensor):
                refuse_batch(f"a Sharded{self._kind}", features)
        ctx.features = features
        _check_device(features, self._device)
        if self._prepare_raw_ids is None:
            arranged = self._features.arrange(check_ids(features, self._feature_rows))
        else:
            arranged = self._prepare_raw_ids(self._features.arrange(features))
        pooled = self._kind == "EmbeddingBagCollection"
        check_weights(features, self._is_weighted if pooled else None, self)
        weights = arranged.weights_or_none()
        if weights is None:
            return arranged
        if not self._is_weighted:
            return arranged._with_ids(arranged.values(), None)
        if weights.requires_grad and self._env.world_size > 1:
            raise ValueError(
                "weights of the batch require a gradient, which does not travel back between "
                "ranks: detach them, weights.detach()"
            )
        if weights.dtype == torch.float32:
            return arranged
        return arranged._with_ids(arranged.values(), weights.float())


def _check_device(features: KeyedJaggedTensor, tables: torch.device) -> None:
    """Raise if the batch is not on the device of the tables.

    Raises:
        ValueError: The batch is on another device.
    """
    device = features.device()
    if device.type != tables.type or (
        tables.index is not None and device.index not in (None, tables.index)
    ):
        raise ValueError(
            f"the batch (keys {features.keys()}) is on {device} and the tables are on {tables}: "
            f"move the batch, features.to(torch.device('{tables}'))"
        )
