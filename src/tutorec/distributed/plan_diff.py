"""What is different between two plans, table by table, and how much would have to move from one to the other.

Used by `ShardingPlan.diff`; works on plans of any origin: planned, written by hand, read from a file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

from tutorec.distributed.text_table import TextTable, bytes_text, ranks_text, several

if TYPE_CHECKING:
    from tutorec.distributed.plan import ParameterSharding, ShardingPlan

_ELEMENT_BYTES = 4
# Tables that are printed; the others are counted.
_PRINTED = 40

# (row, column, end row, end column)
_Rectangle = tuple[int, int, int, int]


@dataclass(frozen=True)
class TableChange:
    """What is different for one table.

    Args:
        path: Of its collection in the model.
        table: Its name.
        before: Sharding type, kernel, ranks of the first plan, in words; empty where it lacks the table.
        after: Likewise of the second.
        moved_bytes: Of FP32 weights that a rank holds after and not before.
    """

    path: str
    table: str
    before: str
    after: str
    moved_bytes: int


@dataclass(frozen=True)
class PlanDiff:
    """The differences of two plans; false where there is none. Printed as a table, in a notebook as HTML.

    Args:
        changes: Of the tables that differ, in the order of the first plan, then of the second.
        alike: How many tables do not.

    Example:
        >>> from tutorec.distributed.plan import EmbeddingModuleShardingPlan, ShardingPlan
        >>> from tutorec.distributed.shard_geometry import table_wise_sharding
        >>> plans = [ShardingPlan({"": EmbeddingModuleShardingPlan(item=table_wise_sharding((8, 4), rank, "cpu"))})
        ...          for rank in (0, 1)]
        >>> print(plan_diff(*plans))
        1 table differs, 0 are alike; 128 B of weights come to ranks that do not hold them
        <BLANKLINE>
        table  before                   after                    comes in
        -----  -----------------------  -----------------------  --------
        item   table_wise, fused, on 0  table_wise, fused, on 1     128 B
        >>> bool(plan_diff(plans[0], plans[0]))
        False
    """

    changes: tuple[TableChange, ...]
    alike: int

    @property
    def moved_bytes(self) -> int:
        """Bytes of FP32 weights that ranks hold in the second plan and not in the first."""
        return sum(change.moved_bytes for change in self.changes)

    def __bool__(self) -> bool:
        return bool(self.changes)

    def __len__(self) -> int:
        return len(self.changes)

    def __iter__(self) -> Iterator[TableChange]:
        return iter(self.changes)

    def __str__(self) -> str:
        return self._summary() if not self.changes else f"{self._summary()}\n\n{self._table()}{self._rest()}"

    def _repr_html_(self) -> str:
        """For a notebook."""
        table = self._table().html() if self.changes else ""
        return f"<p>{escape(self._summary())}</p>{table}<p>{escape(self._rest().strip())}</p>"

    def _summary(self) -> str:
        if not self.changes:
            return f"the plans are the same for {several(self.alike, 'table')}"
        differ = "differs" if len(self.changes) == 1 else "differ"
        return (
            f"{several(len(self.changes), 'table')} {differ}, {self.alike:,} are alike; {bytes_text(self.moved_bytes)} "
            "of weights come to ranks that do not hold them"
        )

    def _table(self) -> TextTable:
        shown = self.changes[:_PRINTED]
        rows = [
            [
                f"{change.path}.{change.table}".strip("."),
                change.before or "not there",
                change.after or "not there",
                bytes_text(change.moved_bytes),
            ]
            for change in shown
        ]
        return TextTable(["table", "before", "after", "comes in"], rows, right=[3], width=120)

    def _rest(self) -> str:
        more = len(self.changes) - _PRINTED
        return f"\nand {several(more, 'table')} more: iterate over the diff for all of them" if more > 0 else ""


def plan_diff(before: ShardingPlan, after: ShardingPlan) -> PlanDiff:
    """The differences between two plans.

    Two entries are alike if they cut and place the table alike, by kernels of the same name; on which device of its
    host a rank keeps it (``cpu``, ``cuda:1``) does not matter.
    """
    changes, alike = [], 0
    for path, table in _tables(before, after):
        one, other = (_entry(plan, path, table) for plan in (before, after))
        if one is not None and other is not None and _compared(one) == _compared(other):
            alike += 1
            continue
        changes.append(TableChange(path, table, _words(one), _words(other), _moved_bytes(one, other)))
    return PlanDiff(tuple(changes), alike)


def _tables(*plans: ShardingPlan) -> list[tuple[str, str]]:
    return list(dict.fromkeys((path, table) for plan in plans for path, of in plan.plan.items() for table in of))


def _entry(plan: ShardingPlan, path: str, table: str) -> ParameterSharding | None:
    module_plan = plan.get_plan_for_module(path)
    return module_plan.get(table) if module_plan is not None else None


def _compared(entry: ParameterSharding) -> tuple[object, ...]:
    kernel = entry.compute_kernel.removeprefix("batched_")
    held = _held(entry)
    return entry.sharding_type, kernel, sorted(held.items()) if held else sorted(entry.ranks or ())


def _words(entry: ParameterSharding | None) -> str:
    if entry is None:
        return ""
    where = ranks_text(entry.ranks) if entry.ranks is not None else "all ranks"
    widths = {rectangle[3] - rectangle[1] for of in _held(entry).values() for rectangle in of}
    shape = entry.table_shape()
    cut = shape is not None and entry.shards() and max(widths, default=0) < shape[1]
    width = f" of {max(widths)} columns" if cut else ""
    return f"{entry.sharding_type}{width}, {entry.compute_kernel}, on {where}"


def _held(entry: ParameterSharding) -> dict[int, list[_Rectangle]]:
    """Rank -> the rectangles of the table that it holds."""
    held: dict[int, list[_Rectangle]] = {}
    for shard in entry.shards():
        rank = shard.placement.rank() if shard.placement is not None else None
        (row, column), (rows, columns) = shard.shard_offsets, shard.shard_sizes
        if rank is not None and rows and columns:
            held.setdefault(rank, []).append((row, column, row + rows, column + columns))
    shape = entry.table_shape()
    if not entry.shards() and shape is not None:  # every rank has a copy
        held = {rank: [(0, 0, *shape)] for rank in entry.ranks or ()}
    return {rank: sorted(of) for rank, of in held.items()}


def _moved_bytes(before: ParameterSharding | None, after: ParameterSharding | None) -> int:
    """Bytes that ranks hold after and not before, if both plans have the table."""
    if before is None or after is None:
        return 0
    had: Mapping[int, Sequence[_Rectangle]] = _held(before)
    elements = 0
    for rank, rectangles in _held(after).items():
        for mine in rectangles:
            elements += _area(mine) - sum(_area(_common(mine, other)) for other in had.get(rank, ()))
    return elements * _ELEMENT_BYTES


def _common(one: _Rectangle, other: _Rectangle) -> _Rectangle:
    return (*map(max, one[:2], other[:2]), *map(min, one[2:], other[2:]))  # type: ignore[return-value]


def _area(rectangle: _Rectangle) -> int:
    row, column, end_row, end_column = rectangle
    return max(end_row - row, 0) * max(end_column - column, 0)
