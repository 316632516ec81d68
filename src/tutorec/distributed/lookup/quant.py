"""Lookups of quantized tables on several devices of one process.

Each device looks up its shards with one operator call per pooling. A shard that is already on the
right device in the operator's layout is not copied: a whole table, or a range of its rows, is a
view.
"""

# No `from __future__ import annotations`: TorchScript compiles the functions below from a traced
# graph.
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tutorec._kernels.packed import PackedTable, PackedTableLookup
from tutorec._kernels.specs import PoolingKind
from tutorec.quant.column_slices import cut_columns
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor


@dataclass(frozen=True, eq=False)
class QuantShard:
    """A shard of a quantized table on one device.

    Args:
        local: Its rows, columns and number format.
        table: The table that it belongs to.
        packed: All packed rows of the table ``[R, row_bytes]``, on their present device.
        row_offset: First row of the shard.
        column_offset: First column of the shard.
        features: Features that look rows up in it.
        pooling: How the device pools; ``"none"`` returns a row per id.
    """

    local: PackedTable
    table: PackedTable
    packed: Tensor
    row_offset: int
    column_offset: int
    features: tuple[str, ...]
    pooling: PoolingKind

    def in_place(self, device: torch.device) -> Tensor | None:
        """The shard's packed rows as a view of the table, or None if the device needs a copy."""
        alike = self.local.columns == self.table.columns and self.packed.device == device
        rows = self._rows()
        return rows if alike and rows.is_contiguous() else None

    def write_to(self, out: Tensor) -> None:
        """Copy the shard's packed rows ``[R, row_bytes]``; zeros for a table on the meta device."""
        if self.packed.is_meta:
            out.zero_()
        elif self.local.columns == self.table.columns:
            out.copy_(self._rows())
        elif out.device == self.packed.device:
            cut_columns(self._rows(), self.table.layout, self.column_offset, self.local.layout, out)
        else:
            out.copy_(
                cut_columns(self._rows(), self.table.layout, self.column_offset, self.local.layout)
            )

    def _rows(self) -> Tensor:
        return self.packed[self.row_offset : self.row_offset + self.local.rows]


@torch.fx.wrap
def _unwrap_kjt(features: KeyedJaggedTensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Ids, offsets and weights, the arguments of an operator. A leaf of traced graphs."""
    return features.values(), features.offsets(), features.weights_or_none()


@torch.fx.wrap
def _required_weights(weights: Tensor | None) -> Tensor:
    """The weights of a batch, in a traced graph; raises if it has none."""
    if weights is None:
        raise ValueError(
            "a weighted collection needs one weight per id, and the batch has no weights: "
            "build it with weights="
        )
    return weights


@torch.fx.wrap
def embeddings_cat_empty_rank_handle_inference(
    embeddings: list[Tensor],
    dim: int = 0,
    device: str | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Join the outputs of one device's operators; an empty tensor if there are none.

    Args:
        embeddings: One tensor per operator.
        dim: Dimension along which they are joined.
        device: Device of the empty tensor.
        dtype: Dtype of the empty tensor.

    Example:
        >>> import torch
        >>> embeddings_cat_empty_rank_handle_inference(
        ...     [torch.ones(1, 1), torch.zeros(1, 1)], dim=1
        ... )
        tensor([[1., 0.]])
        >>> embeddings_cat_empty_rank_handle_inference([], device="cpu")
        tensor([])

    Source:
        TorchRec's ``torchrec.distributed.embedding_lookup``.
    """
    if len(embeddings) == 0:
        target: torch.device | None = None
        if device is not None:
            target = torch.device(device)
        return torch.empty([0], dtype=dtype, device=target)
    if len(embeddings) == 1:
        return embeddings[0]
    return torch.cat(embeddings, dim=dim)


class DeviceLookup(nn.Module):
    """The lookups of one device: one operator per pooling and memory location.

    Args:
        shards: The shards on the device.
        device: The device.
        weighted: Whether each id carries a weight.
        output_dtype: Dtype of the output.
    """

    def __init__(
        self,
        shards: Sequence[QuantShard],
        device: torch.device,
        weighted: bool,
        output_dtype: torch.dtype,
    ) -> None:
        super().__init__()
        groups: dict[tuple[Any, ...], list[int]] = {}
        for index, shard in enumerate(shards):
            groups.setdefault(_alike(shard, device), []).append(index)

        self.device = device
        self.output_dtype = output_dtype
        self._weighted = weighted
        self._positions: dict[int, tuple[int, int]] = {}
        self._operators = nn.ModuleList()
        self._features: list[list[str]] = []
        self._order: list[int] = []

        # Shards of equal properties share one operator.
        for members in groups.values():
            for position, index in enumerate(members):
                self._positions[index] = len(self._operators), position
            own = [shards[index] for index in members]
            self._operators.append(_operator(own, device, output_dtype))
            self._features.append([feature for shard in own for feature in shard.features])
            self._order += members

        # Tables that no feature reads are kept, but not looked up.
        looked_up = [index for index, features in enumerate(self._features) if features]
        self._counts = [len(self._features[index]) for index in looked_up]
        # A plain list: indexing a ModuleList takes as long as a small lookup.
        self._active_operators: list[Any] = [self._operators[index] for index in looked_up]

    @property
    def features(self) -> list[str]:
        """Features in operator order; a feature that two tables read occurs twice."""
        return [feature for features in self._features for feature in features]

    @property
    def order(self) -> list[int]:
        """For each shard in operator order, its index in ``shards``."""
        return self._order

    @property
    def counts(self) -> list[int]:
        """Number of features that each call reads."""
        return self._counts

    def rows_of(self, index: int) -> Tensor:
        """Packed rows ``[R, row_bytes]`` of a shard in the operator's memory: a view."""
        operator, position = self._positions[index]
        return self._operators[operator].table_rows(position)  # pyright: ignore[reportCallIssue]

    def forward(self, features: KeyedJaggedTensor) -> list[Tensor]:
        """Features in ``features`` order -> the output of each operator."""
        batches = [features] if len(self._counts) == 1 else features.split(self._counts)
        results: list[Tensor] = []

        for index, operator in enumerate(self._active_operators):
            ids, offsets, weights = _unwrap_kjt(batches[index])
            # `forward`, not a call: a traced graph should contain the operator, not its module.
            results.append(
                operator.forward(
                    ids, offsets, _required_weights(weights) if self._weighted else None
                )
            )
        return results


class _InferLookup(nn.Module):
    """Lookups of all devices, which print as one and whose buffers have the tables' names."""

    def __init__(self, per_device: Sequence[DeviceLookup]) -> None:
        super().__init__()
        self._embedding_lookups_per_rank = list(per_device)

    @property
    def devices(self) -> list[DeviceLookup]:
        """One lookup per device that holds a shard."""
        return self._embedding_lookups_per_rank

    def _apply(self, fn: Any, recurse: bool = True) -> nn.Module:
        """Do nothing: the plan decides on the devices of rows."""
        return self


class InferGroupedPooledEmbeddingsLookup(_InferLookup):
    """Pooled lookups of quantized tables, one per device.

    Source:
        TorchRec's ``torchrec.distributed.embedding_lookup.InferGroupedPooledEmbeddingsLookup``.
    """

    def forward(self, features: list[KeyedJaggedTensor]) -> list[Tensor]:
        """The features of each device -> pooled rows ``[B, D of the device]`` of each."""
        pooled: list[Tensor] = []
        for index, lookup in enumerate(self._embedding_lookups_per_rank):
            results = lookup.forward(features[index])
            pooled.append(
                embeddings_cat_empty_rank_handle_inference(
                    results, dim=1, device=str(lookup.device), dtype=lookup.output_dtype
                )
            )
        return pooled


class InferGroupedEmbeddingsLookup(_InferLookup):
    """Lookups of quantized tables that return a row per id, one per device.

    Source:
        TorchRec's ``torchrec.distributed.embedding_lookup.InferGroupedEmbeddingsLookup``.
    """

    def forward(self, features: list[KeyedJaggedTensor]) -> list[Tensor]:
        """The features of each device -> rows ``[N, D]`` of each call, device after device."""
        rows: list[Tensor] = []
        for index, lookup in enumerate(self._embedding_lookups_per_rank):
            rows += lookup.forward(features[index])
        return rows


def _alike(shard: QuantShard, device: torch.device) -> tuple[Any, ...]:
    """The properties that shards of one operator share."""
    # Unpooled rows fit into one tensor only if they have equal widths.
    layout = shard.local.layout
    width = (layout.columns, layout.stored_columns) if shard.pooling == "none" else None
    rows = shard.in_place(device)

    return (
        shard.pooling,
        width,
        shard.local.alignment,
        None if rows is None else rows.untyped_storage().data_ptr(),
        bool(shard.features),
    )


def _operator(
    shards: Sequence[QuantShard], device: torch.device, output_dtype: torch.dtype
) -> PackedTableLookup:
    """The operator of shards with equal properties, on views of their tables or else on copies."""
    tables = [shard.local for shard in shards]
    feature_tables = [index for index, shard in enumerate(shards) for _ in shard.features]
    pooling = shards[0].pooling
    rows = [shard.in_place(device) for shard in shards]

    stored = [table_rows for table_rows in rows if table_rows is not None]
    if stored:
        storage = torch.empty(0, dtype=torch.uint8, device=device).set_(stored[0].untyped_storage())
        offsets = [int(table_rows.storage_offset()) for table_rows in stored]
        operator = PackedTableLookup(
            tables,
            feature_tables,
            pooling,
            output_dtype=output_dtype,
            storage=storage,
            table_offsets=offsets,
        )
        operator.asserts_ids = False  # `check_ids` does, with names of features
        return operator

    # Without shared storage the operator allocates its rows, into which the shards are copied.
    operator = PackedTableLookup(
        tables, feature_tables, pooling, output_dtype=output_dtype, device=device
    )
    operator.asserts_ids = False
    for index, shard in enumerate(shards):
        shard.write_to(operator.table_rows(index))
    return operator
