"""Batches of random ids, to try or to time a model with; TorchRec's ``RandomRecDataset``."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, islice

import torch
from torch.utils.data import IterableDataset

from tutorec.datasets.utils import Batch
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor


class RandomRecDataset(IterableDataset[Batch]):
    """Batches with uniform ids, normal dense columns and 0/1 labels, equal to TorchRec's by seed.

    Args:
        keys: F features.
        batch_size: B.
        hash_size: ids of every feature are 0 to ``hash_size - 1``; 100 by default.
        hash_sizes: the same for each feature; ``hash_size`` is not read then.
        ids_per_feature: the most ids of a bag; 2 by default.
        ids_per_features: the same for each feature; ``ids_per_feature`` is not read then.
        num_dense: D, dense columns.
        manual_seed: of a generator of its own; by default torch's global one is used.
        num_batches: batches of a pass; unlimited by default.
        num_generated_batches: so many batches are made at once and repeated in turn; below 0 each
            batch is generated when it is requested.
        min_ids_per_feature: the fewest ids of a bag; ``ids_per_feature`` by default, and 0 where
            that is not given.
        min_ids_per_features: the same for each feature; ``min_ids_per_feature`` is not read then.

    Yields:
        Batches with dense [B, D], ids of every feature, and labels [B], int64.

    Raises:
        ValueError: a list that has not one number for each key, a bag whose fewest ids are more
            than its most, or no batch to repeat.

    Example:
        >>> from tutorec.datasets.random import RandomRecDataset
        >>> data = RandomRecDataset(
        ...     ["user", "item"], batch_size=2, hash_size=10, ids_per_feature=1, num_batches=3
        ... )
        >>> len(data), [batch.sparse_features.lengths().tolist() for batch in data][0]
        (3, [1, 1, 1, 1])
    """

    def __init__(
        self,
        keys: list[str],
        batch_size: int,
        hash_size: int | None = None,
        hash_sizes: list[int] | None = None,
        ids_per_feature: int | None = None,
        ids_per_features: list[int] | None = None,
        num_dense: int = 50,
        manual_seed: int | None = None,
        num_batches: int | None = None,
        num_generated_batches: int = 10,
        min_ids_per_feature: int | None = None,
        min_ids_per_features: list[int] | None = None,
    ) -> None:
        super().__init__()
        fewest = ids_per_feature if min_ids_per_feature is None else min_ids_per_feature
        per_key = {
            "hash_sizes": [hash_size or 100] * len(keys) if hash_sizes is None else hash_sizes,
            "ids_per_features": [ids_per_feature or 2] * len(keys)
            if ids_per_features is None
            else ids_per_features,
            "min_ids_per_features": min_ids_per_features or [fewest or 0] * len(keys),
        }
        for name, numbers in per_key.items():
            if len(numbers) != len(keys):
                raise ValueError(
                    f"{name} has {len(numbers)} number(s), and there are {len(keys)} keys"
                )

        self._features = list(zip(keys, *per_key.values(), strict=True))
        for key, _, most, least in self._features:
            if least > most:
                raise ValueError(
                    f"feature '{key}': bags of at least {least} and at most {most} ids"
                )

        if num_generated_batches == 0:
            raise ValueError(
                "num_generated_batches=0 leaves no batch to repeat: use 1 or more, or -1 for "
                "new ones"
            )

        self._batch_size = batch_size
        self._num_dense = num_dense
        self._generator = (
            None if manual_seed is None else torch.Generator().manual_seed(manual_seed)
        )
        self._generated = [self._generate() for _ in range(num_generated_batches)]
        self.num_batches = num_batches

    def __iter__(self) -> Iterator[Batch]:
        generated = self._generated
        batches = (
            generated[i % len(generated)] if generated else self._generate() for i in count()
        )
        return islice(batches, self.num_batches)

    def __len__(self) -> int:
        if self.num_batches is None:
            raise TypeError(
                "a RandomRecDataset without num_batches has no end: give it num_batches="
            )
        return self.num_batches

    def _generate(self) -> Batch:
        values = []
        lengths = []
        size = (self._batch_size,)
        generator = self._generator
        for _, rows, most, least in self._features:
            lengths.append(
                torch.randint(least, most + 1, size, dtype=torch.int32, generator=generator)
            )
            values.append(torch.randint(rows, (int(lengths[-1].sum()),), generator=generator))

        kjt = KeyedJaggedTensor.from_lengths_sync(
            [key for key, *_ in self._features], torch.cat(values), lengths=torch.cat(lengths)
        )
        dense = torch.randn(self._batch_size, self._num_dense, generator=generator)
        return Batch(dense, kjt, torch.randint(2, size, generator=generator))
