"""Quantized `EmbeddingBagCollection` sharded over the devices of one process.

Its traced graph is a fixed list of calls: reorder features, copy to devices, check ids, look up,
copy back, concatenate. Nothing in it depends on a batch, so tracing needs none.
"""

# No `from __future__ import annotations`: TorchScript compiles `flatten_feature_lengths` from a
# traced graph.
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from tutorec.distributed.core.env import ShardingEnv
from tutorec.distributed.core.orders import ColumnOrder
from tutorec.distributed.lookup.quant import DeviceLookup, InferGroupedPooledEmbeddingsLookup
from tutorec.distributed.plan.plan import ParameterSharding
from tutorec.distributed.quant_behind_mappings import BehindMappingsSharder, ShardedBehindMappings
from tutorec.distributed.quant_sharding import InferSharding, InferWholeRowsSharding
from tutorec.distributed.quant_state import (
    BaseQuantEmbeddingSharder,
    QuantContext,
    QuantSource,
    ShardedQuantModule,
)
from tutorec.fx.utils import is_fx_symbolic_tracing
from tutorec.modules.embedding_configs import EmbeddingBagConfig
from tutorec.modules.pooled_lookup import join_samples
from tutorec.quant.embedding_modules import (
    EmbeddingBagCollection,
    QuantManagedCollisionEmbeddingBagCollection,
)
from tutorec.quant.feature_order import features_in_order, with_equal_strides
from tutorec.sparse.id_check import check_ids
from tutorec.sparse.keyed import KeyedTensor
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor


@torch.fx.wrap
def flatten_feature_lengths(features: KeyedJaggedTensor, order: list[str]) -> KeyedJaggedTensor:
    """Reorder features for the devices; returns the batch itself if it has that order.

    A leaf of traced graphs, since the key order of later batches is unknown. TorchRec's lengths may
    have two dimensions, which explains the name; here they are always flat.

    Args:
        features: The batch.
        order: The features; one may occur twice.

    Raises:
        KeyError: A feature is missing.

    Example:
        >>> batch = KeyedJaggedTensor(
        ...     ["user", "item"], torch.tensor([4, 7, 8]), lengths=torch.tensor([1, 2])
        ... )
        >>> flatten_feature_lengths(batch, ["item", "user"]).values()
        tensor([7, 8, 4])

    Source:
        TorchRec's ``torchrec.distributed.quant_embeddingbag.flatten_feature_lengths``.
    """
    return features_in_order(features, order)


@torch.fx.wrap
def no_columns(features: KeyedJaggedTensor, dtype: torch.dtype) -> torch.Tensor:
    """The result of a collection without features, ``[B, 0]``.

    Example:
        >>> batch = KeyedJaggedTensor(["user"], torch.tensor([4]), lengths=torch.tensor([1, 0]))
        >>> no_columns(batch, torch.float32).shape
        torch.Size([2, 0])
    """
    return torch.empty([features.stride(), 0], dtype=dtype)


class ShardedQuantEbcInputDist(nn.Module):
    """Input dist: sends each feature to the devices that hold its rows.

    Args:
        shardings: The shardings, in order.

    Source:
        TorchRec's ``torchrec.distributed.quant_embeddingbag.ShardedQuantEbcInputDist``.
    """

    def __init__(self, shardings: Sequence[InferSharding]) -> None:
        super().__init__()
        self._shardings = list(shardings)
        self._counts = [len(sharding.features) for sharding in shardings]

    def forward(self, features: Any, ctx: Any) -> list[list[Any]]:
        """Features of all shardings, concatenated -> a batch per sharding and device."""
        if not self._shardings:
            return []
        batches = [features] if len(self._counts) == 1 else features.split(self._counts)
        return [
            sharding.dist(batches[index], ctx[index])
            for index, sharding in enumerate(self._shardings)
        ]


class ShardedQuantEmbeddingBagCollection(ShardedQuantModule[KeyedTensor]):
    """A quantized `EmbeddingBagCollection` sharded over the devices of one process.

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
        TorchRec's ``torchrec.distributed.quant_embeddingbag.ShardedQuantEmbeddingBagCollection``.
    """

    _pools = True

    def __init__(
        self,
        module: EmbeddingBagCollection,
        table_name_to_parameter_sharding: Mapping[str, ParameterSharding],
        env: ShardingEnv,
        fused_params: Mapping[str, Any] | None = None,
        device: torch.device | None = None,
    ) -> None:
        configs = module.embedding_bag_configs()
        source = QuantSource(
            "EmbeddingBagCollection",
            "embedding_bags",
            configs,
            module,
            module.is_weighted(),
            module.output_dtype(),
        )
        super().__init__(source, table_name_to_parameter_sharding, env, device)

        self._configs = configs
        self._input_dist_module = ShardedQuantEbcInputDist(self._active_shardings)
        self._keys = [key for table in self._tables for key in table.output_keys]
        self._result_features = [feature for table in self._tables for feature in table.features]
        arriving = [
            slot for sharding in self._active_shardings for call in sharding.calls for slot in call
        ]
        self._columns = ColumnOrder(arriving, wanted=self._keys)
        unsplit = len(self._active_shardings) == 1 and isinstance(
            self._active_shardings[0], InferWholeRowsSharding
        )
        # In a list, so that it is not registered as a submodule a second time.
        self._alone = (
            self._active_shardings[0].lookups
            if unsplit and len(self._active_shardings[0].lookups) == 1
            else []
        )

    _lookup_of = InferGroupedPooledEmbeddingsLookup

    def input_dist(self, ctx: QuantContext, features: KeyedJaggedTensor) -> list[list[Any]]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Check the batch and send each feature to the devices that hold its rows.

        Raises:
            KeyError: A feature is missing.
            ValueError: An id is outside its table, or weights are missing.
        """
        if is_fx_symbolic_tracing():
            features = check_ids(features, self._feature_rows)
            ctx.features = flatten_feature_lengths(features, self._order.wanted)
            return self._input_dist_module.forward(ctx.features, ctx)

        ctx.features = features = self._checked(features)
        if features.variable_stride_per_key() or features.inverse_indices_or_none() is not None:
            ctx.of_lists = True
            features = with_equal_strides(features)
        return self._input_dist_module.forward(self._order.arrange(features), ctx)

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Look a batch up; the result is that of the unsharded module.

        Args:
            features: F features, B samples; a TensorDict is accepted.
        """
        if not self._alone or type(features) is not KeyedJaggedTensor or is_fx_symbolic_tracing():
            return self._run(features)
        return self._at_once(features, self._alone[0])

    def _at_once(self, features: KeyedJaggedTensor, lookup: DeviceLookup) -> KeyedTensor:
        """Fast path for one device that holds all tables: nothing is moved."""
        near = lookup.device == self._output_device and features.device() == lookup.device
        if (
            not near
            or self._not_loaded
            or features.variable_stride_per_key()
            or features.inverse_indices_or_none() is not None
        ):
            return self._run(features)

        features = check_ids(features, self._feature_rows, self._is_weighted, self)
        pooled = lookup.forward(self._order.arrange(features))
        return self._keyed(pooled[0] if len(pooled) == 1 else torch.cat(pooled, dim=1))

    def _keyed(self, pooled: Any) -> KeyedTensor:
        """Columns in the order of the shardings -> the result."""
        widths = self._columns.length_per_key
        traced = is_fx_symbolic_tracing()
        pooled = self._columns.arrange(pooled)
        if traced:
            return KeyedTensor(self._keys, widths, pooled)
        return KeyedTensor._from_parts(self._keys[:], widths[:], pooled)

    def output_dist(self, ctx: QuantContext, output: list[list[Any]]) -> KeyedTensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Concatenate the columns in the order of the unsharded module."""
        if not self._active_shardings:
            return KeyedTensor(
                [], [], no_columns(ctx.features, self._output_dtype).to(self._output_device)
            )

        columns = [
            sharding.gather(pooled, context, self._output_device)
            for sharding, pooled, context in zip(self._active_shardings, output, ctx, strict=True)
        ]
        joined = columns[0] if len(columns) == 1 else torch.cat(columns, dim=1)
        keyed = self._keyed(joined)
        if not ctx.of_lists:
            return keyed

        pooled = self._of_samples(keyed.values(), ctx.features)
        return KeyedTensor._from_parts(keyed.keys(), keyed.length_per_key(), pooled)

    def _of_samples(self, pooled: torch.Tensor, features: KeyedJaggedTensor) -> torch.Tensor:
        """The pooled rows of samples, for a batch with inverse indices."""
        strides = dict(zip(features.keys(), features.stride_per_key(), strict=True))
        columns_per_feature = pooled.split_with_sizes(self._columns.length_per_key, 1)
        lists = [
            columns[: strides[name]]
            for name, columns in zip(self._result_features, columns_per_feature, strict=True)
        ]

        inverse = features.inverse_indices_or_none()
        if inverse is not None:
            inverse = inverse[0], inverse[1].to(self._output_device)

        return join_samples(
            self._result_features, lists, inverse, features.variable_stride_per_key()
        )

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """Configuration of each table."""
        return self._configs


class QuantEmbeddingBagCollectionSharder(BaseQuantEmbeddingSharder[EmbeddingBagCollection]):
    """Sharder of quantized `EmbeddingBagCollection`, over the devices of one process.

    Args:
        fused_params: TorchRec's; has no effect. Number formats are those of the quantized module.
        shardable_params: Names of the tables to shard; must be all tables, the default.

    Source:
        TorchRec's ``torchrec.distributed.quant_embeddingbag.QuantEmbeddingBagCollectionSharder``.
    """

    unsharded_class = EmbeddingBagCollection
    sharded_class = ShardedQuantEmbeddingBagCollection

    def shard(
        self,
        module: EmbeddingBagCollection,
        params: Mapping[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedQuantEmbeddingBagCollection:
        """Return the sharded module; every rank calls it. ``module_fqn`` has no effect."""
        return ShardedQuantEmbeddingBagCollection(module, params, env, self.fused_params, device)


class ShardedQuantManagedCollisionEmbeddingBagCollection(
    ShardedBehindMappings, ShardedQuantEmbeddingBagCollection
):
    """A quantized collection of raw ids and bags, sharded over the devices of one process.

    It gives what the unsharded `QuantManagedCollisionEmbeddingBagCollection` gives. Its arguments
    are those of `ShardedQuantEmbeddingBagCollection`, with the sharder of the mappings as the
    third.

    Source:
        TorchRec's ``torchrec.distributed.quant_embeddingbag
        .ShardedQuantManagedCollisionEmbeddingBagCollection``.
    """


class QuantManagedCollisionEmbeddingBagCollectionSharder(
    BehindMappingsSharder[QuantManagedCollisionEmbeddingBagCollection]
):
    """Sharder of a `QuantManagedCollisionEmbeddingBagCollection`, over one process's devices.

    Args:
        e_sharder: Says how the tables may be sharded.
        mc_sharder: Puts the mappings where they are used.

    Source:
        TorchRec's ``torchrec.distributed.quant_embeddingbag
        .QuantManagedCollisionEmbeddingBagCollectionSharder``.
    """

    unsharded_class = QuantManagedCollisionEmbeddingBagCollection
    sharded_class = ShardedQuantManagedCollisionEmbeddingBagCollection
    _tables_sharder = QuantEmbeddingBagCollectionSharder

    def shard(
        self,
        module: QuantManagedCollisionEmbeddingBagCollection,
        params: Mapping[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedQuantManagedCollisionEmbeddingBagCollection:
        """Return the sharded module; every rank calls it. ``module_fqn`` has no effect."""
        return ShardedQuantManagedCollisionEmbeddingBagCollection(
            module, params, self.mc_sharder, env, self.fused_params, device
        )
