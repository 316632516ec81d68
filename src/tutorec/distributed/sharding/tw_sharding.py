"""Table-wise sharding (TW): every table lives whole on one rank.

    my samples, every feature    KJT [F x B]
      | input_dist    ids travel to the rank that owns their table      (all-to-all)
    every sample, my features    KJT [F_mine x W*B]
      | lookup        pool rows out of my tables                        (no traffic)
    every sample, my columns     [W*B, D_mine]
      | output_dist   pooled rows travel back to their sample's rank    (all-to-all)
    my samples, every column     [B, D]

Bytes that rank r sends in one step, with F_s features and D_s columns on rank s, N_rs of r's ids for s, and 4 bytes an
id (8 where a table has more than 2 ** 31 rows):

    input ids          sum over s != r of  4 * (F_s * B_r + N_rs)
    output rows        sum over s != r of  4 * B_s * D_r
    output gradients   sum over s != r of  4 * B_r * D_s

A table that no rank can hold alone, or one that is read far more than the others, wants another type.
"""

from __future__ import annotations

from typing import final

from tutorec.distributed.sharding.tw_dist import TwPooledEmbeddingDist, TwSparseFeaturesDist, WholeRowsSharding

__all__ = ["TwPooledEmbeddingDist", "TwPooledEmbeddingSharding", "TwSparseFeaturesDist"]


@final
class TwPooledEmbeddingSharding(WholeRowsSharding):
    """The table-wise tables of a collection of pooled embeddings: one shard for each table."""
