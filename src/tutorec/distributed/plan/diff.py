"""The difference of two plans, by table, and the bytes to send to get from one to the other.

`ShardingPlan.diff` uses it. It compares plans as data, whether they were planned, written by hand
or read from a file.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape

from tutorec._text import TextTable, bytes_text, ranks_text, several
from tutorec.distributed.plan.json import Stored, StoredTable

_ELEMENT_BYTES = 4
# Tables that are printed; the others are only counted.
_PRINTED = 40

# (row, column, end row, end column)
_Rectangle = tuple[int, int, int, int]


@dataclass(frozen=True)
class TableChange:
    """The difference for one table.

    Args:
        path: Path of its collection in the model.
        table: Its name.
        before: Sharding type, kernel and ranks in the first plan, as text; empty if it lacks the
            table.
        after: The same for the second plan.
        moved_bytes: Bytes of FP32 weights that a rank holds after and not before.
    """

    path: str
    table: str
    before: str
    after: str
    moved_bytes: int


@dataclass(frozen=True)
class PlanDiff:
    """The differences of two plans, as a table; false if there are none.

    Args:
        changes: The tables that differ, in the order of the first plan, then of the second.
        alike: Number of tables that are equal.

    Example:
        >>> from tutorec.distributed.plan.plan import EmbeddingModuleShardingPlan, ShardingPlan
        >>> from tutorec.distributed.plan.geometry import table_wise_sharding
        >>> plans = [
        ...     ShardingPlan(
        ...         {
        ...             "": EmbeddingModuleShardingPlan(
        ...                 item=table_wise_sharding((8, 4), rank, "cpu")
        ...             )
        ...         }
        ...     )
        ...     for rank in (0, 1)
        ... ]
        >>> print(plans[0].diff(plans[1]))
        1 table differs, 0 are alike; 128 B of weights come to ranks that do not hold them
        <BLANKLINE>
        table  before                   after                    comes in
        -----  -----------------------  -----------------------  --------
        item   table_wise, fused, on 0  table_wise, fused, on 1     128 B
        >>> bool(plans[0].diff(plans[0]))
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
        return (
            self._summary()
            if not self.changes
            else f"{self._summary()}\n\n{self._table()}{self._rest()}"
        )

    def _repr_html_(self) -> str:
        """The difference as HTML, for a notebook."""
        table = self._table().html() if self.changes else ""
        return f"<p>{escape(self._summary())}</p>{table}<p>{escape(self._rest().strip())}</p>"

    def _summary(self) -> str:
        if not self.changes:
            return f"the plans are the same for {several(self.alike, 'table')}"
        differ = "differs" if len(self.changes) == 1 else "differ"
        are = "is" if self.alike == 1 else "are"

        return (
            f"{several(len(self.changes), 'table')} {differ}, {self.alike:,} {are} alike; "
            f"{bytes_text(self.moved_bytes)} of weights come to ranks that do not hold them"
        )

    def _table(self) -> TextTable:
        printed = self.changes[:_PRINTED]
        rows = [
            [
                f"{change.path}.{change.table}".strip("."),
                change.before or "not there",
                change.after or "not there",
                bytes_text(change.moved_bytes),
            ]
            for change in printed
        ]
        return TextTable(["table", "before", "after", "comes in"], rows, right=[3], width=120)

    def _rest(self) -> str:
        more = len(self.changes) - _PRINTED
        return (
            f"\nand {several(more, 'table')} more: iterate over the diff for all of them"
            if more > 0
            else ""
        )


def plan_diff(before: Stored, after: Stored) -> PlanDiff:
    """The differences between two plans.

    Two entries are equal if they have the same shards on the same ranks and the same kernel. The
    type of device on which a rank stores a shard (``cpu``, ``cuda:1``) is ignored.
    """
    changes = []
    alike = 0
    tables = [
        (path, table)
        for plan in (before, after)
        for path, module in plan.items()
        for table in module
    ]

    for path, table in dict.fromkeys(tables):
        old, new = (plan.get(path, {}).get(table) for plan in (before, after))
        if old is not None and new is not None and _compared(old) == _compared(new):
            alike += 1
            continue
        moved = 0 if old is None or new is None else _moved_bytes(old, new)
        changes.append(TableChange(path, table, _description(old), _description(new), moved))

    return PlanDiff(tuple(changes), alike)


def _compared(entry: StoredTable) -> tuple[object, ...]:
    kernel = entry.compute_kernel.removeprefix("batched_")
    rectangles = _rectangles(entry)
    return (
        entry.sharding_type,
        kernel,
        sorted(rectangles.items()) if rectangles else sorted(entry.ranks or ()),
    )


def _description(entry: StoredTable | None) -> str:
    if entry is None:
        return ""

    where = ranks_text(entry.ranks) if entry.ranks is not None else "all ranks"
    widths = [shard.sizes[1] for shard in entry.shards or () if all(shard.sizes)]
    cut = entry.shape is not None and entry.shards and max(widths, default=0) < entry.shape[1]
    width = f" of {max(widths)} columns" if cut else ""
    return f"{entry.sharding_type}{width}, {entry.compute_kernel}, on {where}"


def _rectangles(entry: StoredTable) -> dict[int, list[_Rectangle]]:
    """Rank -> the rectangles of the table that it holds."""
    if not entry.shards and entry.shape is not None:  # every rank has a replica
        return {rank: [(0, 0, *entry.shape)] for rank in entry.ranks or ()}

    by_rank: dict[int, list[_Rectangle]] = {}
    for shard in entry.shards or ():
        row, column = shard.offsets
        rows, columns = shard.sizes
        if shard.placement is not None and rows and columns:
            rank = int(shard.placement.partition("/")[0].removeprefix("rank:"))
            by_rank.setdefault(rank, []).append((row, column, row + rows, column + columns))

    return {rank: sorted(rectangles) for rank, rectangles in by_rank.items()}


def _moved_bytes(before: StoredTable, after: StoredTable) -> int:
    """Bytes that ranks hold after and not before."""
    previous = _rectangles(before)
    elements = 0
    for rank, rectangles in _rectangles(after).items():
        for rectangle in rectangles:
            elements += _area(rectangle) - sum(
                _area(_common(rectangle, other)) for other in previous.get(rank, ())
            )
    return elements * _ELEMENT_BYTES


def _common(one: _Rectangle, other: _Rectangle) -> _Rectangle:
    return (*map(max, one[:2], other[:2]), *map(min, one[2:], other[2:]))  # type: ignore[return-value]


def _area(rectangle: _Rectangle) -> int:
    row, column, end_row, end_column = rectangle
    return max(end_row - row, 0) * max(end_column - column, 0)
