"""Table-column-wise sharding (TWCW): all column shards of a table are on one host.

::

    host 0: rank 0, rank 1          host 1: rank 2, rank 3
      table a   | |..                 table b   | |..
                ..| |                           ..| |

The exchanges are those of column-wise sharding (`cw_sharding`); the placement differs. The ids of a
bag are sent once per column shard. With all shards on one host, these ids go to that host only, and
between hosts fewer bytes are sent.
"""

from __future__ import annotations

from typing import final

from tutorec.distributed.sharding.tw_dist import WholeRowsSharding


@final
class TwCwPooledEmbeddingSharding(WholeRowsSharding):
    """The table-column-wise tables of a collection: column shards on the ranks of one host."""
