"""`EmbeddingBagCollection` sharded over the ranks of a process group.

Input, output and parameter names are those of the unsharded module. One batch goes through
``input_dist``, ``compute`` and ``output_dist``. Each sharding type in ``sharding/`` implements
these three steps for its tables; this module joins their results in the caller's order of keys.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tutorec.awaitable import Awaitable, map_awaitable
from tutorec.distributed.collectives.kjt import KJTArrival
from tutorec.distributed.core.env import ShardingEnv
from tutorec.distributed.core.orders import ColumnOrder
from tutorec.distributed.core.qcomm import QuantizedCommCodecs
from tutorec.distributed.core.sharded_module import KJTList
from tutorec.distributed.core.sharders import BaseEmbeddingSharder
from tutorec.distributed.core.tables import PlacedTable
from tutorec.distributed.embedding_base import (
    BatchContext,
    ResultAwaitable,
    ShardedEmbeddingModule,
)
from tutorec.distributed.plan.plan import ParameterSharding
from tutorec.distributed.sharding.base import PooledEmbeddingSharding
from tutorec.distributed.sharding.registry import POOLED_SHARDINGS
from tutorec.distributed.source_tables import CollectionSpec
from tutorec.modules.embedding_configs import EmbeddingBagConfig
from tutorec.modules.embedding_modules import EmbeddingBagCollection
from tutorec.modules.pooled_lookup import join_samples
from tutorec.sparse.keyed import KeyedTensor


class EmbeddingBagCollectionContext(BatchContext):
    """State of one batch, shared by ``input_dist``, ``compute`` and ``output_dist``."""


class EmbeddingBagCollectionAwaitable(ResultAwaitable):
    """Lazy result; ``wait()`` returns the `KeyedTensor` in the caller's order of keys."""


class PooledOutputs:
    """Joins the outputs of a module's shardings into one `KeyedTensor`.

    Args:
        shardings: The shardings, in the order of their outputs.
        tables: The tables, in the caller's order.
        device: Device of the tables.
    """

    def __init__(
        self,
        shardings: Sequence[PooledEmbeddingSharding],
        tables: Sequence[PlacedTable],
        device: torch.device,
    ) -> None:
        self._device = device
        self._keys = [key for table in tables for key in table.output_keys]
        self._features = [feature for table in tables for feature in table.features]
        self._piece_features = [list(sharding.output_features()) for sharding in shardings]
        pieces = [list(sharding.output_pieces()) for sharding in shardings]
        self._piece_columns = [[piece.columns for piece in of_sharding] for of_sharding in pieces]
        self._columns = ColumnOrder(
            [piece for of_sharding in pieces for piece in of_sharding], wanted=self._keys
        )

    def join(
        self, parts: Sequence[torch.Tensor], ctx: EmbeddingBagCollectionContext
    ) -> KeyedTensor:
        """Return the columns of every key, from one output per sharding."""
        lengths = self._columns.length_per_key
        if not parts:
            parts = [torch.empty(ctx.batch_size, 0, dtype=torch.float32, device=self._device)]
        if not ctx.variable_batch_per_feature:
            pooled = self._columns.arrange(
                parts[0] if len(parts) == 1 else torch.cat(list(parts), dim=1)
            )
            if ctx.inverse_indices is None:
                return KeyedTensor(self._keys, lengths, pooled)
            by_key = list(pooled.split(lengths, dim=1))
        else:
            # Replicated tables are looked up locally: nothing tells them that another rank's batch
            # is variable.
            flats = [
                part
                if part.dim() == 1
                else torch.cat([block.reshape(-1) for block in part.split(columns, dim=1)])
                for part, columns in zip(parts, self._piece_columns, strict=True)
            ]
            by_key = self._columns.by_key(
                flats[0] if len(flats) == 1 else torch.cat(flats), self._samples(ctx)
            )
        joined = join_samples(
            self._features, by_key, ctx.inverse_indices, ctx.variable_batch_per_feature
        )
        return KeyedTensor(self._keys, lengths, joined)

    def _samples(self, ctx: EmbeddingBagCollectionContext) -> list[int]:
        """For a variable batch, the local samples of each output of a sharding."""
        return [
            of_sharding.batch_size_per_feature_pre_a2a[feature]
            for of_sharding, features in zip(
                ctx.sharding_contexts, self._piece_features, strict=True
            )
            for feature in features
        ]


class ShardedEmbeddingBagCollection(
    ShardedEmbeddingModule[
        EmbeddingBagCollectionContext,
        KJTList,
        list[torch.Tensor],
        KeyedTensor,
        PooledEmbeddingSharding,
    ],
):
    """An `EmbeddingBagCollection` whose tables are sharded over the ranks of a process group.

    The input is a ``KeyedJaggedTensor`` (or a TensorDict) of this rank's samples; ranks may have
    different batch sizes. The output is a lazy ``KeyedTensor [B, D]`` for the same samples.
    Parameters have the names of the unsharded module, and each rank has only those of its own
    shards. Construction is collective: every rank must call it with the same tables and the same
    plan, which is checked.

    Args:
        module: The unsharded collection. Its weights are copied; weights on the meta device are
            initialized here.
        table_name_to_parameter_sharding: The plan of this module.
        env: The ranks.
        fused_params: Options of the fused optimizer, see `fused_params.optimizer_spec`.
        device: Device of this rank's shards; :func:`tutorec.spmd.device` by default.
        qcomm_codecs_registry: Data types in which pooled rows and their gradients are sent; float32
            by default.

    Raises:
        ValueError: The plan does not fit the module or the world size.
        AgreementError: Ranks disagree about tables or plan, or another rank failed.

    Source:
        TorchRec's ``torchrec.distributed.embeddingbag.ShardedEmbeddingBagCollection``.
    """

    _awaitable = EmbeddingBagCollectionAwaitable

    def __init__(
        self,
        module: EmbeddingBagCollection,
        table_name_to_parameter_sharding: Mapping[str, ParameterSharding],
        env: ShardingEnv,
        fused_params: Mapping[str, Any] | None = None,
        device: torch.device | None = None,
        qcomm_codecs_registry: Mapping[str, QuantizedCommCodecs] | None = None,
    ) -> None:
        self._configs = module.embedding_bag_configs()
        weights = {name: bag.get_parameter("weight") for name, bag in module.embedding_bags.items()}
        codecs, weighted = qcomm_codecs_registry or {}, module.is_weighted()
        source = CollectionSpec(
            "EmbeddingBagCollection", "embedding_bags", self._configs, weights, weighted, codecs
        )
        super().__init__(
            source,
            table_name_to_parameter_sharding,
            env,
            fused_params,
            device,
            POOLED_SHARDINGS,
        )
        self._outputs = PooledOutputs(self._shardings, self._tables, self._device)

    # --- one batch

    def create_context(self) -> EmbeddingBagCollectionContext:
        """Return an empty context for one batch."""
        return EmbeddingBagCollectionContext()

    def _received(
        self, ctx: EmbeddingBagCollectionContext, arrivals: Sequence[KJTArrival]
    ) -> Awaitable[KJTList]:
        """Return the received batch of each sharding."""
        return map_awaitable(lambda *batches: KJTList(list(batches)), *arrivals)

    def _join(
        self, parts: Sequence[torch.Tensor], ctx: EmbeddingBagCollectionContext
    ) -> KeyedTensor:
        """Join the outputs of all shardings into the result."""
        return self._outputs.join(parts, ctx)

    # --- interface of the unsharded module

    @property
    def unsharded_module_type(self) -> type[EmbeddingBagCollection]:
        """The class that was sharded."""
        return EmbeddingBagCollection

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """Configuration of every table, including those of other ranks."""
        return self._configs

    def is_weighted(self) -> bool:
        """Whether each id carries a weight."""
        return self._is_weighted


class EmbeddingBagCollectionSharder(BaseEmbeddingSharder[EmbeddingBagCollection]):
    """Sharder of `EmbeddingBagCollection`.

    TorchRec's argument ``sharded_module_order_overwrite``, the order in which sharding types run,
    is absent: results do not depend on that order.

    Args:
        fused_params: Options of the optimizer that runs inside backward: ``optimizer``,
            ``learning_rate``, ``eps``. SGD with a learning rate of 0.01 by default.
        qcomm_codecs_registry: Data types in which pooled rows and their gradients are sent, from
            ``get_qcomm_codecs_registry``; float32 by default.

    Raises:
        ValueError: ``fused_params`` has an unknown option or an invalid value.

    Example:
        >>> from tutorec.distributed.plan.plan import EmbeddingModuleShardingPlan
        >>> from tutorec.distributed.plan.geometry import table_wise_sharding
        >>> from tutorec.sparse.keyed_jagged import KeyedJaggedTensor
        >>> tables = [
        ...     EmbeddingBagConfig(
        ...         num_embeddings=8, embedding_dim=4, name="products", feature_names=["item"]
        ...     )
        ... ]
        >>> plan = EmbeddingModuleShardingPlan(
        ...     products=table_wise_sharding((8, 4), rank=0, device_type="cpu")
        ... )
        >>> sharder = EmbeddingBagCollectionSharder(fused_params={"learning_rate": 0.02})
        >>> sharded = sharder.shard(
        ...     EmbeddingBagCollection(tables), plan, ShardingEnv.from_local(1, 0)
        ... )
        >>> sharded(
        ...     KeyedJaggedTensor(["item"], torch.tensor([3, 1]), lengths=torch.tensor([1, 1]))
        ... ).keys()
        ['item']

    Source:
        TorchRec's ``torchrec.distributed.embeddingbag.EmbeddingBagCollectionSharder``.
    """

    _module_type = EmbeddingBagCollection
    _tables_path = "embedding_bags"
    _types = tuple(POOLED_SHARDINGS)
    _sharded_type = ShardedEmbeddingBagCollection
