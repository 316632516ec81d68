"""The first rows of a table that nobody holds whole: drawn piece by piece, the same numbers under every plan."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch

from tutorec.distributed.shard_geometry import ShardPiece
from tutorec.distributed.tables import TableShard
from tutorec.modules.embedding_configs import BaseEmbeddingConfig
from tutorec.types import data_type_to_dtype

# Numbers that are drawn at once: 4 MB of rows are held beside the shard that is being drawn.
_BLOCK = 1 << 20


class InitialRows:
    """Writes the first rows of a shard: those of the unsharded table, or newly drawn where that is on the meta device.

    What is drawn depends on torch's seed and the table's name, not on the plan.

    Args:
        configs: The tables.
        weights: Table name -> ``[R, D]`` of the unsharded collection.
    """

    def __init__(self, configs: Sequence[BaseEmbeddingConfig], weights: Mapping[str, torch.Tensor]) -> None:
        self._configs = {config.name: config for config in configs}
        self._weights = weights
        on_meta = any(weight.is_meta for weight in weights.values())
        self._seed = int(torch.randint(2**31, ())) if on_meta else 0

    def __call__(self, shard: TableShard, rows: torch.Tensor) -> None:
        """Write the rows ``[R, D]`` of a shard."""
        weight, piece = self._weights[shard.table.name].detach(), shard.piece
        if weight.is_meta:
            draw_piece(self._configs[shard.table.name], piece, self._seed, rows)
            return
        source = weight[piece.row_offset : piece.row_offset + piece.rows]
        rows.copy_(source[:, piece.column_offset : piece.column_offset + piece.columns])


def draw_piece(
    config: BaseEmbeddingConfig, piece: ShardPiece, seed: int, out: torch.Tensor | None = None
) -> torch.Tensor:
    """The initial rows of a piece of a table ``[R, D]`` that was never allocated.

    A table begins with the same numbers under every plan, in every world and on every device: rows are drawn on the CPU
    in blocks, each with a random state of its own, and a rank draws the blocks that its piece touches. Besides the
    piece, one block is held. A table with an ``init_fn`` of its own is an exception: the function is given the whole
    table, since what it writes may depend on where a row stands.

    Args:
        config: The table.
        piece: What is wanted of it.
        seed: Two tables of one name and shape begin alike where it is the same.
        out: Where to write the rows ``[rows, columns]``, on any device; by default a new tensor on the CPU.

    Returns:
        ``[rows, columns]`` of the piece: ``out``, where it is given.

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
        return drawn.copy_(whole[rows, wanted])
    low, high = config.get_weight_init_min(), config.get_weight_init_max()
    rows_per_block = max(1, _BLOCK // columns)
    for block in range(rows.start // rows_per_block, -(-rows.stop // rows_per_block)):
        begins = block * rows_per_block
        ends = min(begins + rows_per_block, config.num_embeddings)
        numbers = torch.Generator().manual_seed(_block_seed(seed, config.name, block))
        values = torch.empty(ends - begins, columns, dtype=dtype).uniform_(low, high, generator=numbers)
        first, last = max(begins, rows.start), min(ends, rows.stop)
        drawn[first - rows.start : last - rows.start] = values[first - begins : last - begins, wanted]
    return drawn


def _block_seed(seed: int, table: str, block: int) -> int:
    """63 bits that differ between blocks, tables and seeds."""
    text = f"{seed}/{table}/{block}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1
