"""`EmbeddingCollection` sharded over the ranks of a process group.

Input, output and parameter names are those of the unsharded module. Every id gets its row; nothing
is pooled. ``sharding/sequence_sharding.py`` exchanges ids and rows, ``embedding_base.py`` has what
all sharded collections share; this module arranges the rows as results of the caller's batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch.autograd.function import once_differentiable

from tutorec.awaitable import Awaitable
from tutorec.distributed.collectives.kjt import ArrivedIds, KJTArrival
from tutorec.distributed.core.env import ShardingEnv
from tutorec.distributed.core.qcomm import QuantizedCommCodecs
from tutorec.distributed.core.sharders import BaseEmbeddingSharder
from tutorec.distributed.core.tables import Table
from tutorec.distributed.embedding_base import (
    BatchContext,
    ResultAwaitable,
    ShardedEmbeddingModule,
)
from tutorec.distributed.plan.plan import ParameterSharding
from tutorec.distributed.sharding.registry import SEQUENCE_SHARDINGS
from tutorec.distributed.sharding.sequence_sharding import (
    SequenceEmbeddingDist,
    SequenceEmbeddingSharding,
    SequenceShardingContext,
)
from tutorec.modules.embedding_collection import EmbeddingCollection
from tutorec.modules.embedding_configs import EmbeddingConfig
from tutorec.modules.embedding_rows import samples_of_lists
from tutorec.sparse.jagged import JaggedTensor, jagged_from_parts
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor
from tutorec.sparse.layout import ints_on_device


class EmbeddingCollectionContext(BatchContext):
    """State of one batch, shared by ``input_dist``, ``compute`` and ``output_dist``."""


class ArrivedIdsAwaitable(Awaitable[list[ArrivedIds]]):
    """Second round of ``input_dist``: ids are in flight; ``wait()`` returns those of each sharding.

    Args:
        arrivals: The ids of each sharding.
        ctx: Context of the batch.
    """

    def __init__(self, arrivals: Sequence[KJTArrival], ctx: EmbeddingCollectionContext) -> None:
        self._arrivals = arrivals
        self._ctx = ctx

    def _wait_impl(self) -> list[ArrivedIds]:
        received = [arrival.wait_by_rank() for arrival in self._arrivals]
        for ids, context in zip(received, self._ctx.sharding_contexts, strict=True):
            context.arrived_counts = ids.counts
        return received


class EmbeddingCollectionAwaitable(ResultAwaitable):
    """Lazy result of a batch; ``wait()`` returns a `JaggedTensor` per feature and table."""


class RowResults:
    """Joins the outputs of a module's shardings into one `JaggedTensor` per feature and table.

    Args:
        shardings: The shardings, in the order of their outputs.
        dists: Their output dists.
        tables: The tables, in the caller's order.
        need_indices: Whether results carry their ids, as weights.
    """

    def __init__(
        self,
        shardings: Sequence[SequenceEmbeddingSharding],
        dists: Sequence[SequenceEmbeddingDist],
        tables: Sequence[Table],
        need_indices: bool,
    ) -> None:
        self._dists = dists
        self._arriving_keys = [key for sharding in shardings for key in sharding.output_keys()]
        self._feature_of = {
            key: feature
            for table in tables
            for key, feature in zip(table.output_keys, table.features, strict=True)
        }
        self._need_indices = need_indices

    def join(
        self, parts: Sequence[torch.Tensor], ctx: EmbeddingCollectionContext
    ) -> dict[str, JaggedTensor]:
        """Return the results in the order of the tables, from one output per sharding."""
        assert ctx.features is not None, "input_dist keeps the batch"
        if len(parts) > 1:
            parts = cast(tuple[torch.Tensor, ...], _AllOrNone.apply(*parts))

        outputs = zip(self._dists, parts, ctx.sharding_contexts, strict=True)
        arrived = [
            rows for dist, output, context in outputs for rows in dist.by_key(output, context)
        ]
        rows_by_key = dict(zip(self._arriving_keys, arrived, strict=True))

        lists = ctx.features.to_dict()
        jagged: dict[str, JaggedTensor] = {}
        for key, feature in self._feature_of.items():
            ids = lists[feature]
            rows = rows_by_key[key]
            if ctx.reverse_indices:
                rows = rows.index_select(0, ctx.reverse_indices[feature])
            indices = ids.values() if self._need_indices else None
            jagged[key] = jagged_from_parts(rows, indices, ids.lengths(), ids.offsets())

        return samples_of_lists(jagged, ctx.features, self._feature_of)


class _AllOrNone(torch.autograd.Function):
    """Identity on the rows of several shardings, which makes backward reach all of them or none.

    A loss may use the results of one sharding on one rank and of another on the next. With this
    node, every rank takes part in the gradient exchanges of all shardings, in the same order.
    """

    @staticmethod
    def forward(ctx: Any, *parts: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(rows.view_as(rows) for rows in parts)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *gradients: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        return gradients


class ShardedEmbeddingCollection(
    ShardedEmbeddingModule[
        EmbeddingCollectionContext,
        list[ArrivedIds],
        list[torch.Tensor],
        dict[str, JaggedTensor],
        SequenceEmbeddingSharding,
    ],
):
    """An `EmbeddingCollection` whose tables are sharded over the ranks of a process group.

    The input is a ``KeyedJaggedTensor`` (or a TensorDict) of this rank's samples; its weights have
    no effect, and ranks may have different batch sizes. The output is lazy: a ``JaggedTensor`` per
    feature and table, whose values ``[N, D]`` are the rows of this rank's ids in their order.
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
        qcomm_codecs_registry: Data types in which rows and their gradients are sent; float32 by
            default.
        use_index_dedup: Whether an id that a feature has several times in a batch is sent once; its
            row returns once, and its gradients are added before they are sent. It costs two sorts
            of the batch's ids.

    Raises:
        ValueError: The plan does not fit the module or the world size.
        AgreementError: Ranks disagree about tables or plan, or another rank failed.

    Source:
        TorchRec's ``torchrec.distributed.embedding.ShardedEmbeddingCollection``.
    """

    _awaitable = EmbeddingCollectionAwaitable
    _sharding_context = SequenceShardingContext
    _source_name = "EmbeddingCollection"
    _tables_path = "embeddings"
    _pools = False
    _sharding_classes = SEQUENCE_SHARDINGS

    def __init__(
        self,
        module: EmbeddingCollection,
        table_name_to_parameter_sharding: Mapping[str, ParameterSharding],
        env: ShardingEnv,
        fused_params: Mapping[str, Any] | None = None,
        device: torch.device | None = None,
        qcomm_codecs_registry: Mapping[str, QuantizedCommCodecs] | None = None,
        use_index_dedup: bool = False,
    ) -> None:
        configs = module.embedding_configs()
        super().__init__(
            module,
            configs,
            False,
            table_name_to_parameter_sharding,
            env,
            fused_params,
            device,
            qcomm_codecs_registry,
        )

        self._configs = configs
        self._embedding_dim_of = module.embedding_dim
        self._use_index_dedup = use_index_dedup
        self._need_indices = module.need_indices()
        self._results = RowResults(
            self._shardings, self._output_dists, self._tables, self._need_indices
        )

    # --- one batch

    def create_context(self) -> EmbeddingCollectionContext:
        """Return an empty context for one batch."""
        return EmbeddingCollectionContext()

    def _arrange(self, features: KeyedJaggedTensor, ctx: BatchContext) -> KeyedJaggedTensor:
        """The checked batch, features in the order of the shardings; ids unique if requested."""
        arranged = super()._arrange(features, ctx)
        if self._use_index_dedup:
            arranged, ctx.reverse_indices = distinct_ids(arranged)
        return arranged

    def _received(
        self, ctx: EmbeddingCollectionContext, arrivals: Sequence[KJTArrival]
    ) -> Awaitable[list[ArrivedIds]]:
        """Return the ids that arrived for this rank's shards, per sharding."""
        return ArrivedIdsAwaitable(arrivals, ctx)

    def _join(
        self, outputs: Sequence[torch.Tensor], ctx: EmbeddingCollectionContext
    ) -> dict[str, JaggedTensor]:
        """Join the rows of all shardings into the results."""
        return self._results.join(outputs, ctx)

    # --- interface of the unsharded module

    @property
    def unsharded_module_type(self) -> type[EmbeddingCollection]:
        """The class that was sharded."""
        return EmbeddingCollection

    def embedding_configs(self) -> list[EmbeddingConfig]:
        """Configuration of every table, including those of other ranks."""
        return self._configs

    def embedding_dim(self) -> int:
        """Number of columns D of every table; -1 without tables, an error where tables differ."""
        return self._embedding_dim_of()

    def need_indices(self) -> bool:
        """Whether results carry their ids, as weights."""
        return self._need_indices


class EmbeddingCollectionSharder(BaseEmbeddingSharder[EmbeddingCollection]):
    """Sharder of `EmbeddingCollection`.

    Args:
        fused_params: Options of the optimizer that runs inside backward: ``optimizer``,
            ``learning_rate``, ``eps``. By default, and with a warning, SGD with a learning rate of
            0.01. An optimizer from ``apply_optimizer_in_backward`` takes precedence.
        qcomm_codecs_registry: Data types in which rows and their gradients are sent, from
            ``get_qcomm_codecs_registry``; float32 by default.
        use_index_dedup: Whether an id that a feature has several times in a batch is sent once.

    Raises:
        ValueError: ``fused_params`` has an unknown option or an invalid value.

    Example:
        >>> from tutorec.distributed.plan.plan import EmbeddingModuleShardingPlan
        >>> from tutorec.distributed.plan.geometry import table_wise_sharding
        >>> from tutorec.sparse.keyed_jagged import KeyedJaggedTensor
        >>> tables = [
        ...     EmbeddingConfig(
        ...         num_embeddings=8, embedding_dim=4, name="products", feature_names=["item"]
        ...     )
        ... ]
        >>> plan = EmbeddingModuleShardingPlan(
        ...     products=table_wise_sharding((8, 4), rank=0, device_type="cpu")
        ... )
        >>> sharder = EmbeddingCollectionSharder(fused_params={"learning_rate": 0.02})
        >>> sharded = sharder.shard(
        ...     EmbeddingCollection(tables), plan, ShardingEnv.from_local(1, 0)
        ... )
        >>> rows = sharded(
        ...     KeyedJaggedTensor(
        ...         ["item"], torch.tensor([3, 1, 3]), lengths=torch.tensor([2, 1])
        ...     )
        ... )["item"]
        >>> rows.values().shape, rows.lengths().tolist()
        (torch.Size([3, 4]), [2, 1])

    Source:
        TorchRec's ``torchrec.distributed.embedding.EmbeddingCollectionSharder``.
    """

    unsharded_class = EmbeddingCollection
    sharded_class = ShardedEmbeddingCollection
    _tables_path = "embeddings"
    _types = tuple(SEQUENCE_SHARDINGS)

    def __init__(
        self,
        fused_params: Mapping[str, Any] | None = None,
        qcomm_codecs_registry: Mapping[str, QuantizedCommCodecs] | None = None,
        use_index_dedup: bool = False,
    ) -> None:
        super().__init__(fused_params, qcomm_codecs_registry)
        self.use_index_dedup = use_index_dedup

    def shard(
        self,
        module: EmbeddingCollection,
        params: Mapping[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedEmbeddingCollection:
        """Return the sharded module; every rank calls it. ``module_fqn`` has no effect."""
        return ShardedEmbeddingCollection(
            module,
            params,
            env,
            self.fused_params,
            device,
            self.qcomm_codecs_registry,
            self.use_index_dedup,
        )


def distinct_ids(batch: KeyedJaggedTensor) -> tuple[KeyedJaggedTensor, dict[str, torch.Tensor]]:
    """The distinct ids of each feature, as one list of the feature. A sync point.

    Args:
        batch: Ids without weights.

    Returns:
        A batch of one sample, and feature -> which of its distinct ids each of its ids is ``[N]``.

    Example:
        >>> ids, reverse = distinct_ids(
        ...     KeyedJaggedTensor(
        ...         ["a", "b"], torch.tensor([7, 5, 7, 7]), lengths=torch.tensor([2, 1, 1, 0])
        ...     )
        ... )
        >>> ids.values().tolist(), ids.lengths().tolist(), reverse["a"].tolist()
        ([5, 7, 7], [2, 1], [1, 0, 1])
    """
    ids = batch.values()
    counts = batch.length_per_key()
    numbers = ints_on_device([[*range(len(counts))], counts], torch.int64, ids.device)
    feature = numbers[0].repeat_interleave(numbers[1], output_size=ids.numel())
    rank = torch.unique(ids, return_inverse=True)[1]

    # Each (feature, id) pair is one number: an id is replaced by its rank, which is less than N.
    pairs, inverse = torch.unique(feature * ids.numel() + rank, return_inverse=True)
    distinct = ids.new_empty(pairs.numel()).scatter_(0, inverse, ids)
    starts = torch.searchsorted(pairs, numbers[0] * ids.numel())
    per_key = starts.diff(append=starts.new_full((1,), pairs.numel()))
    reverse = (inverse - starts[feature]).split(counts)

    keys = batch.keys()
    sizes = per_key.tolist()
    sent = KeyedJaggedTensor._from_parts(
        keys, distinct, None, per_key.to(batch.lengths().dtype), None, 1, sizes
    )
    return sent, dict(zip(keys, reverse, strict=True))
