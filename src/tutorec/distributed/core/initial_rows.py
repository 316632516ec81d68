"""Initial rows of sharded tables on the meta device: the same values under every plan."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch

from tutorec._kernels.unwritten import copy_written_rows
from tutorec.distributed.core.tables import TableShard
from tutorec.distributed.plan.geometry import ShardPiece
from tutorec.modules.embedding_configs import BaseEmbeddingConfig
from tutorec.types import data_type_to_dtype

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

    def __call__(self, shard: TableShard, rows: torch.Tensor) -> None:
        """Write the rows ``[R, D]`` of a shard."""
        weight = self._weights[shard.table.name].detach()
        piece, virtual = shard.piece, shard.table.virtual
        if weight.is_meta:
            if not virtual:
                draw_piece(self._configs[shard.table.name], piece, self._seed, rows)
            return
        if virtual:
            copy_written_rows(rows, piece.of(weight))
        else:
            rows.copy_(piece.of(weight))


def draw_piece(
    config: BaseEmbeddingConfig, piece: ShardPiece, seed: int, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Initialize a shard of a table ``[R, D]`` that was never allocated.

    A table has the same initial values under every plan, in every world and on every device. Rows
    are drawn on the CPU in blocks, each with its own random state, and a rank draws only the blocks
    that overlap its shard. One block is held in addition to the shard. A table with its own
    ``init_fn`` is an exception: the function gets the whole table, since its values may depend on a
    row's position.

    Args:
        config: The table.
        piece: The shard.
        seed: Two tables with the same name, shape and seed get the same values.
        out: Tensor to write ``[rows, columns]`` to, on any device; by default a new tensor on the
            CPU.

    Returns:
        The shard's rows ``[rows, columns]``: ``out``, if it is given.

    Example:
        >>> from tutorec.modules.embedding_configs import EmbeddingBagConfig
        >>> table = EmbeddingBagConfig(6, 4, "item", feature_names=["item"])
        >>> whole = draw_piece(table, ShardPiece(0, 0, 0, 6, 4), seed=1)
        >>> torch.equal(draw_piece(table, ShardPiece(1, 2, 1, 3, 2), seed=1), whole[2:5, 1:3])
        True
    """
    dtype = data_type_to_dtype(config.data_type)
    rows, columns = slice(piece.row_offset, piece.row_offset + piece.rows), config.embedding_dim
    wanted = slice(piece.column_offset, piece.column_offset + piece.columns)
    drawn = torch.empty(piece.rows, piece.columns, dtype=dtype) if out is None else out
    if config.init_fn is not None:
        whole = torch.empty(config.num_embeddings, columns, dtype=dtype)
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(_block_seed(seed, config.name, 0))
            config.init_weight(whole)
        return drawn.copy_(piece.of(whole))
    low, high = config.get_weight_init_min(), config.get_weight_init_max()
    rows_per_block = max(1, _BLOCK // columns)
    for block in range(rows.start // rows_per_block, -(-rows.stop // rows_per_block)):
        begins = block * rows_per_block
        ends = min(begins + rows_per_block, config.num_embeddings)
        numbers = torch.Generator().manual_seed(_block_seed(seed, config.name, block))
        values = torch.empty(ends - begins, columns, dtype=dtype).uniform_(
            low, high, generator=numbers
        )
        first, last = max(begins, rows.start), min(ends, rows.stop)
        drawn[first - rows.start : last - rows.start] = values[
            first - begins : last - begins, wanted
        ]
    return drawn


def _block_seed(seed: int, table: str, block: int) -> int:
    """63 bits that differ between blocks, tables and seeds."""
    text = f"{seed}/{table}/{block}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1
