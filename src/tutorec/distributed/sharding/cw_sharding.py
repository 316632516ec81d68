"""Column-wise sharding (CW): a table is cut into slices of columns, and every slice has all rows.

    my samples, every feature    KJT [F x B]
      | input_dist    ids travel to every rank that has a slice of their table       (all-to-all)
    every sample, my slices      KJT [S_mine x W*B]
      | lookup        pool parts of rows out of my slices                            (no traffic)
    every sample, my columns     [W*B, D_mine]
      | output_dist   parts of pooled rows travel back, and are put side by side     (all-to-all)
    my samples, every column     [B, D]

    a table of 4 columns on two ranks       its pooled row, at home

        rank 0    rank 1                    from 0  from 1
        | | |     | | |                     | | |   | | |   ->  | | | | |

Ids are sent once for every slice, pooled columns once: with k slices the ids cost k times what they cost table-wise,
the rows cost the same. Pooling and SGD know nothing of the cut. Row-wise Adagrad does: it keeps one number for a row
*of each slice*, the mean square over the slice's own columns.

For tables that are wide, or that one rank alone would be kept busy by.
"""

from __future__ import annotations

from typing import final

from tutorec.distributed.sharding.tw_dist import WholeRowsSharding


@final
class CwPooledEmbeddingSharding(WholeRowsSharding):
    """The column-wise tables of a collection of pooled embeddings: a shard for each slice of columns."""
