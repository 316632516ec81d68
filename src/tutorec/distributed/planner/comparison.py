"""Plans side by side: what a step takes under each, and by which sharding types."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tutorec._text import TextTable, bytes_text, number_text
from tutorec.distributed.plan.plan import ShardingType
from tutorec.distributed.planner.report import PlannedSharding, named_entries
from tutorec.errors import PlannerError

# Columns of a line, and copied tables that are named in it.
_WIDTH = 140
_NAMED = 3
_MS_DIGITS = 4


@dataclass(frozen=True)
class ComparedPlan:
    """The numbers of one plan among others.

    Args:
        ms: Estimated milliseconds of a step.
        above_best: By which fraction ``ms`` is above that of the best of the plans: 0.1 for 10 %.
        bound_ms: No plan for the same inputs takes less.
        seconds: Time that the planner took; None if it is not known.
        types: Sharding type -> number of its tables, the most frequent type first.
        copied: Names of the tables that every rank has a copy of (``data_parallel``).
        largest_rank_bytes: Bytes of tables, their state and their buffers on the rank with the
            most.
        parts: Milliseconds of the slowest rank by what it does, and the latency of the exchanges;
            their sum is ``ms``.
    """

    ms: float
    above_best: float
    bound_ms: float
    seconds: float | None
    types: dict[str, int]
    copied: tuple[str, ...]
    largest_rank_bytes: int
    parts: dict[str, float]


class PlanComparison(Mapping[str, ComparedPlan]):
    """Name -> numbers of a plan; prints as a table, in a notebook as HTML.

    Args:
        plans: Name -> numbers, in the order in which they are shown.
    """

    def __init__(self, plans: Mapping[str, ComparedPlan]) -> None:
        self._plans = dict(plans)

    def __getitem__(self, name: str) -> ComparedPlan:
        return self._plans[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._plans)

    def __len__(self) -> int:
        return len(self._plans)

    @property
    def best(self) -> str:
        """Name of the plan with the shortest step."""
        return min(self._plans, key=lambda name: self._plans[name].ms)

    def __repr__(self) -> str:
        return repr(self._table())

    def _repr_html_(self) -> str:
        return self._table().html()

    def _table(self) -> TextTable:
        head = ["plan", "ms a step", "above best", "s to plan", "tables of each type"]
        head += ["copied", "largest rank"]
        rows = [[name, *self._cells(plan)] for name, plan in self._plans.items()]
        return TextTable(head, rows, right=[1, 2, 3, 6], width=_WIDTH)

    @staticmethod
    def _cells(plan: ComparedPlan) -> list[str]:
        return [
            number_text(plan.ms, _MS_DIGITS),
            f"{100 * plan.above_best:.1f} %" if plan.above_best else "best",
            "" if plan.seconds is None else f"{plan.seconds:.2f}",
            ", ".join(f"{count:,} {sharding_type}" for sharding_type, count in plan.types.items()),
            _few(plan.copied),
            bytes_text(plan.largest_rank_bytes),
        ]


def compare(plans: Mapping[str, PlannedSharding]) -> PlanComparison:
    """Put plans side by side.

    The plans may be for different machines, batches or constraints. Each is estimated for what it
    was planned for; no search is run.

    Args:
        plans: Name -> plan, as `EmbeddingShardingPlanner.plan` returns it.

    Raises:
        ValueError: There is no plan.
        PlannerError: A plan has no tables, or has no report.

    Example:
        >>> from tutorec.distributed.planner import EmbeddingShardingPlanner, Topology
        >>> from tutorec.modules.embedding_configs import EmbeddingBagConfig
        >>> from tutorec.modules.embedding_modules import EmbeddingBagCollection
        >>> item = EmbeddingBagConfig(10_000_000, 64, "item", feature_names=["item"])
        >>> model = EmbeddingBagCollection([item], device="meta")
        >>> planners = [
        ...     EmbeddingShardingPlanner(Topology.laptop(2), size) for size in (64, 512)
        ... ]
        >>> small, large = (planner.plan(model) for planner in planners)
        >>> compared = compare({"64 samples": small, "512 samples": large})
        >>> print(compared)  # doctest: +ELLIPSIS
        plan         ms a step  above best  s to plan  tables of each type  copied  largest rank
        -----------  ---------  ----------  ---------  -------------------  ------  ------------
        64 samples       1.299        best   ...  1 data_parallel      item        2.38 GiB
        512 samples      1.989      53.1 %   ...  1 data_parallel      item        2.38 GiB
        >>> compared.best, compared["64 samples"].types
        ('64 samples', {'data_parallel': 1})
    """
    if not plans:
        raise ValueError("there is nothing to compare: pass at least one plan, as {name: plan}")

    for name, plan in plans.items():
        if not plan.plan:
            raise PlannerError(f"plan {name!r} has no table: leave it out")
        if getattr(plan, "report", None) is None:  # a ShardingPlan, written by hand or loaded
            raise PlannerError(
                f"plan {name!r} has no report of a planner: EmbeddingShardingPlanner(...).estimate("
                "plan, model) gives it one"
            )

    best = min(plan.report.cost for plan in plans.values() if plan.report is not None)
    return PlanComparison({name: _compared(plan, best) for name, plan in plans.items()})


def _compared(plan: PlannedSharding, best: float) -> ComparedPlan:
    report = plan.report
    assert report is not None, "compare has refused plans without one"
    entries = named_entries(plan)
    types = Counter(entry.sharding_type for entry in entries.values())
    copied = ShardingType.DATA_PARALLEL.value

    return ComparedPlan(
        ms=report.cost,
        above_best=report.cost / best - 1 if best else 0.0,
        bound_ms=report.bound.ms,
        seconds=report.seconds or None,
        types=dict(types.most_common()),
        copied=tuple(name for name, entry in entries.items() if entry.sharding_type == copied),
        largest_rank_bytes=int(report.rank_memory.sum(axis=1).max()),
        parts=report.step_parts,
    )


def _few(names: tuple[str, ...]) -> str:
    """The first names, and the number of the others."""
    more = len(names) - _NAMED
    listed = ", ".join(names[:_NAMED])
    return f"{listed} and {more:,} more" if more > 0 else listed
