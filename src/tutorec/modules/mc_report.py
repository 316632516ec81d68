"""Counters of managed collisions: lookups, hits, collisions, evictions; as a table and a figure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from tutorec._style import ACCENT, INK, STYLE
from tutorec._text import TextTable

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass
class CollisionCounts:
    """Counters of one mapping since its construction. On a GPU they are updated asynchronously.

    Attributes:
        lookups: Ids that were remapped.
        admitted: Those of them that had a row of their own.
        evictions: Rows that were reassigned from one id to another.
    """

    lookups: int = 0
    admitted: Tensor | int = 0
    evictions: Tensor | int = 0

    def add(self, lookups: int, absent: Tensor | int) -> None:
        """Count the ids of a batch, and how many of them have no row of their own."""
        self.lookups += lookups
        self.admitted = self.admitted + lookups - absent


@dataclass(frozen=True)
class TableCollisions:
    """What has happened to the ids of one table so far.

    Attributes:
        table: Its name.
        rows: R.
        occupied: Rows that an id has.
        lookups: Ids that were remapped.
        collisions: Those of them that had no row of their own.
        evictions: Rows that were reassigned from one id to another.
    """

    table: str
    rows: int
    occupied: int
    lookups: int
    collisions: int
    evictions: int

    @classmethod
    def of(cls, table: str, rows: int, open_rows: int, counts: CollisionCounts) -> TableCollisions:
        """From the counters of a table, R rows of which ``open_rows`` are free. A sync point."""
        collisions = counts.lookups - int(counts.admitted)
        return cls(table, rows, rows - open_rows, counts.lookups, collisions, int(counts.evictions))

    @property
    def admitted_share(self) -> float:
        """The share of lookups whose id had a row of its own; 1 before the first lookup."""
        return 1 - self.collisions / max(self.lookups, 1)


@dataclass(frozen=True, repr=False)
class CollisionReport(TextTable):
    """A row for each table whose ids are remapped, and a bar for each in a figure.

    Example:
        >>> CollisionReport.of([TableCollisions("item", 1000, 750, 40_000, 3_000, 120)])
        table   rows  occupied  lookups  admitted  collisions  evictions
        -----  -----  --------  -------  --------  ----------  ---------
        item   1,000    75.0 %   40,000    92.5 %       3,000        120
    """

    tables: Sequence[TableCollisions] = ()

    @classmethod
    def of(cls, tables: Sequence[TableCollisions]) -> CollisionReport:
        """The report of some tables, in their order."""
        head = ["table", "rows", "occupied", "lookups", "admitted", "collisions", "evictions"]
        rows = [
            [
                table.table,
                f"{table.rows:,}",
                f"{100 * table.occupied / table.rows:.1f} %",
                f"{table.lookups:,}",
                f"{100 * table.admitted_share:.1f} %",
                f"{table.collisions:,}",
                f"{table.evictions:,}",
            ]
            for table in tables
        ]
        return cls(head, rows, range(1, len(head)), tables=tables)

    def plot(self) -> Figure:
        """Two panels with a bar for each table: rows in use, and lookups of own and shared rows."""
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        bars = range(len(self.tables))
        names = [f"{table.table}\n{table.evictions:,} evictions" for table in self.tables]
        occupied = [100 * table.occupied / table.rows for table in self.tables]
        own = [100 * table.admitted_share for table in self.tables]
        shared = [100 - share for share in own]

        with matplotlib.rc_context(STYLE):
            figure = Figure(figsize=(7.0, 1.3 + 0.5 * len(names)), layout="constrained")
            FigureCanvasAgg(figure)
            rows, lookups = figure.subplots(1, 2, sharey=True)
            rows.barh(bars, occupied, color=ACCENT, height=0.62)
            lookups.barh(bars, own, color=ACCENT, height=0.62, label="own row")
            hatched = {"color": "none", "edgecolor": INK, "hatch": "///"}
            lookups.barh(bars, shared, left=own, height=0.62, label="shared row", **hatched)
            rows.set_yticks(bars, names)
            rows.set(xlim=(0, 100), xlabel="% of the rows in use")
            lookups.set(xlim=(0, 100), xlabel="% of the lookups")
            lookups.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=2, borderpad=0.0)
            rows.invert_yaxis()

        return figure
