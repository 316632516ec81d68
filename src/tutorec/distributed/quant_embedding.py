"""Quantized `EmbeddingCollection` sharded over the devices of one process."""

# No `from __future__ import annotations`: TorchScript compiles `rows_of_features` from a traced
# graph.
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tutorec.distributed.core.env import ShardingEnv
from tutorec.distributed.lookup.quant import InferGroupedEmbeddingsLookup
from tutorec.distributed.plan.plan import ParameterSharding
from tutorec.distributed.quant_behind_mappings import BehindMappingsSharder, ShardedBehindMappings
from tutorec.distributed.quant_embeddingbag import (
    QuantEmbeddingBagCollectionSharder,
    QuantManagedCollisionEmbeddingBagCollectionSharder,
    ShardedQuantEbcInputDist,
    flatten_feature_lengths,
)
from tutorec.distributed.quant_sharding import on_device
from tutorec.distributed.quant_state import (
    BaseQuantEmbeddingSharder,
    QuantContext,
    QuantSource,
    ShardedQuantModule,
)
from tutorec.fx.utils import is_fx_symbolic_tracing
from tutorec.modules.embedding_configs import EmbeddingConfig
from tutorec.modules.embedding_rows import samples_of_lists
from tutorec.quant.embedding_collection import EmbeddingCollection as QuantEmbeddingCollection
from tutorec.quant.embedding_collection import QuantManagedCollisionEmbeddingCollection
from tutorec.sparse.id_check import check_ids
from tutorec.sparse.jagged import JaggedTensor, jagged_from_parts
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor

# A leaf of traced graphs, here as in the module that defines it.
torch.fx.wrap("flatten_feature_lengths")


@torch.fx.wrap
def rows_of_features(
    rows: Tensor, features: KeyedJaggedTensor, first: int, count: int
) -> list[Tensor]:
    """Split rows by feature.

    Args:
        rows: ``[N, D]``, feature by feature.
        features: A batch with these features, among others.
        first: Position of the first of them.
        count: Number of features.

    Example:
        >>> batch = KeyedJaggedTensor(
        ...     ["user", "item"], torch.tensor([4, 7, 8]), lengths=torch.tensor([1, 2])
        ... )
        >>> [len(rows) for rows in rows_of_features(torch.zeros(3, 2), batch, 0, 2)]
        [1, 2]
    """
    slices: list[Tensor] = rows.split_with_sizes(features.length_per_key()[first : first + count])  # pyright: ignore[reportAssignmentType]
    return slices


class ShardedQuantEcInputDist(ShardedQuantEbcInputDist):
    """Input dist: sends each feature to the devices that hold its rows."""


class ShardedQuantEmbeddingCollection(ShardedQuantModule[dict[str, JaggedTensor]]):
    """A quantized `EmbeddingCollection` sharded over the devices of one process.

    Args:
        module: The quantized collection.
        table_name_to_parameter_sharding: How each table is sharded: ``table_wise``, ``column_wise``
            or ``row_wise``.
        env: ``ShardingEnv.from_local(n, 0)`` for n devices.
        fused_params: TorchRec's; has no effect.
        device: Device type; by default that of the tables.

    Raises:
        TypeError: ``env`` or the plan has another type.
        ValueError: The plan does not fit, ``env`` has several processes, or there are fewer
            devices.

    Source:
        TorchRec's ``torchrec.distributed.quant_embedding.ShardedQuantEmbeddingCollection``.
    """

    _pools = False

    def __init__(
        self,
        module: QuantEmbeddingCollection,
        table_name_to_parameter_sharding: Mapping[str, ParameterSharding],
        env: ShardingEnv,
        fused_params: Mapping[str, Any] | None = None,
        device: torch.device | None = None,
    ) -> None:
        configs = module.embedding_configs()
        source = QuantSource(
            "EmbeddingCollection", "embeddings", configs, module, False, module.output_dtype()
        )
        super().__init__(source, table_name_to_parameter_sharding, env, device)
        self._configs = configs
        self._need_indices = module.need_indices()
        self._input_dist_module = ShardedQuantEcInputDist(self._active_shardings)
        self._feature_of = {
            key: feature
            for table in self._tables
            for key, feature in zip(table.output_keys, table.features, strict=True)
        }

    _lookup_of = InferGroupedEmbeddingsLookup

    def input_dist(self, ctx: QuantContext, features: KeyedJaggedTensor) -> list[list[Any]]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Check the batch and send each feature to the devices that hold its rows.

        Raises:
            KeyError: A feature is missing.
            ValueError: An id is outside its table.
        """
        if is_fx_symbolic_tracing():
            features = check_ids(features, self._feature_rows)
            ctx.features = flatten_feature_lengths(features, self._order.wanted)
            return self._input_dist_module.forward(ctx.features, ctx)

        ctx.features = features = self._checked(features)
        return self._input_dist_module.forward(_one_list_each(self._order.arrange(features)), ctx)

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Look a batch up; the result is that of the unsharded module.

        Args:
            features: F features, B samples; a TensorDict is accepted.
        """
        return self._run(features)

    def output_dist(self, ctx: QuantContext, output: list[list[Any]]) -> dict[str, JaggedTensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Collect the rows under the names of the unsharded module."""
        by_name: dict[str, list[tuple[int, Any]]] = {name: [] for name in self._feature_of}
        for sharding, rows, context in zip(self._active_shardings, output, ctx, strict=True):
            for slots, batch, first, call_rows in sharding.rows_home(
                rows, context, self._output_device
            ):
                every = rows_of_features(call_rows, batch, first, len(slots))
                for position, slot in enumerate(slots):
                    by_name[slot.key].append((slot.offset, every[position]))

        traced = is_fx_symbolic_tracing()
        lists = on_device(ctx.features, self._output_device).to_dict()
        results: dict[str, JaggedTensor] = {}
        for name, slices in by_name.items():
            ids = lists[self._feature_of[name]]
            columns = [rows for _, rows in sorted(slices, key=lambda each: each[0])]
            rows = columns[0] if len(columns) == 1 else torch.cat(columns, dim=1)
            indices = ids.values() if self._need_indices else None
            results[name] = jagged_from_parts(
                rows, indices, ids.lengths(), None if traced else ids.offsets()
            )

        return results if traced else samples_of_lists(results, ctx.features, self._feature_of)

    def embedding_configs(self) -> list[EmbeddingConfig]:
        """Configuration of each table."""
        return self._configs

    def need_indices(self) -> bool:
        """Whether results carry their ids, as weights."""
        return self._need_indices


class QuantEmbeddingCollectionSharder(BaseQuantEmbeddingSharder[QuantEmbeddingCollection]):
    """Sharder of quantized `EmbeddingCollection`, over the devices of one process.

    Args:
        fused_params: TorchRec's; has no effect. Number formats are those of the quantized module.
        shardable_params: Names of the tables to shard; must be all tables, the default.

    Source:
        TorchRec's ``torchrec.distributed.quant_embedding.QuantEmbeddingCollectionSharder``.
    """

    unsharded_class = QuantEmbeddingCollection
    sharded_class = ShardedQuantEmbeddingCollection

    def shard(
        self,
        module: QuantEmbeddingCollection,
        params: Mapping[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedQuantEmbeddingCollection:
        """Return the sharded module; every rank calls it. ``module_fqn`` has no effect."""
        return ShardedQuantEmbeddingCollection(module, params, env, self.fused_params, device)


class ShardedQuantManagedCollisionEmbeddingCollection(
    ShardedBehindMappings, ShardedQuantEmbeddingCollection
):
    """A quantized collection of raw ids, sharded over the devices of one process.

    It gives what the unsharded `QuantManagedCollisionEmbeddingCollection` gives. Its arguments are
    those of `ShardedQuantEmbeddingCollection`, with the sharder of the mappings as the third.

    Source:
        TorchRec's
        ``torchrec.distributed.quant_embedding.ShardedQuantManagedCollisionEmbeddingCollection``.
    """


class QuantManagedCollisionEmbeddingCollectionSharder(
    BehindMappingsSharder[QuantManagedCollisionEmbeddingCollection]
):
    """Sharder of a `QuantManagedCollisionEmbeddingCollection`, over the devices of one process.

    Args:
        e_sharder: Says how the tables may be sharded.
        mc_sharder: Puts the mappings where they are used.

    Source:
        TorchRec's
        ``torchrec.distributed.quant_embedding.QuantManagedCollisionEmbeddingCollectionSharder``.
    """

    unsharded_class = QuantManagedCollisionEmbeddingCollection
    sharded_class = ShardedQuantManagedCollisionEmbeddingCollection
    _tables_sharder = QuantEmbeddingCollectionSharder

    def shard(
        self,
        module: QuantManagedCollisionEmbeddingCollection,
        params: Mapping[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedQuantManagedCollisionEmbeddingCollection:
        """Return the sharded module; every rank calls it. ``module_fqn`` has no effect."""
        return ShardedQuantManagedCollisionEmbeddingCollection(
            module, params, self.mc_sharder, env, self.fused_params, device
        )


def _one_list_each(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """For a variable batch, all ids of a feature as one bag, which is enough for unpooled rows."""
    if not features.variable_stride_per_key():
        return features
    counts = features.length_per_key()
    lengths = torch.tensor(counts, device=features.device())
    return KeyedJaggedTensor._from_parts(
        features.keys(), features.values(), None, lengths, None, 1, counts
    )


# One sharder for each class of quantized collections.
QUANT_SHARDERS: tuple[type[BaseQuantEmbeddingSharder[Any]], ...] = (
    QuantEmbeddingBagCollectionSharder,
    QuantEmbeddingCollectionSharder,
    QuantManagedCollisionEmbeddingBagCollectionSharder,
    QuantManagedCollisionEmbeddingCollectionSharder,
)
