"""A small model with two kinds of tables, and random batches for it, as TorchRec's tests use them.

::

    float_features [B, floats]    idlist_features (KJT)    idscore_features (KJT with weights)
      | dense                       | sparse.ebc             | sparse.weighted_ebc
    [B, 8]                        pooled rows, one KeyedTensor for both
      |____________ over ____________|
    mean and sigmoid [B], with the loss while training

Names, arguments and weights are those of ``torchrec.distributed.test_utils.test_model``: the same
seed gives the same batches and, with the tables on meta, the same dense weights. Feature
processors, towers and managed collisions are not supported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tutorec.distributed.utils import CopyableMixin
from tutorec.modules.embedding_configs import BaseEmbeddingConfig, EmbeddingBagConfig
from tutorec.modules.embedding_modules import EmbeddingBagCollection
from tutorec.sparse.keyed import KeyedTensor
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor

DENSE_LAYER_OUT_SIZE = 8
OVER_ARCH_OUT_SIZE = 16


@dataclass
class ModelInput:
    """A batch of B samples.

    Attributes:
        float_features: [B, floats].
        idlist_features: Ids without weights.
        idscore_features: Ids with weights; None if no table is weighted.
        label: [B].
    """

    __test__ = False

    float_features: Tensor
    idlist_features: KeyedJaggedTensor | None
    idscore_features: KeyedJaggedTensor | None
    label: Tensor

    @staticmethod
    def generate(
        batch_size: int,
        world_size: int,
        num_float_features: int,
        tables: Sequence[BaseEmbeddingConfig],
        weighted_tables: Sequence[BaseEmbeddingConfig],
        pooling_avg: int = 10,
        dedup_tables: Sequence[BaseEmbeddingConfig] | None = None,
        variable_batch_size: bool = False,
        tables_pooling: Sequence[int] | None = None,
        weighted_tables_pooling: Sequence[int] | None = None,
        randomize_indices: bool = True,
        device: torch.device | None = None,
        max_feature_lengths: Sequence[int] | None = None,
        *,
        use_offsets: bool = False,
        indices_dtype: torch.dtype = torch.int64,
        offsets_dtype: torch.dtype = torch.int64,
        lengths_dtype: torch.dtype = torch.int64,
        random_seed: int | None = None,
    ) -> tuple[ModelInput, list[ModelInput]]:
        """Generate the batch of all ranks, W * B samples, and the part of each rank.

        Args:
            batch_size: B.
            world_size: W.
            num_float_features: Columns of `float_features`.
            tables: Tables whose features have ids without weights.
            weighted_tables: Tables whose features have ids with weights.
            pooling_avg: Mean bag length.
            dedup_tables: Has no effect, as in TorchRec.
            variable_batch_size: Rank r has r samples fewer, at least one; the batch of all ranks
                has empty bags there.
            tables_pooling: Mean bag length for each of ``tables``, with a deviation of a tenth.
            weighted_tables_pooling: Mean bag length for each of ``weighted_tables``.
            randomize_indices: Whether values are random; otherwise ids, columns and labels are 0.
            device: Device of the batches.
            max_feature_lengths: Maximum bag length for each feature of ``tables``.
            use_offsets: Whether batches are made from offsets instead of lengths.
            indices_dtype: Type of ids.
            offsets_dtype: Type of offsets, if they are used.
            lengths_dtype: Type of lengths, otherwise.
            random_seed: Seed of torch, set first.

        Raises:
            ValueError: There is not one mean bag length per table.
        """
        if random_seed is not None:
            torch.manual_seed(random_seed)
        sizes = [
            max(batch_size - rank, 1) if variable_batch_size else batch_size
            for rank in range(world_size)
        ]

        draw = _Draw(batch_size, sizes, device, randomize_indices)
        batch = partial(_batch, use_offsets, indices_dtype, offsets_dtype, lengths_dtype)
        longest_bags = dict(zip(_feature_names(tables), max_feature_lengths or ()))  # noqa: B905

        features = _features("tables", tables, tables_pooling, pooling_avg)
        plain_bags = {
            name: draw.bags(rows, draw.lengths(mean, bool(tables_pooling), longest_bags.get(name)))
            for name, (rows, mean) in features.items()
        }

        features = _features(
            "weighted_tables", weighted_tables, weighted_tables_pooling, pooling_avg
        )
        weighted_bags = {
            name: draw.bags(rows, draw.lengths(mean), True)
            for name, (rows, mean) in features.items()
        }

        fill = torch.rand if randomize_indices else torch.zeros
        floats = fill(world_size * batch_size, num_float_features, device=device)
        labels = fill(world_size * batch_size, device=device)
        local_batches = [
            ModelInput(
                floats.split(batch_size)[rank],
                batch({name: draw.of_rank(bags, rank) for name, bags in plain_bags.items()}),
                batch({name: draw.of_rank(bags, rank) for name, bags in weighted_bags.items()}),
                labels.split(batch_size)[rank],
            )
            for rank in range(world_size)
        ]

        return ModelInput(floats, batch(plain_bags), batch(weighted_bags), labels), local_batches

    def to(self, device: torch.device, non_blocking: bool = False) -> ModelInput:
        """A copy on ``device``."""
        moved: list[Any] = [
            None if tensor is None else tensor.to(device, non_blocking=non_blocking)
            for tensor in self._parts()
        ]
        return ModelInput(*moved)

    def record_stream(self, stream: torch.Stream) -> None:
        """Tell the CUDA caching allocator that ``stream`` uses the batch."""
        for tensor in self._parts():
            if tensor is not None:
                tensor.record_stream(stream)

    def _parts(self) -> tuple[Any, ...]:
        return self.float_features, self.idlist_features, self.idscore_features, self.label


class _Bags(NamedTuple):
    """One feature's bags: lengths [samples], ids [N], weights [N] or None."""

    lengths: Tensor
    ids: Tensor
    weights: Tensor | None


class _Draw(NamedTuple):
    """Draws random bags of all ranks; rank r has the first ``sizes[r]`` of ``batch_size``."""

    batch_size: int
    sizes: list[int]
    device: torch.device | None
    randomize: bool

    def lengths(self, mean: float, narrow: bool = False, longest: int | None = None) -> Tensor:
        """Lengths [W * B] around a mean."""
        samples = len(self.sizes) * self.batch_size
        if narrow:
            lengths = torch.normal(mean, mean / 10, [samples], device=self.device).clamp(min=1)
        else:
            lengths = (torch.randn(samples, device=self.device) + mean).abs()

        positions = torch.arange(self.batch_size, device=self.device)
        lengths = lengths.long() if longest is None else lengths.long().clamp(max=longest)
        return lengths * torch.cat([positions < size for size in self.sizes])

    def bags(self, rows: int, lengths: Tensor, weighted: bool = False) -> _Bags:
        """Bags of the given lengths with ids below ``rows``."""
        shape = (int(lengths.sum()),)
        if self.randomize:
            ids = torch.randint(0, rows, shape, device=self.device)
        else:
            ids = torch.zeros(shape, dtype=torch.long, device=self.device)
        return _Bags(lengths, ids, torch.rand(shape, device=self.device) if weighted else None)

    def of_rank(self, bags: _Bags, rank: int) -> _Bags:
        """The bags of one rank's samples."""
        lengths = bags.lengths.view(-1, self.batch_size)
        ids = lengths.sum(1).tolist()
        weights = None if bags.weights is None else bags.weights.split(ids)[rank]
        return _Bags(lengths[rank, : self.sizes[rank]], bags.ids.split(ids)[rank], weights)


def _features(
    argument: str, tables: Sequence[BaseEmbeddingConfig], poolings: Sequence[int] | None, mean: int
) -> dict[str, tuple[int, int]]:
    """For each feature: number of ids of its tables, and mean bag length."""
    if poolings and len(poolings) != len(tables):
        raise ValueError(
            f"{argument}_pooling has {len(poolings)} numbers for {len(tables)} tables: give one "
            "for each"
        )

    features: dict[str, tuple[int, int]] = {}
    for table, pooling in zip(tables, poolings or [mean] * len(tables), strict=True):
        rows_after_pruning = table.num_embeddings_post_pruning
        rows = table.num_embeddings if rows_after_pruning is None else rows_after_pruning
        for name in table.feature_names:
            features[name] = min(rows, features.get(name, (rows, 0))[0]), pooling
    return features


def _batch(
    use_offsets: bool,
    indices_dtype: torch.dtype,
    offsets_dtype: torch.dtype,
    lengths_dtype: torch.dtype,
    bags: Mapping[str, _Bags],
) -> KeyedJaggedTensor | None:
    """Concatenate features; None if there are none."""
    if not bags:
        return None

    lengths, ids, weights = zip(*bags.values(), strict=True)
    all_weights = None if weights[0] is None else torch.cat(weights)
    keys = list(bags)
    all_ids = torch.cat(ids).to(indices_dtype)
    all_lengths = torch.cat(lengths)
    if use_offsets:
        offsets = nn.functional.pad(all_lengths.cumsum(0), (1, 0)).to(offsets_dtype)
        return KeyedJaggedTensor(keys, all_ids, all_weights, offsets=offsets)
    return KeyedJaggedTensor(keys, all_ids, all_weights, all_lengths.to(lengths_dtype))


class TestDenseArch(nn.Module):
    """Linear layers: columns [B, floats] to [B, 8].

    Args:
        num_float_features: Input columns.
        device: Device of the weights.
        dense_arch_out_size: Output columns, 8 by default.
        dense_arch_hidden_sizes: Widths of the hidden layers, none by default.
        **kwargs: Arguments of other layers, ignored.
    """

    __test__ = False

    def __init__(
        self,
        num_float_features: int,
        device: torch.device | None = None,
        dense_arch_out_size: int | None = None,
        dense_arch_hidden_sizes: list[int] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        widths = [num_float_features, *(dense_arch_hidden_sizes or [])]
        hidden = [nn.Linear(*pair, device=device) for pair in pairwise(widths)]
        self.hidden_layers = nn.ModuleList(hidden) if hidden else None
        self.linear = nn.Linear(
            widths[-1], dense_arch_out_size or DENSE_LAYER_OUT_SIZE, device=device
        )

        # Tests look for them in a state_dict: a parameter without a gradient, and a buffer.
        self.dummy_param = nn.Parameter(torch.zeros(2, device=device))
        self.register_buffer("dummy_buffer", torch.zeros(1, device=device))

    def forward(self, dense_input: Tensor) -> Tensor:
        """Columns [B, floats] to [B, 8]."""
        for layer in self.hidden_layers or ():
            dense_input = layer(dense_input)
        return self.linear(dense_input)


class TestDHNArch(nn.Module):
    """Two linear layers: [B, in_features] to [B, 16].

    Args:
        in_features: Input columns.
        device: Device of the weights.
        over_arch_out_size: Output columns, 16 by default.
    """

    __test__ = False

    def __init__(
        self,
        in_features: int,
        device: torch.device | None = None,
        over_arch_out_size: int | None = None,
    ) -> None:
        super().__init__()
        width = over_arch_out_size or OVER_ARCH_OUT_SIZE
        self.linear0 = nn.Linear(in_features, width, device=device)
        self.linear1 = nn.Linear(width, width, device=device)

    def forward(self, input: Tensor) -> Tensor:
        """Both layers, [B, 16]."""
        return self.linear1(self.linear0(input))


class TestOverArch(nn.Module):
    """The top layers: dense columns [B, 8] and pooled rows to [B, 16].

    Args:
        tables: Tables without weights.
        weighted_tables: Tables with weights.
        embedding_names: Outputs of ``tables`` by name, by default their features.
        device: Device of the weights.
        dense_arch_out_size: Dense columns, 8 by default.
        over_arch_out_size: Output columns, 16 by default.
        **kwargs: Arguments of other layers, ignored.
    """

    __test__ = False

    def __init__(
        self,
        tables: list[EmbeddingBagConfig],
        weighted_tables: list[EmbeddingBagConfig],
        embedding_names: list[str] | None = None,
        device: torch.device | None = None,
        dense_arch_out_size: int | None = None,
        over_arch_out_size: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        self._embedding_names = embedding_names or _feature_names(tables)
        self._weighted_features = _feature_names(weighted_tables)
        columns = sum(
            table.embedding_dim * len(table.feature_names) for table in [*tables, *weighted_tables]
        )
        in_features = (dense_arch_out_size or DENSE_LAYER_OUT_SIZE) + columns
        self.dhn_arch: nn.Module = TestDHNArch(in_features, device, over_arch_out_size)

    def forward(self, dense: Tensor, sparse: KeyedTensor) -> Tensor:
        """Dense columns [B, 8] and pooled rows to [B, 16]."""
        groups = KeyedTensor.regroup([sparse], [self._embedding_names, self._weighted_features])
        return self.dhn_arch(_beside(dense, groups))


class TestEBCSparseArch(nn.Module):
    """Both collections of tables; their results are joined in one `KeyedTensor`.

    Args:
        tables: Tables of ids without weights.
        weighted_tables: Tables of ids with weights; may be empty.
        device: Device of the tables.
        **kwargs: Arguments of other layers, ignored.
    """

    __test__ = False

    def __init__(
        self,
        tables: list[EmbeddingBagConfig],
        weighted_tables: list[EmbeddingBagConfig],
        device: torch.device | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        self.ebc = EmbeddingBagCollection(tables, device=device)
        self.weighted_ebc = (
            EmbeddingBagCollection(weighted_tables, is_weighted=True, device=device)
            if weighted_tables
            else None
        )

    def forward(
        self,
        features: KeyedJaggedTensor,
        weighted_features: KeyedJaggedTensor | None = None,
        batch_size: int | None = None,
    ) -> KeyedTensor:
        """Pooled rows [B, D]; zeros for samples up to ``batch_size`` that the features lack."""
        weighted = None
        if self.weighted_ebc is not None and weighted_features is not None:
            weighted = self.weighted_ebc(weighted_features)
        return _joined(self.ebc(features), weighted, batch_size)


class TestSparseNNBase(nn.Module):
    """Base of models with tables.

    Args:
        tables: Not stored; a subclass builds them.
        weighted_tables: Not stored.
        embedding_groups: Not stored.
        dense_device: Device of the dense layers, the CPU by default.
        sparse_device: Device of the tables, the CPU by default.
    """

    __test__ = False

    def __init__(
        self,
        tables: list[BaseEmbeddingConfig],
        weighted_tables: list[BaseEmbeddingConfig] | None = None,
        embedding_groups: dict[str, list[str]] | None = None,
        dense_device: torch.device | None = None,
        sparse_device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.dense_device = dense_device or torch.device("cpu")
        self.sparse_device = sparse_device or torch.device("cpu")


class TestSparseNN(TestSparseNNBase, CopyableMixin):
    """The model in this module's figure: batch -> prediction [B]; in training (loss, prediction).

    Args:
        tables: Tables of ids without weights.
        num_float_features: Dense columns.
        weighted_tables: Tables of ids with weights.
        embedding_groups: The first group names the results of ``tables`` that the dense layers
            read.
        dense_device: Device of the dense layers.
        sparse_device: Device of the tables.
        max_feature_lengths: TorchRec's; not supported.
        feature_processor_modules: Has no effect, as in TorchRec.
        over_arch_clazz: A class with the arguments of `TestOverArch`.
        postproc_module: Applied to the batch first.
        zch_kwargs: TorchRec's; not supported.
        submodule_kwargs: Arguments for all layers; each uses those that it has.

    Raises:
        NotImplementedError: Feature processors or managed collisions are requested.

    Example:
        >>> from tutorec.distributed.test_utils.test_model import ModelInput, TestSparseNN
        >>> from tutorec.modules.embedding_configs import EmbeddingBagConfig
        >>> tables = [
        ...     EmbeddingBagConfig(
        ...         num_embeddings=20, embedding_dim=8, name="t", feature_names=["f"]
        ...     )
        ... ]
        >>> batch, _ = ModelInput.generate(4, 1, 10, tables, [])
        >>> loss, prediction = TestSparseNN(tables)(batch)
        >>> prediction.shape
        torch.Size([4])
    """

    def __init__(
        self,
        tables: list[EmbeddingBagConfig],
        num_float_features: int = 10,
        weighted_tables: list[EmbeddingBagConfig] | None = None,
        embedding_groups: dict[str, list[str]] | None = None,
        dense_device: torch.device | None = None,
        sparse_device: torch.device | None = None,
        max_feature_lengths: dict[str, int] | None = None,
        feature_processor_modules: dict[str, nn.Module] | None = None,
        over_arch_clazz: Callable[..., nn.Module] | None = None,
        postproc_module: nn.Module | None = None,
        zch_kwargs: dict[str, Any] | None = None,
        submodule_kwargs: dict[str, Any] | None = None,
    ) -> None:
        super().__init__([*tables], dense_device=dense_device, sparse_device=sparse_device)
        refused = {"max_feature_lengths": max_feature_lengths, "zch_kwargs": zch_kwargs}
        for name, value in refused.items():
            if value is not None:
                raise NotImplementedError(f"TestSparseNN: {name} is not supported; leave it out")

        weighted_tables = weighted_tables or []
        kwargs = submodule_kwargs or {}
        self.dense = TestDenseArch(num_float_features, dense_device, **kwargs)
        self.sparse: nn.Module = TestEBCSparseArch(tables, weighted_tables, sparse_device, **kwargs)
        names = next(iter(embedding_groups.values())) if embedding_groups else None
        over = over_arch_clazz or TestOverArch
        self.over = over(tables, weighted_tables, names, dense_device, **kwargs)
        self.register_buffer("dummy_ones", torch.ones(1, device=dense_device))
        self.postproc_module = postproc_module

    def sparse_forward(self, input: ModelInput) -> KeyedTensor:
        """Pooled rows of both collections, [B, D]."""
        return self.sparse(
            features=input.idlist_features,
            weighted_features=input.idscore_features,
            batch_size=input.float_features.size(0),
        )

    def dense_forward(
        self, input: ModelInput, sparse_output: KeyedTensor
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Prediction [B]; (loss, prediction) while training."""
        over_output = self.over(self.dense(input.float_features), sparse_output)
        prediction = torch.sigmoid(over_output.mean(dim=1)) + self.get_buffer("dummy_ones")
        if not self.training:
            return prediction
        return F.binary_cross_entropy_with_logits(prediction, input.label), prediction

    def forward(self, input: ModelInput) -> Tensor | tuple[Tensor, Tensor]:
        """Prediction [B]; (loss, prediction) while training."""
        if self.postproc_module is not None:
            input = self.postproc_module(input)
        return self.dense_forward(input, self.sparse_forward(input))


def _feature_names(tables: Sequence[BaseEmbeddingConfig]) -> list[str]:
    return [name for table in tables for name in table.feature_names]


@torch.fx.wrap
def _beside(dense: Tensor, groups: list[Tensor]) -> Tensor:
    """Concatenate columns."""
    return torch.cat([dense, *groups], dim=1)


@torch.fx.wrap
def _joined(plain: KeyedTensor, weighted: KeyedTensor | None, samples: int | None) -> KeyedTensor:
    """Both results as one, [samples, D]."""
    results = [plain] if weighted is None else [plain, weighted]
    values = torch.cat([result.values() for result in results], dim=1)
    if samples is not None:
        values = F.pad(values, (0, 0, 0, samples - values.size(0)))
    keys = [key for result in results for key in result.keys()]
    lengths = [length for result in results for length in result.length_per_key()]
    return KeyedTensor(keys, lengths, values)
