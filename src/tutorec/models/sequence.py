"""Prediction of the next item of a session: attention over a history, and a score for every item.

::

    history: ids, oldest first        item: one id
      | rows, one for each id           | row of the same table
      | + row of its position           |
      | self-attention                  |
      | the newest position             |
    query [B, D]                      candidate [B, D]
      |_________ inner product _________|

The interface is that of :class:`tutorec.models.two_tower.TwoTower`, so that `TwoTowerTrain`,
`build_index` and `recall_at` serve here too. The collection of tables may be sharded or not.

After Kang and McAuley, 2018, "Self-attentive sequential recommendation". Theirs learns from every
position of a history and needs a causal mask for it; this one learns from the last position alone.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tutorec.models.two_tower import with_empty_bags
from tutorec.modules.embedding_collection import EmbeddingCollection
from tutorec.sparse.jagged import JaggedTensor
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor

# One call in a graph, so that a train pipeline finds what leads to the tables.
torch.fx.wrap("with_empty_bags")
torch.fx.wrap("newest_first")


class SequenceTower(nn.Module):
    """Histories as vectors whose inner product with the row of an item is the item's score.

    Args:
        embedding_collection: one table with D columns, for the features ``history`` and ``item``.
        history: the feature with the items so far, oldest first.
        item: the feature with the item that came next, one for each sample.
        longest: L, how many of the newest items of a history are looked at.
        layers: layers of self-attention.
        heads: heads of each layer; D must be a multiple of them.
        dense_device: where the dense layers are made.

    Raises:
        ValueError: the table of ``item`` and that of ``history`` differ in their columns, or no
            table has one of them.

    Example:
        >>> import torch
        >>> from tutorec.models.sequence import SequenceTower
        >>> from tutorec.modules.embedding_collection import EmbeddingCollection
        >>> from tutorec.modules.embedding_configs import EmbeddingConfig
        >>> from tutorec.sparse.keyed_jagged import KeyedJaggedTensor
        >>> table = EmbeddingConfig(9, 8, name="t_item", feature_names=["history", "item"])
        >>> tower = SequenceTower(EmbeddingCollection([table]), longest=4)
        >>> tower.queries(
        ...     KeyedJaggedTensor(
        ...         ["history"], torch.tensor([7, 1, 3]), lengths=torch.tensor([2, 1])
        ...     )
        ... ).shape
        torch.Size([2, 8])
    """

    def __init__(
        self,
        embedding_collection: EmbeddingCollection,
        history: str = "history",
        item: str = "item",
        longest: int = 20,
        layers: int = 1,
        heads: int = 2,
        dense_device: torch.device | None = None,
    ) -> None:
        super().__init__()
        configs = embedding_collection.embedding_configs()
        columns = {
            feature: config.embedding_dim for config in configs for feature in config.feature_names
        }
        if not columns.keys() >= {history, item} or columns[history] != columns[item]:
            raise ValueError(
                f"SequenceTower: '{history}' and '{item}' need rows of one width, and have "
                f"{columns}"
            )

        self.embedding_collection = embedding_collection
        self.candidate_features: list[str] = [item]
        self._features = list(columns)
        self._history = history
        self._item = item
        width = columns[history]
        self.positions = nn.Parameter(0.02 * torch.randn(longest, width, device=dense_device))
        self.attention = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width,
                heads,
                2 * width,
                dropout=0.0,
                batch_first=True,
                norm_first=True,
                device=dense_device,
            )
            for _ in range(layers)
        )

    def forward(self, features: KeyedJaggedTensor) -> tuple[Tensor, Tensor]:
        """Ids of B samples to queries [B, D] and candidates [B, D]."""
        rows = self.embedding_collection(features)
        return self._query(rows[self._history]), rows[self._item].values()

    def queries(self, features: KeyedJaggedTensor) -> Tensor:
        """Histories to queries [B, D]; other features are not needed."""
        return self._query(self._rows(features)[self._history])

    def candidates(self, features: KeyedJaggedTensor) -> Tensor:
        """Items, one for each sample, to candidates [B, D]; other features are not needed."""
        return self._rows(features)[self._item].values()

    def _rows(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Rows of all features; an absent feature has no ids: all ranks look up all tables."""
        return self.embedding_collection(with_empty_bags(features, self._features))

    def _query(self, history: JaggedTensor) -> Tensor:
        rows, known = newest_first(history, len(self.positions))
        hidden = rows + self.positions
        for layer in self.attention:
            hidden = layer(hidden, src_key_padding_mask=~known)
        return hidden[:, 0]


def newest_first(history: JaggedTensor, longest: int) -> tuple[Tensor, Tensor]:
    """The newest rows of each sample [B, L, D], newest first, zero-padded, and a mask [B, L].

    Position 0 always counts as there, so that attention over an empty history has something to look
    at.

    Example:
        >>> import torch
        >>> from tutorec.models.sequence import newest_first
        >>> from tutorec.sparse.jagged import JaggedTensor
        >>> rows = JaggedTensor(
        ...     torch.tensor([[1.0], [2.0], [3.0]]), lengths=torch.tensor([3, 0])
        ... )
        >>> newest_first(rows, 2)[0].squeeze(2).tolist()
        [[3.0, 2.0], [0.0, 0.0]]
    """
    values = history.values()
    lengths = history.lengths()
    position = torch.arange(longest, device=values.device)
    known = position < lengths.unsqueeze(1)
    index = history.offsets()[1:].unsqueeze(1) - 1 - position
    rows = values.new_zeros(*known.shape, values.shape[1])
    rows[known] = values[index[known]]

    return rows, known | (position == 0)
