"""Table-row-wise sharding (TWRW): each table's rows are split over the ranks of one host.

::

    local samples, all features  KJT [F x B]
      | input_dist    send ids to the rank with their row on their table's host  (all-to-all)
    all samples, local rows      KJT [F_host x W*B]
      | lookup        add the local rows: a partial sum of each bag             (no communication)
    all samples, partial sums    [W*B, D_host]
      | output_dist   1. partial sums are added inside the host     (reduce-scatter of L ranks)
      |               2. sums are sent to their sample's host       (all-to-all of H ranks)
    local samples, all columns   [B, D]

    host 0: rank 0, rank 1           host 1: rank 2, rank 3
      table a   rows 0-1  rows 2-3     table b   rows 0-4  rows 5-9

Bytes of pooled rows that leave a host in one step, with H hosts of L ranks and B samples per rank::

    row-wise          L * (W - L) * 4 * B * D         a partial sum per rank and sample outside
    table-row-wise    (W - L) * 4 * B * D_host        one sum per sample outside

A table uses the memory of all ranks of its host, and the bytes between hosts are those of
table-wise sharding.
"""

from __future__ import annotations

from typing import final

from tutorec.distributed.sharding.twrw_dist import HostRowsSharding, TwRwPooledEmbeddingDist

__all__ = ["TwRwPooledEmbeddingDist", "TwRwPooledEmbeddingSharding"]


@final
class TwRwPooledEmbeddingSharding(HostRowsSharding):
    """The table-row-wise tables of a collection: one shard per rank of a table's host."""
