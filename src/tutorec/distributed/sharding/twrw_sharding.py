"""Table-row-wise sharding (TWRW): every table lives on one host, its rows split over that host's ranks.

    my samples, every feature    KJT [F x B]
      | input_dist    ids travel to the rank of their table's host that has their row    (all-to-all)
    every sample, my row ranges  KJT [F_host x W*B]
      | lookup        add up the rows that I have: a part of each bag's sum              (no traffic)
    every sample, partial sums   [W*B, D_host]
      | output_dist   1. parts are added inside the host            (reduce-scatter of L ranks)
      |               2. sums travel to their sample's host         (all-to-all of H ranks)
    my samples, every column     [B, D]

    host 0: rank 0, rank 1           host 1: rank 2, rank 3
      table a   rows 0-1  rows 2-3     table b   rows 0-4  rows 5-9

Bytes of pooled rows that leave a host in one step, with H hosts of L ranks and B samples a rank:

    row-wise          L * (W - L) * 4 * B * D         every rank sends its part to every rank outside
    table-row-wise    (W - L) * 4 * B * D_host        one finished sum for every sample outside

A host's tables take the memory of all its ranks, and what crosses between hosts is what table-wise sharding sends.
"""

from __future__ import annotations

from typing import final

from tutorec.distributed.sharding.twrw_dist import HostRowsSharding, TwRwPooledEmbeddingDist

__all__ = ["TwRwPooledEmbeddingDist", "TwRwPooledEmbeddingSharding"]


@final
class TwRwPooledEmbeddingSharding(HostRowsSharding):
    """The table-row-wise tables of a collection of pooled embeddings: one shard for each rank of a table's host."""
