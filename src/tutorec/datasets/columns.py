"""Columns of a table that is in memory to a batch: pandas, polars, Arrow, Hugging Face, NumPy.

None of these libraries is needed or imported: a column is recognised by the methods that it has.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from tutorec._check import warn_caller
from tutorec.sparse.hashing import hash_strings, mixing_hash
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor

_LARGEST_ID = 2**63 - 1
_LARGEST_IN_FLOAT = 2**53  # above it, float64 does not have every whole number


class Columns(Protocol):
    """A data frame, an Arrow table, a batch of a Hugging Face dataset, or a dict of lists."""

    def __getitem__(self, name: str, /) -> Any:
        """The column of this name."""
        ...


def dense_ids_labels(
    columns: Columns,
    sparse: Sequence[str],
    dense: Sequence[str],
    label: str | None,
    hash_to: Mapping[str, int] | None,
) -> tuple[Tensor, KeyedJaggedTensor, Tensor]:
    """The three parts of a batch, for `tutorec.datasets.utils.Batch.from_columns`.

    Args:
        columns: as there.
        sparse: as there.
        dense: as there.
        label: as there.
        hash_to: as there.

    Raises:
        ValueError: the columns make no batch.
    """
    if isinstance(sparse, str) or not sparse:
        raise ValueError(f"sparse={sparse!r}: give a list of at least one column")

    hashed = dict(hash_to or {})
    unknown = hashed.keys() - set(sparse)
    if unknown:
        raise ValueError(f"hash_to names {sorted(unknown)}, and the features are {list(sparse)}")

    values = []
    lengths = []
    for name in sparse:
        ids, bag_lengths = _bags(_column(columns, name), name)
        values.append(_ids(ids, name, hashed.get(name)))
        lengths.append(bag_lengths)

    numbers = [_numbers(_column(columns, name), name) for name in dense]
    labels = [_numbers(_column(columns, label), label)] if label is not None else []

    # Every column must have one entry for each row of the batch.
    names = [*sparse, *dense, *([label] if label is not None else [])]
    rows = dict(zip(names, map(len, [*lengths, *numbers, *labels]), strict=True))
    if len(set(rows.values())) > 1:
        raise ValueError(f"columns differ in their numbers of rows: {rows}")

    size = len(lengths[0])
    kjt = KeyedJaggedTensor(
        list(sparse), torch.cat(values), lengths=torch.from_numpy(np.concatenate(lengths))
    )
    return (
        torch.from_numpy(np.stack(numbers, axis=1)) if numbers else torch.zeros(size, 0),
        kjt,
        torch.from_numpy(labels[0]) if labels else torch.zeros(size),
    )


def _column(columns: Columns, name: str) -> Any:
    try:
        return columns[name]
    except Exception as error:  # each library has its own kind
        names = getattr(columns, "column_names", None)
        if names is None:
            names = getattr(columns, "columns", None)
        if names is None:
            names = getattr(columns, "keys", list)()
        raise ValueError(f"no column {name!r}; there are {[*names]}") from error


def _bags(column: Any, name: str) -> tuple[NDArray[Any], NDArray[np.int32]]:
    """Values of all rows, concatenated, and how many each row has."""
    if hasattr(column, "combine_chunks"):  # Arrow's chunked array
        column = column.combine_chunks()
    if hasattr(column, "value_lengths"):  # Arrow's lists, concatenated
        lengths = column.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
        return _as_numpy(column.flatten()), lengths.astype(np.int32)

    array = _as_numpy(column)
    if array.ndim == 2:
        return array.reshape(-1), np.full(len(array), array.shape[1], dtype=np.int32)
    if array.dtype != object:
        return _without_missing(array)

    bags = [_bag(value) for value in array.tolist()]
    lengths = np.fromiter(map(len, bags), dtype=np.int32, count=len(bags))
    return _array(list(chain.from_iterable(bags))), lengths


def _as_numpy(column: Any) -> NDArray[Any]:
    """A column as an array [B], of numbers or objects, or [B, k]."""
    if isinstance(column, Tensor):
        return column.detach().cpu().numpy()
    if isinstance(column, np.ndarray):
        return column

    if hasattr(column, "combine_chunks"):  # Arrow's chunked array
        column = column.combine_chunks()
    if _has_missing(column):  # as an array, whole numbers would be floats
        to_list = column.to_pylist if hasattr(column, "to_pylist") else column.to_list
        return _array(to_list())

    if hasattr(column, "to_numpy"):
        try:
            return np.asarray(column.to_numpy(zero_copy_only=False))  # Arrow
        except TypeError:
            return np.asarray(column.to_numpy())  # pandas, polars

    return _array(list(column))


def _has_missing(column: Any) -> bool:
    """Whether a column of Arrow, polars or pandas says that values are missing."""
    count = getattr(column, "null_count", 0)  # a property of Arrow's, a method of polars'
    return bool(count() if callable(count) else count) or bool(getattr(column, "hasnans", False))


def _array(values: list[Any]) -> NDArray[Any]:
    """A list as an array of numbers if it holds numbers alone, else of objects."""
    if values and all(isinstance(value, int | float | np.number) for value in values):
        return np.asarray(values)
    array = np.empty(len(values), dtype=object)
    array[:] = values
    return array


def _without_missing(array: NDArray[Any]) -> tuple[NDArray[Any], NDArray[np.int32]]:
    """One value of each row, none where it is NaN."""
    if array.dtype.kind != "f":
        return array, np.ones(len(array), dtype=np.int32)
    present = ~np.isnan(array)
    return array[present], present.astype(np.int32)


def _bag(value: Any) -> Any:
    """The values of one row: none, one or several."""
    missing = isinstance(value, float) and math.isnan(value)
    if value is None or missing or type(value).__name__ == "NAType":  # pandas' NA
        return ()
    if isinstance(value, list | tuple | np.ndarray):
        return value
    return (value,)


def _ids(values: NDArray[Any], name: str, rows: int | None) -> Tensor:
    """Ids [N] int64, hashed to rows if a number of rows is given."""
    if values.dtype.kind in "OUT":
        strings = values.tolist()
        not_strings = [value for value in strings if not isinstance(value, str)]
        if not_strings:
            raise ValueError(
                f"column {name!r} holds {not_strings[0]!r}, and ids are strings or numbers"
            )
        if strings and rows is None:
            raise ValueError(
                f"column {name!r} holds strings, such as {strings[0]!r}: hash them, "
                f"hash_to={{{name!r}: rows of the table}}, or map them to numbers, IdMap"
            )
        return mixing_hash(hash_strings(strings), rows or 1)
    if values.dtype.kind == "f":
        exact = (np.abs(values) <= _LARGEST_IN_FLOAT) & (np.trunc(values) == values)
        bad = np.flatnonzero(~exact)
        if len(bad):
            raise ValueError(
                f"column {name!r} holds {values[bad[0]]} as a float, and ids are whole numbers; "
                "beyond 2**53 a float has lost digits: keep ids as integers, with pandas as Int64 "
                "where some are missing"
            )
        values = values.astype(np.int64)

    if values.dtype.kind not in "biu":
        raise ValueError(f"column {name!r} holds {values.dtype}, and ids are strings or numbers")

    if values.dtype == np.uint64:
        if rows is None and len(values) and values.max() > _LARGEST_ID:
            raise ValueError(
                f"column {name!r} holds the id {values.max()}, and ids go up to 2**63 - 1: hash "
                f"them, hash_to={{{name!r}: rows of the table}}"
            )
        values = values.view(np.int64)

    ids = torch.from_numpy(np.array(values, dtype=np.int64))
    return ids if rows is None else mixing_hash(ids, rows)


def _numbers(column: Any, name: str) -> NDArray[np.float32]:
    """A column of numbers [B] as float32."""
    array = _as_numpy(column)
    if array.dtype.kind not in "biufO":
        raise ValueError(f"column {name!r} holds {array.dtype}, not numbers")

    try:
        numbers = array.astype(np.float64) if array.dtype == object else array
    except (TypeError, ValueError) as error:
        raise ValueError(f"column {name!r} holds {array.dtype}, not numbers: {error}") from error
    numbers, remark = as_float32(numbers, f"column {name!r}")
    if remark is not None:
        warn_caller(remark)
    if numbers.ndim != 1:
        raise ValueError(
            f"column {name!r} has shape {list(numbers.shape)}, not a number for each row"
        )

    missing = np.flatnonzero(np.isnan(numbers))
    if len(missing):
        raise ValueError(
            f"column {name!r}: {len(missing)} of {len(numbers)} numbers are missing, the first in "
            f"row {missing[0]}: fill them"
        )
    return numbers


def as_float32(numbers: NDArray[Any], where: str) -> tuple[NDArray[np.float32], str | None]:
    """Numbers [B] as float32, and what is to be said of a whole number that it rounds.

    Args:
        numbers: of any type.
        where: begins what is said.

    Raises:
        ValueError: a number is too large for float32.
    """
    with np.errstate(over="ignore"):
        rounded = numbers.astype(np.float32)
    if numbers.dtype == np.float64:
        too_large = np.isinf(rounded) & np.isfinite(numbers)
        if too_large.any():
            row = int(np.flatnonzero(too_large)[0])
            raise ValueError(
                f"{where}: row {row} holds {numbers.reshape(-1)[row]}, and float32 holds at most "
                "3.4e38: write it scaled, or as its logarithm"
            )
    # A whole number beyond 2**24 may be rounded: report the first one that is.
    elif numbers.dtype.kind in "iu" and numbers.itemsize >= 4:
        with np.errstate(invalid="ignore"):  # what is rounded up may be too large for the type
            changed = rounded.astype(numbers.dtype) != numbers
        if changed.any():
            row = int(np.flatnonzero(changed)[0])
            return rounded, (
                f"{where}: row {row} holds {numbers.reshape(-1)[row]}, which float32 rounds to "
                f"{int(rounded.reshape(-1)[row])}; float32 holds every whole number only up to "
                "2**24 = 16,777,216: if this matters, subtract or divide first"
            )

    return rounded, None


class IdMap(nn.Module):
    """Row of each value of a small vocabulary; 0 for a value that it does not have.

    It is part of a model, and its buffer is saved and loaded with the model's tables. Values are
    kept as hashes of 64 bits, so a string that is not in the vocabulary takes the row of another
    with a chance of V / 2**64.

    Args:
        values: V different strings or whole numbers; the rows 1 to V are theirs. A number alone is
            V, for a map that is then loaded.

    Raises:
        ValueError: a value occurs twice.

    Example:
        >>> colours = IdMap(["red", "green", "blue"])
        >>> colours(["blue", "red", "mauve"])
        tensor([3, 1, 0])
        >>> colours.rows
        4
    """

    keys: Tensor
    order: Tensor

    def __init__(self, values: Sequence[str] | Sequence[int] | int) -> None:
        super().__init__()
        hashes = torch.arange(values) if isinstance(values, int) else _hashes(values)
        sorted_keys, order = hashes.sort()
        repeated = (sorted_keys[1:] == sorted_keys[:-1]).nonzero()
        if len(repeated) and not isinstance(values, int):
            raise ValueError(f"IdMap: {values[int(order[int(repeated[0])])]!r} occurs twice")

        self.register_buffer("keys", sorted_keys)
        self.register_buffer("order", order + 1)

    @property
    def rows(self) -> int:
        """Rows of a table for this map: V + 1."""
        return len(self.keys) + 1

    def forward(self, values: Any) -> Tensor:
        """Row of each value of a column, [N] int64.

        Args:
            values: a column of strings or whole numbers, as `Batch.from_columns` takes them.
        """
        hashes = _hashes(values).to(self.keys.device)
        if not len(self.keys):
            return torch.zeros_like(hashes)
        position = torch.searchsorted(self.keys, hashes).clamp(max=len(self.keys) - 1)
        return torch.where(self.keys[position] == hashes, self.order[position], 0)


def _hashes(values: Any) -> Tensor:
    """A 64-bit number of each value."""
    array = _as_numpy(values)
    if array.dtype.kind in "OUT":
        return hash_strings(array.tolist())
    return _ids(array.view(np.int64) if array.dtype == np.uint64 else array, "values", None)
