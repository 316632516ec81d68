"""Drawn inputs for property tests. Empty bags, empty batches and repeated ids are drawn often, on
purpose.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from hypothesis import settings
from hypothesis import strategies as st

from tutorec.modules.embedding_configs import (
    BaseEmbeddingConfig,
    EmbeddingBagConfig,
    EmbeddingConfig,
    PoolingType,
)
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor

PROFILE_EXAMPLES = 40  # of a property test that names no other number, as conftest.py sets it


def examples(count: int) -> settings:
    """So many examples for a property test, fewer in ``make quick``, more in ``make random``."""
    return settings(max_examples=max(1, count * settings().max_examples // PROFILE_EXAMPLES))


Lists = dict[str, list[list[int]]]
WeightLists = dict[str, list[list[float]]]


@dataclass(frozen=True)
class DrawnBatch:
    """A batch as plain lists, ``ids[feature][sample]``, and the same as a KeyedJaggedTensor."""

    ids: Lists
    weights: WeightLists | None
    samples: int
    ids_dtype: torch.dtype
    lengths_dtype: torch.dtype
    from_offsets: bool

    @property
    def keys(self) -> list[str]:
        return list(self.ids)

    @property
    def flat_ids(self) -> list[int]:
        return [number for bags in self.ids.values() for bag in bags for number in bag]

    @property
    def flat_weights(self) -> list[float] | None:
        if self.weights is None:
            return None
        return [number for bags in self.weights.values() for bag in bags for number in bag]

    @property
    def lengths(self) -> list[int]:
        return [len(bag) for bags in self.ids.values() for bag in bags]

    @property
    def offsets(self) -> list[int]:
        out = [0]
        for length in self.lengths:
            out.append(out[-1] + length)
        return out

    def kjt(self) -> KeyedJaggedTensor:
        values = torch.tensor(self.flat_ids, dtype=self.ids_dtype)
        weights = (
            None
            if self.flat_weights is None
            else torch.tensor(self.flat_weights, dtype=torch.float32)
        )
        if self.from_offsets:
            offsets = torch.tensor(self.offsets, dtype=self.lengths_dtype)
            return KeyedJaggedTensor(
                self.keys, values, weights, offsets=offsets, stride=self.samples
            )
        lengths = torch.tensor(self.lengths, dtype=self.lengths_dtype)
        return KeyedJaggedTensor(self.keys, values, weights, lengths=lengths, stride=self.samples)


@dataclass(frozen=True)
class DrawnVariableBatch(DrawnBatch):
    """A batch whose features have different numbers of samples; ``samples`` is the most that one
    has.

    ``ranks[feature][rank]`` numbers of samples add up to the feature's lists; some are given as a
    tensor.
    """

    ranks: list[list[int]]
    ranks_as_tensor: bool

    def kjt(
        self, inverse_indices: tuple[list[str], torch.Tensor] | None = None
    ) -> KeyedJaggedTensor:
        values = torch.tensor(self.flat_ids, dtype=self.ids_dtype)
        weights = (
            None
            if self.flat_weights is None
            else torch.tensor(self.flat_weights, dtype=torch.float32)
        )
        lengths = torch.tensor(self.lengths, dtype=self.lengths_dtype)
        offsets = torch.tensor(self.offsets, dtype=self.lengths_dtype)
        return KeyedJaggedTensor(
            self.keys,
            values,
            weights,
            lengths=None if self.from_offsets else lengths,
            offsets=offsets if self.from_offsets else None,
            stride_per_key_per_rank=torch.tensor(self.ranks)
            if self.ranks_as_tensor
            else self.ranks,
            inverse_indices=inverse_indices,
        )


# Halves, so that sums of weights and ids are exact.
halves = st.integers(-8, 8).map(lambda number: number / 2)


@st.composite
def jagged_batches(
    draw: st.DrawFn,
    rows: dict[str, int] | int = 12,
    *,
    samples: st.SearchStrategy[int] | None = None,
    weighted: bool | None = None,
    max_features: int = 4,
    max_bag: int = 4,
) -> DrawnBatch:
    """A batch.

    Args:
        draw: From hypothesis.
        rows: Rows that ids of each feature stay below, or one number for features ``f0``, ``f1``,
            ...
        samples: Number of samples, by default 0 to 5.
        weighted: Whether ids carry weights; drawn by default.
        max_features: Most features, where ``rows`` is a number.
        max_bag: Longest bag.
    """
    if isinstance(rows, int):
        features = draw(st.integers(1, max_features))
        rows = {f"f{index}": rows for index in range(features)}
    count = draw(samples if samples is not None else st.integers(0, 5))
    weighted = draw(st.booleans()) if weighted is None else weighted
    ids: Lists = {}
    weights: WeightLists = {}
    for feature, below in rows.items():
        # Few distinct ids, so that bags and batches repeat them; empty bags come as often as
        # others.
        few = draw(st.lists(st.integers(0, below - 1), min_size=1, max_size=3))
        bag = st.one_of(st.just([]), st.lists(st.sampled_from(few), max_size=max_bag))
        ids[feature] = [draw(bag) for _ in range(count)]
        weights[feature] = [[draw(halves) for _ in one] for one in ids[feature]]
    return DrawnBatch(
        ids,
        weights if weighted else None,
        count,
        draw(st.sampled_from([torch.int64, torch.int32])),
        draw(st.sampled_from([torch.int64, torch.int32])),
        draw(st.booleans()),
    )


@st.composite
def variable_batches(
    draw: st.DrawFn,
    rows: int = 12,
    *,
    weighted: bool | None = None,
    max_features: int = 4,
    max_bag: int = 4,
) -> DrawnVariableBatch:
    """A batch whose features have different numbers of samples, from one to three ranks.

    Args:
        draw: From hypothesis.
        rows: Ids stay below.
        weighted: Whether ids carry weights; drawn by default.
        max_features: Most features.
        max_bag: Longest bag.
    """
    count, world = draw(st.integers(1, max_features)), draw(st.integers(1, 3))
    weighted = draw(st.booleans()) if weighted is None else weighted
    ranks = [[draw(st.integers(0, 3)) for _ in range(world)] for _ in range(count)]
    bag = st.one_of(st.just([]), st.lists(st.integers(0, rows - 1), max_size=max_bag))
    ids = {
        f"f{index}": [draw(bag) for _ in range(sum(per_rank))]
        for index, per_rank in enumerate(ranks)
    }
    weights = {key: [[draw(halves) for _ in one] for one in bags] for key, bags in ids.items()}
    return DrawnVariableBatch(
        ids,
        weights if weighted else None,
        max(sum(per_rank) for per_rank in ranks),
        draw(st.sampled_from([torch.int64, torch.int32])),
        draw(st.sampled_from([torch.int64, torch.int32])),
        draw(st.booleans()),
        ranks,
        draw(st.booleans()),
    )


@st.composite
def table_sets(
    draw: st.DrawFn, *, pooling: PoolingType | None = None, max_tables: int = 4, max_rows: int = 12
) -> list[EmbeddingBagConfig]:
    """One to ``max_tables`` tables; features are shared between tables, and one table serves
    several, often.

    Widths that are no multiple of 4 and tables of one row are drawn; poolings are mixed unless one
    is given.
    """
    names = [f"f{index}" for index in range(draw(st.integers(1, 5)))]
    tables = []
    for index in range(draw(st.integers(1, max_tables))):
        features = draw(st.lists(st.sampled_from(names), min_size=1, max_size=3, unique=True))
        kinds = [PoolingType.SUM, PoolingType.MEAN, PoolingType.SQRTN]
        pooled = draw(st.sampled_from(kinds)) if pooling is None else pooling
        tables.append(
            EmbeddingBagConfig(
                num_embeddings=draw(st.integers(1, max_rows)),
                embedding_dim=draw(st.sampled_from([1, 3, 4, 6, 8])),
                name=f"t{index}",
                feature_names=features,
                pooling=pooled,
            )
        )
    return tables


@st.composite
def sequence_tables(
    draw: st.DrawFn, *, max_tables: int = 4, max_rows: int = 12
) -> list[EmbeddingConfig]:
    """Tables as ``table_sets`` draws them, without a pooling; in half of the cases all have one
    width.
    """
    drawn = draw(table_sets(max_tables=max_tables, max_rows=max_rows))
    width = draw(st.one_of(st.none(), st.sampled_from([1, 4, 6, 8])))
    return [
        EmbeddingConfig(
            table.num_embeddings,
            width or table.embedding_dim,
            table.name,
            feature_names=table.feature_names,
        )
        for table in drawn
    ]


def rows_of(tables: Sequence[BaseEmbeddingConfig]) -> dict[str, int]:
    """For each feature the fewest rows of the tables that it looks up: ids below that fit all of
    them.
    """
    rows: dict[str, int] = {}
    for table in tables:
        for feature in table.feature_names:
            rows[feature] = min(rows.get(feature, table.num_embeddings), table.num_embeddings)
    return rows
