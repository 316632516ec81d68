"""The shop's clicks as Criteo's files of numpy."""

from __future__ import annotations

from pathlib import Path

from tutorec.datasets.criteo import BinaryCriteoUtils
from tutorec.datasets.random import shop

# options of a small run
CRITEO = "--batch-size 100 --hash-rows 300 --columns 8 --no-progress".split()


def write_days(folder: Path, days: dict[str, int]) -> Path:
    """Write so many rows of each day; the folder."""
    store, start = shop(rows=sum(days.values())), 0
    for day, rows in days.items():
        text = store.write_criteo(folder / f"{day}.txt", rows=rows, start=start)
        parts = [str(folder / f"{day}_{part}.npy") for part in ("dense", "sparse", "labels")]
        BinaryCriteoUtils.tsv_to_npys(str(text), *parts)
        start += rows
    return folder
