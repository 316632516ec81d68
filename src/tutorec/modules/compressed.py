"""Compressed tables with the interface of ``torch.nn.EmbeddingBag``, and the memory of a model.

Tables for several ranks are in ``modules/compressed_collection.py``.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tutorec._validation import validation_enabled
from tutorec.modules.compressions import QR, Operation
from tutorec.modules.embedding_configs import EmbeddingBagConfig


def compute_mem(model: nn.Module) -> int:
    """MiB of a model's parameters and buffers, rounded down.

    Example:
        >>> compute_mem(nn.Embedding(1024, 512))
        2
    """
    tensors = [*model.parameters(), *model.buffers()]
    return sum(tensor.nelement() * tensor.element_size() for tensor in tensors) // 1024**2


class BlockEmbeddingBag(nn.Module):
    """A low-rank table: narrow rows [V, E_b] are looked up and pooled, then multiplied by [E_b, E].

    Sum and mean commute with the matrix, so the result is that of a table [V, E] of rank E_b;
    ``max`` is taken over the narrow columns.

    Args:
        vocab_size: V, rows.
        block_embedding_dim: E_b, stored columns; if it equals E, there is no matrix.
        embedding_dim: E, columns of the result.
        mode: ``"sum"``, ``"mean"`` or ``"max"``.
        include_last_offset: Whether offsets end with the number of ids.
        device: Device of the weights; on ``meta`` nothing is allocated.

    Raises:
        ValueError: E_b is larger than E.

    Example:
        >>> bag = BlockEmbeddingBag(1000, 4, 16)
        >>> (
        ...     bag(torch.tensor([[1, 2, 3], [4, 5, 6]])).shape,
        ...     sum(weight.numel() for weight in bag.parameters()),
        ... )
        (torch.Size([2, 16]), 4064)

    See Also:
        ``tutorec.modules.compressions.Block``, for a table of a collection.
    """

    def __init__(
        self,
        vocab_size: int,
        block_embedding_dim: int,
        embedding_dim: int,
        mode: str = "mean",
        include_last_offset: bool = False,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        if not 1 <= block_embedding_dim <= embedding_dim:
            raise ValueError(
                f"BlockEmbeddingBag: block_embedding_dim={block_embedding_dim} columns are widened "
                f"to embedding_dim={embedding_dim}; store from 1 to {embedding_dim}"
            )

        weight = torch.empty(vocab_size, block_embedding_dim, device=device)
        self.embedding = nn.EmbeddingBag(
            vocab_size,
            block_embedding_dim,
            mode=mode,
            include_last_offset=include_last_offset,
            _weight=weight,
        )

        narrow = block_embedding_dim < embedding_dim
        self.linear = (
            nn.Linear(block_embedding_dim, embedding_dim, False, device)
            if narrow
            else nn.Identity()
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize the weights."""
        for weight in self.parameters():
            nn.init.xavier_normal_(weight)

    def forward(
        self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
    ) -> Tensor:
        """Ids [B, L], or [N] with offsets [B] -> pooled rows [B, E]; weights shaped like ids."""
        return self.linear(self.embedding(input, offsets, per_sample_weights))


class QREmbeddingBag(nn.Module):
    """Quotient-remainder table: row i combines row i // buckets and row i % buckets of two tables.

    Rows are combined per id and then pooled, ``sum(q * r)``, like the rows of a table [V, E]; the
    rows [N, E] of all N ids are in memory. The class of the CachedEmbedding playground differs: it
    pools quotients and remainders separately, multiplies the results and sums over columns.

    Args:
        embedding_dim: E, columns.
        num_buckets: Rows of the remainder table.
        num_embeddings: V, rows of the table that the two replace, by default ``num_buckets ** 2``.
        operation: ``"multiply"``, ``"add"`` or ``"concatenate"``.
        mode: ``"sum"``, ``"mean"`` or ``"max"``; weights require ``"sum"``.
        include_last_offset: Whether offsets end with the number of ids.
        verbose: Whether to print the number of parameters.
        device: Device of the weights; on ``meta`` nothing is allocated.

    Raises:
        ValueError: There are no buckets, or the operation is unknown.

    Example:
        >>> bag = QREmbeddingBag(8, num_buckets=100, verbose=True)
        QREmbeddingBag: 1,600 parameters instead of 80,000
        >>> row = bag.quotient[12] * bag.remainder[34]
        >>> torch.equal(bag(torch.tensor([[1234]])), row[None])
        True

    Source:
        Shi et al., *Compositional Embeddings Using Complementary Partitions* (2020).

    See Also:
        ``tutorec.modules.compressions.QR``, for a table of a collection.
    """

    def __init__(
        self,
        embedding_dim: int,
        num_buckets: int,
        num_embeddings: int | None = None,
        operation: Operation = "multiply",
        mode: str = "mean",
        include_last_offset: bool = False,
        verbose: bool = False,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.compression = QR(num_buckets, operation)
        self.num_buckets = num_buckets
        self.num_embeddings = num_embeddings or num_buckets**2
        self.mode = mode
        self.include_last_offset = include_last_offset

        config = EmbeddingBagConfig(self.num_embeddings, embedding_dim, "table")
        self._parts = self.compression.parts(config)
        self.quotient, self.remainder = [
            nn.Parameter(torch.empty(table.num_embeddings, table.embedding_dim, device=device))
            for table, _ in self._parts
        ]

        self.reset_parameters()
        if verbose:
            stored = self.quotient.numel() + self.remainder.numel()
            print(
                f"QREmbeddingBag: {stored:,} parameters instead of "
                f"{self.num_embeddings * embedding_dim:,}"
            )

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialize the weights."""
        for stored_part, weight in zip(self._parts, (self.quotient, self.remainder), strict=True):
            stored_part.table.init_weight(weight)

    def forward(
        self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
    ) -> Tensor:
        """Ids [B, L], or [N] with offsets [B] -> pooled rows [B, E]; weights shaped like ids."""
        ids = input.flatten()
        if validation_enabled() and ids.is_cpu and ids.numel():
            low, high = ids.aminmax()
            if low < 0 or high >= self.num_embeddings:
                raise ValueError(
                    f"QREmbeddingBag has rows for ids 0 to {self.num_embeddings - 1}, got ids from "
                    f"{low} to {high}; make it with num_embeddings="
                )

        rows = [
            F.embedding(ids.div(self.num_buckets, rounding_mode="floor"), self.quotient),
            F.embedding(ids.remainder(self.num_buckets), self.remainder),
        ]

        positions = torch.arange(ids.shape[0], dtype=ids.dtype, device=ids.device).view(input.shape)
        return F.embedding_bag(
            positions,
            self.compression.combine(rows),
            offsets,
            mode=self.mode,
            per_sample_weights=per_sample_weights,
            include_last_offset=self.include_last_offset,
        )
