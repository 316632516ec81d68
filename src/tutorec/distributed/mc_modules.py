"""Mappings of raw ids to rows, on the ranks that have the rows.

A raw id is sent once, to the rank that may give it a row; there it is remapped and looked up::

    my samples, raw ids          KJT [F x B]
      | input_dist    raw ids travel to the rank that owns their table or bucket    (all-to-all)
    every sample, my buckets     KJT [F_mine x W*B]
      | remap         observe the ids, update the mapping at its interval; reassigned rows are reset
    every sample, my rows        KJT [F_mine x W*B]
      | lookup, output_dist      as of the collection of tables
      | output_dist of rows      with return_remapped_features=True: 4 bytes an id      (all-to-all)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import nn

from tutorec.awaitable import Awaitable, LazyAwaitable, NoWait
from tutorec.distributed import comm
from tutorec.distributed.collectives.kjt import ArrivedIds, feature_major
from tutorec.distributed.core.agreement import check_agreement
from tutorec.distributed.core.env import ShardingEnv
from tutorec.distributed.core.orders import FeatureOrder
from tutorec.distributed.core.qcomm import QuantizedCommCodecs
from tutorec.distributed.core.raw_ids import RawIds
from tutorec.distributed.core.sharders import ModuleSharder
from tutorec.distributed.core.tables import Table
from tutorec.distributed.embedding_base import BatchContext
from tutorec.distributed.plan.geometry import TableShard
from tutorec.distributed.plan.plan import EmbeddingComputeKernel, ParameterSharding, ShardingType
from tutorec.distributed.sharding.base import EmbeddingSharding, EmbeddingShardingContext, Slot
from tutorec.distributed.sharding.sequence_sharding import RowOrder
from tutorec.distributed.state.sharded_tensor import ShardedTensor
from tutorec.distributed.state.state_dict import local_shard, sharded_tensor
from tutorec.modules.mc_base import ManagedCollisionModule
from tutorec.modules.mc_modules import ManagedCollisionCollection, TableRemapper
from tutorec.modules.mch_module import NO_ID
from tutorec.sparse.hashing import bucket_of
from tutorec.sparse.jagged import jagged_from_parts
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor
from tutorec.sparse.layout import ids_by_offsets, ints_on_device, segment_sums
from tutorec.spmd.rank import device as own_device

REMAPPED_IDS_STAGE = "remapped ids"
MANAGED_SHARDINGS = (ShardingType.ROW_WISE, ShardingType.TABLE_WISE, ShardingType.TABLE_ROW_WISE)
_ON_META = torch.device("meta")


@dataclass
class ManagedCollisionCollectionContext(BatchContext):
    """State of one batch between its exchanges.

    Args:
        remapped_kjt: For each sharding every sample's rows of my slots, in the whole tables.
        evictions_per_table: Table -> rows of mine that this batch has given to other ids.

    Source:
        TorchRec's ``torchrec.distributed.mc_modules.ManagedCollisionCollectionContext``.
    """

    remapped_kjt: list[KeyedJaggedTensor] = field(default_factory=list)
    evictions_per_table: dict[str, torch.Tensor | None] = field(default_factory=dict)


class ManagedCollisionCollectionAwaitable(LazyAwaitable[KeyedJaggedTensor]):
    """The rows of my ids on their way back; ``wait()`` returns my batch with rows for raw ids.

    Args:
        arriving: The rows of each sharding.
        orders: The order of the rows of each sharding.
        ctx: The context of the batch.
        features: The features of all tables, in the order of the tables.

    Source:
        TorchRec's ``torchrec.distributed.mc_modules.ManagedCollisionCollectionAwaitable``.
    """

    def __init__(
        self,
        arriving: Sequence[Awaitable[torch.Tensor]],
        orders: Sequence[RowOrder],
        ctx: BatchContext,
        features: FeatureOrder,
    ) -> None:
        super().__init__()
        self._arriving = arriving
        self._orders = orders
        self._ctx = ctx
        self._features = features

    def _wait_impl(self) -> KeyedJaggedTensor:
        ctx = self._ctx
        assert ctx.features is not None, "input_dist keeps the batch"
        rows: dict[str, torch.Tensor] = {}
        for arriving, order, sharding_ctx in zip(
            self._arriving, self._orders, ctx.sharding_contexts, strict=True
        ):
            arrived = arriving.wait()
            rows_per_key = order.by_key(arrived, sharding_ctx.sent_counts, sharding_ctx.places)
            rows |= zip(order.keys, rows_per_key, strict=True)

        for key, reverse in ctx.reverse_indices.items():
            rows[key] = rows[key].index_select(0, reverse)

        batch = self._features.arrange(ctx.features)
        values = torch.cat([rows[key].view(-1) for key in self._features.wanted]).long()
        rows_batch = batch._with_ids(values, batch.weights_or_none())
        return rows_batch._with_inverse_indices(ctx.features.inverse_indices_or_none())


@dataclass(frozen=True)
class TableMapping:
    """The mapping of one table over the ranks.

    Args:
        table: The table.
        full: The mapping onto all its rows, on meta: it has no state, and defines how ids are
            hashed and bucketized.
        local: The mapping onto the rows of this rank; None if it has none.
        shard: These rows; None if it has none.
        width: Raw ids of a bucket; 0: the ids are unbounded.
        bounds: The first bucket of each row range, and the number of buckets.
        ranks: The rank of each row range.
    """

    table: Table
    full: ManagedCollisionModule
    local: ManagedCollisionModule | None
    shard: TableShard | None
    width: int
    bounds: Sequence[int]
    ranks: Sequence[int]

    @property
    def first_row(self) -> int:
        """The first row of this rank."""
        return self.shard.row_offset if self.shard is not None else 0

    def owners(self, ids: torch.Tensor) -> torch.Tensor:
        """The rank that may give each raw id a row ``[N]``."""
        numbers = ints_on_device([self.width, *self.bounds, *self.ranks], torch.int64, ids.device)
        width, bounds, ranks = numbers.split([1, len(self.bounds), len(self.ranks)])
        return ranks[
            torch.searchsorted(bounds[1:-1], bucket_of(ids, width, bounds[-1:]), right=True)
        ]


class _LocalTables:
    """The tables of one sharding that this rank looks up, in the order of its slots.

    Args:
        mappings: Of all tables.
        slots: Those of this rank; the slots of a table are neighbours.
    """

    def __init__(self, mappings: Sequence[TableMapping], slots: Sequence[Slot]) -> None:
        by_name = {mapping.table.name: mapping for mapping in mappings}
        slots_per_table = Counter(slot.table.name for slot in slots)
        self._slots_per_table = [*slots_per_table.values()]
        self._first_rows = [by_name[name].first_row for name in slots_per_table]
        modules = {name: by_name[name].local for name in slots_per_table}
        self._remapper = TableRemapper(modules, self._slots_per_table, is_preprocessed=True)

    def remap(self, batch: KeyedJaggedTensor, needs_all_rows: bool) -> KeyedJaggedTensor:
        """Raw ids of this rank's slots -> rows of the whole tables."""
        if not self._slots_per_table:
            return batch

        remapped = self._remapper.remap(batch)
        ids = batch.values().numel()
        rows = remapped.values().numel()
        if rows < ids and (needs_all_rows or batch.weights_or_none() is not None):
            raise ValueError(
                f"{ids} ids of features {batch.keys()} have arrived for tables "
                f"{self._remapper.tables}, and their mappings have taken all but {rows} out of "
                "their lists: use mappings that have a row for every id (disable_fallback=False "
                "or no_bag=True), or for pooled rows return_remapped_features=False and ids that "
                "have no weights"
            )

        return remapped

    def count_from_first_row(self, rows: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Rows of the whole tables -> rows of this rank."""
        if not any(self._first_rows):
            return rows

        counts = segment_sums(rows.length_per_key(), self._slots_per_table)
        values = [
            table_rows - first_row
            for table_rows, first_row in zip(
                rows.values().split(counts), self._first_rows, strict=True
            )
        ]
        return rows._with_ids(torch.cat(values), rows.weights_or_none())


class ShardedManagedCollisionCollection(nn.Module):
    """The mappings of a `ManagedCollisionCollection`, each on the ranks that hold its table's rows.

    It sends no ids: the collection of tables does, by the exchange that both share. Its state has
    the names of the unsharded module; a rank has that of its own rows.

    Args:
        module: The unsharded mappings.
        table_name_to_parameter_sharding: The plan of the collection.
        env: The ranks.
        device: Where this rank's tables live.
        embedding_shardings: Those of the collection of tables, which say where rows are.
        qcomm_codecs_registry: TorchRec's; ids travel as they are.
        use_index_dedup: TorchRec's; has no effect. Where the collection sends an id once that a
            feature has several times in a batch, it is counted once.

    Attributes:
        mappings: Those of all tables, in the order in which the shardings take them.
        has_ids: Whether ids had rows before it was sharded, which may be on other ranks than the
            ids' owners.
        slot_keys: The feature of each slot of this rank, for each sharding.

    Raises:
        ValueError: A table has a sharding type or a kernel that mappings are not made for, or is
            cut inside a bucket.
        AgreementError: Another rank failed.

    Source:
        TorchRec's ``torchrec.distributed.mc_modules.ShardedManagedCollisionCollection``.
    """

    def __init__(
        self,
        module: ManagedCollisionCollection,
        table_name_to_parameter_sharding: Mapping[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device,
        embedding_shardings: Sequence[EmbeddingSharding],
        qcomm_codecs_registry: Mapping[str, QuantizedCommCodecs] | None = None,
        use_index_dedup: bool = False,
    ) -> None:
        super().__init__()
        self._env = env
        self._device = device
        self._shardings = list(embedding_shardings)
        self._managed_collision_modules = nn.ModuleDict()
        self.mappings: list[TableMapping] = []
        problem: Exception | None = None
        try:
            for sharding in self._shardings:
                self.mappings += self._build(sharding, module)
        except (ValueError, RuntimeError) as error:
            problem = error

        ids = {
            f"table {mapping.table.name!r}: ids with a row": str(_count_ids(module, mapping))
            for mapping in self.mappings
        }
        check_agreement("sharding a ManagedCollisionCollection", ids, env, problem)
        self.has_ids = any(count != "0" for count in ids.values())
        self._features_per_table = [len(mapping.table.features) for mapping in self.mappings]
        self._need_preprocess = module.need_preprocess
        self._local_tables = [
            _LocalTables(self.mappings, sharding.slots.per_rank[env.rank])
            for sharding in self._shardings
        ]
        self._orders = [
            RowOrder(sharding.slots, sharding.route, columns=1) for sharding in self._shardings
        ]
        self.slot_keys = [
            [slot.feature for slot in sharding.slots.per_rank[env.rank]]
            for sharding in self._shardings
        ]
        features = [
            feature for config in module.embedding_configs() for feature in config.feature_names
        ]
        self._feature_order = FeatureOrder(features, {})
        self.register_state_dict_post_hook(_store_sharded)
        self.register_load_state_dict_pre_hook(_load_sharded)

    @property
    def rank(self) -> int:
        """This rank."""
        return self._env.rank

    def preprocess(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """This rank's batch in the shardings' order -> ids to send: checked, hashed, int64."""
        features._check_numbers()
        ids = features.values().long()
        if self._need_preprocess:
            tables = zip(self.mappings, features.split(self._features_per_table), strict=True)
            ids = torch.cat([_preprocessed(mapping, batch) for mapping, batch in tables])

        return features._with_ids(ids, features.weights_or_none())

    def compute(
        self,
        ctx: ManagedCollisionCollectionContext,
        dist_input: Sequence[KeyedJaggedTensor],
        needs_all_rows: bool = False,
    ) -> list[KeyedJaggedTensor]:
        """All samples' raw ids of this rank's shards -> its rows; in training mappings learn.

        Args:
            ctx: The context of the batch.
            dist_input: The raw ids, for each sharding.
            needs_all_rows: Whether each id must have a row, as where rows are not pooled.

        Raises:
            ValueError: A mapping has taken ids out of their lists that must have a row.
        """
        ctx.remapped_kjt = [
            tables.remap(batch, needs_all_rows)
            for tables, batch in zip(self._local_tables, dist_input, strict=True)
        ]
        ctx.evictions_per_table = self.evict()
        return [
            tables.count_from_first_row(rows)
            for tables, rows in zip(self._local_tables, ctx.remapped_kjt, strict=True)
        ]

    def output_dist(
        self, ctx: ManagedCollisionCollectionContext, output: Sequence[KeyedJaggedTensor]
    ) -> LazyAwaitable[KeyedJaggedTensor]:
        """The result of ``compute``, all rows -> this rank's samples, rows instead of raw ids."""
        exchanges = zip(self._shardings, output, ctx.sharding_contexts, strict=True)
        arriving = [_send_back(*exchange) for exchange in exchanges]
        return ManagedCollisionCollectionAwaitable(arriving, self._orders, ctx, self._feature_order)

    def evict(self) -> dict[str, torch.Tensor | None]:
        """Table -> reassigned rows of this rank ``[U]``, counted from its first row; or None."""
        evictions: dict[str, torch.Tensor | None] = {}
        for mapping in self.mappings:
            if mapping.local is not None:
                rows = mapping.local.evict()
                evictions[mapping.table.name] = None if rows is None else rows - mapping.first_row

        return evictions

    def open_slots(self) -> dict[str, torch.Tensor]:
        """Table -> rows of this rank that no id has ``[1]``."""
        return {
            mapping.table.name: mapping.local.open_slots()
            for mapping in self.mappings
            if mapping.local is not None
        }

    def row_state(self, prefix: str = "") -> Iterator[tuple[str, TableMapping, torch.Tensor]]:
        """The states of rows: name in the state dict, mapping, all rows ``[R, ...]`` on meta."""
        for mapping in self.mappings:
            path = f"{prefix}_managed_collision_modules.{mapping.table.name}"
            for name, value in mapping.full.row_states().items():
                yield f"{path}.{name}", mapping, value

    # --- set-up

    def _build(
        self, sharding: EmbeddingSharding, module: ManagedCollisionCollection
    ) -> list[TableMapping]:
        """The mappings of the tables of one sharding; its slots get the buckets of raw ids."""
        mappings: list[TableMapping] = []
        for table in sharding.slots.tables:
            source = cast(ManagedCollisionModule, module._managed_collision_modules[table.name])
            _check_placed(table)
            mappings.append(self._build_mapping(table, source))

        by_feature = [mapping for mapping in mappings for _ in mapping.table.features]
        widths = [mapping.width for mapping in by_feature]
        bounds = [mapping.bounds for mapping in by_feature]
        sharding.slots.raw_ids = RawIds(widths, bounds)
        return mappings

    def _build_mapping(self, table: Table, source: ManagedCollisionModule) -> TableMapping:
        """The mapping of one table; this rank's rows take the ids of the unsharded mapping."""
        shards = sorted(table.shards, key=lambda shard: shard.row_offset)
        segments = [*(shard.row_offset for shard in shards if shard.rows), table.rows]
        full = source.rebuild_with_output_id_range((0, table.rows), segments, _ON_META)
        bucket_starts = full._output_segments
        cuts = [*(shard.row_offset for shard in shards), table.rows]
        if any(row not in bucket_starts for row in cuts):
            count = full.buckets()
            raise ValueError(
                f"table {table.name!r} has {count} buckets of rows, which begin at "
                f"{bucket_starts}, and the plan cuts it at rows {cuts}: a bucket lies on one rank; "
                f"row_wise(num_buckets={count}) cuts between buckets"
            )

        local_shards = (shard for shard in shards if shard.rank == self._env.rank and shard.rows)
        shard = next(local_shards, None)
        local = None
        if shard is not None:
            end = shard.row_offset + shard.rows
            local = source.shard(shard.row_offset, end, segments, self._device)
            self._managed_collision_modules[table.name] = local.train(source.training)

        return TableMapping(
            table,
            full,
            local,
            shard,
            width=-(-full.input_size() // full.buckets()),
            bounds=[bucket_starts.index(row) for row in cuts],
            ranks=[shard.rank for shard in shards],
        )


def _send_back(
    sharding: EmbeddingSharding, remapped: KeyedJaggedTensor, ctx: EmbeddingShardingContext
) -> Awaitable[torch.Tensor]:
    """Rows of all ranks' ids in local slots -> awaitable of the rows of this rank's ids."""
    slots = sharding.slots
    rows = remapped.values()
    group = slots.process_group()
    if group is None or slots.env.world_size == 1:
        return NoWait(rows)

    counts = ctx.arrived_counts or arrived_counts(remapped, ctx)
    sent = [sum(slot_counts) for slot_counts in counts]
    received = [sum(slot_counts) for slot_counts in ctx.sent_counts]
    by_rank = rank_major(rows, counts).to(slots.rows_dtype)
    return comm.all_to_all(by_rank, sent, received, group, REMAPPED_IDS_STAGE)


def _store_sharded(
    module: Any, state_dict: dict[str, Any], prefix: str, local_metadata: Any
) -> None:
    """Put the state of every mapping into the state dict as ShardedTensors of all rows."""
    if module._env.process_group is None:
        return

    for key, mapping, full in module.row_state(prefix):
        shards = [shard for shard in mapping.table.shards if shard.rows]
        rectangles = [(*_block(shard, full), shard.rank) for shard in shards]
        local = [state_dict.pop(key)] if key in state_dict else []
        state_dict[key] = sharded_tensor(
            full.shape, rectangles, local, full.dtype, module._env, module._device
        )


def _load_sharded(module: Any, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Leave in the state dict the rows of this rank."""
    for key, mapping, full in module.row_state(prefix):
        value: torch.Tensor | None = state_dict.pop(key, None)
        shard = mapping.shard
        if value is None or shard is None:
            continue

        if isinstance(value, ShardedTensor):
            owner = f"the mapping of table {mapping.table.name!r}"
            state_dict[key] = local_shard(value, *_block(shard, full), owner)
        else:
            state_dict[key] = value[shard.row_offset : shard.row_offset + shard.rows]


def _block(shard: TableShard, full: torch.Tensor) -> tuple[list[int], list[int]]:
    """Offsets and sizes of the rows of a shard, in a state of all rows ``[R, ...]``."""
    trailing = list(full.shape[1:])
    return [shard.row_offset, *[0] * len(trailing)], [shard.rows, *trailing]


def as_batch(ids: ArrivedIds, keys: Sequence[str]) -> KeyedJaggedTensor:
    """Ids in order of arrival -> one list for each slot and rank.

    Args:
        ids: Of W ranks.
        keys: The feature of each slot.

    Example:
        >>> batch = as_batch(
        ...     ArrivedIds(torch.tensor([1, 2, 3, 4]), [[1, 1], [2, 0]]), ["a", "b"]
        ... )
        >>> batch.values().tolist(), batch.lengths().tolist()
        ([1, 3, 4, 2], [1, 2, 1, 0])
    """
    counts_per_slot: list[list[int]] = []
    values = ids.values
    if keys:
        counts_per_slot = _transposed(ids.counts)
        per_rank = ids.values.split([sum(slot_counts) for slot_counts in ids.counts])
        values = feature_major(per_rank, ids.counts)

    lengths = [count for rank_counts in counts_per_slot for count in rank_counts]
    return KeyedJaggedTensor._from_parts(
        list(keys),
        values,
        None,
        ints_on_device(lengths, torch.int64, values.device),
        None,
        len(ids.counts),
        [sum(rank_counts) for rank_counts in counts_per_slot],
    )


def rank_major(values: torch.Tensor, counts: Sequence[Sequence[int]]) -> torch.Tensor:
    """Ordered by shard, then rank -> in order of arrival: ``counts[rank][shard]`` of each.

    Example:
        >>> rank_major(torch.tensor([1, 3, 4, 2]), [[1, 1], [2, 0]])
        tensor([1, 2, 3, 4])
    """
    counts_per_slot = _transposed(counts)
    if not counts_per_slot:
        return values

    per_slot = values.split([sum(rank_counts) for rank_counts in counts_per_slot])
    return feature_major(per_slot, counts_per_slot)


def _transposed(counts: Sequence[Sequence[int]]) -> list[list[int]]:
    return [list(column) for column in zip(*counts, strict=True)]


def arrived_counts(batch: KeyedJaggedTensor, ctx: EmbeddingShardingContext) -> list[list[int]]:
    """Ids per rank and shard ``[W][slots]`` of a batch ordered by rank. A sync point."""
    slots = len(batch.keys())
    ranks = range(len(ctx.batch_size_per_rank))
    samples = ctx.batch_size_per_rank_per_feature or [
        [size] * slots for size in ctx.batch_size_per_rank
    ]
    lists = [samples[rank][slot] for slot in range(slots) for rank in ranks]
    counts = ids_by_offsets(batch.offsets(), lists)
    return [counts[rank :: len(ranks)] for rank in ranks]


def _count_ids(module: ManagedCollisionCollection, mapping: TableMapping) -> int:
    """How many ids of an unsharded mapping have rows, where they may be given others."""
    source = cast(ManagedCollisionModule, module._managed_collision_modules[mapping.table.name])
    if source.row_ids is None or source.device.type == "meta":
        return 0
    return int((source.get_buffer(source.row_ids) != NO_ID).sum())


def _preprocessed(mapping: TableMapping, batch: KeyedJaggedTensor) -> torch.Tensor:
    """The ids of one table after ``preprocess`` of its mapping ``[N]``."""
    name = mapping.table.name
    lists = jagged_from_parts(batch.values().long(), None, batch.lengths(), None)
    return mapping.full.preprocess({name: lists})[name].values()


def _check_placed(table: Table) -> None:
    """Refuse a plan that spreads an id's row over ranks, or whose optimizer has no reset.

    Raises:
        ValueError: It is such a plan.
    """
    types = [sharding_type.value for sharding_type in MANAGED_SHARDINGS]
    if table.sharding_type not in MANAGED_SHARDINGS:
        raise ValueError(
            f"table {table.name!r} remaps ids, and the plan shards it {table.sharding_type.value}: "
            f"use one of {types}, which keep the whole row of an id on one rank"
        )

    if table.kernel is EmbeddingComputeKernel.DENSE:
        raise ValueError(
            f"table {table.name!r} remaps ids, and has the compute kernel 'dense', whose optimizer "
            "keeps the state of rows that are given to other ids: use 'fused'"
        )


class ManagedCollisionCollectionSharder(ModuleSharder[ManagedCollisionCollection]):
    """Shards the mappings of a collection, for the sharder of the collection, which calls it.

    Args:
        qcomm_codecs_registry: TorchRec's; ids travel as they are.

    Source:
        TorchRec's ``torchrec.distributed.mc_modules.ManagedCollisionCollectionSharder``.
    """

    @property
    def module_type(self) -> type[ManagedCollisionCollection]:
        """The class of modules that it shards."""
        return ManagedCollisionCollection

    def shard(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        module: ManagedCollisionCollection,
        params: Mapping[str, ParameterSharding],
        env: ShardingEnv,
        embedding_shardings: Sequence[EmbeddingSharding],
        device: torch.device | None = None,
        use_index_dedup: bool = False,
    ) -> ShardedManagedCollisionCollection:
        """The mappings, sharded as the tables are; every rank calls it."""
        device = torch.device(device) if device is not None else own_device()
        return ShardedManagedCollisionCollection(
            module,
            params,
            env,
            device,
            embedding_shardings,
            self.qcomm_codecs_registry,
            use_index_dedup,
        )

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """`ShardingType` values that it can build, on any device."""
        return [sharding_type.value for sharding_type in MANAGED_SHARDINGS]


class InferManagedCollisionCollectionSharder(ManagedCollisionCollectionSharder):
    """Puts the mappings of a quantized collection on the device of its results, whole.

    Source:
        TorchRec's ``torchrec.distributed.mc_modules.InferManagedCollisionCollectionSharder``, which
        splits mappings by rows.
    """

    def shard(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        module: ManagedCollisionCollection,
        params: Mapping[str, ParameterSharding],
        env: ShardingEnv,
        embedding_shardings: Sequence[Any],
        device: torch.device | None = None,
    ) -> ManagedCollisionCollection:
        """A collection of the mappings that are on the device, and of copies of the others."""
        device = torch.device(device or "cpu")
        mappings = {name: mapping.on(device) for name, mapping in module._modules_by_table()}
        configs = module.embedding_configs()
        return ManagedCollisionCollection(mappings, configs, module.need_preprocess).eval()
