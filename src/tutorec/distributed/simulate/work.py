"""What a plan makes ranks do in a step: rows looked up and updated, and exchanges.

The bytes of exchanges are computed for all ranks of a class at once; tests hold them to be equal to what the counter
sees. A lookup of i ids that gives n numbers moves ``i * (8 + max(4 * D, 128)) + 4 * n`` bytes, and an
update moves that, times the topology's multiplier, and takes the topology's time of each id besides: as the planner
estimates expected batches, and here of any.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tutorec._kernels.optimizer_spec import OptimizerSpec
from tutorec.distributed.collectives import sparse_gradients
from tutorec.distributed.collectives.kjt import IDS_STAGE, SIZES_STAGE, STRIDES_STAGE, WEIGHTS_STAGE
from tutorec.distributed.collectives.rows import GRADIENTS_STAGE, ROWS_STAGE
from tutorec.distributed.plan import ShardingType
from tutorec.distributed.planner.constants import DENSE_GRADIENT_PASSES, ROW_READ_BYTES
from tutorec.distributed.simulate.exchanges import Exchange, Reach
from tutorec.distributed.simulate.ids import Floats, Ints
from tutorec.distributed.simulate.loads import RankLoads

_ID = 8  # bytes of an id that is read
_BY_WAY_OF_HOSTS = (ShardingType.TABLE_ROW_WISE, ShardingType.GRID_SHARD)


@dataclass(frozen=True, eq=False)
class SimulatedTable:
    """A table as a plan places it; P pieces.

    Args:
        path: Of its collection in the model.
        name: Of the table.
        rows: R.
        columns: D.
        features: Input features that read it.
        pooled: Whether the rows of a bag become one.
        weighted: Whether each id comes with a weight.
        sharding_type: How it is divided.
        pieces: ``[P, 4]``: rank, first row, end row, columns; of a replicated table none.
        read_speed: Bytes per ms that its kernel moves.
        update_factor: Time of an update for the time of a lookup.
        id_ms: Milliseconds of each id of an update, beyond the bytes that are moved.
        leaves_gradient: Whether its kernel leaves a gradient as large as the piece.
        optimizer: What updates it in backward; None: one that neither moves rows whose gradient is 0 nor limits
            gradients.
    """

    path: str
    name: str
    rows: int
    columns: int
    features: tuple[str, ...]
    pooled: bool
    weighted: bool
    sharding_type: ShardingType
    pieces: Ints
    read_speed: float
    update_factor: float
    id_ms: float
    leaves_gradient: bool
    optimizer: OptimizerSpec | None = None

    def lookup_ms(self, ids: Floats, columns: Ints | int, numbers: Floats) -> Floats:
        """Milliseconds to look so many ids up in pieces of so many columns, which gives so many numbers."""
        row = _ID + np.maximum(4 * columns, ROW_READ_BYTES)
        return (ids * row + 4.0 * numbers) / self.read_speed

    def update_ms(self, ids: Floats, columns: Ints | int, numbers: Floats) -> Floats:
        """Milliseconds to update rows by the gradients of so many numbers."""
        return self.update_factor * self.lookup_ms(ids, columns, numbers) + self.id_ms * ids

    def whole_ms(self, numbers: Ints) -> Floats:
        """Milliseconds that the gradient of a whole piece of so many numbers takes, beyond the rows of the batch."""
        return DENSE_GRADIENT_PASSES * 4 * numbers.astype(np.float64) / self.read_speed


@dataclass(eq=False)
class RankWork:
    """What each rank does in its memory in a step, ``[W]`` each.

    Args:
        lookups: Rows of pieces that are looked up; a row cut into two slices of columns is two.
        distinct: Rows of pieces that the update touches, each once.
        read_bytes: Of the rows that are looked up.
        lookup_ms: Milliseconds of lookups.
        update_ms: Milliseconds of updates. Of replicated tables every rank applies the gradients of all ranks, or,
            where whole tables were added up, those of a table.
    """

    lookups: Floats
    distinct: Floats
    read_bytes: Floats
    lookup_ms: Floats
    update_ms: Floats

    @classmethod
    def none(cls, world_size: int) -> RankWork:
        """No work yet."""
        return cls(*(np.zeros(world_size) for _ in range(5)))


def step_work(
    tables: Sequence[SimulatedTable], loads: RankLoads, local_size: int, wire: Mapping[str, int]
) -> tuple[RankWork, list[Exchange]]:
    """The work of a step, and its exchanges in the order of their stages.

    Args:
        tables: As the plan places them.
        loads: What each rank brings.
        local_size: L, ranks per host.
        wire: ``"rows"`` and ``"gradients"`` -> bytes of a number on its way.
    """
    world_size = len(loads.classes)
    work, exchanges = RankWork.none(world_size), []
    groups: dict[tuple[str, ShardingType], list[SimulatedTable]] = {}
    for table in tables:
        groups.setdefault((table.path, table.sharding_type), []).append(table)
    for (_, kind), members in groups.items():
        if kind is ShardingType.DATA_PARALLEL:
            exchanges += _replicated(members, loads, local_size, work)
        else:
            exchanges += _sharded(members, loads, local_size, wire, work)
    return work, [exchange for exchange in exchanges if exchange.connects]


@dataclass(eq=False)
class _Slots:
    """What one rank of each class sends to, and gets from, each holder of pieces of one sharding type."""

    ids: Floats  # [C, W]
    lists: Floats  # [C, W]
    numbers: Floats  # [C, W]: of rows that come home
    count: Floats  # [W]: slots


def _sharded(
    tables: Sequence[SimulatedTable], loads: RankLoads, local_size: int, wire: Mapping[str, int], work: RankWork
) -> list[Exchange]:
    slots = _slots(tables, loads, work)
    world_size, kind, path = len(loads.classes), tables[0].sharding_type, tables[0].path
    of_class = np.zeros((world_size, len(loads.members)))
    of_class[np.arange(world_size), loads.classes] = 1.0
    one = np.ones((world_size, 1))
    id_bytes = _id_bytes(tables)

    def exchange(stage: str, left: Floats, right: Floats, reach: Reach = Reach.ALL) -> Exchange:
        return Exchange(stage, path, left, right, local_size, reach)

    exchanges = [
        exchange(SIZES_STAGE, 24 * one, one.T),
        exchange(IDS_STAGE, of_class, id_bytes * (slots.lists + slots.ids)),
    ]
    if loads.variable:
        exchanges.append(exchange(STRIDES_STAGE, one, 8 * slots.count[None]))
    if tables[0].weighted:
        exchanges.append(exchange(WEIGHTS_STAGE, of_class, 4 * slots.ids))
    rows, gradients = wire["rows"] * slots.numbers, wire["gradients"] * slots.numbers
    if kind in _BY_WAY_OF_HOSTS and tables[0].pooled:
        # Of each class, how many ranks have my local number: their samples are added up, or handed out, by me.
        numbers = np.arange(world_size) % local_size
        alike = np.zeros((local_size, len(loads.members)))
        np.add.at(alike, (numbers, loads.classes), 1.0)
        return [
            *exchanges,
            exchange(ROWS_STAGE, rows.T, alike[numbers].T, Reach.HOST),
            exchange(ROWS_STAGE, rows.T, of_class.T, Reach.PEERS),
            exchange(GRADIENTS_STAGE, of_class, gradients, Reach.PEERS),
            exchange(GRADIENTS_STAGE, alike[numbers], gradients, Reach.HOST),
        ]
    return [*exchanges, exchange(ROWS_STAGE, rows.T, of_class.T), exchange(GRADIENTS_STAGE, of_class, gradients)]


def _slots(tables: Sequence[SimulatedTable], loads: RankLoads, work: RankWork) -> _Slots:
    """The slots of one sharding type; what they make their ranks do is added to ``work``."""
    world_size, classes = len(loads.classes), len(loads.members)
    shape = (classes, world_size)
    slots = _Slots(np.zeros(shape), np.zeros(shape), np.zeros(shape), np.zeros(world_size))
    for table in tables:
        ranks, starts, ends, columns = table.pieces.T
        for feature in table.features:
            ids = loads.ids(feature, table.rows, starts, ends)
            samples = loads.samples(feature)
            lists = np.repeat(samples[:, None], len(ranks), axis=1)
            numbers = (lists if table.pooled else ids) * columns
            for total, part in ((slots.ids, ids), (slots.lists, lists), (slots.numbers, numbers)):
                np.add.at(total.T, ranks, part.T)
            np.add.at(slots.count, ranks, 1.0)
            of_all = loads.members @ ids
            given = loads.members @ numbers
            np.add.at(work.lookups, ranks, of_all)
            np.add.at(work.read_bytes, ranks, 4.0 * of_all * columns)
            np.add.at(work.lookup_ms, ranks, table.lookup_ms(of_all, columns, given))
            np.add.at(work.update_ms, ranks, table.update_ms(of_all, columns, given))
        if table.leaves_gradient:
            np.add.at(work.update_ms, ranks, table.whole_ms((ends - starts) * columns))
        np.add.at(work.distinct, ranks, loads.distinct(table.features, table.rows, starts, ends))
    return slots


def _replicated(tables: Sequence[SimulatedTable], loads: RankLoads, local_size: int, work: RankWork) -> list[Exchange]:
    """Replicated tables: gradients to every rank, as what was looked up or as whole tables."""
    world_size, path = len(loads.classes), tables[0].path
    pooled, weighted = tables[0].pooled, tables[0].weighted
    id_bytes, weight_bytes = _id_bytes(tables), 4 if weighted else 0
    features = [feature for table in tables for feature in table.features]
    # Bags are padded to the most samples of a feature.
    samples = np.max([np.zeros(len(loads.members)), *(loads.samples(feature) for feature in features)], axis=0)
    bag_stages = sparse_gradients.IDS_STAGE, sparse_gradients.WEIGHTS_STAGE, sparse_gradients.ROWS_STAGE
    as_bags = {stage: np.zeros(len(samples)) for stage in bag_stages}
    chosen = 0
    elements, first = 0, np.array([0])
    for table in tables:
        end, size = np.array([table.rows]), np.array([table.rows * table.columns])
        ids = sum((loads.ids(f, table.rows, first, end)[:, 0] for f in table.features), np.zeros(len(samples)))
        lists = len(table.features) * samples if pooled else np.zeros_like(samples)
        numbers = (lists if pooled else ids) * table.columns
        update_ms = table.update_ms(ids, table.columns, numbers)
        work.lookups += ids[loads.classes]
        work.read_bytes += 4.0 * table.columns * ids[loads.classes]
        work.lookup_ms += table.lookup_ms(ids, table.columns, numbers)[loads.classes]
        work.distinct += loads.distinct(table.features, table.rows, first, end)
        if table.leaves_gradient:
            work.update_ms += table.whole_ms(size)
        looked_up = loads.members @ (ids * (id_bytes + weight_bytes) + lists * 4 + numbers * 4)
        rule = table.optimizer
        summable = rule is None or rule.max_gradient is None
        if looked_up > 8 * table.rows * table.columns and world_size > 1 and summable:
            elements += table.rows * (table.columns + (rule is not None and rule.moves_without_gradient))
            work.update_ms += update_ms[loads.classes] + table.whole_ms(size)
            continue
        work.update_ms += loads.members @ update_ms
        chosen += 1
        as_bags[sparse_gradients.IDS_STAGE] += id_bytes * (lists + ids)
        as_bags[sparse_gradients.WEIGHTS_STAGE] += weight_bytes * ids
        as_bags[sparse_gradients.ROWS_STAGE] += 4 * numbers
    one = np.ones((world_size, 1))

    def to_all(stage: str, of_source: Floats, of_destination: Floats = one) -> Exchange:
        return Exchange(stage, path, of_source.reshape(-1, 1), of_destination.reshape(1, -1), local_size)

    exchanges = [to_all(sparse_gradients.SIZES_STAGE, 8.0 * (len(features) + pooled) * one)]
    if chosen:
        without = () if weighted else (sparse_gradients.WEIGHTS_STAGE,)
        exchanges += [to_all(stage, count[loads.classes]) for stage, count in as_bags.items() if stage not in without]
    if elements:
        whole, rest = divmod(elements, world_size)
        summed: Floats = np.full(world_size, 4.0 * whole)
        summed[:rest] += 4.0
        # Every rank adds up a part, and then tells the others.
        exchanges += [to_all(sparse_gradients.SUMS_STAGE, one, summed), to_all(sparse_gradients.SUMS_STAGE, summed)]
    return exchanges


def _id_bytes(tables: Sequence[SimulatedTable]) -> int:
    """What an id takes on the wire: tables of one sharding type travel together."""
    return 4 if all(table.rows < 2**31 for table in tables) else 8
