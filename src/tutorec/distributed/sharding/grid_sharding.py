"""Grid sharding: a table is split by columns over hosts, and by rows over the ranks of a host.

::

    a table of 4 rows and 4 columns        host 0            host 1
                                        rank 0  rank 1    rank 2  rank 3
                                        rows    rows      rows    rows
                                        0-1     2-3       0-1     2-3
                                        | columns 0-1 |   | columns 2-3 |

Each column shard is exchanged like a table-row-wise table (`twrw_sharding`): ids go to the rank of
its host that holds their row, partial sums are added inside the host, and sums are sent between
hosts. The columns of a row are then concatenated, as in column-wise sharding. Ids are sent once per
column shard.

Use it for tables that are too large for one host.
"""

from __future__ import annotations

from typing import final

from tutorec.distributed.sharding.twrw_dist import HostRowsSharding


@final
class GridPooledEmbeddingSharding(HostRowsSharding):
    """The grid-sharded tables of a collection: one shard per rank of each column shard's host."""
