"""Tables that are used where they are in a file: the pages of a batch are read together.

A lookup that finds a page of the file missing waits for it before it looks at the next row, so that
a batch with a thousand missing pages waits a thousand times. A disk reads a thousand pages that are
requested together in a fraction of that time. So before the lookup, the system is asked for all
pages that the batch needs, of the weights and of the optimizer's states, which backward updates.

A request costs time for each row, also where its page is in memory. That is why a batch is only
requested if the lookup before it read from the disk: a table that fits in memory stops requesting
once its pages are there.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from threading import get_ident
from typing import Any

import torch
from torch import Tensor

from tutorec._kernels.row_file import ask_for_pages, blocks_read
from tutorec._kernels.specs import GroupSpec
from tutorec._kernels.tbe import TableBatch

__all__ = ["PageRequests", "request_pages", "rows_by_table"]


class PageRequests:
    """Requests the pages of each batch of a `TableBatch` before its lookup.

    Nothing else changes: no number, no row. The system reads the pages while this thread goes on.
    The first lookup that finds pages missing reads one after another, and the batches after it are
    requested until a lookup finds all of its pages in memory.
    """

    def __init__(self) -> None:
        self._waits_for_disk = False
        self._blocks_before: dict[int, int] = {}  # of each thread that looks up

    def watch(self, tables: TableBatch) -> None:
        """Do so for all lookups of these tables, which are in a file."""
        tables.register_forward_pre_hook(self._before_lookup)
        tables.register_forward_hook(self._after_lookup)

    def _before_lookup(self, tables: TableBatch, inputs: tuple[Any, ...]) -> None:
        # Counted for each lookup: between two of them the thread may read other files.
        self._blocks_before[get_ident()] = blocks_read()
        if self._waits_for_disk:
            request_pages(tables, inputs[0], inputs[1])

    def _after_lookup(self, tables: TableBatch, inputs: tuple[Any, ...], pooled: Tensor) -> None:
        before = self._blocks_before.pop(get_ident())
        self._waits_for_disk = blocks_read() != before  # what was requested counts as read, too


def request_pages(tables: TableBatch, values: Tensor, offsets: Tensor) -> None:
    """Have the system begin to read what a batch needs of tables in a file; nothing waits for it.

    Args:
        tables: The operator.
        values: Ids ``[N]``, those of the first feature first.
        offsets: Where each bag begins ``[F*B+1]``.
    """
    features = len(tables.spec.feature_tables)
    if values.is_floating_point() or (offsets.numel() - 1) % features:
        return  # the lookup says what is wrong with them

    weights = tables.table_weights()
    states = tables.table_states()
    for table, rows in rows_by_table(tables.spec, values, offsets):
        for tensor in (weights[table], *states[table]):
            ask_for_pages(tensor, rows)


def rows_by_table(spec: GroupSpec, values: Tensor, offsets: Tensor) -> Iterator[tuple[int, Tensor]]:
    """The distinct rows of a batch, rising, of each table: (its number in the group, rows).

    Args:
        spec: Tables and features of the group.
        values: Ids ``[N]``, those of the first feature first.
        offsets: Where each bag begins ``[F*B+1]``.

    Example:
        >>> from tutorec._kernels.specs import GroupSpec, TableSpec
        >>> tables = (TableSpec("item", 10, 4), TableSpec("user", 10, 4))
        >>> spec = GroupSpec(tables, feature_tables=(0, 1, 0))  # two features share a table
        >>> ids, offsets = torch.tensor([7, 2, 9, 2, 5]), torch.tensor([0, 2, 3, 5])
        >>> [(table, rows.tolist()) for table, rows in rows_by_table(spec, ids, offsets)]
        [(0, [2, 5, 7]), (1, [9])]
    """
    features = len(spec.feature_tables)
    samples = (offsets.numel() - 1) // features
    begins = offsets[::samples].tolist() if samples else [0] * (features + 1)

    ids_of_table: dict[int, list[Tensor]] = {}
    for table, (begin, end) in zip(spec.feature_tables, pairwise(begins), strict=True):
        ids_of_table.setdefault(table, []).append(values[begin:end])
    for table, ids in ids_of_table.items():
        yield table, torch.cat(ids).unique()
