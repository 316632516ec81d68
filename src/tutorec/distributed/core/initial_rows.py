"""First rows of shards: copied, or drawn where tables are on meta; the same under every plan."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch

from tutorec._kernels.memory import copy_written_rows
from tutorec.distributed.core.tables import TableGroup
from tutorec.distributed.plan.geometry import TableShard
from tutorec.modules.embedding_configs import BaseEmbeddingConfig

# Values initialized at once: 4 MB in addition to the shard.
_BLOCK = 1 << 20


class InitialRows:
    """Writes a shard's initial rows: copied, or initialized if the unsharded table is on meta.

    Initialized values depend on torch's seed and the table's name, not on the plan.

    Args:
        configs: The tables.
        weights: Table name -> weights ``[R, D]`` of the unsharded collection.
    """

    def __init__(
        self, configs: Sequence[BaseEmbeddingConfig], weights: Mapping[str, torch.Tensor]
    ) -> None:
        self._configs = {config.name: config for config in configs}
        self._weights = weights
        on_meta = any(weight.is_meta for weight in weights.values())
        self._seed = int(torch.randint(2**31, ())) if on_meta else 0

    def write(self, group: TableGroup, index: int, rows: torch.Tensor) -> None:
        """Write the initial rows ``[R, D]`` of a shard into the memory of its operator.

        Args:
            group: The tables of the operator.
            index: Index of the shard in the group.
            rows: The memory.
        """
        table = group.tables[index]
        shard = group.shards[index]
        weight = self._weights[table.name].detach()

        if weight.is_meta:
            if not table.virtual:
                draw_shard(self._configs[table.name], shard, self._seed, rows)
        elif table.virtual:
            copy_written_rows(rows, shard.view(weight))
        else:
            rows.copy_(shard.view(weight))


def draw_shard(
    config: BaseEmbeddingConfig, shard: TableShard, seed: int, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Initialize a shard of a table ``[R, D]`` that was never allocated.

    A table has the same initial values under every plan, in every world and on every device. Rows
    are drawn on the CPU in blocks, each with its own random state, and a rank draws only the blocks
    that overlap its shard. One block is held in addition to the shard. A table with its own
    ``init_fn`` is an exception: the function gets the whole table, since its values may depend on a
    row's position.

    Args:
        config: The table.
        shard: The shard.
        seed: Two tables with the same name, shape and seed get the same values.
        out: Tensor to write ``[rows, columns]`` to, on any device; by default a new tensor on the
            CPU.

    Returns:
        The shard's rows ``[rows, columns]``: ``out``, if it is given.

    Example:
        >>> from tutorec.modules.embedding_configs import EmbeddingBagConfig
        >>> table = EmbeddingBagConfig(6, 4, "item", feature_names=["item"])
        >>> whole = draw_shard(table, TableShard(0, 0, 0, 6, 4), seed=1)
        >>> torch.equal(draw_shard(table, TableShard(1, 2, 1, 3, 2), seed=1), whole[2:5, 1:3])
        True
    """
    dtype = config.dtype
    drawn = torch.empty(shard.rows, shard.columns, dtype=dtype) if out is None else out

    if config.init_fn is not None:
        table = torch.empty(config.num_embeddings, config.embedding_dim, dtype=dtype)
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(_block_seed(seed, config.name, 0))
            config.init_weight(table)
        return drawn.copy_(shard.view(table))

    low = config.get_weight_init_min()
    high = config.get_weight_init_max()
    first_row = shard.row_offset
    end_row = shard.row_offset + shard.rows
    first_column = shard.column_offset
    end_column = shard.column_offset + shard.columns

    rows_per_block = max(1, min(_BLOCK // config.embedding_dim, config.num_embeddings))
    # One buffer: of a new one for each block, the allocator keeps several.
    buffer = torch.empty(rows_per_block, config.embedding_dim, dtype=dtype)
    for block in range(first_row // rows_per_block, -(-end_row // rows_per_block)):
        block_start = block * rows_per_block
        block_end = min(block_start + rows_per_block, config.num_embeddings)
        generator = torch.Generator().manual_seed(_block_seed(seed, config.name, block))
        values = buffer[: block_end - block_start]
        values.uniform_(low, high, generator=generator)

        # The rows that the block and the shard share.
        start = max(block_start, first_row)
        end = min(block_end, end_row)
        overlap = values[start - block_start : end - block_start, first_column:end_column]
        drawn[start - first_row : end - first_row] = overlap

    return drawn


def _block_seed(seed: int, table: str, block: int) -> int:
    """63 bits that differ between blocks, tables and seeds."""
    text = f"{seed}/{table}/{block}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1
