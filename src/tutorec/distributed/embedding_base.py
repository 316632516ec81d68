"""Base class of sharded collections: reading the plan, copying weights, preparing batches.

A collection is sharded in three steps. Each rank reads the plan and compares it with that of the
other ranks; it copies the rows of its shards from the unsharded tables; the first batch builds the
exchanges.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, ClassVar, Generic, TypeVar, cast

import torch
from torch import nn

from tutorec._kernels.caches.cached_tables import CachedTableBatch
from tutorec._kernels.caches.row_cache import CacheCounts
from tutorec._text import several
from tutorec.awaitable import Awaitable, LazyAwaitable, WaitAll
from tutorec.distributed import comm
from tutorec.distributed.collectives.autograd import division_fact
from tutorec.distributed.collectives.kjt import KJTArrival
from tutorec.distributed.core.agreement import check_agreement
from tutorec.distributed.core.env import ShardingEnv
from tutorec.distributed.core.initial_rows import InitialRows, draw_shard
from tutorec.distributed.core.orders import FeatureOrder
from tutorec.distributed.core.qcomm import QuantizedCommCodecs
from tutorec.distributed.core.sharded_module import CompIn, DistOut, Out, ShardedModule
from tutorec.distributed.core.tables import (
    IN_FILE,
    SUPPORTED_KERNELS,
    LocalShards,
    SharderSupport,
    Table,
    place_tables,
    usable_device,
    warn_who_trains,
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
from tutorec.distributed.state.state_dict import (
    ShardedStates,
    copy_when_loading,
    keep_parameters,
    register_state_hooks,
)
from tutorec.modules.embedding_configs import BaseEmbeddingConfig
from tutorec.optim.fused import FusedOptimizerModule
from tutorec.optim.keyed import CombinedOptimizer
from tutorec.sparse.deferred import raise_deferred_id_errors
from tutorec.sparse.id_check import check_ids, check_weights
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor
from tutorec.sparse.refuse import refuse_batch
from tutorec.sparse.tensor_dict import maybe_td_to_kjt
from tutorec.spmd.held import held_bytes

_logger = logging.getLogger("tutorec.distributed")
S = TypeVar("S", bound=EmbeddingSharding)


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


class SizesAwaitable(Awaitable[Awaitable[CompIn]]):
    """First round of ``input_dist``: sizes are in flight; waiting for them sends the ids.

    Args:
        exchanges: The exchange of each sharding.
        ctx: Context of the batch.
        received: Returns the awaitable of the ids, from what arrives for each sharding.
    """

    def __init__(
        self,
        exchanges: Sequence[Awaitable[KJTArrival]],
        ctx: BatchContext,
        received: Callable[[Any, Sequence[KJTArrival]], Awaitable[CompIn]],
    ) -> None:
        self._exchanges = exchanges
        self._ctx = ctx
        self._received = received

    def _wait_impl(self) -> Awaitable[CompIn]:
        arrivals = [exchange.wait() for exchange in self._exchanges]
        for context, arrival in zip(self._ctx.sharding_contexts, arrivals, strict=True):
            # Sizes are known before the ids arrive.
            context.batch_size_per_rank = arrival.batch_size_per_rank
            context.batch_size_per_rank_per_feature = arrival.batch_size_per_rank_per_feature
            context.sent_counts = arrival.sent_counts
            if arrival.batch_size_per_rank_per_feature is not None:
                self._ctx.variable_batch_per_feature = True

        return self._received(self._ctx, arrivals)


class ResultAwaitable(LazyAwaitable[Any]):
    """Lazy result of one batch; ``wait()`` joins the outputs of all shardings.

    Args:
        exchanges: The awaitable output of each sharding.
        join: Computes the result from the outputs that have arrived.
        ctx: Context of the batch.
    """

    def __init__(
        self,
        exchanges: Sequence[Awaitable[torch.Tensor]],
        join: Callable[..., Any],
        ctx: BatchContext,
    ) -> None:
        super().__init__()
        self._exchanges = exchanges
        self._join = join
        self._ctx = ctx
        self._graph_is_recorded = torch.is_grad_enabled()

    def _wait_impl(self) -> Any:
        # Use the grad mode of the forward: a result that is first read under no_grad, for example
        # to print it, must still be trainable.
        with torch.set_grad_enabled(self._graph_is_recorded):
            return self._join([exchange.wait() for exchange in self._exchanges], self._ctx)


class ShardedEmbeddingModule(
    ShardedModule[C, CompIn, DistOut, Out],
    FusedOptimizerModule,
    Generic[C, CompIn, DistOut, Out, S],
):
    """A collection of tables sharded over the ranks of a process group.

    Args:
        module: The unsharded collection. Its weights are copied; weights on the meta device are
            initialized here.
        configs: Configuration of each table.
        is_weighted: Whether each id must carry a weight.
        plan: Table name -> how it is sharded.
        env: The ranks.
        fused_params: Options of the fused optimizer, see `fused_params.optimizer_spec`.
        device: Device of this rank's shards; :func:`tutorec.spmd.device` by default.
        codecs: Name of an exchange -> data type in which rows are sent in it; float32 by default.

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

    # What a subclass says of its collection: the name of the unsharded class, for messages; the
    # path of the tables in the module; whether their rows are pooled; and the class that builds
    # the tables of each sharding type.
    _source_name: ClassVar[str]
    _tables_path: ClassVar[str]
    _pools: ClassVar[bool]
    _sharding_classes: ClassVar[Mapping[ShardingType, type[EmbeddingSharding]]]

    def __init__(
        self,
        module: nn.Module,
        configs: Sequence[BaseEmbeddingConfig],
        is_weighted: bool,
        plan: Mapping[str, ParameterSharding],
        env: ShardingEnv,
        fused_params: Mapping[str, Any] | None,
        device: torch.device | None,
        codecs: Mapping[str, QuantizedCommCodecs] | None,
    ) -> None:
        super().__init__()
        self._env = env
        self._is_weighted = is_weighted
        self._table_configs = {config.name: config for config in configs}
        self._device = usable_device(device, plan)
        codecs = codecs or {}

        weights = {
            name: table.get_parameter("weight")
            for name, table in module.get_submodule(self._tables_path).named_children()
        }
        self._tables = self._read_plan(configs, weights, plan, fused_params, codecs)
        if env.rank == 0:
            warn_who_trains(self._tables, weights, fused_params, self._source_name)
        self.module_sharding_plan = EmbeddingModuleShardingPlan(plan)

        self._shardings = self._build_shardings(codecs)
        self._lookups = self._build_lookups(InitialRows(configs, weights))
        # The first batch builds the exchanges: a module that never runs one needs no process group.
        self._input_dists: list[SparseFeaturesDist] = []
        self._output_dists: list[Any] = [
            sharding.create_output_dist() for sharding in self._shardings
        ]
        self._exchanges_are_built = False

        self._prepare_raw_ids: Callable[[KeyedJaggedTensor], KeyedJaggedTensor] | None = None
        self._prepare_features()
        self._register_rows(weights)
        self._fused = [
            optimizer for lookup in self._lookups for optimizer in lookup.fused_optimizers()
        ]
        self._store_optimizer_states_as_tables()
        self._optimizer = CombinedOptimizer([("", optimizer) for optimizer in self._fused])
        register_state_hooks(self)
        self._log_tables()

    # --- construction, in the order of its steps

    def _read_plan(
        self,
        configs: Sequence[BaseEmbeddingConfig],
        weights: Mapping[str, torch.Tensor],
        plan: Mapping[str, ParameterSharding],
        fused_params: Mapping[str, Any] | None,
        codecs: Mapping[str, QuantizedCommCodecs],
    ) -> list[Table]:
        """Read the plan, check it, and compare it with the other ranks' plans.

        Raises:
            AgreementError: Ranks disagree about tables or plan, or another rank failed.
        """
        rules = SharderSupport(
            self._env.world_size,
            self._is_weighted,
            tuple(self._sharding_classes),
            SUPPORTED_KERNELS,
            fused_params,
            self._env.local_size,
        )
        tables: list[Table] = []
        problem: Exception | None = None
        try:
            tables = place_tables(configs, weights, plan, rules)
        except (ValueError, KeyError, TypeError) as error:
            problem = error

        description = {
            "tables": ", ".join(config.name for config in configs),
            "qcomm_codecs_registry": str(sorted(codecs.items())),
            "ranks per host": str(self._env.local_size),
            **division_fact(),
        }
        for table in tables:
            description |= table.describe()
            description[f"table {table.name!r}: requires_grad"] = str(
                weights[table.name].requires_grad
            )

        article = "an" if self._source_name[0] in "AEIOU" else "a"
        check_agreement(f"sharding {article} {self._source_name}", description, self._env, problem)
        return tables

    def _build_shardings(self, codecs: Mapping[str, QuantizedCommCodecs]) -> list[S]:
        """One sharding for the tables of each sharding type."""
        by_type: dict[ShardingType, list[Table]] = {}
        for table in self._tables:
            by_type.setdefault(table.sharding_type, []).append(table)

        return [
            cast(S, self._sharding_classes[sharding_type](tables, self._env, codecs))
            for sharding_type, tables in by_type.items()
        ]

    def _build_lookups(self, initial_rows: InitialRows) -> list[EmbeddingLookup]:
        """Allocate this rank's shards and write their rows."""
        return [sharding.create_lookup(initial_rows, self._device) for sharding in self._shardings]

    def _prepare_features(self) -> None:
        """Compute what depends on names only: the features of each sharding and their tables."""
        feature_tables: dict[str, list[str]] = {}
        self._feature_rows: list[tuple[str, str, int]] = []
        for table in self._tables:
            for feature in table.features:
                feature_tables.setdefault(feature, []).append(table.name)
                self._feature_rows.append((feature, table.name, table.rows))
        self._feature_names = list(feature_tables)

        names_per_sharding = [sharding.feature_names() for sharding in self._shardings]
        self._features_per_sharding = [len(names) for names in names_per_sharding]
        self._feature_order = FeatureOrder(
            [*chain.from_iterable(names_per_sharding)], feature_tables
        )

    def _register_rows(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Register the rows of this rank's shards as parameters, under their unsharded names."""
        tables = nn.ModuleDict({table.name: nn.Module() for table in self._tables})
        for lookup in self._lookups:
            for name, rows in lookup.named_weights():
                table_name, _, parameter_name = name.rpartition(".")
                rows.requires_grad_(weights[table_name].requires_grad)
                tables[table_name].register_parameter(parameter_name, rows)

        for name, table in tables.items():
            if not table._parameters:
                # Code that reads `weight` finds no rows: they are on other ranks.
                table.weight = torch.empty(0)
            copy_when_loading(table)
            keep_parameters(table, name)
        self.add_module(self._tables_path, tables)

    def _store_optimizer_states_as_tables(self) -> None:
        """Have the states of optimizers saved whole, under the names of the unsharded tables."""
        local_shards = self.local_shards()
        for optimizer in self._fused:
            names = list(optimizer.params)
            optimizer.store_as(ShardedStates(local_shards, names, self._env, self._device))

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
        if self._exchanges_are_built:
            ctx.arranged = self._arrange(features, ctx)

    def input_dist(self, ctx: C, features: KeyedJaggedTensor) -> Awaitable[Awaitable[CompIn]]:
        """Send the ids of this rank's samples to the ranks that hold their rows, for each sharding.

        Returns:
            An awaitable of an awaitable: waiting for the first sends the ids, waiting for the
            second returns the received batches.

        Raises:
            KeyError: A feature is missing.
            ValueError: An id is outside its table, or weights are missing.
        """
        ctx.sharding_contexts = [self._sharding_context() for _ in self._shardings]
        arranged = ctx.arranged
        ctx.arranged = None
        if arranged is None:
            if self._exchanges_are_built:
                arranged = self._arrange(features, ctx)
            else:
                arranged = self._check_first_batch(features, ctx)
                self._build_exchanges()

        if len(self._input_dists) == 1:
            batches = [arranged]
        else:
            batches = arranged.split(self._features_per_sharding)
        exchanges = [
            input_dist(batch, context)
            for input_dist, batch, context in zip(
                self._input_dists, batches, ctx.sharding_contexts, strict=True
            )
        ]
        return SizesAwaitable(exchanges, ctx, self._received)

    @abstractmethod
    def _received(self, ctx: C, arrivals: Sequence[KJTArrival]) -> Awaitable[CompIn]:
        """Return the input of ``compute`` from what the second round delivers for each sharding."""

    def compute(self, ctx: C, dist_input: CompIn) -> DistOut:
        """Look up the received ids in this rank's shards, for each sharding."""
        batches = cast(Sequence[Any], dist_input)
        rows = [lookup(batch) for lookup, batch in zip(self._lookups, batches, strict=True)]
        return cast(DistOut, rows)

    def output_dist(self, ctx: C, output: DistOut) -> LazyAwaitable[Out]:
        """Send looked-up rows back to the ranks of their samples."""
        exchanges = [
            output_dist(rows, context)
            for output_dist, rows, context in zip(
                self._output_dists,
                cast(list[torch.Tensor], output),
                ctx.sharding_contexts,
                strict=True,
            )
        ]

        return self._awaitable(exchanges, self._join, ctx)

    @abstractmethod
    def _join(self, outputs: Sequence[torch.Tensor], ctx: C) -> Out:
        """Join the outputs of all shardings into the result."""

    def send_status(self, status: int) -> Awaitable[Any]:
        """Take part in the first round of ``input_dist`` without a batch; not for the first batch.

        Raises:
            RanksWithoutBatch: On every rank, when it waits for that round.
        """
        return WaitAll([dist.send_status(status, self._device) for dist in self._input_dists])

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

    def set_id_remapper(self, prepare: Callable[[KeyedJaggedTensor], KeyedJaggedTensor]) -> None:
        """Send ids as ``prepare`` returns them; they become rows before ``compute``.

        Args:
            prepare: Checks and hashes a batch, whose features are in the order in which the
                shardings take them.
        """
        self._prepare_raw_ids = prepare

    @property
    def _has_uninitialized_input_dist(self) -> bool:
        """TorchRec's: whether the first batch is still to come, of a module that takes rows."""
        return self._prepare_raw_ids is None and not self._exchanges_are_built

    @property
    def shardings(self) -> list[S]:
        """One for each sharding type, in the order in which batches are split."""
        return self._shardings

    # --- interface of the unsharded module

    def sharded_parameter_names(self, prefix: str = "") -> Iterator[str]:
        """Names of this rank's parameters, without those of replicated tables."""
        sharding_types = {table.name: table.sharding_type for table in self._tables}
        for name, _ in self.named_parameters(prefix):
            if sharding_types[name.split(".")[-2]] is not ShardingType.DATA_PARALLEL:
                yield name

    @property
    def fused_optimizer(self) -> CombinedOptimizer:
        """The optimizers that update this rank's tables in backward, one per group of tables."""
        return self._optimizer

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialize all rows again, from rank 0's torch seed; keeps optimizer state. Collective.

        Rows of tables in virtual memory are kept.
        """
        if self._device.type == "meta":
            return

        seed = torch.randint(2**31, (1,))
        if (group := self._env.process_group) is not None:
            seed = seed.to(comm.message_device(group))
            comm.broadcast(seed, 0, group, "initial rows")

        for local in self.local_shards():
            if local.table.virtual:
                continue
            for shard, rows in zip(local.shards, local.rows, strict=True):
                draw_shard(self._table_configs[local.table.name], shard, int(seed), rows)

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

    def local_shards(self) -> list[LocalShards]:
        """Every table of the collection, with the shards that this rank holds."""
        self.flush()
        parameters = dict(self.named_parameters())
        local_shards: list[LocalShards] = []
        for table in self._tables:
            shards = tuple(shard for shard in table.shards if shard.rank == self._env.rank)
            stem = f"{self._tables_path}.{table.name}.weight"
            names = [f"{stem}_{index}" if index else stem for index in range(len(shards))]
            rows = tuple(parameters[name] for name in names)
            local_shards.append(LocalShards(stem, table, shards, rows))
        return local_shards

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
        for title, modules in (
            ("lookups", self._lookups),
            ("_input_dists", self._input_dists),
            ("_output_dists", self._output_dists),
        ):
            if modules:
                lines.append(f"({title}): ")
                lines += [repr(module).replace("\n", "\n  ") for module in modules]
        return "\n ".join(lines)

    def __getstate__(self) -> Any:
        """Refuse ``copy.deepcopy`` and ``pickle``.

        A copy would share the exchanges of the process group and lose its optimizer.
        """
        raise TypeError(
            f"a Sharded{self._source_name} belongs to its process group and can be neither copied "
            f"nor pickled: shard the unsharded {self._source_name} once more, and give it this "
            "one's state_dict()"
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

    # --- checks of a batch

    def _check_first_batch(
        self, features: KeyedJaggedTensor, ctx: BatchContext
    ) -> KeyedJaggedTensor:
        """Arrange and check the first batch together with the other ranks."""
        arranged: KeyedJaggedTensor | None = None
        problem: Exception | None = None
        try:
            arranged = self._arrange(features, ctx)
            # All ranks wait here anyway, so wait for the id check of a GPU, too.
            raise_deferred_id_errors()
        except (ValueError, KeyError, TypeError) as error:
            problem = error

        description = {
            "weighted": str(self._is_weighted),
            "collection": self._title(),
            **division_fact(),
        }
        check_agreement("the first batch", description, self._env, problem)
        assert arranged is not None, "check_agreement raises where this rank has a problem"
        return arranged

    def _build_exchanges(self) -> None:
        """Build input and output dists; every rank does so at its first batch."""
        self._input_dists = [sharding.create_input_dist() for sharding in self._shardings]
        if self._env.process_group is not None:
            for dist in self._input_dists:
                number = comm.number_of_next_exchange(self._env.process_group)
                dist.identify(number, self._title())

        for dist in self._output_dists:
            dist.build()
        self._exchanges_are_built = True

    @property
    @abstractmethod
    def unsharded_module_type(self) -> type[nn.Module]:
        """The class that was sharded."""

    def _title(self) -> str:
        """Class and table names, for messages."""
        names = [table.name for table in self._tables]
        quoted = ", ".join(map(repr, names[:3])) + (
            f" and {len(names) - 3} more" if len(names) > 3 else ""
        )

        return f"the {self._source_name} of tables {quoted}"

    def _arrange(self, features: KeyedJaggedTensor, ctx: BatchContext) -> KeyedJaggedTensor:
        """The batch, checked, with its features in the order of the shardings."""
        if not isinstance(features, KeyedJaggedTensor):
            features = maybe_td_to_kjt(features, self._feature_names)
            if not isinstance(features, KeyedJaggedTensor):
                refuse_batch(f"a Sharded{self._source_name}", features)

        ctx.features = features
        _check_device(features, self._device)

        weighted = self._is_weighted if self._pools else None
        if self._prepare_raw_ids is None:
            features = check_ids(features, self._feature_rows, weighted, self)
            arranged = self._feature_order.arrange(features)
        else:
            arranged = self._prepare_raw_ids(self._feature_order.arrange(features))
            check_weights(features, weighted, self)

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
