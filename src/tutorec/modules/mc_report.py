"""Counters of managed collisions: lookups, hits, collisions, evictions; and their table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tutorec._text import TextTable


@dataclass
class CollisionCounts:
    """Counters of one mapping since it was made. On a GPU they are added to without waiting for it.

    Attributes:
        lookups: Ids that were remapped.
        admitted: Those of them that had a row of their own.
        evictions: Rows that were taken from one id and given to another.
    """

    lookups: int = 0
    admitted: Tensor | int = 0
    evictions: Tensor | int = 0

    def add_lookups(self, has_row: Tensor) -> None:
        """Count the ids of a batch, given whether each has a row [N]."""
        self.lookups += has_row.numel()
        self.admitted = self.admitted + torch.count_nonzero(has_row)


@dataclass(frozen=True)
class TableCollisions:
    """What has happened to the ids of one table so far.

    Attributes:
        table: Its name.
        rows: R.
        occupied: Rows that an id has.
        lookups: Ids that were remapped.
        collisions: Those of them that had no row of their own.
        evictions: Rows that were taken from one id and given to another.
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


def collision_table(tables: Sequence[TableCollisions]) -> TextTable:
    """A row for each table.

    Example:
        >>> collision_table([TableCollisions("item", 1000, 750, 40_000, 3_000, 120)])
        table   rows  occupied  lookups  admitted  collisions  evictions
        -----  -----  --------  -------  --------  ----------  ---------
        item   1,000    75.0 %   40,000    92.5 %       3,000        120
    """
    head = ["table", "rows", "occupied", "lookups", "admitted", "collisions", "evictions"]
    rows = [
        [
            one.table,
            f"{one.rows:,}",
            f"{one.occupied / one.rows:.1%}".replace("%", " %"),
            f"{one.lookups:,}",
            f"{one.admitted_share:.1%}".replace("%", " %"),
            f"{one.collisions:,}",
            f"{one.evictions:,}",
        ]
        for one in tables
    ]
    return TextTable(head, rows, right=range(1, len(head)))
