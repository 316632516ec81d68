"""Sizes, positions and columns that data sets cannot have are refused where they are given."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tutorec.datasets.criteo import CriteoDataset, read_criteo
from tutorec.datasets.ids import uniform_ids
from tutorec.datasets.random import shop
from tutorec.datasets.utils import RowBatches, rank_slices, step_slices

STORE = shop(rows=40, test_rows=20)


def of_rows(**options: Any) -> RowBatches:
    return RowBatches(lambda start, stop: (start, stop), 10, 4, **options)  # pyright: ignore


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: shop(users=0), "shop: users=0 must be a whole number, at least 1"),
        (lambda: shop(max_clicked=-1), "shop: max_clicked=-1 must be a whole number, at least 0"),
        (lambda: shop(exponent=float("nan")), "shop: exponent=nan must be a finite number"),
        (lambda: STORE.batches(4, world_size=0), "world_size=0 must be a whole number, at least 1"),
        (lambda: of_rows(epochs=-1), "epochs=-1 must be a whole number, at least 0"),
        (lambda: of_rows(start=2.5), "start=2.5 must be a whole number, 0 to 10"),
        (lambda: step_slices(-3, 2), "rows=-3 must be a whole number, at least 0"),
        (lambda: rank_slices(7, True), "batch_size=True must be a whole number"),
    ],
)
def test_sizes_are_whole_numbers(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_numbers_of_numpy_will_do() -> None:
    four = np.int64(4)
    assert list(of_rows(start=four)) == [(4, 8), (8, 10)]
    assert len(next(shop(rows=four, test_rows=four).batches(four)).labels) == 4
    assert uniform_ids(four, four).shape == (4,)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"rows_per_table": {"u": "x"}, "features": {"u": ["cat_0"]}},
            "feature 'u': rows='x' must be a whole number",
        ),
        ({"features": {}}, r"features=\{\} must map names to columns"),
        ({"features": {"u": "cat_0"}}, "feature 'u' is made of columns 'cat_0': give a list"),
    ],
)
def test_columns_and_tables_are_checked_when_files_are_named(
    tmp_path: Path, options: dict[str, Any], said: str
) -> None:
    path = STORE.write_criteo(tmp_path / "day.tsv")
    with pytest.raises(ValueError, match=said):
        CriteoDataset(path, **{"rows_per_table": 10, **options})


def test_numbers_of_rows_and_epochs_of_files_are_checked(tmp_path: Path) -> None:
    path = STORE.write_criteo(tmp_path / "day.tsv")
    assert len(read_criteo(path, 0)) == 0
    with pytest.raises(ValueError, match=r"read_criteo: rows=-1 .* at least 0"):
        read_criteo(path, -1)
    with pytest.raises(ValueError, match=r"epochs=-1 .* at least 0"):
        list(CriteoDataset(path, 10).batches(4, epochs=-1))
    assert torch.equal(
        next(CriteoDataset(path, 10).batches(4)).labels, STORE.labels("train")[:4].float()
    )
