"""Table-column-wise sharding (TWCW): a table is cut into slices of columns that stay on one host.

    host 0: rank 0, rank 1          host 1: rank 2, rank 3
      table a   | |..                 table b   | |..
                ..| |                           ..| |

The moves are those of column-wise sharding (`cw_sharding`); what differs is the placement, and by it the price. A bag's
ids are sent once for every slice, and when all slices are on one host they leave that host's neighbours alone. Between
hosts the ids of a table go to one host instead of all of them.
"""

from __future__ import annotations

from typing import final

from tutorec.distributed.sharding.tw_dist import WholeRowsSharding


@final
class TwCwPooledEmbeddingSharding(WholeRowsSharding):
    """The table-column-wise tables of a collection of pooled embeddings: slices of columns on the ranks of one host."""
