"""`EmbeddingBagCollection` sharded over the ranks of a process group.

Input, output and parameter names are those of the unsharded module. One batch goes through
``input_dist``, ``compute`` and ``output_dist``. Each sharding type in ``sharding/`` implements
these three steps for its tables; this module joins their results in the caller's order of keys.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch

from tutorec.awaitable import Awaitable
from tutorec.distributed.collectives.kjt import KJTArrival
from tutorec.distributed.core.env import ShardingEnv
from tutorec.distributed.core.orders import ColumnOrder
from tutorec.distributed.core.qcomm import QuantizedCommCodecs
from tutorec.distributed.core.sharded_module import KJTList
from tutorec.distributed.core.sharders import BaseEmbeddingSharder
from tutorec.distributed.core.tables import Table
from tutorec.distributed.embedding_base import (
    BatchContext,
    ResultAwaitable,
    ShardedEmbeddingModule,
)
from tutorec.distributed.plan.plan import ParameterSharding
from tutorec.distributed.sharding.base import PooledEmbeddingSharding
from tutorec.distributed.sharding.registry import POOLED_SHARDINGS
from tutorec.modules.embedding_configs import EmbeddingBagConfig
from tutorec.modules.embedding_modules import EmbeddingBagCollection
from tutorec.modules.pooled_lookup import join_samples
from tutorec.sparse.keyed import KeyedTensor


class EmbeddingBagCollectionContext(BatchContext):
    """State of one batch, shared by ``input_dist``, ``compute`` and ``output_dist``."""


class KJTListAwaitable(Awaitable[KJTList]):
    """Second round of ``input_dist``: ids are in flight; ``wait()`` returns a batch per sharding.

    Args:
        arrivals: The ids of each sharding.

    Source:
        TorchRec's ``torchrec.distributed.embedding_sharding.KJTListAwaitable``.
    """

    def __init__(self, arrivals: Sequence[KJTArrival]) -> None:
        self._arrivals = arrivals

    def _wait_impl(self) -> KJTList:
        return KJTList([arrival.wait() for arrival in self._arrivals])


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
        tables: Sequence[Table],
        device: torch.device,
    ) -> None:
        self._device = device
        self._keys = [key for table in tables for key in table.output_keys]
        self._features = [feature for table in tables for feature in table.features]

        # Of each sharding: the columns that it returns, and the feature that each of them is for.
        columns = [list(sharding.output_columns()) for sharding in shardings]
        self._widths = [[output.columns for output in outputs] for outputs in columns]
        self._output_features = [list(sharding.output_features()) for sharding in shardings]
        self._order = ColumnOrder([*chain.from_iterable(columns)], wanted=self._keys)

    def join(
        self, outputs: Sequence[torch.Tensor], ctx: EmbeddingBagCollectionContext
    ) -> KeyedTensor:
        """Return the columns of every key, from one output per sharding."""
        lengths = self._order.length_per_key
        if not outputs:
            outputs = [torch.empty(ctx.batch_size, 0, dtype=torch.float32, device=self._device)]

        if ctx.variable_batch_per_feature:
            by_key = self._variable_columns(outputs, ctx)
        else:
            arrived = outputs[0] if len(outputs) == 1 else torch.cat(list(outputs), dim=1)
            pooled = self._order.arrange(arrived)
            if ctx.inverse_indices is None:
                return KeyedTensor._from_parts(list(self._keys), lengths, pooled)
            by_key = list(pooled.split(lengths, dim=1))

        joined = join_samples(
            self._features, by_key, ctx.inverse_indices, ctx.variable_batch_per_feature
        )
        return KeyedTensor._from_parts(list(self._keys), lengths, joined)

    def _variable_columns(
        self, outputs: Sequence[torch.Tensor], ctx: EmbeddingBagCollectionContext
    ) -> list[torch.Tensor]:
        """For a variable batch: the columns ``[samples, D]`` of every key."""
        flat_outputs = []
        for output, widths in zip(outputs, self._widths, strict=True):
            if output.dim() > 1:
                # Replicated tables are looked up locally, without an exchange that shows whether
                # another rank's batch is variable.
                blocks = output.split(widths, dim=1)
                output = torch.cat([block.reshape(-1) for block in blocks])
            flat_outputs.append(output)

        flat = flat_outputs[0] if len(flat_outputs) == 1 else torch.cat(flat_outputs)
        return self._order.by_key(flat, self._samples(ctx))

    def _samples(self, ctx: EmbeddingBagCollectionContext) -> list[int]:
        """For a variable batch, the local samples of each output of a sharding."""
        samples = []
        for context, features in zip(ctx.sharding_contexts, self._output_features, strict=True):
            samples += [context.batch_size_per_feature_pre_a2a[feature] for feature in features]
        return samples


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
    _source_name = "EmbeddingBagCollection"
    _tables_path = "embedding_bags"
    _pools = True
    _sharding_classes = POOLED_SHARDINGS

    def __init__(
        self,
        module: EmbeddingBagCollection,
        table_name_to_parameter_sharding: Mapping[str, ParameterSharding],
        env: ShardingEnv,
        fused_params: Mapping[str, Any] | None = None,
        device: torch.device | None = None,
        qcomm_codecs_registry: Mapping[str, QuantizedCommCodecs] | None = None,
    ) -> None:
        configs = module.embedding_bag_configs()
        super().__init__(
            module,
            configs,
            module.is_weighted(),
            table_name_to_parameter_sharding,
            env,
            fused_params,
            device,
            qcomm_codecs_registry,
        )
        self._configs = configs
        self._outputs = PooledOutputs(self._shardings, self._tables, self._device)

    # --- one batch

    def create_context(self) -> EmbeddingBagCollectionContext:
        """Return an empty context for one batch."""
        return EmbeddingBagCollectionContext()

    def _received(
        self, ctx: EmbeddingBagCollectionContext, arrivals: Sequence[KJTArrival]
    ) -> Awaitable[KJTList]:
        """Return the received batch of each sharding."""
        return KJTListAwaitable(arrivals)

    def _join(
        self, outputs: Sequence[torch.Tensor], ctx: EmbeddingBagCollectionContext
    ) -> KeyedTensor:
        """Join the outputs of all shardings into the result."""
        return self._outputs.join(outputs, ctx)

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
            ``learning_rate``, ``eps``. By default, and with a warning, SGD with a learning rate of
            0.01. An optimizer from ``apply_optimizer_in_backward`` takes precedence.
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

    unsharded_class = EmbeddingBagCollection
    sharded_class = ShardedEmbeddingBagCollection
    _tables_path = "embedding_bags"
    _types = tuple(POOLED_SHARDINGS)

    def shard(
        self,
        module: EmbeddingBagCollection,
        params: Mapping[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedEmbeddingBagCollection:
        """Return the sharded module; every rank calls it. ``module_fqn`` has no effect."""
        return ShardedEmbeddingBagCollection(
            module, params, env, self.fused_params, device, self.qcomm_codecs_registry
        )
