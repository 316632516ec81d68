"""Column-wise sharding (CW): every rank holds some columns of a table, with all its rows.

::

    local samples, all features  KJT [F x B]
      | input_dist    send ids to every rank with a column shard of a table   (all-to-all)
    all samples, local shards    KJT [S_local x W*B]
      | lookup        pool partial rows from the local shards                 (no communication)
    all samples, local columns   [W*B, D_local]
      | output_dist   return partial rows, concatenate their columns          (all-to-all)
    local samples, all columns   [B, D]

    a table of 4 columns on two ranks       its pooled row after output_dist

        rank 0    rank 1                    from 0  from 1
        | | |     | | |                     | | |   | | |   ->  | | | | |

Ids are sent once per column shard, pooled columns once. With k shards the ids cost k times the
bytes of table-wise sharding; the rows cost the same. Pooling and SGD give the same result as for
the unsharded table. Row-wise Adagrad does not: it keeps one accumulator per row *and column shard*,
the mean square over that shard's columns.

Use it for wide tables, and for tables whose lookups would overload a single rank.
"""

from __future__ import annotations

from typing import final

from tutorec.distributed.sharding.tw_dist import WholeRowsSharding


@final
class CwPooledEmbeddingSharding(WholeRowsSharding):
    """The column-wise tables of a pooled collection: one shard per range of columns."""
