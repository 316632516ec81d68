"""One bag over all features of a sample, with row-wise sharded rows.

It is the parallel bag of the *CachedEmbedding playground*, implemented with the exchanges of a
sharded collection::

    local samples, all features      ids [B, F]
      | concatenate   id of feature f + rows of the features before it
    one table of all rows            KJT [1 x B], F ids per bag
      | row-wise      ids to the ranks of their rows, rows back
    local samples                    [B, D]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from tutorec.balance import check_feature_rows, check_id_columns
from tutorec.distributed import comm
from tutorec.distributed.core.env import ShardingEnv
from tutorec.distributed.embedding import EmbeddingCollectionSharder
from tutorec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from tutorec.distributed.plan.geometry import parameter_sharding, row_wise_shards
from tutorec.distributed.plan.plan import (
    EmbeddingComputeKernel,
    EmbeddingModuleShardingPlan,
    ShardingType,
)
from tutorec.modules.embedding_collection import EmbeddingCollection
from tutorec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from tutorec.modules.embedding_modules import EmbeddingBagCollection
from tutorec.sparse.id_check import check_ids
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor
from tutorec.spmd.rank import device as own_device

Mode = Literal["sum", "mean", "max"]
_TABLE = "all_rows"
_FEATURE = "all_ids"


class ParallelMixVocabEmbeddingBag(nn.Module):
    """``nn.EmbeddingBag`` over the rows of F features; each rank holds ``ceil(R / W)`` of R rows.

    The input is ids ``[B, F]`` of the local samples; ranks may have different B. The output is
    ``[B, D]``: the sum, mean or maximum of each sample's F rows. For sums and means, ranks send
    partial sums, W rows per sample. For the maximum, the F rows of a sample are sent to its rank
    and reduced there.

    Construction is collective: every rank calls it with the same sizes.

    Args:
        embeddings_per_feat: R of each of the F features.
        embedding_dim: D.
        mode: ``"sum"``, ``"mean"`` or ``"max"``.
        weight: Initial rows ``[R, D]``, feature by feature; random by default.
        env: The ranks; by default those of the default process group, or this process alone.
        device: Device of the rows; :func:`tutorec.spmd.device` by default.
        fused_params: The optimizer that updates rows during backward, as in
            `EmbeddingBagCollectionSharder`. By default there is none, and the weight has a gradient
            ``[ceil(R / W), D]``, the mean over ranks.

    Raises:
        ValueError: ``mode`` is unknown, a feature has no rows, or ``weight`` does not have R rows.

    Example:
        >>> bag = ParallelMixVocabEmbeddingBag(
        ...     [3, 2], embedding_dim=4, weight=torch.arange(5.0)[:, None].expand(5, 4)
        ... )
        >>> bag(torch.tensor([[2, 1], [0, 0]]))[:, 0].tolist()
        [6.0, 3.0]

    Source:
        ``recsys.modules.embeddings.ParallelMixVocabEmbeddingBag`` of CachedEmbedding, in which
        every rank processes every sample and clamps the ids of other ranks to its own rows.
    """

    starts: Tensor

    def __init__(
        self,
        embeddings_per_feat: Sequence[int],
        embedding_dim: int = 128,
        mode: Mode = "sum",
        weight: Tensor | None = None,
        env: ShardingEnv | None = None,
        device: torch.device | None = None,
        fused_params: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        rows = [int(count) for count in embeddings_per_feat]
        _check(rows, mode, weight)
        self._mode = mode
        self._features = [f"feature_{number}" for number in range(len(rows))]
        self._feature_rows = [*zip(self._features, self._features, rows, strict=True)]

        device = torch.device(device) if device is not None else own_device()
        self.register_buffer(
            "starts", torch.tensor([0, *accumulate(rows[:-1])], device=device), persistent=False
        )
        env = env if env is not None else _env()
        kernel = (
            EmbeddingComputeKernel.DENSE if fused_params is None else EmbeddingComputeKernel.FUSED
        )

        shards = row_wise_shards(sum(rows), embedding_dim, range(env.world_size))
        entry = parameter_sharding(
            ShardingType.ROW_WISE, shards, device.type, env.local_size, kernel
        )
        plan = EmbeddingModuleShardingPlan({_TABLE: entry})
        config: dict[str, Any] = {
            "num_embeddings": sum(rows),
            "embedding_dim": embedding_dim,
            "name": _TABLE,
            "feature_names": [_FEATURE],
            "init_fn": None if weight is None else lambda _: weight,
        }

        # The unsharded collection is on the meta device: each rank allocates its own rows only.
        meta = torch.device("meta")
        if mode == "max":
            table = EmbeddingCollection([EmbeddingConfig(**config)], device=meta)
            self.collection = EmbeddingCollectionSharder(fused_params).shard(
                table, plan, env, device
            )
        else:
            pooling = PoolingType.SUM if mode == "sum" else PoolingType.MEAN
            table = EmbeddingBagCollection(
                [EmbeddingBagConfig(**config, pooling=pooling)], device=meta
            )
            self.collection = EmbeddingBagCollectionSharder(fused_params).shard(
                table, plan, env, device
            )

    def forward(self, x: Tensor) -> Tensor:
        """Ids ``[B, F]`` -> ``[B, D]``.

        Raises:
            ValueError: ``x`` does not have F columns, or an id is outside its feature's rows.
        """
        check_id_columns(x, len(self._features))
        samples, features = x.shape

        # Checked before offsets are added: an id too large for its feature is a row of the next
        # feature.
        ones = torch.ones(x.numel(), dtype=torch.int64, device=x.device)
        checked = check_ids(
            KeyedJaggedTensor(self._features, x.t().reshape(-1), lengths=ones), self._feature_rows
        )
        x = checked.values().view(features, samples).t()

        lengths = torch.full((samples,), features, device=x.device)
        embeddings = self.collection(
            KeyedJaggedTensor([_FEATURE], (x + self.starts).reshape(-1), lengths=lengths)
        )
        if self._mode != "max":
            return embeddings.values()
        # Features share no rows, so the gradient of each column's maximum goes to one row.
        return embeddings[_FEATURE].values().unflatten(0, (samples, features)).max(dim=1).values


def _env() -> ShardingEnv:
    group = comm.default_group()
    return ShardingEnv.from_local(1, 0) if group is None else ShardingEnv.from_process_group(group)


def _check(rows: Sequence[int], mode: str, weight: Tensor | None) -> None:
    if mode not in get_args(Mode):
        raise ValueError(f"mode={mode!r}: a bag is pooled by one of {list(get_args(Mode))}")
    check_feature_rows(rows)
    if weight is not None and len(weight) != sum(rows):
        raise ValueError(
            f"weight has {len(weight)} rows, the features have {sum(rows)}: {list(rows)}"
        )
