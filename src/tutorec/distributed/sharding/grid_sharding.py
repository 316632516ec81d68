"""Grid sharding: a table is cut into slices of columns, one for a host, and a slice into rows over the host's ranks.

    a table of 4 rows and 4 columns        host 0            host 1
                                        rank 0  rank 1    rank 2  rank 3
                                        rows    rows      rows    rows
                                        0-1     2-3       0-1     2-3
                                        | columns 0-1 |   | columns 2-3 |

Each slice moves as a table-row-wise table does (`twrw_sharding`): ids to the rank of the slice's host that has their
row, parts added inside the host, finished sums between hosts. At home the slices of a row are put side by side, as in
column-wise sharding. Ids are sent once for every slice.

For tables that one host cannot hold.
"""

from __future__ import annotations

from typing import final

from tutorec.distributed.sharding.twrw_dist import HostRowsSharding


@final
class GridPooledEmbeddingSharding(HostRowsSharding):
    """The grid-sharded tables of a collection of pooled embeddings: one shard for each rank of each slice's host."""
