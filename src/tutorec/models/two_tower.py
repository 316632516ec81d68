"""Two towers: which of many items will this user click? One vector for the user, one for each item.

::

    user, recent clicks: ids          item: ids
      | rows of the tables, pooled      | rows of the tables, pooled
      | MLP                             | MLP
    query [B, D]                      candidate [B, D]
      |_________ inner product _________|     a score for every pair

The towers meet in the inner product only, so that candidates can be computed once and searched for
every query: :mod:`tutorec.models.retrieval`. The collection of tables may be sharded or not.

After Yi et al., 2019, "Sampling-bias-corrected neural modeling for large corpus item
recommendations".
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tutorec._check import require_int, require_one_of
from tutorec.datasets.utils import Batch
from tutorec.modules.embedding_modules import EmbeddingBagCollection, get_embedding_names_by_table
from tutorec.modules.mlp import MLP
from tutorec.sparse.keyed import KeyedTensor
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor

# One call each in a graph, so that a train pipeline finds what leads to the tables.
torch.fx.wrap("one_id_each")
torch.fx.wrap("with_empty_bags")
torch.fx.wrap("_other_candidates")
torch.fx.wrap("_with_more_samples")


class Towers(Protocol):
    """The model that `TwoTowerTrain` trains and `build_index` searches, from ids to vectors.

    Attributes:
        candidate_features: features that say what may be found; the first is its id, one for each
            sample.
    """

    candidate_features: list[str]

    def __call__(self, features: KeyedJaggedTensor) -> tuple[Tensor, Tensor]:
        """Ids of B samples to queries [B, D] and candidates [B, D]."""
        ...

    def queries(self, features: KeyedJaggedTensor) -> Tensor:
        """Ids of the query's features to queries [B, D]; other features are not needed."""
        ...

    def candidates(self, features: KeyedJaggedTensor) -> Tensor:
        """Ids of the candidate's features to candidates [B, D]; other features are not needed."""
        ...

    def parameters(self) -> Iterator[nn.Parameter]:
        """Of the module."""
        ...


class TwoTower(nn.Module):
    """Queries and candidates as vectors whose inner product is the score of the pair.

    Args:
        embedding_bag_collection: The tables; both towers may share some.
        query_features: Features that say who asks.
        candidate_features: Features that say what may be found; the first is its id, one for each
            sample.
        layer_sizes: Layers of both MLPs; the last is D, the width of the vectors.
        dense_device: Where the MLPs are made.

    Raises:
        ValueError: a tower has no features, or a feature that no table has.

    Example:
        >>> import torch
        >>> from tutorec.models.two_tower import TwoTower
        >>> from tutorec.modules.embedding_configs import EmbeddingBagConfig
        >>> from tutorec.modules.embedding_modules import EmbeddingBagCollection
        >>> from tutorec.sparse.keyed_jagged import KeyedJaggedTensor
        >>> tables = [
        ...     EmbeddingBagConfig(9, 4, name=f"t_{name}", feature_names=[name])
        ...     for name in ("user", "item")
        ... ]
        >>> towers = TwoTower(EmbeddingBagCollection(tables), ["user"], ["item"], [8])
        >>> towers.queries(
        ...     KeyedJaggedTensor(["user"], torch.tensor([7, 1]), lengths=torch.tensor([1, 1]))
        ... ).shape
        torch.Size([2, 8])
    """

    def __init__(
        self,
        embedding_bag_collection: EmbeddingBagCollection,
        query_features: Sequence[str],
        candidate_features: Sequence[str],
        layer_sizes: list[int],
        dense_device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.embedding_bag_collection = embedding_bag_collection
        self.query_features: list[str] = list(query_features)
        self.candidate_features: list[str] = list(candidate_features)
        configs = embedding_bag_collection.embedding_bag_configs()

        columns: dict[str, list[tuple[str, int]]] = {}
        for config, names in zip(configs, get_embedding_names_by_table(configs), strict=True):
            for feature, name in zip(config.feature_names, names, strict=True):
                columns.setdefault(feature, []).append((name, config.embedding_dim))

        self._features = list(columns)
        self._query_columns, query_width = _tower_columns(
            "query_features", self.query_features, columns
        )
        self._candidate_columns, candidate_width = _tower_columns(
            "candidate_features", self.candidate_features, columns
        )
        self.query_tower, self.candidate_tower = (
            MLP(width, layer_sizes, activation_on_last=False, device=dense_device)
            for width in (query_width, candidate_width)
        )

    def forward(self, features: KeyedJaggedTensor) -> tuple[Tensor, Tensor]:
        """Ids of B samples to queries [B, D] and candidates [B, D]."""
        pooled = self._pooled(features)
        return self._query(pooled), self._candidate(pooled)

    def queries(self, features: KeyedJaggedTensor) -> Tensor:
        """Ids of the query's features to queries [B, D]; other features are not needed."""
        return self._query(self._pooled(features))

    def candidates(self, features: KeyedJaggedTensor) -> Tensor:
        """Ids of the candidate's features to candidates [B, D]; other features are not needed."""
        return self._candidate(self._pooled(features))

    def _pooled(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Pooled rows of all tables; absent features are empty: all ranks look up all tables."""
        return self.embedding_bag_collection(with_empty_bags(features, self._features))

    def _query(self, pooled: KeyedTensor) -> Tensor:
        return self.query_tower(torch.cat([pooled[name] for name in self._query_columns], dim=1))

    def _candidate(self, pooled: KeyedTensor) -> Tensor:
        return self.candidate_tower(
            torch.cat([pooled[name] for name in self._candidate_columns], dim=1)
        )


class TwoTowerTrain(nn.Module):
    """Two towers and their loss: among its own and other candidates, each query is to find its own.

    The loss is the cross-entropy of a softmax over candidates. All items would be too many, so a
    sample of them is used:

    - ``"in_batch"``: the candidates of the other samples. They cost nothing, but what is clicked
      often is there often, and would be pushed down for it; given the candidates' frequencies, a
      score is corrected by their logarithm.
    - ``"random"``: ids drawn evenly, the same ones for all samples of a batch. What is drawn is a
      function of the batch, so that a run that goes on from a checkpoint draws what it would have
      drawn.

    A candidate that is the sample's own by chance is left out. Each rank finds others among its own
    samples, and the gradient is the mean over ranks, however many samples each has.

    Args:
        two_tower: The model: a TwoTower, or another module with its queries and candidates.
        negatives: Which candidates are that sample.
        frequency: [rows], how often each id is a candidate, in any unit; for ``"in_batch"``. None:
            no correction.
        rows: Ids to draw from, 0 .. rows-1; for ``"random"``.
        drawn: How many are drawn; for ``"random"``.

    Raises:
        ValueError: ``"random"`` without rows, or for candidates of several features: nobody knows
            the others' ids; frequencies that are not numbers [rows] of at least 0.
    """

    _log_frequency: Tensor | None

    def __init__(
        self,
        two_tower: Towers,
        negatives: Literal["in_batch", "random"] = "in_batch",
        frequency: Tensor | None = None,
        rows: int | None = None,
        drawn: int = 64,
    ) -> None:
        super().__init__()
        require_one_of("negatives", negatives, ("in_batch", "random"))
        if negatives == "random":
            require_int("rows", rows, 1)
            require_int("drawn", drawn, 1)
            names = two_tower.candidate_features
            if len(names) > 1:
                raise ValueError(
                    f"negatives='random' draws ids of one feature; use 'in_batch' for {names}"
                )

        self.model: Towers = two_tower
        self._negatives = negatives
        self._rows = rows or 0
        self._drawn = drawn
        if frequency is not None and not (frequency.dim() == 1 and bool((frequency >= 0).all())):
            raise ValueError(
                f"frequency must be a tensor [rows] of numbers from 0, got {list(frequency.shape)}"
            )
        # One click more for every id: none is infinitely rare. No part of the model's state: it
        # comes from the data.
        log_frequency = None if frequency is None else torch.log(frequency.float() + 1.0)
        self.register_buffer("_log_frequency", log_frequency, persistent=False)

    def forward(self, batch: Batch) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        """B samples to mean loss and (detached loss, scores [B, C], own candidate's index [B])."""
        features = batch.sparse_features
        ids = one_id_each(features, self.model.candidate_features[0])
        scores, targets = (
            self._in_batch(features, ids)
            if self._negatives == "in_batch"
            else self._random(features, ids)
        )
        # The mean over no samples would be no number, and other ranks wait for this one's
        # gradients.
        loss = F.cross_entropy(scores, targets, reduction="sum") / max(len(ids), 1)

        return loss, (loss.detach(), scores.detach(), targets)

    def _in_batch(self, features: KeyedJaggedTensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Scores [B, B] with the candidates of all samples."""
        queries, candidates = self.model(features)
        scores = queries @ candidates.t()
        if self._log_frequency is not None:
            scores = scores - self._log_frequency[ids]

        targets = torch.arange(len(ids), device=ids.device)
        again = ids.unsqueeze(0) == ids.unsqueeze(1)
        again.fill_diagonal_(False)
        return scores.masked_fill(again, -torch.inf), targets

    def _random(self, features: KeyedJaggedTensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Scores [B, 1 + drawn]: the sample's own candidate first."""
        drawn = _other_candidates(ids, self._rows, self._drawn)
        key = self.model.candidate_features[0]
        # Looked up as further samples of the same batch: one exchange for both.
        queries, candidates = self.model(_with_more_samples(features, key, drawn.to(ids.dtype)))
        queries = queries[: len(ids)]
        positives, negatives = candidates.tensor_split([len(ids)])
        scores = torch.cat(
            [(queries * positives).sum(1, keepdim=True), queries @ negatives.t()], dim=1
        )
        again = F.pad(drawn.unsqueeze(0) == ids.unsqueeze(1), (1, 0))

        return scores.masked_fill(again, -torch.inf), torch.zeros_like(ids, dtype=torch.long)


def _other_candidates(ids: Tensor, rows: int, number: int) -> Tensor:
    """Ids drawn evenly, a function of the ids of the batch [B]."""
    seed = int((ids * torch.arange(1, len(ids) + 1, device=ids.device)).sum())
    return torch.randint(0, rows, (number,), generator=torch.Generator().manual_seed(seed)).to(
        ids.device
    )


def clicks_of(batch: Batch) -> Batch:
    """The samples of a batch that were clicked: what a retrieval model learns from.

    Example:
        >>> from tutorec.datasets.random import shop
        >>> from tutorec.models.two_tower import clicks_of
        >>> batch = next(shop().batches(100))
        >>> clicks = clicks_of(batch)
        >>> len(clicks.labels) == int(batch.labels.sum()), clicks.sparse_features.keys()
        (True, ['user', 'item', 'clicked'])
    """
    features = batch.sparse_features
    clicked = batch.labels != 0
    lengths = features.lengths().view(len(features.keys()), -1)
    id_clicked = clicked.repeat(len(lengths)).repeat_interleave(features.lengths().long())
    weights = features.weights_or_none()
    picked = KeyedJaggedTensor(
        features.keys(),
        features.values()[id_clicked],
        None if weights is None else weights[id_clicked],
        lengths=lengths[:, clicked].reshape(-1),
    )

    return Batch(batch.dense_features[clicked], picked, batch.labels[clicked])


def with_empty_bags(features: KeyedJaggedTensor, names: list[str]) -> KeyedJaggedTensor:
    """The same samples with all of these features: those that are missing have empty bags.

    Example:
        >>> import torch
        >>> from tutorec.models.two_tower import with_empty_bags
        >>> from tutorec.sparse.keyed_jagged import KeyedJaggedTensor
        >>> users = KeyedJaggedTensor(
        ...     ["user"], torch.tensor([7, 1]), lengths=torch.tensor([1, 1])
        ... )
        >>> with_empty_bags(users, ["user", "item"]).lengths().tolist()
        [1, 1, 0, 0]
    """
    keys = features.keys()
    missing = torch.jit.annotate(list[str], [])
    for name in names:  # in words that TorchScript compiles
        if name not in keys:
            missing.append(name)

    if len(missing) == 0:
        return features
    empty = features.lengths().new_zeros([len(missing) * features.stride()])
    lengths = torch.cat([features.lengths(), empty])
    return KeyedJaggedTensor.from_lengths_sync(
        keys + missing, features.values(), lengths, features.weights_or_none()
    )


def one_id_each(features: KeyedJaggedTensor, key: str) -> Tensor:
    """The ids [B] of a feature that has one for each sample.

    Raises:
        ValueError: a sample has none, or several.
    """
    bags = features[key]
    other = (bags.lengths() != 1).nonzero()
    if len(other):
        sample = int(other[0])
        raise ValueError(
            f"feature '{key}': sample {sample} has {int(bags.lengths()[sample])} ids and needs one"
        )
    return bags.values()


def _tower_columns(
    argument: str, features: Sequence[str], columns: dict[str, list[tuple[str, int]]]
) -> tuple[list[str], int]:
    """Names of a tower's pooled rows, and how many columns they are together."""
    if not features or not set(features) <= columns.keys():
        raise ValueError(
            f"TwoTower: {argument}={features} must name at least one of {sorted(columns)}, and no "
            "other"
        )
    pooled = [column for feature in features for column in columns[feature]]
    return [name for name, _ in pooled], sum(width for _, width in pooled)


def _with_more_samples(features: KeyedJaggedTensor, key: str, ids: Tensor) -> KeyedJaggedTensor:
    """The samples, and one more for each id, with only that id in the bag of ``key``."""
    values = []
    lengths = []
    for name in features.keys():
        bags = features[name]
        more = ids if name == key else ids[:0]
        values += [bags.values(), more]
        lengths += [bags.lengths(), bags.lengths().new_full((len(ids),), int(name == key))]

    return KeyedJaggedTensor(features.keys(), torch.cat(values), lengths=torch.cat(lengths))
