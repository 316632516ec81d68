"""``CriteoTest``: small random files in Criteo's format, for tests written for TorchRec's class."""

from __future__ import annotations

import random
import tempfile
import unittest
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import compress
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from tutorec.datasets.criteo_files import (
    CAT_FEATURE_COUNT,
    DEFAULT_CAT_NAMES,
    DEFAULT_INT_NAMES,
    INT_FEATURE_COUNT,
)


class CriteoTest(unittest.TestCase):
    """Make files in a temporary folder and check samples of them; TorchRec's ``CriteoTest``."""

    INT_FEATURE_COUNT: ClassVar[int] = INT_FEATURE_COUNT
    CAT_FEATURE_COUNT: ClassVar[int] = CAT_FEATURE_COUNT
    LABEL_VAL_RANGE: ClassVar[tuple[int, int]] = (0, 1)
    INT_VAL_RANGE: ClassVar[tuple[int, int]] = (0, 100)
    CAT_VAL_RANGE: ClassVar[tuple[int, int]] = (0, 1000)

    @classmethod
    @contextmanager
    def _create_dataset_tsv(
        cls, num_rows: int = 10, train: bool = True, filename: str = "criteo"
    ) -> Iterator[str]:
        """The path of a text file; without ``train`` its lines have no label."""

        def line() -> str:
            label = [str(random.randint(*cls.LABEL_VAL_RANGE))] * train
            ints = [str(random.randint(*cls.INT_VAL_RANGE)) for _ in range(cls.INT_FEATURE_COUNT)]
            cats = [
                f"{random.randint(*cls.CAT_VAL_RANGE):08x}" for _ in range(cls.CAT_FEATURE_COUNT)
            ]
            return "\t".join([*label, *ints, *cats]) + "\n"

        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / filename
            path.write_text("".join(line() for _ in range(num_rows)))
            yield str(path)

    def _validate_sample(self, sample: dict[str, Any], train: bool = True) -> None:
        """Fail unless the sample has all columns, with values that the files here hold."""
        names = ["label"] * train + DEFAULT_INT_NAMES + DEFAULT_CAT_NAMES
        assert sorted(sample) == sorted(names), f"the columns are {list(sample)}"

        ranges = [self.LABEL_VAL_RANGE] * train + [self.INT_VAL_RANGE] * self.INT_FEATURE_COUNT
        for name, (low, high) in zip(names, ranges, strict=False):
            assert low <= sample[name] <= high, f"{name} is {sample[name]}"
        for name in DEFAULT_CAT_NAMES:
            assert 0 <= int(sample[name], 16) < 1 << 32, f"{name} is {sample[name]}"

    @classmethod
    @contextmanager
    def _create_dataset_npys(
        cls,
        num_rows: int = 10,
        filename: str | None = "criteo",
        filenames: list[str] | None = None,
        generate_dense: bool = True,
        generate_sparse: bool = True,
        generate_labels: bool = True,
        dense: NDArray[Any] | None = None,
        sparse: NDArray[Any] | None = None,
        labels: NDArray[Any] | None = None,
    ) -> Iterator[tuple[str, ...]]:
        """Paths of the dense, sparse and label arrays of each name, all with the same rows."""

        def drawn(bounds: tuple[int, int], columns: int) -> NDArray[np.int32]:
            return np.random.randint(bounds[0], bounds[1] + 1, (num_rows, columns), np.int32)

        if dense is None:
            dense = np.random.random((num_rows, INT_FEATURE_COUNT)).astype(np.float32)
        if sparse is None:
            sparse = drawn(cls.CAT_VAL_RANGE, CAT_FEATURE_COUNT)
        if labels is None:
            labels = drawn(cls.LABEL_VAL_RANGE, 1)
        arrays = {"dense": dense, "sparse": sparse, "labels": labels}
        is_generated = generate_dense, generate_sparse, generate_labels

        with tempfile.TemporaryDirectory() as folder:
            paths: list[str] = []
            for name in [filename] if filenames is None else filenames:
                for array_name, array in compress(arrays.items(), is_generated):
                    paths.append(f"{folder}/{name}_{array_name}.npy")
                    np.save(paths[-1], array)
            yield tuple(paths)
