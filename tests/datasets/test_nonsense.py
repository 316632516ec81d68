"""What data sets are told is checked where it is told: sizes, positions, columns."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tutorec.datasets.criteo import CriteoDataset, read_criteo
from tutorec.datasets.ids import power_law_ids, uniform_ids
from tutorec.datasets.random import shop
from tutorec.datasets.utils import RowBatches, rank_slices, step_slices

STORE = shop(rows=40, test_rows=20)


def of_rows(**options: Any) -> RowBatches:
    return RowBatches(lambda start, stop: (start, stop), 10, 4, **options)  # pyright: ignore


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: shop(rows="x"), "shop: rows='x' must be a whole number"),  # type: ignore[arg-type]
        (lambda: shop(users=1.5), r"shop: users=1\.5 must be a whole number"),  # type: ignore[arg-type]
        (lambda: shop(max_clicked=2.5), r"shop: max_clicked=2\.5 must be a whole number"),  # type: ignore[arg-type]
        (lambda: shop(seed=-1), "shop: seed=-1 must be a whole number, at least 0"),
        (lambda: shop(exponent=float("nan")), "shop: exponent=nan must be a finite number"),
        (lambda: STORE.batches("x"), "batch_size='x' must be a whole number"),  # type: ignore[arg-type]
        (lambda: STORE.batches(4, world_size=0), "world_size=0 must be a whole number, at least 1"),
        (lambda: STORE.rows("x", 3), "shop: start='x' must be a whole number"),  # type: ignore[arg-type]
        (lambda: of_rows(epochs=1.5), r"epochs=1\.5 must be a whole number, at least 0"),
        (lambda: of_rows(epochs=-1), "epochs=-1 must be a whole number, at least 0"),
        (lambda: of_rows(rank="x"), "rank='x' must be a whole number"),
        (lambda: step_slices(-3, 2), "rows=-3 must be a whole number, at least 0"),
        (lambda: step_slices(7, 2.5), r"batch_size=2\.5 must be a whole number"),  # type: ignore[arg-type]
        (lambda: rank_slices(7, True), "batch_size=True must be a whole number"),
        (lambda: power_law_ids(3, 4, "x"), "exponent='x' must be a finite number"),  # type: ignore[arg-type]
    ],
)
def test_sizes_are_whole_numbers(call: Callable[[], Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        call()


@pytest.mark.parametrize("start", ["x", None, 2.5, True, {"epoch": 1, "row": 3}])
def test_a_position_is_what_batches_called_so(start: Any) -> None:
    with pytest.raises(ValueError, match=r"start=.* is no position: give the \.position of the batches of the run"):
        of_rows(start=start)


def test_numbers_of_numpy_will_do() -> None:
    four = np.int64(4)
    assert list(of_rows(start=four)) == [(4, 8), (8, 10)]
    assert len(next(shop(rows=four, test_rows=four).batches(four)).labels) == 4
    assert uniform_ids(four, four).shape == (4,)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: uniform_ids(True, 3), "count=True and rows=3 must be whole numbers"),
        (lambda: uniform_ids(1, 3, "x"), "generator is a str: pass a torch.Generator"),  # type: ignore[arg-type]
        (lambda: CriteoDataset(None, 10), "paths is a NoneType: give the path of a Criteo file"),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_number_no_generator_or_no_path_is_refused(call: Callable[[], Any], said: str) -> None:
    with pytest.raises(TypeError, match=said):
        call()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"rows_per_table": None}, "rows_per_table=None must be one number of rows, or a dict"),
        ({"rows_per_table": "x"}, "rows_per_table='x' must be one number of rows"),
        ({"rows_per_table": {"u": "x"}, "features": {"u": ["cat_0"]}}, "feature 'u': rows='x' must be a whole number"),
        ({"features": {}}, r"features=\{\} must map names to columns"),
        ({"features": ["cat_0"]}, r"features=\['cat_0'\] must map names to columns"),
        ({"features": {"u": "cat_0"}}, r"feature 'u' is made of columns 'cat_0': give a list, \['cat_0'\]"),
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
    with pytest.raises(ValueError, match="read_criteo: rows=-1 must be a whole number, at least 0"):
        read_criteo(path, -1)
    with pytest.raises(ValueError, match="epochs=-1 must be a whole number, at least 0"):
        list(CriteoDataset(path, 10).batches(4, epochs=-1))
    assert torch.equal(next(CriteoDataset(path, 10).batches(4)).labels, STORE.labels("train")[:4].float())
