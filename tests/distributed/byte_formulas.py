"""How many bytes a step sends from which rank to which: the tests' oracle, over what a plan says,
for every type.

A *slot* is a feature that a shard of a table looks up. With B_rf samples and N_rf ids of feature f
on rank r (where rows are split, those ids that fall into the slot's range of rows), b bytes for an
id and D columns of a slot, rank r sends rank s in one step, for each sharding type of the
collection on its own,

    input sizes        24
    input strides      8 * (slots of s)                            with variable batch only
    input ids          b * sum over slots f of s of (B_rf + N_rf)
    input weights      4 * sum over slots f of s of N_rf           of weighted collections only
    output rows        4 * sum over slots f of r of B_sf * D       not pooled: N_sf * D
    output gradients   what s sends r as output rows

b is 4, or 8 where a table of that sharding type has 2 ** 31 rows or more. Of the types that split
rows inside a host, rank (h, l), which is number l on host h, sends pooled rows by way of the host:

    output rows        inside the host, to (h, m)   what the ranks number m of all hosts get
                       across hosts, to (g, l)      the sums that are for that rank

Replicated tables send nothing forward. Backward they send gradients, with F features of all of
them, and B_r the most samples that one of these has on rank r,

    gradient sizes     8 * (1 + F)                                 not pooled: 8 * F
    gradient ids       b * sum over f of (B_r + N_rf)              not pooled: without B_r
    gradient weights   4 * sum over f of N_rf                      of weighted collections only
    gradient rows      4 * sum over f of B_r * D                   not pooled: N_rf * D
    gradient sums      4 * (E_s + E_r)

where a table whose ids, weights and rows, of all ranks together, are more than 8 * R * D bytes
leaves the sums over f, and adds its R * D numbers to E instead, of which rank r has E_r = E / W
(the first E % W ranks one more). Where rows move without gradient, as Adam's do, R more say which
of them are in the batch. A table whose gradients are limited number by number is not summed.

It shares no code with the counter of `traffic`, which sees tensors, nor with the simulation, which
computes classes of ranks at once; tests hold the three to be equal.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tutorec.distributed.core.tables import Table
from tutorec.distributed.plan.geometry import TableShard
from tutorec.distributed.plan.plan import ShardingType
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor

# What the exchanges call themselves.
SIZES, STRIDES, IDS, WEIGHTS = "input sizes", "input strides", "input ids", "input weights"
ROWS, GRADIENTS = "output rows", "output gradients"
COPIES_SIZES, COPIES_IDS, COPIES_WEIGHTS = "gradient sizes", "gradient ids", "gradient weights"
COPIES_ROWS, COPIES_SUMS = "gradient rows", "gradient sums"

_INSIDE_HOSTS = (ShardingType.TABLE_ROW_WISE, ShardingType.GRID_SHARD)

# (stage, source, destination) -> bytes
Bytes = Counter[tuple[str, int, int]]
_OfRank = Counter[str]


@dataclass(frozen=True)
class StepBatches:
    """What the batches of one step hold, as numbers: those of real batches (`of`), or expected
    ones.

    Args:
        samples: For each rank, feature -> B.
        ids: ``(rank, feature, first row, end row)`` -> how many of that rank's ids lie there.
        variable: Whether on any rank features differ in their number of samples.

    Example:
        >>> batches = StepBatches(
        ...     [{"item": 4}, {"item": 4}], ids=lambda rank, feature, first, end: end - first
        ... )
        >>> batches.samples[1]["item"], batches.ids(0, "item", 0, 3)
        (4, 3)
    """

    samples: Sequence[Mapping[str, int]]
    ids: Callable[[int, str, int, int], int]
    variable: bool = False

    @classmethod
    def of(cls, batches: Sequence[KeyedJaggedTensor]) -> StepBatches:
        """The numbers of the batches of all ranks, in rank order.

        Example:
            >>> import torch
            >>> batch = KeyedJaggedTensor(
            ...     ["item"], torch.tensor([0, 5, 2]), lengths=torch.tensor([1, 2])
            ... )
            >>> found = StepBatches.of([batch])
            >>> found.samples, found.ids(0, "item", 0, 3)
            ([{'item': 2}], 2)
        """
        samples = [
            dict(zip(batch.keys(), batch.stride_per_key(), strict=True)) for batch in batches
        ]
        sorted_ids = [
            {
                key: sorted(ids.tolist())
                for key, ids in zip(
                    batch.keys(), batch.values().split(batch.length_per_key()), strict=True
                )
            }
            for batch in batches
        ]

        def count(rank: int, feature: str, first: int, end: int) -> int:
            ids = sorted_ids[rank][feature]
            return bisect_left(ids, end) - bisect_left(ids, first)

        return cls(samples, count, any(batch.variable_stride_per_key() for batch in batches))


@dataclass(frozen=True)
class Slot:
    """A feature that a shard looks up."""

    feature: str
    table: Table
    shard: TableShard

    def samples(self, batches: StepBatches, rank: int) -> int:
        """B of a rank: how many bags of its ids there are."""
        return batches.samples[rank][self.feature]

    def ids(self, batches: StepBatches, rank: int) -> int:
        """Ids of a rank that the shard looks up."""
        first = self.shard.row_offset
        return batches.ids(rank, self.feature, first, first + self.shard.rows)

    def elements(self, batches: StepBatches, rank: int) -> int:
        """Numbers that the shard gives for a rank's batch."""
        pooled = self.table.pooling != "none"
        return (self.samples if pooled else self.ids)(batches, rank) * self.shard.columns


def step_traffic(
    tables: Sequence[Table],
    batches: StepBatches,
    local_size: int | None = None,
    *,
    row_bytes: int = 4,
    gradient_bytes: int = 4,
) -> Bytes:
    """Bytes of one step of a collection, forward and backward, after its first: (stage, source,
    destination) -> bytes.

    Args:
        tables: As the plan places them.
        batches: One of each rank.
        local_size: Ranks per host; None: all are on one.
        row_bytes: Of a number on its way home: 4, or 2 where a codec makes it float16 or bfloat16.
        gradient_bytes: Of a number on its way back, likewise.

    Example:
        >>> import torch
        >>> from tutorec.distributed.plan.plan import EmbeddingComputeKernel
        >>> from tutorec.distributed.plan.geometry import parameter_sharding, row_wise_shards
        >>> from tutorec.distributed.core.tables import SharderSupport, place_table
        >>> from tutorec.modules.embedding_configs import EmbeddingBagConfig
        >>> entry = parameter_sharding(
        ...     ShardingType.ROW_WISE, row_wise_shards(8, 4, [0, 1]), "cpu"
        ... )
        >>> rules = SharderSupport(
        ...     2, False, list(ShardingType), list(EmbeddingComputeKernel), None
        ... )
        >>> config = EmbeddingBagConfig(8, 4, "item", feature_names=["item"])
        >>> table = place_table(config, ["item"], torch.empty(8, 4), entry, rules)
        >>> ten_each = StepBatches([{"item": 3}] * 2, ids=lambda rank, feature, first, end: 10)
        >>> [
        ...     step_traffic([table], ten_each)[stage, 0, 1]
        ...     for stage in (SIZES, IDS, ROWS, GRADIENTS)
        ... ]
        [24, 52, 48, 48]
    """
    world_size = len(batches.samples)
    sent: Bytes = Counter()
    by_type: dict[ShardingType, list[Table]] = {}
    for table in tables:
        by_type.setdefault(table.sharding_type, []).append(table)
    sent += _replicated(by_type.pop(ShardingType.DATA_PARALLEL, []), batches)
    for kind, members in by_type.items():
        slots = [
            [
                Slot(feature, table, shard)
                for table in members
                for shard in table.shards
                if shard.rank == rank
                for feature in table.features
            ]
            for rank in range(world_size)
        ]
        sent += _input(members, slots, batches)
        elements = [
            [sum(slot.elements(batches, to) for slot in mine) for to in range(world_size)]
            for mine in slots
        ]
        if kind in _INSIDE_HOSTS and members[0].pooling != "none":
            elements = _by_way_of_hosts(elements, local_size or world_size)
        for source in range(world_size):
            for destination in range(world_size):
                if source != destination:
                    sent[ROWS, source, destination] += row_bytes * elements[source][destination]
                    sent[GRADIENTS, source, destination] += (
                        gradient_bytes * elements[destination][source]
                    )
    return sent


def _input(tables: Sequence[Table], slots: Sequence[Sequence[Slot]], batches: StepBatches) -> Bytes:
    """The way in of one sharding type."""
    id_bytes = _id_bytes(tables)
    sent: Bytes = Counter()
    for source in range(len(slots)):
        for destination, theirs in enumerate(slots):
            if source == destination:
                continue
            lists = sum(slot.samples(batches, source) for slot in theirs)
            ids = sum(slot.ids(batches, source) for slot in theirs)
            sent[SIZES, source, destination] = 24
            sent[IDS, source, destination] = id_bytes * (lists + ids)
            if batches.variable:
                sent[STRIDES, source, destination] = 8 * len(theirs)
            if tables[0].weighted:
                sent[WEIGHTS, source, destination] = 4 * ids
    return sent


def _by_way_of_hosts(elements: Sequence[Sequence[int]], local_size: int) -> list[list[int]]:
    """From ``elements[source][destination]`` that are looked up to those that are sent: first
    inside, then across.
    """
    world_size = len(elements)
    sent = [[0] * world_size for _ in range(world_size)]
    for source, looked_up in enumerate(elements):
        host, number = divmod(source, local_size)
        for destination, count in enumerate(looked_up):
            # Added up by the rank of my host that has the destination's number, ...
            inside = host * local_size + destination % local_size
            if inside != source:
                sent[source][inside] += count
            # ... and sent on from there, if that is me and the destination is elsewhere.
            elif destination // local_size != host and destination % local_size == number:
                sent[source][destination] += count
    return sent


def _replicated(tables: Sequence[Table], batches: StepBatches) -> Bytes:
    """The gradients of replicated tables, each to every rank: as what was looked up, or as whole
    tables.
    """
    sent: Bytes = Counter()
    if not tables:
        return sent
    ranks = range(len(batches.samples))
    pooled, id_bytes = tables[0].pooling != "none", _id_bytes(tables)
    features = [feature for table in tables for feature in table.features]
    # Bags are padded to the most samples of a feature; a row that is not pooled is a bag of its
    # own, without a length.
    samples = [
        max((batches.samples[rank][feature] for feature in features), default=0) for rank in ranks
    ]
    per_rank: list[_OfRank] = [Counter() for _ in ranks]
    elements = 0
    for table in tables:
        ids = [
            sum(batches.ids(rank, feature, 0, table.rows) for feature in table.features)
            for rank in ranks
        ]
        lists = [len(table.features) * samples[rank] if pooled else 0 for rank in ranks]
        bags = lists if pooled else ids
        weight_bytes = 4 if table.weighted else 0
        looked_up = (
            sum(ids) * (id_bytes + weight_bytes) + sum(lists) * 4 + sum(bags) * table.columns * 4
        )
        rule = table.optimizer
        if looked_up > 8 * table.rows * table.columns and (
            rule is None or rule.max_gradient is None
        ):
            marked = rule is not None and rule.moves_without_gradient
            elements += table.rows * (table.columns + marked)
            continue
        for rank in ranks:
            per_rank[rank][COPIES_IDS] += id_bytes * (lists[rank] + ids[rank])
            per_rank[rank][COPIES_WEIGHTS] += weight_bytes * ids[rank]
            per_rank[rank][COPIES_ROWS] += 4 * bags[rank] * table.columns
    summed = [elements // len(ranks) + (rank < elements % len(ranks)) for rank in ranks]
    for source in ranks:
        for destination in ranks:
            if source == destination:
                continue
            for stage, count in per_rank[source].items():
                sent[stage, source, destination] = count
            sent[COPIES_SIZES, source, destination] = 8 * (len(features) + pooled)
            sent[COPIES_SUMS, source, destination] = 4 * (summed[destination] + summed[source])
    return sent


def _id_bytes(tables: Sequence[Table]) -> int:
    """What an id takes on the wire: tables of one sharding type travel together."""
    return 4 if all(table.rows < 2**31 for table in tables) else 8
