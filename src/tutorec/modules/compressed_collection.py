"""`CompressedEmbeddingBagCollection`: compressed tables, stored in ordinary collections."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tutorec._kernels.pooling import bag_weights
from tutorec._kernels.specs import PoolingKind, kernel_pooling
from tutorec._loaded import check_loaded
from tutorec.awaitable import Awaitable
from tutorec.modules.compressions import Compression, IdMap, Part, Whole
from tutorec.modules.embedding_collection import EmbeddingCollection
from tutorec.modules.embedding_configs import (
    BaseEmbeddingConfig,
    EmbeddingBagConfig,
    EmbeddingConfig,
    checked_tables,
    get_embedding_names_by_table,
    pooling_type_to_str,
)
from tutorec.modules.embedding_modules import EmbeddingBagCollection, check_pooling
from tutorec.modules.pooled_lookup import join_samples
from tutorec.sparse.id_check import check_ids
from tutorec.sparse.jagged import JaggedTensor, jagged_from_parts
from tutorec.sparse.keyed import KeyedTensor
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor
from tutorec.sparse.tensor_dict import maybe_td_to_kjt

# a collection's feature -> the caller's feature, and the map of its ids
Features = dict[str, tuple[str, IdMap]]


class TableBytes(NamedTuple):
    """Bytes of a table's weights, uncompressed and compressed."""

    whole: int
    stored: int


@dataclass(frozen=True)
class _Result:
    """One result: a feature's bags in one table.

    Attributes:
        feature: The caller's feature.
        table: The caller's table.
        compression: Compression of the table.
        lookups: Names of the results from the table's parts.
    """

    feature: str
    table: EmbeddingBagConfig
    compression: Compression
    lookups: tuple[str, ...]


class CompressedEmbeddingBagCollection(nn.Module):
    """An `EmbeddingBagCollection` with compressed tables; results have all columns.

    The input is a batch of F features and B samples, the output a ``KeyedTensor`` ``[B, D]`` with
    the keys of ``EmbeddingBagCollection(tables)``. The weights are plain tables in two ordinary
    collections, which DistributedModelParallel, the planner, optimizers in backward, checkpoints
    and ``quantize`` support:

    ==========  ==========================  ========================================================
    ``pooled``  ``EmbeddingBagCollection``  uncompressed tables, and parts whose pooled rows combine
    ``rows``    ``EmbeddingCollection``     parts whose rows combine per id and are then pooled
    ==========  ==========================  ========================================================

    A collection without tables is None. The features of these collections are named after the map
    of their ids, ``item//1024`` and ``item%1024``. A sharded lookup in ``rows`` sends a row per id,
    one in ``pooled`` a row per bag.

    Args:
        tables: Configuration of each table, as without compression.
        compression: Table name -> compression: ``{"item_table": QR()}``.
        is_weighted: Whether each id carries a weight that multiplies its row.
        device: Device of the tables; on ``meta`` nothing is allocated.

    Raises:
        KeyError: A compression is given for an unknown table.
        ValueError: As in ``EmbeddingBagCollection``, or a table cannot be compressed in this way.

    Example:
        >>> import torch
        >>> from tutorec.modules.compressions import QR
        >>> tables = [EmbeddingBagConfig(1_000_000, 8, "item_table", feature_names=["item"])]
        >>> module = CompressedEmbeddingBagCollection(tables, {"item_table": QR()})
        >>> module(
        ...     KeyedJaggedTensor(
        ...         ["item"], torch.tensor([3, 999_999]), lengths=torch.tensor([1, 1])
        ...     )
        ... )["item"].shape
        torch.Size([2, 8])
        >>> module.table_bytes()
        {'item_table': TableBytes(whole=32000000, stored=64000)}
    """

    def __init__(
        self,
        tables: list[EmbeddingBagConfig],
        compression: Mapping[str, Compression],
        is_weighted: bool = False,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        tables = checked_tables("CompressedEmbeddingBagCollection", tables, EmbeddingBagConfig)
        check_pooling(tables, is_weighted)
        names = [table.name for table in tables]
        unknown = sorted(set(compression).difference(names))
        if unknown:
            raise KeyError(f"there are no tables {unknown} to compress; they are {names}")

        self.register_load_state_dict_pre_hook(check_loaded)
        self._tables = tables
        self._is_weighted = is_weighted
        how = {table.name: compression.get(table.name, Whole()) for table in tables}
        self._parts = {table.name: how[table.name].parts(table) for table in tables}
        pooled, rows = (
            [
                stored_part
                for table in tables
                if how[table.name].per_id == per_id
                for stored_part in self._parts[table.name]
            ]
            for per_id in (False, True)
        )

        configs = [_plain(stored_part) for stored_part in pooled]
        row_configs = [_unpooled(_plain(stored_part)) for stored_part in rows]
        self.pooled = EmbeddingBagCollection(configs, is_weighted, device) if pooled else None
        self.rows = EmbeddingCollection(row_configs, device) if rows else None
        self._pooled_features = _made_features(pooled)
        self._row_features = _made_features(rows)
        self.projections = nn.ModuleDict(
            {
                table.name: nn.Linear(width, table.embedding_dim, bias=False, device=device)
                for table in tables
                if (width := how[table.name].width(table)) != table.embedding_dim
            }
        )

        # By table: each table is in one of the two collections.
        names = _result_names(configs) | _result_names(row_configs)
        self._results = [
            _Result(
                feature, table, how[table.name], _lookups(index, self._parts[table.name], names)
            )
            for table in tables
            for index, feature in enumerate(table.feature_names)
        ]
        self._checked = [
            (r.feature, r.table.name, r.table.num_embeddings)
            for r in self._results
            if r.compression.bounded
        ]

        self._names = [name for names in get_embedding_names_by_table(tables) for name in names]
        self._widths = [result.table.embedding_dim for result in self._results]
        self._keys = list(dict.fromkeys(result.feature for result in self._results))

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Look the parts up, combine them, and pool each bag.

        Args:
            features: F features, B samples; a TensorDict is accepted.

        Returns:
            The pooled rows ``[B, D]``, one key per feature and table.
        """
        features = maybe_td_to_kjt(features, self._keys)
        features = check_ids(features, self._checked, self._is_weighted, self)
        for key in self._keys:
            if key not in features.index_per_key():
                raise KeyError(
                    f"KeyedJaggedTensor has no key {key!r}; its keys are {features.keys()}"
                )

        # Both lookups are started before either result is awaited.
        pooled = None if self.pooled is None else self.pooled(self._pooled_batch(features))
        rows = (
            None
            if self.rows is None
            else self.rows(_made(features, self._row_features, weighted=False))
        )
        pooled_results = {} if pooled is None else _waited(pooled).to_dict()
        row_results = (
            {}
            if rows is None
            else {name: jagged.values() for name, jagged in _waited(rows).items()}
        )

        columns = [
            self._columns(
                result, row_results if result.compression.per_id else pooled_results, features
            )
            for result in self._results
        ]
        order = [result.feature for result in self._results]
        values = join_samples(order, columns, None, features.variable_stride_per_key())
        return KeyedTensor(self._names, self._widths, values)

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """Configuration of each table, in order."""
        return self._tables

    def is_weighted(self) -> bool:
        """Whether each id carries a weight."""
        return self._is_weighted

    def reset_parameters(self) -> None:
        """Initialize the weights."""
        for module in (self.pooled, self.rows, *self.projections.values()):
            if module is not None:
                cast(EmbeddingBagCollection, module).reset_parameters()

    def table_bytes(self) -> dict[str, TableBytes]:
        """Bytes of each table's weights, uncompressed and compressed."""
        sizes: dict[str, TableBytes] = {}
        for table in self._tables:
            size = table.dtype.itemsize
            part_tables = [stored_part.table for stored_part in self._parts[table.name]]
            stored = size * sum(
                stored_part.num_embeddings * stored_part.embedding_dim
                for stored_part in part_tables
            )
            if table.name in self.projections:
                stored += self.projections[table.name].get_parameter("weight").nbytes
            sizes[table.name] = TableBytes(
                size * table.num_embeddings * table.embedding_dim, stored
            )
        return sizes

    def _pooled_batch(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """The batch for the tables that are pooled directly."""
        batch = _made(features, self._pooled_features, self._is_weighted)
        inverse = features.inverse_indices_or_none()
        if inverse is None:
            return batch

        present = [
            (name, feature)
            for name, (feature, _) in self._pooled_features.items()
            if feature in inverse[0]
        ]
        rows = torch.tensor(
            [inverse[0].index(feature) for _, feature in present], device=inverse[1].device
        )

        return KeyedJaggedTensor(
            batch.keys(),
            batch.values(),
            batch.weights_or_none(),
            batch.lengths(),
            stride_per_key_per_rank=[[lists] for lists in batch.stride_per_key()],
            inverse_indices=([name for name, _ in present], inverse[1].index_select(0, rows)),
        )

    def _columns(
        self, result: _Result, lookups: Mapping[str, Tensor], features: KeyedJaggedTensor
    ) -> Tensor:
        """One result [B, D] from its lookups: pooled rows, or rows per id."""
        rows = result.compression.combine([lookups[name] for name in result.lookups])
        if result.compression.per_id:
            inverse = features.inverse_indices_or_none()
            pooled = self._pool(rows, features.to_dict()[result.feature], result.table)
            rows = join_samples(
                [result.feature], [pooled], inverse, features.variable_stride_per_key()
            )

        if result.table.name in self.projections:
            rows = self.projections[result.table.name](rows)
        return rows

    def _pool(self, rows: Tensor, bags: JaggedTensor, table: EmbeddingBagConfig) -> Tensor:
        """Pool rows per id [N, D] to one row per bag."""
        pooling = cast(PoolingKind, pooling_type_to_str(table.pooling))
        weights = bag_weights(
            pooling, bags.offsets(), bags.weights() if self._is_weighted else None, rows.shape[0]
        )

        return F.embedding_bag(
            torch.arange(rows.shape[0], dtype=bags.offsets().dtype, device=rows.device),
            rows,
            bags.offsets(),
            mode=kernel_pooling(pooling, self._is_weighted),
            per_sample_weights=None if weights is None else weights.to(rows.dtype),
            include_last_offset=True,
        )


def _plain(part: Part) -> EmbeddingBagConfig:
    """The table of a part, with the features computed for it."""
    names = [
        feature + id_map.suffix for feature in part.table.feature_names for id_map in part.maps
    ]
    return replace(part.table, feature_names=names)


def _unpooled(table: EmbeddingBagConfig) -> EmbeddingConfig:
    return EmbeddingConfig(
        **{field.name: getattr(table, field.name) for field in fields(EmbeddingConfig)}
    )


def _made_features(parts: Sequence[Part]) -> Features:
    return {
        feature + id_map.suffix: (feature, id_map)
        for stored_part in parts
        for feature in stored_part.table.feature_names
        for id_map in stored_part.maps
    }


def _result_names(tables: Sequence[BaseEmbeddingConfig]) -> dict[str, list[str]]:
    """Names of each table's results."""
    names = get_embedding_names_by_table(tables)
    return {table.name: table_names for table, table_names in zip(tables, names, strict=True)}


def _lookups(index: int, parts: Sequence[Part], names: Mapping[str, list[str]]) -> tuple[str, ...]:
    """Names of a table's results for its feature at ``index``, in the order of parts and maps."""
    features: list[str] = []
    for stored_part in parts:
        count = len(stored_part.maps)
        features += names[stored_part.table.name][index * count : (index + 1) * count]
    return tuple(features)


def _made(features: KeyedJaggedTensor, made: Features, weighted: bool) -> KeyedJaggedTensor:
    """A batch of features whose ids are computed from others; lengths and weights are unchanged."""
    batch: dict[str, JaggedTensor] = {}
    lists = features.to_dict()
    for name, (feature, id_map) in made.items():
        bags = lists[feature]
        ids = bags.values() if id_map.rows is None else id_map.rows(bags.values())
        weights = bags.weights() if weighted else None
        batch[name] = jagged_from_parts(ids, weights, bags.lengths(), bags.offsets())
    return KeyedJaggedTensor.from_jt_dict(batch)


def _waited(result: Any) -> Any:
    """The result of a sharded lookup, which is awaited, or of an unsharded one."""
    return result.wait() if isinstance(result, Awaitable) else result
