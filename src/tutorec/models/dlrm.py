"""DLRM: click models of dense columns and embedding tables (Naumov et al., arXiv 1906.00091).

::

    dense columns [B, D_in]            ids, KJT [F x B]
      | dense_arch                       | sparse_arch
    one vector [B, D]                  one vector per feature [B, F, D]
      |__________________ inter_arch _______|
    features of features [B, D_inter]
      | over_arch
    logit [B, 1]

===================  =====================================================  =============
model                inter_arch gives                                       D_inter
===================  =====================================================  =============
``DLRM``             the dense vector and all inner products of two         D + F(F+1)/2
                     vectors
``DLRM_DCN``         all vectors, crossed by a `LowRankCrossNet`            (F+1) D
``DLRM_Projection``  the dense vector and the inner products of two sets    D + F1 F2
                     of vectors, F1 and F2, that two MLPs make of all
===================  =====================================================  =============

Names and signatures are those of ``torchrec.models.dlrm``; a state_dict moves both ways. The
collection of tables may be sharded or not: a sharded one answers with an awaitable, which waits
when its result is first looked at.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import comb

import torch
from torch import Tensor, nn
from torch.jit import is_scripting  # pyright: ignore[reportPrivateImportUsage]

from tutorec.datasets.utils import Batch
from tutorec.modules.crossnet import LowRankCrossNet
from tutorec.modules.embedding_configs import BaseEmbeddingConfig
from tutorec.modules.embedding_modules import EmbeddingBagCollection, get_embedding_names_by_table
from tutorec.modules.mlp import MLP
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor
from tutorec.sparse.layout import checkable


def choose(n: int, k: int) -> int:
    """Number of subsets of k among n elements; 0 if there are none.

    Example:
        >>> from tutorec.models.dlrm import choose
        >>> choose(4, 2), choose(2, 4)
        (6, 0)
    """
    return comb(n, k) if 0 <= k <= n else 0


class _NoTablesError(ValueError, AssertionError):
    """A model of tables was given a collection without any; TorchRec raises an AssertionError."""


def common_width(model: str, configs: Sequence[BaseEmbeddingConfig]) -> int:
    """The number of columns that all tables have, as inner products need it.

    Raises:
        ValueError: There are no tables, or they have different widths.
    """
    widths = {config.name: config.embedding_dim for config in configs}
    if not widths:
        raise _NoTablesError(f"{model} needs one or more tables, and its collection has none")
    if len(set(widths.values())) != 1:
        raise ValueError(f"{model} needs tables of one width; embedding_dim is {widths}")
    return configs[0].embedding_dim


class SparseArch(nn.Module):
    """The tables: ids in, one pooled vector per feature out.

    Args:
        embedding_bag_collection: Tables of one width D; F is the number of their (table, feature)
            pairs.

    Raises:
        ValueError: No tables, or tables of different widths.
    """

    def __init__(self, embedding_bag_collection: EmbeddingBagCollection) -> None:
        super().__init__()
        configs = embedding_bag_collection.embedding_bag_configs()
        self.embedding_bag_collection = embedding_bag_collection
        self.D: int = common_width("SparseArch", configs)
        self._sparse_feature_names = [
            name for names in get_embedding_names_by_table(configs) for name in names
        ]
        self.F: int = len(self._sparse_feature_names)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        """Ids of F features to their vectors [B, F, D]."""
        return self.embedding_bag_collection(features).values().reshape(-1, self.F, self.D)

    @property
    def sparse_feature_names(self) -> list[str]:
        """The F names in the order of the vectors; ``feature@table`` for shared features."""
        return self._sparse_feature_names


class DenseArch(nn.Module):
    """An MLP that turns dense columns [B, D_in] into one vector [B, layer_sizes[-1]].

    Args:
        in_features: D_in.
        layer_sizes: Width of each layer; the last one is D.
        device: Where the weights are made.
    """

    def __init__(
        self, in_features: int, layer_sizes: list[int], device: torch.device | None = None
    ) -> None:
        super().__init__()
        self.model: nn.Module = MLP(
            in_features, layer_sizes, bias=True, activation="relu", device=device
        )

    def forward(self, features: Tensor) -> Tensor:
        """Dense columns [B, D_in] to a vector [B, D]."""
        return self.model(features)


class InteractionArch(nn.Module):
    """The dense vector, and the inner product of every two of the 1 + F vectors: [B, D + F(F+1)/2].

    Args:
        num_sparse_features: F.
        device: Where the positions of the inner products are made; vectors must be there, too.

    Example:
        >>> import torch
        >>> from tutorec.models.dlrm import InteractionArch
        >>> dense, sparse = torch.tensor([[1.0, 0.0]]), torch.tensor([[[2.0, 3.0], [4.0, 5.0]]])
        >>> InteractionArch(2)(dense, sparse)  # 1*2+0*3, 1*4+0*5, 2*4+3*5
        tensor([[ 1.,  0.,  2.,  4., 23.]])
    """

    _pairs: Tensor

    def __init__(self, num_sparse_features: int, device: torch.device | None = None) -> None:
        super().__init__()
        self.F: int = num_sparse_features
        pairs = torch.empty(choose(1 + self.F, 2), dtype=torch.long, device=device)
        self.register_buffer("_pairs", pairs, persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Write the positions of the inner products, which to_empty() leaves undefined."""
        vectors = 1 + self.F
        rows, columns = torch.triu_indices(vectors, vectors, offset=1, device="cpu")
        # As positions in the flattened matrix: one index_select takes half the time of indexing by
        # row and column.
        self._pairs.copy_(rows * vectors + columns)

    def forward(self, dense_features: Tensor, sparse_features: Tensor) -> Tensor:
        """Vectors [B, D] and [B, F, D] to [B, D + F(F+1)/2]."""
        if self.F <= 0:
            return dense_features
        vectors = _all_vectors(dense_features, sparse_features, self.F)
        products = torch.bmm(vectors, vectors.transpose(1, 2))
        return torch.cat((dense_features, products.flatten(1).index_select(1, self._pairs)), dim=1)


class InteractionDCNArch(nn.Module):
    """All 1 + F vectors side by side, crossed: [B, (F+1) D].

    Args:
        num_sparse_features: F.
        crossnet: From [B, (F+1) D] to as many columns; see `tutorec.modules.crossnet`.

    Example:
        >>> import torch
        >>> from tutorec.models.dlrm import InteractionDCNArch
        >>> from tutorec.modules.crossnet import LowRankCrossNet
        >>> arch = InteractionDCNArch(
        ...     2, LowRankCrossNet(in_features=12, num_layers=2, low_rank=3)
        ... )
        >>> arch(torch.randn(5, 4), torch.randn(5, 2, 4)).shape
        torch.Size([5, 12])
    """

    def __init__(self, num_sparse_features: int, crossnet: nn.Module) -> None:
        super().__init__()
        self.F: int = num_sparse_features
        self.crossnet = crossnet

    def forward(self, dense_features: Tensor, sparse_features: Tensor) -> Tensor:
        """Vectors [B, D] and [B, F, D] to [B, (F+1) D]."""
        if self.F <= 0:
            return dense_features
        return self.crossnet(_all_vectors(dense_features, sparse_features, self.F).flatten(1))


class InteractionProjectionArch(nn.Module):
    """The dense vector, and the inner products of F1 vectors with F2 others: [B, D + F1 F2].

    Args:
        num_sparse_features: F.
        interaction_branch1: From all vectors side by side, [B, (F+1) D], to F1 vectors, [B, F1 D].
        interaction_branch2: From the same to F2 vectors, [B, D F2]; each has its columns F2 apart.

    Example:
        >>> import torch
        >>> from tutorec.models.dlrm import DenseArch, InteractionProjectionArch
        >>> arch = InteractionProjectionArch(2, DenseArch(12, [3 * 4]), DenseArch(12, [5 * 4]))
        >>> arch(torch.randn(6, 4), torch.randn(6, 2, 4)).shape  # 4 + 3 * 5
        torch.Size([6, 19])
    """

    def __init__(
        self,
        num_sparse_features: int,
        interaction_branch1: nn.Module,
        interaction_branch2: nn.Module,
    ) -> None:
        super().__init__()
        self.F: int = num_sparse_features
        self.interaction_branch1 = interaction_branch1
        self.interaction_branch2 = interaction_branch2

    def forward(self, dense_features: Tensor, sparse_features: Tensor) -> Tensor:
        """Vectors [B, D] and [B, F, D] to [B, D + F1 F2]."""
        if self.F <= 0:
            return dense_features

        columns = _all_vectors(dense_features, sparse_features, self.F).flatten(1)
        width = dense_features.shape[1]
        first = self.interaction_branch1(columns).unflatten(1, (-1, width))
        second = self.interaction_branch2(columns).unflatten(1, (width, -1))
        return torch.cat((dense_features, torch.bmm(first, second).flatten(1)), dim=1)


def _all_vectors(dense: Tensor, sparse: Tensor, features: int) -> Tensor:
    """The dense vector [B, D] before those of the features [B, F, D]: [B, 1 + F, D]."""
    if not is_scripting() and not any(
        isinstance(vectors, torch.fx.Proxy) for vectors in (dense, sparse)
    ):
        dense_shape = list(dense.shape)
        sparse_shape = list(sparse.shape)
        if len(dense_shape) != 2 or sparse_shape != [dense_shape[0], features, dense_shape[1]]:
            raise ValueError(
                f"DLRM: dense vectors are {dense_shape} and the features' {sparse_shape}, not "
                f"[B, D] and [B, {features}, D]"
            )

    return torch.cat((dense.unsqueeze(1), sparse), dim=1)


class OverArch(nn.Module):
    """The last MLP: all layers but the last with ReLU, the last one linear.

    Args:
        in_features: Width of what the interaction gives.
        layer_sizes: Width of each layer; the last one is 1 for a logit.
        device: Where the weights are made.

    Raises:
        ValueError: Fewer than two layers.
    """

    def __init__(
        self, in_features: int, layer_sizes: list[int], device: torch.device | None = None
    ) -> None:
        super().__init__()
        if len(layer_sizes) < 2:
            raise ValueError(
                f"OverArch: layer_sizes={layer_sizes} must have at least two layers, as in [32, 1]"
            )

        self.model: nn.Module = nn.Sequential(
            MLP(in_features, layer_sizes[:-1], bias=True, activation="relu", device=device),
            nn.Linear(layer_sizes[-2], layer_sizes[-1], bias=True, device=device),
        )

    def forward(self, features: Tensor) -> Tensor:
        """Features [B, in_features] to [B, layer_sizes[-1]]."""
        return self.model(features)


class DLRM(nn.Module):
    """The click model of this module's figure, with inner products: logits [B, 1].

    Args:
        embedding_bag_collection: Tables of one width D, with F features in all.
        dense_in_features: D_in, number of dense columns.
        dense_arch_layer_sizes: Layers of the dense MLP; the last one must be D.
        over_arch_layer_sizes: Layers of the last MLP; the last one is 1 for a logit.
        dense_device: Where the MLPs are made.

    Raises:
        ValueError: No tables, tables of different widths, or a dense MLP that ends in another
            width.

    Example:
        >>> from tutorec.datasets.random import shop
        >>> from tutorec.models.dlrm import DLRM
        >>> from tutorec.modules.embedding_configs import EmbeddingBagConfig
        >>> from tutorec.modules.embedding_modules import EmbeddingBagCollection
        >>> tables = [
        ...     EmbeddingBagConfig(
        ...         num_embeddings=500, embedding_dim=8, name="t_user", feature_names=["user"]
        ...     )
        ... ]
        >>> model = DLRM(
        ...     EmbeddingBagCollection(tables),
        ...     4,
        ...     dense_arch_layer_sizes=[8],
        ...     over_arch_layer_sizes=[8, 1],
        ... )
        >>> batch = next(shop().batches(32))
        >>> model(batch.dense_features, batch.sparse_features).shape
        torch.Size([32, 1])
    """

    inter_arch: nn.Module

    def __init__(
        self,
        embedding_bag_collection: EmbeddingBagCollection,
        dense_in_features: int,
        dense_arch_layer_sizes: list[int],
        over_arch_layer_sizes: list[int],
        dense_device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.sparse_arch = SparseArch(embedding_bag_collection)
        width = self.sparse_arch.D
        features = self.sparse_arch.F
        if dense_arch_layer_sizes[-1:] != [width]:
            raise ValueError(
                f"DLRM: {dense_arch_layer_sizes=} must end in {width}, the tables' embedding_dim"
            )

        self.dense_arch = DenseArch(dense_in_features, dense_arch_layer_sizes, device=dense_device)
        self.inter_arch = InteractionArch(features, device=dense_device)
        self.over_arch = OverArch(
            width + choose(features + 1, 2), over_arch_layer_sizes, device=dense_device
        )

    def compile_dense_path(self, compile_mode: str = "reduce-overhead") -> None:
        """Compile the parts that compute densely by ``torch.compile``; lookups stay as they are.

        Parameters keep their names, so a state of the model loads before and after.

        Args:
            compile_mode: A mode of ``torch.compile``. The default records CUDA graphs.
        """
        for arch in (self.dense_arch, self.inter_arch, self.over_arch):
            arch.compile(mode=compile_mode)

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        """Dense columns [B, D_in] and ids of F features to logits [B, 1]."""
        dense = self.dense_arch(dense_features)
        sparse = self.sparse_arch(sparse_features)
        return self.over_arch(self.inter_arch(dense, sparse))


class DLRM_DCN(DLRM):
    """DLRM with a cross network, as in MLPerf's training benchmark: logits [B, 1].

    Args:
        embedding_bag_collection: Tables of one width D, with F features in all.
        dense_in_features: D_in, number of dense columns.
        dense_arch_layer_sizes: Layers of the dense MLP; the last one must be D.
        over_arch_layer_sizes: Layers of the last MLP; the last one is 1 for a logit.
        dcn_num_layers: Layers of the cross network.
        dcn_low_rank_dim: The rank of its matrices.
        dense_device: Where MLPs and cross network are made.

    Raises:
        ValueError: What `DLRM` refuses, or a rank less than 1.

    Example:
        >>> from tutorec.datasets.random import shop
        >>> from tutorec.models.dlrm import DLRM_DCN
        >>> from tutorec.modules.embedding_configs import EmbeddingBagConfig
        >>> from tutorec.modules.embedding_modules import EmbeddingBagCollection
        >>> tables = [
        ...     EmbeddingBagConfig(
        ...         num_embeddings=500, embedding_dim=8, name="t_user", feature_names=["user"]
        ...     )
        ... ]
        >>> model = DLRM_DCN(
        ...     EmbeddingBagCollection(tables),
        ...     4,
        ...     [8],
        ...     [8, 1],
        ...     dcn_num_layers=3,
        ...     dcn_low_rank_dim=4,
        ... )
        >>> batch = next(shop().batches(32))
        >>> model(batch.dense_features, batch.sparse_features).shape
        torch.Size([32, 1])
    """

    def __init__(
        self,
        embedding_bag_collection: EmbeddingBagCollection,
        dense_in_features: int,
        dense_arch_layer_sizes: list[int],
        over_arch_layer_sizes: list[int],
        dcn_num_layers: int,
        dcn_low_rank_dim: int,
        dense_device: torch.device | None = None,
    ) -> None:
        super().__init__(
            embedding_bag_collection,
            dense_in_features,
            dense_arch_layer_sizes,
            over_arch_layer_sizes,
            dense_device,
        )
        columns = (self.sparse_arch.F + 1) * self.sparse_arch.D
        crossnet = LowRankCrossNet(columns, dcn_num_layers, dcn_low_rank_dim).to(dense_device)
        self.inter_arch = InteractionDCNArch(self.sparse_arch.F, crossnet)
        self.over_arch = OverArch(columns, over_arch_layer_sizes, device=dense_device)


class DLRM_Projection(DLRM):
    """DLRM with inner products between two sets of vectors, made by two MLPs: logits [B, 1].

    Args:
        embedding_bag_collection: Tables of one width D, with F features in all.
        dense_in_features: D_in, number of dense columns.
        dense_arch_layer_sizes: Layers of the dense MLP; the last one must be D.
        over_arch_layer_sizes: Layers of the last MLP; the last one is 1 for a logit.
        interaction_branch1_layer_sizes: Layers of the first set's MLP; the last one is F1 D.
        interaction_branch2_layer_sizes: Layers of the second set's MLP; the last one is F2 D.
        dense_device: Where the MLPs are made.

    Raises:
        ValueError: What `DLRM` refuses, or a branch that does not end in a multiple of D.

    Example:
        >>> from tutorec.datasets.random import shop
        >>> from tutorec.models.dlrm import DLRM_Projection
        >>> from tutorec.modules.embedding_configs import EmbeddingBagConfig
        >>> from tutorec.modules.embedding_modules import EmbeddingBagCollection
        >>> tables = [
        ...     EmbeddingBagConfig(
        ...         num_embeddings=500, embedding_dim=8, name="t_user", feature_names=["user"]
        ...     )
        ... ]
        >>> model = DLRM_Projection(
        ...     EmbeddingBagCollection(tables), 4, [8], [8, 1], [16, 3 * 8], [16, 5 * 8]
        ... )
        >>> batch = next(shop().batches(32))
        >>> model(batch.dense_features, batch.sparse_features).shape
        torch.Size([32, 1])
    """

    def __init__(
        self,
        embedding_bag_collection: EmbeddingBagCollection,
        dense_in_features: int,
        dense_arch_layer_sizes: list[int],
        over_arch_layer_sizes: list[int],
        interaction_branch1_layer_sizes: list[int],
        interaction_branch2_layer_sizes: list[int],
        dense_device: torch.device | None = None,
    ) -> None:
        super().__init__(
            embedding_bag_collection,
            dense_in_features,
            dense_arch_layer_sizes,
            over_arch_layer_sizes,
            dense_device,
        )
        features = self.sparse_arch.F
        width = self.sparse_arch.D

        branches = []
        products = 1
        for number, sizes in enumerate(
            (interaction_branch1_layer_sizes, interaction_branch2_layer_sizes), start=1
        ):
            if sizes[-1] % width:
                raise ValueError(
                    f"interaction_branch{number}_layer_sizes={sizes} must end in a multiple of "
                    f"{width}"
                )
            branches.append(DenseArch((features + 1) * width, sizes, device=dense_device))
            products *= sizes[-1] // width

        self.inter_arch = InteractionProjectionArch(features, *branches)
        self.over_arch = OverArch(width + products, over_arch_layer_sizes, device=dense_device)


class DLRMTrain(nn.Module):
    """A DLRM of any kind and its loss, for a training loop or a pipeline.

    A rank without samples has the loss 0, with a backward that takes part in the ranks' exchanges.

    Args:
        dlrm_module: The model.
    """

    def __init__(self, dlrm_module: DLRM) -> None:
        super().__init__()
        self.model = dlrm_module
        self.loss_fn: nn.Module = nn.BCEWithLogitsLoss()

    def forward(self, batch: Batch) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        """A batch to its mean log loss (0 if empty) and (detached loss, logits [B], labels [B])."""
        logits = self.model(batch.dense_features, batch.sparse_features).squeeze(-1)
        if not is_scripting():
            _check_labels(batch.labels)
        loss = _zero_without_samples(self.loss_fn(logits, batch.labels.float()), logits)
        return loss, (loss.detach(), logits.detach(), batch.labels.detach())


def _check_labels(labels: Tensor) -> None:
    """Raise unless labels are between 0 and 1; skipped where looking would wait for a device."""
    if (
        isinstance(labels, torch.fx.Proxy)
        or not checkable(labels)
        or not labels.is_cpu
        or not labels.numel()
    ):
        return

    low, high = labels.aminmax()
    if not (bool(low >= 0) and bool(high <= 1)):  # written so that NaN is refused, too
        sample = int((~((labels >= 0) & (labels <= 1))).flatten().nonzero()[0])
        raise ValueError(
            f"DLRMTrain: the label of sample {sample} is {labels.flatten()[sample].item()}; the "
            "log loss wants 1 for a click and 0 for none, or a probability between them; "
            "tutorec.validation(False) takes any label"
        )


def _zero_without_samples(loss: Tensor, logits: Tensor) -> Tensor:
    """The mean loss; 0 without samples, whose mean would be NaN."""
    return loss if logits.numel() else logits.sum()


torch.fx.wrap("_zero_without_samples")  # a trace cannot ask how many samples there are
