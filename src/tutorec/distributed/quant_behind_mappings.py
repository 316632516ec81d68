"""Sharded quantized collections of raw ids: what both kinds do with the mappings.

One process drives all devices, and its mappings do not change. So they stay whole, on the device of
the results, in front of the tables::

    raw ids                    KJT [F x B]
      | remap                  on one device
    rows                       KJT [F x B]
      | input_dist, lookup, output_dist      as of the collection of tables
"""

# No `from __future__ import annotations`: TorchScript compiles what is called in a traced graph.

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import nn

from tutorec.distributed.core.env import ShardingEnv
from tutorec.distributed.core.sharders import M
from tutorec.distributed.mc_modules import InferManagedCollisionCollectionSharder
from tutorec.distributed.plan.plan import ParameterSharding
from tutorec.distributed.quant_sharding import on_device
from tutorec.distributed.quant_state import (
    BaseQuantEmbeddingSharder,
    QuantContext,
    ShardedQuantModule,
)
from tutorec.fx.utils import is_fx_symbolic_tracing
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor
from tutorec.sparse.tensor_dict import maybe_td_to_kjt


class ShardedBehindMappings(ShardedQuantModule[Any]):
    """The part of a sharded quantized collection of raw ids that remaps them; it comes first.

    Args:
        module: The quantized collection of raw ids.
        table_name_to_parameter_sharding: How each table is sharded.
        mc_sharder: Puts the mappings where they are used.
        env: ``ShardingEnv.from_local(n, 0)`` for n devices.
        fused_params: TorchRec's; has no effect.
        device: Device type; by default that of the tables.
    """

    def __init__(
        self,
        module: Any,
        table_name_to_parameter_sharding: Mapping[str, ParameterSharding],
        mc_sharder: InferManagedCollisionCollectionSharder,
        env: ShardingEnv,
        fused_params: Mapping[str, Any] | None = None,
        device: torch.device | None = None,
    ) -> None:
        tables: Any = super()
        tables.__init__(module, table_name_to_parameter_sharding, env, fused_params, device)
        self._managed_collision_collection = mc_sharder.shard(
            module._managed_collision_collection,
            table_name_to_parameter_sharding,
            env,
            self._shardings,
            self._devices[0],
        )
        self.eval()

    def input_dist(self, ctx: QuantContext, features: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Remap the ids, and send each feature to the devices that hold its rows.

        Raises:
            KeyError: A feature is missing.
        """
        mappings = self._managed_collision_collection
        if not is_fx_symbolic_tracing():
            features = maybe_td_to_kjt(features, mappings._feature_names)
        ctx.remapped = mappings(on_device(features, self._devices[0]))
        return super().input_dist(ctx, ctx.remapped)

    def output_dist(self, ctx: QuantContext, output: list[list[Any]]) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The result of the unsharded module: that of the tables, and the batch of rows."""
        return super().output_dist(ctx, output), ctx.remapped

    def forward(self, features: KeyedJaggedTensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Raw ids -> the result of the unsharded module."""
        return self._run(features)


class BehindMappingsSharder(BaseQuantEmbeddingSharder[M]):
    """What the sharders of both quantized collections of raw ids have in common.

    Args:
        e_sharder: Says how the tables may be sharded.
        mc_sharder: Puts the mappings where they are used.
    """

    _tables_sharder: ClassVar[type[BaseQuantEmbeddingSharder[Any]]]

    def __init__(
        self,
        e_sharder: BaseQuantEmbeddingSharder[Any] | None = None,
        mc_sharder: InferManagedCollisionCollectionSharder | None = None,
    ) -> None:
        self._e_sharder = e_sharder or self._tables_sharder()
        self.mc_sharder = mc_sharder or InferManagedCollisionCollectionSharder()
        super().__init__(self._e_sharder.fused_params)

    def shardable_parameters(self, module: nn.Module) -> dict[str, nn.Parameter]:
        """Table name -> a parameter ``[R, D]`` on the meta device, for the planner."""
        return self._e_sharder.shardable_parameters(module)

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """The `ShardingType` values of the sharder of the tables."""
        return self._e_sharder.sharding_types(compute_device_type)
