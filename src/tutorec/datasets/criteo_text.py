"""Criteo's text format: label TAB 13 integers TAB 26 hexadecimal ids, any of the 39 may be empty.

One line is one impression of an advertisement. The files of the Kaggle challenge and of the 1 TB click logs (24 files,
day_0 to day_23) share this form. Names as in ``torchrec.datasets.criteo``.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

INT_FEATURE_COUNT = 13
CAT_FEATURE_COUNT = 26
DAYS = 24
DEFAULT_LABEL_NAME = "label"
DEFAULT_INT_NAMES: list[str] = [f"int_{i}" for i in range(INT_FEATURE_COUNT)]
DEFAULT_CAT_NAMES: list[str] = [f"cat_{i}" for i in range(CAT_FEATURE_COUNT)]
FIELDS = 1 + INT_FEATURE_COUNT + CAT_FEATURE_COUNT


@dataclass(frozen=True)
class CriteoColumns:
    """B rows of a Criteo file.

    Attributes:
        label: [B].
        ints: [B, 13]; where ``ints_known`` is False the file had nothing, and the value is 0.
        ints_known: [B, 13].
        cats: [B, 26], the 32-bit ids; where ``cats_known`` is False the file had nothing, and the value is 0.
        cats_known: [B, 26].
    """

    label: NDArray[np.int64]
    ints: NDArray[np.int64]
    ints_known: NDArray[np.bool_]
    cats: NDArray[np.int64]
    cats_known: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.label)


def write_rows(path: Path, blocks: Iterable[CriteoColumns]) -> Path:
    """Write blocks of rows as one Criteo TSV; ``.gz`` in the name compresses.

    Args:
        path: the file; it is overwritten.
        blocks: the rows.

    Returns:
        ``path``.
    """
    # mtime=0: equal rows make equal bytes
    with open(path, "wb") as raw:
        file = (
            gzip.GzipFile(filename="", fileobj=raw, mode="wb", compresslevel=3, mtime=0)
            if path.suffix == ".gz"
            else raw
        )
        for block in blocks:
            file.write(format_rows(block))
        if file is not raw:
            file.close()
    return path


def format_rows(rows: CriteoColumns) -> bytes:
    """The text of some rows, one line each."""
    ints = np.where(rows.ints_known, rows.ints.astype(np.str_), "")
    cats = np.where(rows.cats_known, _hex8(rows.cats), "")
    columns = [rows.label.astype(np.str_).tolist(), *ints.T.tolist(), *cats.T.tolist()]
    return "".join("\t".join(line) + "\n" for line in zip(*columns, strict=True)).encode("ascii")


def _hex8(ids: NDArray[np.int64]) -> NDArray[np.str_]:
    """Eight hexadecimal digits for every id."""
    shifts = np.arange(28, -4, -4)
    digits = np.frombuffer(b"0123456789abcdef", dtype=np.uint8)[(ids[..., None] >> shifts) & 15]
    return np.ascontiguousarray(digits.astype(np.uint32)).view("<U8")[..., 0]
