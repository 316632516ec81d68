"""DeepFM: a click model with all pairwise products and an MLP (Guo et al., 2017).

::

    dense columns [B, D_in]      ids, KJT [F x B]
      | dense_arch                 | sparse_arch
    one vector [B, D]            one vector for each feature [B, F D]
      |________ inter_arch _________|
    dense vector, deep half, sum of products [B, D + deep_fm_dimension + 1]
      | over_arch
    probability [B, 1]

Names and weights are those of ``torchrec.models.deepfm``.
"""

import torch
from torch import Tensor, nn

from tutorec.models.dlrm import common_width
from tutorec.modules.deepfm import DeepFM, FactorizationMachine
from tutorec.modules.embedding_modules import EmbeddingBagCollection, get_embedding_names_by_table
from tutorec.sparse.keyed import KeyedTensor
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor


class SparseArch(nn.Module):
    """The tables: ids in, pooled rows out.

    Args:
        embedding_bag_collection: The tables.
    """

    def __init__(self, embedding_bag_collection: EmbeddingBagCollection) -> None:
        super().__init__()
        self.embedding_bag_collection = embedding_bag_collection

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Ids of F features to pooled rows."""
        return self.embedding_bag_collection(features)


class DenseArch(nn.Module):
    """Two layers with ReLU: dense columns [B, in_features] to a vector [B, embedding_dim].

    Args:
        in_features: D_in.
        hidden_layer_size: Width of the first layer.
        embedding_dim: D.
    """

    def __init__(self, in_features: int, hidden_layer_size: int, embedding_dim: int) -> None:
        super().__init__()
        self.model: nn.Module = nn.Sequential(
            nn.Linear(in_features, hidden_layer_size),
            nn.ReLU(),
            nn.Linear(hidden_layer_size, embedding_dim),
            nn.ReLU(),
        )

    def forward(self, features: Tensor) -> Tensor:
        """Dense columns [B, D_in] to a vector [B, D]."""
        return self.model(features)


class FMInteractionArch(nn.Module):
    """The dense vector, the deep half and the sum of products: [B, D + deep_fm_dimension + 1].

    Args:
        fm_in_features: Numbers of a sample, D + F D.
        sparse_feature_names: The keys of the pooled rows.
        deep_fm_dimension: Columns of the deep half.
    """

    def __init__(
        self, fm_in_features: int, sparse_feature_names: list[str], deep_fm_dimension: int
    ) -> None:
        super().__init__()
        self.sparse_feature_names = sparse_feature_names
        self.deep_fm = DeepFM(
            nn.Sequential(nn.Linear(fm_in_features, deep_fm_dimension), nn.ReLU())
        )
        self.fm = FactorizationMachine()

    def forward(self, dense_features: Tensor, sparse_features: KeyedTensor) -> Tensor:
        """[B, D] and pooled rows to [B, D + deep_fm_dimension + 1]; [B, D] without features."""
        if not self.sparse_feature_names:
            return dense_features
        vectors = [dense_features, *(sparse_features[name] for name in self.sparse_feature_names)]
        return torch.cat([dense_features, self.deep_fm(vectors), self.fm(vectors)], dim=1)


class OverArch(nn.Module):
    """One linear layer and a sigmoid: [B, in_features] to [B, 1].

    Args:
        in_features: Columns in.
    """

    def __init__(self, in_features: int) -> None:
        super().__init__()
        self.model: nn.Module = nn.Sequential(nn.Linear(in_features, 1), nn.Sigmoid())

    def forward(self, features: Tensor) -> Tensor:
        """A probability for each sample, [B, 1]."""
        return self.model(features)


class SimpleDeepFMNN(nn.Module):
    """The click model of this module's figure: probabilities [B, 1].

    Args:
        num_dense_features: D_in.
        embedding_bag_collection: Tables of one width D.
        hidden_layer_size: Width of the dense part's first layer.
        deep_fm_dimension: Columns of the deep half.

    Raises:
        ValueError: There are no tables, or they have different widths.

    Example:
        >>> from tutorec.datasets.random import shop
        >>> from tutorec.models.deepfm import SimpleDeepFMNN
        >>> from tutorec.modules.embedding_configs import EmbeddingBagConfig
        >>> tables = [
        ...     EmbeddingBagConfig(
        ...         num_embeddings=500, embedding_dim=8, name="t_user", feature_names=["user"]
        ...     )
        ... ]
        >>> batch = next(shop().batches(32))
        >>> SimpleDeepFMNN(4, EmbeddingBagCollection(tables), 20, 5)(
        ...     batch.dense_features, batch.sparse_features
        ... ).shape
        torch.Size([32, 1])
    """

    def __init__(
        self,
        num_dense_features: int,
        embedding_bag_collection: EmbeddingBagCollection,
        hidden_layer_size: int,
        deep_fm_dimension: int,
    ) -> None:
        super().__init__()
        configs = embedding_bag_collection.embedding_bag_configs()
        names = [
            name for table_names in get_embedding_names_by_table(configs) for name in table_names
        ]
        width = common_width("SimpleDeepFMNN", configs)
        self.sparse_arch = SparseArch(embedding_bag_collection)
        self.dense_arch = DenseArch(num_dense_features, hidden_layer_size, width)
        self.inter_arch = FMInteractionArch(width * (len(names) + 1), names, deep_fm_dimension)
        self.over_arch = OverArch(width + deep_fm_dimension + 1)

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        """Dense columns [B, D_in] and ids of F features to probabilities [B, 1]."""
        dense = self.dense_arch(dense_features)
        return self.over_arch(self.inter_arch(dense, self.sparse_arch(sparse_features)))
