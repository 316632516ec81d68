"""Mappings of raw ids to rows, on the ranks that hold the rows.

A raw id is sent once, to the rank that may give it a row; there it is remapped and looked up::

    my samples, raw ids          KJT [F x B]
      | input_dist    raw ids travel to the rank that owns their table or bucket    (all-to-all)
    every sample, my buckets     KJT [F_mine x W*B]
      | remap         observe the ids, update the mapping when due; reassigned rows are reset
    every sample, my rows        KJT [F_mine x W*B]
      | lookup, output_dist      as of the collection of tables
      | output_dist of rows      with return_remapped_features=True: 4 bytes an id      (all-to-all)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
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
from tutorec.distributed.plan.plan import EmbeddingComputeKernel, ParameterSharding, ShardingType
from tutorec.distributed.sharding.base import EmbeddingSharding, EmbeddingShardingContext
from tutorec.distributed.sharding.sequence_sharding import RowOrder
from tutorec.distributed.state.sharded_tensor import ShardedTensor
from tutorec.distributed.state.state_dict import local_shard, sharded_tensor
from tutorec.modules.mc_base import ManagedCollisionModule
from tutorec.modules.mc_modules import ManagedCollisionCollection
from tutorec.modules.mch_module import NO_ID
from tutorec.sparse.hashing import bucket_of
from tutorec.sparse.jagged import jagged_from_parts
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor
from tutorec.sparse.layout import ids_by_offsets, ints_on_device
from tutorec.spmd.devices import device as own_device

REMAPPED_IDS_STAGE = "remapped ids"
MANAGED_SHARDINGS = (ShardingType.ROW_WISE, ShardingType.TABLE_WISE, ShardingType.TABLE_ROW_WISE)
_ON_META = torch.device("meta")


@dataclass
class ManagedCollisionCollectionContext(BatchContext):
    """What the moves of one batch tell each other.

    Args:
        remapped_kjt: For each sharding every sample's rows of my slots, counted from the first row
            that I hold.
        evictions_per_table: Table -> rows of mine that this batch has given to other ids.
        arrived: For each sharding every sample's raw ids of my slots.

    Source:
        TorchRec's ``torchrec.distributed.mc_modules.ManagedCollisionCollectionContext``.
    """

    remapped_kjt: list[KeyedJaggedTensor] = field(default_factory=list)
    evictions_per_table: dict[str, torch.Tensor | None] = field(default_factory=dict)
    arrived: list[KeyedJaggedTensor] = field(default_factory=list)


class ManagedCollisionCollectionAwaitable(LazyAwaitable[KeyedJaggedTensor]):
    """Rows of my ids that return; ``wait()`` gives my batch with rows in place of raw ids.

    Args:
        arriving: Of each sharding.
        orders: Of each sharding: where each row belongs.
        ctx: Of the batch.
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
        self._arriving, self._orders, self._ctx, self._features = arriving, orders, ctx, features

    def _wait_impl(self) -> KeyedJaggedTensor:
        ctx = self._ctx
        assert ctx.features is not None, "input_dist keeps the batch"
        rows: dict[str, torch.Tensor] = {}
        for part, order, own in zip(
            self._arriving, self._orders, ctx.sharding_contexts, strict=True
        ):
            rows |= zip(
                order.keys, order.by_key(part.wait(), own.sent_counts, own.places), strict=True
            )
        for key, reverse in ctx.reverse_indices.items():
            rows[key] = rows[key].index_select(0, reverse)
        batch = self._features.arrange(ctx.features)
        values = torch.cat([rows[key].view(-1) for key in self._features.wanted]).long()
        inverse = ctx.features.inverse_indices_or_none()
        return batch._with_tensors(
            values, batch.weights_or_none(), batch.lengths(), batch.offsets_or_none(), inverse
        )


@dataclass(frozen=True)
class TableMapping:
    """The mapping of one table over the ranks.

    Args:
        table: The table.
        whole: The mapping onto all its rows, on meta: it has no state, and says how ids are hashed
            and bucketized.
        held: The mapping onto the rows of this rank; None where it holds none.
        first_row: The first of them.
        width: Raw ids of a bucket; 0: the ids are unbounded.
        bounds: The first bucket of each row range, and the number of buckets.
        ranks: Who holds each row range.
    """

    table: Table
    whole: ManagedCollisionModule
    held: ManagedCollisionModule | None
    first_row: int
    width: int
    bounds: Sequence[int]
    ranks: Sequence[int]

    def owners(self, ids: torch.Tensor) -> torch.Tensor:
        """The rank that may give each raw id a row ``[N]``."""
        numbers = ints_on_device([self.width, *self.bounds, *self.ranks], torch.int64, ids.device)
        width, bounds, ranks = numbers.split([1, len(self.bounds), len(self.ranks)])
        return ranks[
            torch.searchsorted(bounds[1:-1], bucket_of(ids, width, bounds[-1:]), right=True)
        ]


# a mapping, and how many neighbouring slots of this rank look its table up
_Held = tuple[TableMapping, int]


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
        use_index_dedup: Whether the collection sends an id once that a feature has several times in
            a batch; it is then counted once.

    Attributes:
        mappings: Those of all tables, in the order in which the shardings take them.
        has_ids: Whether ids had rows before it was sharded, which may lie on other ranks than the
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
        self._env, self._device, self._use_index_dedup = env, device, use_index_dedup
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
            f"table {each.table.name!r}: ids with a row": str(_count_ids(module, each))
            for each in self.mappings
        }
        check_agreement("sharding a ManagedCollisionCollection", ids, env, problem)
        self.has_ids = any(count != "0" for count in ids.values())
        self._features_per_table = [len(each.table.features) for each in self.mappings]
        self._need_preprocess = module.need_preprocess
        self._held = [self._held_slots(sharding) for sharding in self._shardings]
        self._orders = [
            RowOrder(sharding.slots, sharding.route, columns=1) for sharding in self._shardings
        ]
        self.slot_keys = [
            [slot.feature for slot in each.slots.per_rank[env.rank]] for each in self._shardings
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
            parts = zip(self.mappings, features.split(self._features_per_table), strict=True)
            ids = torch.cat([_preprocessed(mapping, part) for mapping, part in parts])
        return features._with_ids(ids, features.weights_or_none())

    def compute(
        self, ctx: ManagedCollisionCollectionContext, dist_input: Sequence[KeyedJaggedTensor]
    ) -> list[KeyedJaggedTensor]:
        """All samples' raw ids of this rank's shards -> its rows; in training mappings learn."""
        ctx.arrived = list(dist_input)
        ctx.remapped_kjt = [
            self._remapped(batch, held) for batch, held in zip(ctx.arrived, self._held, strict=True)
        ]
        ctx.evictions_per_table = self.evict()
        return ctx.remapped_kjt

    def output_dist(
        self, ctx: ManagedCollisionCollectionContext, output: Sequence[KeyedJaggedTensor]
    ) -> LazyAwaitable[KeyedJaggedTensor]:
        """The result of ``compute`` -> this rank's samples, with table rows instead of raw ids.

        Raises:
            ValueError: A mapping has taken ids out of their lists, so that there is no row for each
                id.
        """
        moves = zip(
            self._shardings, self._held, ctx.arrived, output, ctx.sharding_contexts, strict=True
        )
        arriving = [self._send_back(*move) for move in moves]
        return ManagedCollisionCollectionAwaitable(arriving, self._orders, ctx, self._feature_order)

    def evict(self) -> dict[str, torch.Tensor | None]:
        """Table -> reassigned rows of this rank ``[U]``, counted from its first row; or None."""
        evictions: dict[str, torch.Tensor | None] = {}
        for mapping in self.mappings:
            if mapping.held is not None:
                rows = mapping.held.evict()
                evictions[mapping.table.name] = None if rows is None else rows - mapping.first_row
        return evictions

    def open_slots(self) -> dict[str, torch.Tensor]:
        """Table -> rows of mine that no id has ``[1]``."""
        return {
            each.table.name: each.held.open_slots()
            for each in self.mappings
            if each.held is not None
        }

    def row_state(self, prefix: str = "") -> Iterator[tuple[str, Table, torch.Tensor]]:
        """What is kept per row: name in the state dict, table, the whole ``[R, ...]`` on meta."""
        for each in self.mappings:
            for name, value in each.whole.state_dict().items():
                if name not in each.whole.once_per_table:
                    yield (
                        f"{prefix}_managed_collision_modules.{each.table.name}.{name}",
                        each.table,
                        value,
                    )

    # --- set-up

    def _build(
        self, sharding: EmbeddingSharding, module: ManagedCollisionCollection
    ) -> list[TableMapping]:
        """The mappings of the tables of one sharding, and how raw ids find them."""
        found = list[TableMapping]()
        for table in sharding.slots.tables:
            source = cast(ManagedCollisionModule, module._managed_collision_modules[table.name])
            _check_placed(table)
            shards = sorted(table.shards, key=lambda shard: shard.row_offset)
            segments = [*(shard.row_offset for shard in shards if shard.rows), table.rows]
            whole = source.rebuild_with_output_id_range((0, table.rows), segments, _ON_META)
            starts: list[int] = getattr(whole, "_output_segments", segments)
            ends = [*(shard.row_offset for shard in shards), table.rows]
            if any(row not in starts for row in ends):
                count = whole.buckets()
                raise ValueError(
                    f"table {table.name!r} has {count} buckets of rows, which begin at {starts}, "
                    f"and the plan cuts it at rows {ends}: a bucket lies on one rank; "
                    f"row_wise(num_buckets={count}) cuts between buckets"
                )
            held, first = None, 0
            for shard in shards:
                if shard.rank == self._env.rank and shard.rows:
                    first, end = shard.row_offset, shard.row_offset + shard.rows
                    held = source.rebuild_with_output_id_range((first, end), segments, self._device)
                    self._managed_collision_modules[table.name] = held.train(source.training)
                    if source.device.type != "meta":
                        held.load_state_by_row(_rows_of_state(source, first, end))
            width, bounds = (
                -(-whole.input_size() // whole.buckets()),
                [starts.index(row) for row in ends],
            )
            ranks = [shard.rank for shard in shards]
            found.append(TableMapping(table, whole, held, first, width, bounds, ranks))
        by_feature = [mapping for mapping in found for _ in mapping.table.features]
        widths, bounds = [each.width for each in by_feature], [each.bounds for each in by_feature]
        sharding.slots.raw_ids = RawIds(widths, [of_feature[-1] for of_feature in bounds], bounds)
        return found

    def _held_slots(self, sharding: EmbeddingSharding) -> list[tuple[TableMapping, int]]:
        """One table's neighbouring shards on this rank: its mapping, and how many shards."""
        of_table = {each.table.name: each for each in self.mappings}
        tables = [slot.table.name for slot in sharding.slots.per_rank[self._env.rank]]
        return [(of_table[name], len(list(slots))) for name, slots in groupby(tables)]

    # --- one batch

    def _remapped(self, batch: KeyedJaggedTensor, held: Sequence[_Held]) -> KeyedJaggedTensor:
        """Raw ids of my slots -> rows, counted from the first that I hold."""
        if not held:
            return batch
        parts = zip(batch.split([slots for _, slots in held]), held, strict=True)
        found = [_remapped_table(part, mapping) for part, (mapping, _) in parts]
        values = torch.cat([rows for rows, _ in found])
        if values.numel() == batch.values().numel():
            return batch._with_ids(values, batch.weights_or_none())
        if batch.weights_or_none() is not None:
            raise ValueError(
                f"the mappings of tables {_names(held)} take ids without a row out of their lists, "
                "and these ids have weights: use mappings that have a row for every id "
                "(disable_fallback=False)"
            )
        variable, lengths = (
            batch.variable_stride_per_key(),
            torch.cat([lengths for _, lengths in found]),
        )
        strides = batch._stride_per_key_per_rank if variable else None
        stride = None if variable else batch.stride()
        return KeyedJaggedTensor._from_parts(
            batch.keys(), values, None, lengths, None, stride, None, strides
        )

    def _send_back(
        self,
        sharding: EmbeddingSharding,
        held: Sequence[_Held],
        arrived: KeyedJaggedTensor,
        remapped: KeyedJaggedTensor,
        ctx: EmbeddingShardingContext,
    ) -> Awaitable[torch.Tensor]:
        """Rows of every rank's ids in my slots -> promise of the rows of my ids."""
        if remapped.values().numel() != arrived.values().numel():
            raise ValueError(
                f"{arrived.values().numel()} ids have arrived for tables {_names(held)}, and their "
                f"mappings have taken all but {remapped.values().numel()} out of their lists: use "
                "mappings that have a row for every id, or return_remapped_features=False"
            )
        slots = sharding.slots
        firsts = [mapping.first_row for mapping, slots in held for _ in range(slots)]
        numbers = ints_on_device([firsts, arrived.length_per_key()], torch.int64, remapped.device())
        rows = remapped.values() + numbers[0].repeat_interleave(
            numbers[1], output_size=remapped.values().numel()
        )
        group = slots.process_group()
        if group is None or slots.env.world_size == 1:
            return NoWait(rows)
        counts = ctx.arrived_counts or arrived_counts(arrived, ctx)
        out, into = (
            [sum(of_rank) for of_rank in counts],
            [sum(of_rank) for of_rank in ctx.sent_counts],
        )
        by_rank = rank_major(rows, counts).to(slots.rows_dtype)
        return comm.all_to_all(by_rank, out, into, group, REMAPPED_IDS_STAGE)


def _store_sharded(
    module: Any, state_dict: dict[str, Any], prefix: str, local_metadata: Any
) -> None:
    """Name the state of every mapping in the state dict, whole, as ShardedTensors."""
    if module._env.process_group is None:
        return
    for key, table, whole in module.row_state(prefix):
        shards, trailing = [shard for shard in table.shards if shard.rows], list(whole.shape[1:])
        rectangles = [
            ([shard.row_offset, *[0] * len(trailing)], [shard.rows, *trailing], shard.rank)
            for shard in shards
        ]
        held = [state_dict.pop(key)] if key in state_dict else []
        state_dict[key] = sharded_tensor(
            whole.shape, rectangles, held, whole.dtype, module._env, module._device
        )


def _load_sharded(module: Any, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Leave in the state dict what this rank holds."""
    for key, table, whole in module.row_state(prefix):
        value: torch.Tensor | None = state_dict.pop(key, None)
        mine = next(
            (shard for shard in table.shards if shard.rank == module._env.rank and shard.rows), None
        )
        if value is None or mine is None:
            continue
        sizes = [mine.rows, *whole.shape[1:]]
        offsets = [mine.row_offset, *[0] * (len(sizes) - 1)]
        is_sharded = isinstance(value, ShardedTensor)
        state_dict[key] = (
            local_shard(value, offsets, sizes, f"the mapping of table {table.name!r}")
            if is_sharded
            else value[mine.row_offset : mine.row_offset + mine.rows]
        )


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
    by_slot = [list(of_slot) for of_slot in zip(*ids.counts, strict=True)] if keys else []
    values = (
        feature_major(ids.values.split([sum(c) for c in ids.counts]), ids.counts)
        if keys
        else ids.values
    )
    lengths = ints_on_device(
        [count for of_slot in by_slot for count in of_slot], torch.int64, values.device
    )
    per_key = [sum(of_slot) for of_slot in by_slot]
    return KeyedJaggedTensor._from_parts(
        list(keys), values, None, lengths, None, len(ids.counts), per_key
    )


def rank_major(values: torch.Tensor, counts: Sequence[Sequence[int]]) -> torch.Tensor:
    """Ordered by shard, then rank -> in order of arrival: ``counts[rank][shard]`` of each.

    Example:
        >>> rank_major(torch.tensor([1, 3, 4, 2]), [[1, 1], [2, 0]])
        tensor([1, 2, 3, 4])
    """
    by_slot = [list(of_slot) for of_slot in zip(*counts, strict=True)]
    return feature_major(values.split([sum(c) for c in by_slot]), by_slot) if by_slot else values


def arrived_counts(batch: KeyedJaggedTensor, ctx: EmbeddingShardingContext) -> list[list[int]]:
    """Ids per rank and shard ``[W][slots]`` of a batch ordered by rank. A sync point."""
    slots, ranks = len(batch.keys()), range(len(ctx.batch_size_per_rank))
    samples = ctx.batch_size_per_rank_per_feature or [
        [size] * slots for size in ctx.batch_size_per_rank
    ]
    of_lists = [samples[rank][slot] for slot in range(slots) for rank in ranks]
    counts = ids_by_offsets(batch.offsets(), of_lists)
    return [counts[rank :: len(ranks)] for rank in ranks]


def _count_ids(module: ManagedCollisionCollection, mapping: TableMapping) -> int:
    """How many ids of an unsharded mapping have rows, where they may be given others."""
    source = cast(ManagedCollisionModule, module._managed_collision_modules[mapping.table.name])
    if source.row_ids is None or source.device.type == "meta":
        return 0
    return int((source.state_by_row()[source.row_ids] != NO_ID).sum())


def _rows_of_state(source: ManagedCollisionModule, first: int, end: int) -> dict[str, torch.Tensor]:
    """The state of a part of the rows."""
    state = source.state_by_row().items()
    return {
        name: value if name in source.once_per_table else value[first:end] for name, value in state
    }


def _names(held: Sequence[_Held]) -> list[str]:
    return [mapping.table.name for mapping, _ in held]


def _preprocessed(mapping: TableMapping, batch: KeyedJaggedTensor) -> torch.Tensor:
    """The ids of one table as its mapping wants them ``[N]``."""
    name = mapping.table.name
    lists = jagged_from_parts(batch.values().long(), None, batch.lengths(), None)
    return mapping.whole.preprocess({name: lists})[name].values()


def _remapped_table(
    batch: KeyedJaggedTensor, mapping: TableMapping
) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's rows for one table's ids, counted from its first row, and list lengths."""
    module = mapping.held
    if module is None:  # no row is here, and no id was sent
        return batch.values(), batch.lengths()
    counts = torch.tensor(batch.length_per_key()) if module.wants_feature_lengths else None
    features = {
        mapping.table.name: jagged_from_parts(batch.values(), counts, batch.lengths(), None)
    }
    if module._enable_per_feature_lookups and any(
        key.endswith(module.read_only_suffix) for key in batch.keys()
    ):
        features = batch.to_dict()
    found = module.remap(module.profile(features)).values()
    rows = torch.cat([lists.values() for lists in found])
    return rows - mapping.first_row, torch.cat([lists.lengths() for lists in found])


def _check_placed(table: Table) -> None:
    """Refuse a plan that spreads an id's row over ranks, or whose optimizer has no reset.

    Raises:
        ValueError: It is such a plan.
    """
    types = [kind.value for kind in MANAGED_SHARDINGS]
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
        """The mappings themselves where they are on the device, else copies."""
        device = torch.device(device or "cpu")
        mappings = {name: each.on(device) for name, each in module._modules_by_table()}
        if [*mappings.values()] == [*module._managed_collision_modules.values()]:
            return module
        configs = module.embedding_configs()
        return ManagedCollisionCollection(mappings, configs, module.need_preprocess).eval()
