"""A step of a plan on machines that need not exist: rows looked up, bytes on every link, milliseconds, and who waits.

    plan + topology + load  ->  rows by rank  ->  bytes by link  ->  ms by rank and phase  ->  ms of the step

Time is what an alpha-beta model says. An exchange takes a latency, and of each rank the slower of its two links: what
it sends or gets inside its host, and what it sends or gets across. Lookups and updates take the bytes that they move,
at the speed of the memory. The five phases of a step are

    ids         sizes, ids and weights travel to the ranks that hold their rows
    lookup      rows are read and pooled
    rows        they travel home
    gradients   they travel back; those of replicated tables travel to all ranks
    update      the rows that were looked up are moved

and each begins when the slowest rank has finished the one before: a step is the sum, over the phases, of the slowest
rank's time.

Corresponds to nothing in TorchRec; the bytes are those that `traffic` counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import nn

from tutorec.distributed import shard_traffic as stages
from tutorec.distributed.plan import ParameterSharding, ShardingPlan, ShardingType
from tutorec.distributed.planner.input_checks import able
from tutorec.distributed.shard_traffic import StepBatches
from tutorec.distributed.simulate import report
from tutorec.distributed.simulate.exchanges import Exchange
from tutorec.distributed.simulate.ids import Floats
from tutorec.distributed.simulate.loads import Load, RankLoads, rank_loads
from tutorec.distributed.simulate.placed import Configs, placed_tables, ranks_per_host
from tutorec.distributed.simulate.work import RankWork, SimulatedTable, step_work
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PHASES = ("ids", "lookup", "rows", "gradients", "update")
PARTS = ("memory", "inside hosts", "across hosts", "latency")
_TO_HOLDERS = (stages.SIZES, stages.STRIDES, stages.IDS, stages.WEIGHTS)


@dataclass(frozen=True)
class HotRow:
    """A row that comes often.

    Args:
        table: Its name.
        row: Its number.
        reads: Times that all ranks together ask for it in a step.
        of_table: The part of the table's ids that these are.
        ranks: Who holds it: several where columns are cut; all of them where the table is replicated.
        of_rank: The part of the lookups of the first of these ranks; of a replicated table, of all ranks together.
    """

    table: str
    row: int
    reads: float
    of_table: float
    ranks: tuple[int, ...]
    of_rank: float


@dataclass(frozen=True)
class Straggler:
    """A rank that the others wait for.

    Args:
        rank: Which.
        ms: Its own time, without waiting.
        behind: By how much that is more than the mean, as a part of it.
        phase: Where it loses most.
        reason: In words.
    """

    rank: int
    ms: float
    behind: float
    phase: str
    reason: str


@dataclass(frozen=True, eq=False)
class Simulation:
    """One step of a plan, by rank, link and phase. Arrays have a number for each of W ranks unless they say otherwise.

    Args:
        world_size: W.
        local_size: L, ranks per host.
        tables: As the plan places them.
        samples: B of each rank, the most of a feature.
        work: Rows that ranks look up and update.
        exchanges: What they send.
        parts: Phase -> part -> ms of each rank: phases in the order of time, parts as in `step_parts`.
        hot_rows: Rows that come most often, the most frequent first.

    Example:
        >>> from tutorec.distributed.planner.topology import Topology
        >>> from tutorec.distributed.shard_geometry import table_wise_sharding
        >>> from tutorec.modules.embedding_configs import EmbeddingBagConfig
        >>> item = EmbeddingBagConfig(8, 4, "item", feature_names=["item"])
        >>> plan = {"item": table_wise_sharding((8, 4), rank=1, device_type="cpu")}
        >>> step = simulate(plan, Topology(2, "cpu"), [item], Load(batch_size=3, pooling_factor=2))
        >>> step.work.lookups.tolist(), step.matrix("output rows").tolist()  # 3 samples of 4 columns, 4 bytes each
        ([0.0, 12.0], [[0.0, 0.0], [48.0, 0.0]])
    """

    world_size: int
    local_size: int
    tables: Sequence[SimulatedTable]
    samples: Floats
    work: RankWork
    exchanges: Sequence[Exchange]
    parts: Mapping[str, Mapping[str, Floats]]
    hot_rows: Sequence[HotRow] = field(default_factory=tuple)

    # --- time

    @cached_property
    def phases(self) -> dict[str, Floats]:
        """Phase -> milliseconds of each rank, in the order of time."""
        return {phase: np.sum(list(parts.values()), axis=0) for phase, parts in self.parts.items()}

    @cached_property
    def rank_ms(self) -> Floats:
        """Milliseconds that each rank works and sends, without waiting."""
        return np.sum(list(self.phases.values()), axis=0)

    @cached_property
    def step_ms(self) -> float:
        """Milliseconds of the step, its critical path: of each phase the slowest rank."""
        return float(sum(times.max() for times in self.phases.values()))

    @cached_property
    def step_parts(self) -> dict[str, float]:
        """What the step's milliseconds are spent on, by the slowest rank of each phase.

        ``memory`` (lookups and updates), ``inside hosts`` and ``across hosts`` (exchanges, of which the slower link
        counts), ``latency``.
        """
        found: dict[str, float] = {**dict.fromkeys(PARTS, 0.0)}
        for phase, parts in self.parts.items():
            slowest = int(self.phases[phase].argmax())
            for part, times in parts.items():
                found[part] += float(times[slowest])
        return found

    @property
    def busiest_ms(self) -> float:
        """Milliseconds of the rank that does most: what a planner minimises. At most `step_ms`."""
        return float(self.rank_ms.max())

    def stragglers(self, behind: float = 0.1) -> list[Straggler]:
        """Ranks whose own time is more than so much above the mean, the slowest first.

        Args:
            behind: 0.1 is a tenth.

        Raises:
            ValueError: It is negative.
        """
        if behind < 0:
            raise ValueError(f"stragglers(behind={behind}): give a part of the mean from 0, e.g. 0.1")
        mean = float(self.rank_ms.mean())
        slow = [
            rank
            for rank in np.argsort(-self.rank_ms, kind="stable").tolist()
            if self.rank_ms[rank] > mean * (1 + behind)
        ]
        return [self._straggler(rank, mean) for rank in slow]

    def _straggler(self, rank: int, mean: float) -> Straggler:
        loses = {phase: float(times[rank] - times.mean()) for phase, times in self.phases.items()}
        phase = max(loses, key=loses.__getitem__)
        lookups = self.work.lookups
        reason = f"{loses[phase]:.3g} ms more than the mean for {phase}"
        if lookups[rank] > lookups.mean():
            reason += f"; {lookups[rank] / lookups.mean():.2f} times the mean of rows looked up"
        hot = [
            each
            for each in self.hot_rows
            if rank in each.ranks and each.of_rank > 0.1 and len(each.ranks) < self.world_size
        ]
        if hot:
            reason += f", {hot[0].of_rank:.0%} of them row {hot[0].row} of table {hot[0].table!r}"
        return Straggler(rank, float(self.rank_ms[rank]), float(self.rank_ms[rank]) / mean - 1, phase, reason)

    # --- as text, as HTML, as a figure

    def __str__(self) -> str:
        return report.text(self)

    def _repr_html_(self) -> str:
        """As the text, with tables as tables."""
        return report.html(self)

    def plot(self) -> Figure:
        """Milliseconds of each rank by phase, and the bytes on its two links; a matplotlib figure."""
        return report.figure(self)

    # --- bytes; the words are those of `traffic.Traffic`

    def sent(self, stage: str | None = None, *, crossing: bool | None = None) -> Floats:
        """Bytes that each rank sends.

        Args:
            stage: Those of one stage; None: of all.
            crossing: True: those that leave their host; False: those that stay on it; None: both.
        """
        return self._by_rank([exchange.sent for exchange in self._of(stage)], crossing)

    def received(self, stage: str | None = None, *, crossing: bool | None = None) -> Floats:
        """Bytes that each rank gets; arguments as in `sent`."""
        return self._by_rank([exchange.received for exchange in self._of(stage)], crossing)

    def host_sent(self, stage: str | None = None) -> Floats:
        """Bytes that leave each host, one number per host."""
        return self.sent(stage, crossing=True).reshape(-1, self.local_size).sum(axis=1)

    def host_received(self, stage: str | None = None) -> Floats:
        """Bytes that reach each host from others, one number per host."""
        return self.received(stage, crossing=True).reshape(-1, self.local_size).sum(axis=1)

    def total(self, stage: str | None = None, *, crossing: bool | None = None) -> float:
        """Bytes that all ranks send; arguments as in `sent`."""
        return float(self.sent(stage, crossing=crossing).sum())

    def by_stage(self, *, crossing: bool | None = None) -> dict[str, float]:
        """Bytes sent in each stage; ``crossing`` as in `sent`."""
        return {stage: self.total(stage, crossing=crossing) for stage in self.issues()}

    def issues(self) -> dict[str, int]:
        """How many exchanges each stage has."""
        found: dict[str, int] = {}
        for exchange in self.exchanges:
            found[exchange.stage] = found.get(exchange.stage, 0) + 1
        return found

    def matrix(self, stage: str | None = None) -> Floats:
        """Bytes from each rank to each, ``[W, W]``.

        Raises:
            ValueError: There are more than 512 ranks.
        """
        return sum((exchange.matrix() for exchange in self._of(stage)), np.zeros((self.world_size, self.world_size)))

    def _of(self, stage: str | None) -> list[Exchange]:
        return [exchange for exchange in self.exchanges if stage in (None, exchange.stage)]

    def _by_rank(self, parts: Sequence[Floats], crossing: bool | None) -> Floats:
        both = sum(parts, np.zeros((2, self.world_size)))
        return both.sum(axis=0) if crossing is None else both[int(crossing)]


def simulate(
    plan: ShardingPlan | Mapping[str, ParameterSharding],
    topology: Any,
    tables: nn.Module | Configs | Mapping[str, Configs],
    load: Load | RankLoads | StepBatches | KeyedJaggedTensor | Sequence[KeyedJaggedTensor],
    *,
    weighted: bool = False,
    row_bytes: int = 4,
    gradient_bytes: int = 4,
    slow: Mapping[int, float] | None = None,
) -> Simulation:
    """A step of a plan: what ranks look up and send, and how long that takes. Nothing runs; no device is needed.

    Its bytes are those of real processes on the same batches, after their first step. Up to thousands of ranks it takes
    seconds; a rank's neighbours with equally large batches cost nothing.

    Args:
        plan: Of a model, or of one collection: the planner's or a hand-written one.
        topology: The ranks, their hosts, and speeds in bytes per ms.
        tables: The model, the tables of its only collection, or path -> tables of each.
        load: What ranks bring: `Load` (expected numbers), batches (one for each rank, or fewer that come again in
            turn), or `StepBatches`.
        weighted: Whether ids come with weights, where ``tables`` is no model that says so itself.
        row_bytes: Of a number on its way home: 4, or 2 where a codec makes it float16 or bfloat16.
        gradient_bytes: Of a number on its way back, likewise.
        slow: Rank -> by what factor its memory is slower than the others'.

    Raises:
        TypeError: An argument of another kind.
        ValueError: Plan, tables, load and topology do not belong together; a slow rank does not exist.
        PlannerError: Nothing is known of a compute kernel, or the topology is none.
    """
    able("topology", topology, "world_size local_world_size", "give Topology(...) or Topology.preset(...)")
    world_size, local_size = topology.world_size, ranks_per_host(topology)
    placed = placed_tables(plan, tables, topology, weighted)
    loads = rank_loads(load, world_size)
    work, exchanges = step_work(placed, loads, local_size, {"rows": row_bytes, "gradients": gradient_bytes})
    features = {feature for table in placed for feature in table.features}
    samples = np.max([np.zeros(len(loads.members)), *map(loads.samples, sorted(features))], axis=0)[loads.classes]
    return Simulation(
        world_size=world_size,
        local_size=local_size,
        tables=placed,
        samples=samples,
        work=work,
        exchanges=exchanges,
        parts=_parts(work, exchanges, topology, _slowness(slow, world_size)),
        hot_rows=_hot_rows(placed, loads, work),
    )


def _parts(
    work: RankWork, exchanges: Sequence[Exchange], topology: Any, slowness: Floats
) -> dict[str, dict[str, Floats]]:
    """Milliseconds of each rank in each phase, by what they are spent on."""
    world_size = len(work.lookups)
    found = {phase: {part: np.zeros(world_size) for part in PARTS} for phase in PHASES}
    found["lookup"]["memory"] += slowness * work.lookup_ms
    found["update"]["memory"] += slowness * work.update_ms
    for exchange in exchanges:
        phase = "ids" if exchange.stage in _TO_HOLDERS else "rows" if exchange.stage == stages.ROWS else "gradients"
        # Links carry both ways at once, and the two links of a rank work side by side: the slower one counts.
        inside, across = np.maximum(exchange.sent, exchange.received)
        inside, across = inside / topology.intra_host_bw, across / topology.inter_host_bw
        found[phase]["latency"] += topology.latency_ms
        found[phase]["inside hosts"] += np.where(inside > across, inside, 0.0)
        found[phase]["across hosts"] += np.where(inside > across, 0.0, across)
    return found


def _slowness(slow: Mapping[int, float] | None, world_size: int) -> Floats:
    factors = np.ones(world_size)
    for rank, factor in (slow or {}).items():
        if not 0 <= rank < world_size or not factor > 0:
            raise ValueError(
                f"slow={{{rank}: {factor}}} for {world_size} ranks: give a rank from 0 to {world_size - 1}, and "
                "a factor above 0"
            )
        factors[rank] = factor
    return factors


def _hot_rows(tables: Sequence[SimulatedTable], loads: RankLoads, work: RankWork, most: int = 10) -> list[HotRow]:
    """Rows that come most often, of all tables."""
    found = []
    for table in tables:
        whole = np.array([0]), np.array([table.rows])
        ids = sum(float(loads.members @ loads.ids(f, table.rows, *whole)[:, 0]) for f in table.features)
        for row, reads in loads.hottest(table.features, table.rows, most):
            copied = table.sharding_type is ShardingType.DATA_PARALLEL
            holds = (table.pieces[:, 1] <= row) & (row < table.pieces[:, 2])
            ranks = range(len(loads.classes)) if copied else np.unique(table.pieces[holds, 0]).tolist()
            # A rank may hold several slices of the columns of a row, and looks each of them up.
            slices = 1 if copied else int((holds & (table.pieces[:, 0] == ranks[0])).sum())
            lookups = work.lookups.sum() if copied else work.lookups[ranks[0]]
            found.append(HotRow(table.name, row, reads, reads / ids, tuple(ranks), float(reads * slices / lookups)))
    return sorted(found, key=lambda hot: -hot.reads)[:most]
