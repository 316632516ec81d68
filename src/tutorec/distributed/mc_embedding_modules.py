"""Base classes of sharded collections with managed collisions: tables, mappings, one exchange."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, cast

import torch
from torch import nn

from tutorec.awaitable import Awaitable, LazyAwaitable
from tutorec.distributed.core.env import ShardingEnv
from tutorec.distributed.core.qcomm import QuantizedCommCodecs
from tutorec.distributed.core.sharded_module import ShardedModule
from tutorec.distributed.core.sharders import BaseEmbeddingSharder, CollectionSharder, M
from tutorec.distributed.embedding_base import ShardedEmbeddingModule
from tutorec.distributed.mc_modules import (
    ManagedCollisionCollectionContext,
    ManagedCollisionCollectionSharder,
)
from tutorec.distributed.mc_resharding import move_ids_to_owners
from tutorec.distributed.plan.plan import EmbeddingComputeKernel, ParameterSharding
from tutorec.modules.mc_embedding_modules import BaseManagedCollisionEmbeddingCollection, reset_rows
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor


class BaseShardedManagedCollisionEmbeddingCollection(
    ShardedModule[
        ManagedCollisionCollectionContext,
        Any,
        Any,
        tuple[Any, LazyAwaitable[KeyedJaggedTensor] | None],
    ]
):
    """A collection with managed collisions over the ranks of a process group.

    In: my samples, with raw ids. Out: what the sharded collection returns, and my batch with rows
    in place of raw ids, or None. To build one is a collective: every rank does it with the same
    tables and the same plan. Whatever the number of ranks, a batch is remapped by one mapping, that
    of after the batch was observed. In eval mode nothing changes.

    Args:
        module: The unsharded collection.
        table_name_to_parameter_sharding: The plan of this module.
        e_sharder: Shards the tables.
        mc_sharder: Shards the mappings.
        env: The ranks.
        device: Where this rank's tables are to live.

    Raises:
        ValueError: The plan does not fit the module or the world.
        AgreementError: Ranks differ, or another rank failed.

    Source:
        TorchRec's
        ``torchrec.distributed.mc_embedding_modules.BaseShardedManagedCollisionEmbeddingCollection``.
    """

    # One call in a traced graph, as every sharded collection.
    is_traced_whole: ClassVar[bool] = True

    def __init__(
        self,
        module: BaseManagedCollisionEmbeddingCollection,
        table_name_to_parameter_sharding: Mapping[str, ParameterSharding],
        e_sharder: BaseEmbeddingSharder[Any],
        mc_sharder: ManagedCollisionCollectionSharder,
        env: ShardingEnv,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        plan = table_name_to_parameter_sharding
        tables = cast(
            ShardedEmbeddingModule[Any, Any, Any, Any, Any],
            e_sharder.shard(module._embedding_module, plan, env, device),
        )
        self._embedding_module = tables
        self._managed_collision_collection = mc_sharder.shard(
            module._managed_collision_collection,
            plan,
            env,
            tables.shardings,
            tables.device,
            getattr(e_sharder, "use_index_dedup", False),
        )
        tables.set_id_remapper(self._managed_collision_collection.preprocess)
        self._configs = {
            config.name: config
            for config in module._managed_collision_collection.embedding_configs()
        }
        self._return_remapped_features = module._return_remapped_features
        self._allow_in_place_embed_weight_update = module._allow_in_place_embed_weight_update
        self._resets = 0
        self.train(module.training)
        if self._managed_collision_collection.has_ids:
            self.move_ids_to_owners()

    # --- one batch

    def create_context(self) -> ManagedCollisionCollectionContext:
        """The context of one batch."""
        return ManagedCollisionCollectionContext()

    def prepare_input(
        self, ctx: ManagedCollisionCollectionContext, features: KeyedJaggedTensor
    ) -> None:
        """Do what ``input_dist`` does on this rank alone."""
        self._embedding_module.prepare_input(ctx, features)

    def input_dist(
        self, ctx: ManagedCollisionCollectionContext, features: KeyedJaggedTensor
    ) -> Awaitable[Any]:
        """My samples, raw ids -> every sample, raw ids that I may give a row."""
        return self._embedding_module.input_dist(ctx, features)

    def send_status(self, status: int) -> Awaitable[Any]:
        """Take part in the first round of ``input_dist`` without a batch."""
        return self._embedding_module.send_status(status)

    def compute(self, ctx: ManagedCollisionCollectionContext, dist_input: Any) -> Any:
        """Raw ids -> rows; rows that were given to other ids are reset; then they are looked up."""
        with torch.no_grad():
            remapped = self._remapped(ctx, dist_input)
            self._evict(ctx.evictions_per_table)

        embeddings = self._embedding_module.compute(ctx, remapped)
        if not self._allow_in_place_embed_weight_update and torch.is_grad_enabled():
            for rows in embeddings:
                if rows.requires_grad:
                    rows.register_hook(partial(self._refuse_reset_rows, self._resets))

        return embeddings

    @abstractmethod
    def _remapped(self, ctx: ManagedCollisionCollectionContext, dist_input: Any) -> Any:
        """The received ids, with rows in place of raw ids."""

    def output_dist(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, ctx: ManagedCollisionCollectionContext, output: Any
    ) -> tuple[Any, LazyAwaitable[KeyedJaggedTensor] | None]:
        """Send the results, and on request the rows, to the ranks of the samples."""
        result = self._embedding_module.output_dist(ctx, output)
        if not self._return_remapped_features:
            return result, None
        return result, self._managed_collision_collection.output_dist(ctx, ctx.remapped_kjt)

    def _evict(self, evictions_per_table: Mapping[str, torch.Tensor | None]) -> None:
        """Reset this rank's rows that belong to other ids now, and their optimizer state."""
        evicted = {
            name: rows
            for name, rows in evictions_per_table.items()
            if rows is not None and rows.numel()
        }
        if not evicted:
            return

        for shard in self._embedding_module.local_shards():
            name = shard.table.name
            if name in evicted and shard.rows:
                reset_rows(
                    self._configs[name],
                    shard.rows[0],
                    evicted[name],
                    self._allow_in_place_embed_weight_update,
                )

        self._resets += 1

    def _refuse_reset_rows(self, resets: int, gradient: torch.Tensor) -> None:
        """Refuse a backward that would give rows the gradients of ids that have left."""
        if self._resets != resets:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: rows of tables {[*self._configs]} were given to other ids "
                "after this forward; call its backward before the next forward, or build the "
                "collection with allow_in_place_embed_weight_update=True"
            )

    def move_ids_to_owners(self) -> None:
        """Send ids whose rows were loaded on another rank than their owner there. A collective."""
        move_ids_to_owners(
            self._embedding_module, self._managed_collision_collection, self._configs
        )

    # --- what it shares with the unsharded module

    @property
    def env(self) -> ShardingEnv:
        """The ranks."""
        return self._embedding_module.env


class BaseManagedCollisionEmbeddingCollectionSharder(CollectionSharder[M]):
    """What the sharders of both collections with managed collisions have in common.

    Args:
        e_sharder: Shards the tables.
        mc_sharder: Shards the mappings.
        qcomm_codecs_registry: What rows and their gradients travel as, from
            ``get_qcomm_codecs_registry``.

    Source:
        TorchRec's
        ``torchrec.distributed.mc_embedding_modules.BaseManagedCollisionEmbeddingCollectionSharder``.
    """

    def __init__(
        self,
        e_sharder: BaseEmbeddingSharder[Any],
        mc_sharder: ManagedCollisionCollectionSharder,
        qcomm_codecs_registry: Mapping[str, QuantizedCommCodecs] | None = None,
    ) -> None:
        super().__init__(qcomm_codecs_registry)
        self.e_sharder = e_sharder
        self.mc_sharder = mc_sharder

    @property
    def fused_params(self) -> dict[str, Any] | None:
        """The optimizer that runs inside backward."""
        return self.e_sharder.fused_params

    def shardable_parameters(self, module: Any) -> dict[str, nn.Parameter]:
        """Table name -> weights ``[R, D]``."""
        return self.e_sharder.shardable_parameters(module._embedding_module)

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """`ShardingType` values that both tables and mappings can be built for, on any device."""
        known = self.e_sharder.sharding_types(compute_device_type)
        return [
            sharding_type
            for sharding_type in self.mc_sharder.sharding_types(compute_device_type)
            if sharding_type in known
        ]

    def shard(
        self,
        module: M,
        params: Mapping[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> Any:
        """Return the sharded module; every rank calls it. ``module_fqn`` has no effect."""
        sharded_class: Any = self.sharded_class
        return sharded_class(module, params, self.e_sharder, self.mc_sharder, env, device)

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        """Kernels whose optimizer runs in backward: its state is reset with reassigned rows."""
        kernels: Sequence[str] = self.e_sharder.compute_kernels(sharding_type, compute_device_type)
        return [kernel for kernel in kernels if kernel != EmbeddingComputeKernel.DENSE.value]
