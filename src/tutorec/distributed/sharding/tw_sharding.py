"""Table-wise sharding (TW): every table lives whole on one rank.

::

    local samples, all features  KJT [F x B]
      | input_dist    send ids to the rank that owns their table         (all-to-all)
    all samples, local features  KJT [F_local x W*B]
      | lookup        pool rows of the local tables                      (no communication)
    all samples, local columns   [W*B, D_local]
      | output_dist   return pooled rows to the rank of their sample     (all-to-all)
    local samples, all columns   [B, D]

Bytes that rank r sends in one step, with F_s features and D_s columns on rank s, N_rs of r's ids
for s, and 4 bytes per id (8 where a table has more than 2 ** 31 rows)::

    input ids          sum over s != r of  4 * (F_s * B_r + N_rs)
    output rows        sum over s != r of  4 * B_s * D_r
    output gradients   sum over s != r of  4 * B_r * D_s

Do not use it for a table that is too large for one rank, or that is read far more often than the
others.
"""

from __future__ import annotations

from typing import final

from tutorec.distributed.sharding.tw_dist import (
    TwPooledEmbeddingDist,
    TwSparseFeaturesDist,
    WholeRowsSharding,
)

__all__ = ["TwPooledEmbeddingDist", "TwPooledEmbeddingSharding", "TwSparseFeaturesDist"]


@final
class TwPooledEmbeddingSharding(WholeRowsSharding):
    """The table-wise tables of a collection of pooled embeddings: one shard per table."""
