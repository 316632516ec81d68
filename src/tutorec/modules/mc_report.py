"""Counters of managed collisions: lookups, hits, collisions, evictions; and a table of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from tutorec._text import TextTable


@dataclass
class CollisionCounts:
    """Counters of one mapping since its construction. On a GPU they are updated asynchronously.

    Attributes:
        lookups: Ids that were remapped.
        collisions: Those of them that had no row of their own.
        evictions: Rows that were reassigned from one id to another.
    """

    lookups: int = 0
    collisions: Tensor | int = 0
    evictions: Tensor | int = 0

    def add(self, lookups: int, absent: Tensor | int) -> None:
        """Count the ids of a batch, and how many of them have no row of their own."""
        self.lookups += lookups
        self.collisions = self.collisions + absent


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

    @property
    def admitted_share(self) -> float:
        """The share of lookups whose id had a row of its own; 1 before the first lookup."""
        return 1 - self.collisions / max(self.lookups, 1)


@dataclass(frozen=True, repr=False)
class CollisionReport(TextTable):
    """A row for each table whose ids are remapped.

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
