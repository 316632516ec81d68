"""What a table-batched operator looks up: its tables, and which feature reads which."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from tutorec._kernels.pooling import PoolingKind

__all__ = ["FirstRows", "GroupSpec", "TableSpec", "memory_of_tables"]

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Rows [R, D] of each table; or what writes the rows of table number i in place, so that they
# exist once.
FirstRows = Sequence[Tensor] | Callable[[int, Tensor], None]


@dataclass(frozen=True)
class TableSpec:
    """One table: its name, R rows and D columns.

    Raises:
        ValueError: The kernels do not train rows of this dtype.

    Example:
        >>> from tutorec._kernels.table_specs import TableSpec
        >>> TableSpec("item", rows=100, columns=8).columns
        8
    """

    name: str
    rows: int
    columns: int
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        if self.dtype not in _DTYPES:
            raise ValueError(
                f"table {self.name!r} has dtype {self.dtype}: trained tables are one of {_DTYPES}"
            )


@dataclass(frozen=True)
class GroupSpec:
    """Tables that are looked up in one call, and which feature reads which table.

    Args:
        tables: The tables of the group, all of one dtype.
        feature_tables: For each input feature, in input order, the index of its table; a table may
            serve several.
        pooling: ``"sum"``, ``"mean"`` or ``"sqrtn"`` (see ``pooling.py``) of a bag's rows, or
            ``"none"``: one row for each id.
        weighted: Whether each id carries a weight.

    Example:
        >>> from tutorec._kernels.table_specs import GroupSpec, TableSpec
        >>> group = GroupSpec(
        ...     (TableSpec("user", 10, 4), TableSpec("item", 20, 8)), feature_tables=(0, 1, 1)
        ... )
        >>> group.feature_columns
        (4, 8, 8)
    """

    tables: tuple[TableSpec, ...]
    feature_tables: tuple[int, ...]
    pooling: PoolingKind = "sum"
    weighted: bool = False

    @property
    def feature_columns(self) -> tuple[int, ...]:
        """Width D of each input feature's table, in input order."""
        return tuple(self.tables[table].columns for table in self.feature_tables)

    @property
    def dtype(self) -> torch.dtype:
        """Data type of the rows."""
        return self.tables[0].dtype

    @property
    def names(self) -> list[str]:
        """Names of the tables."""
        return [table.name for table in self.tables]


@contextmanager
def memory_of_tables(tables: Sequence[tuple[str, int, int, int]], remedy: str) -> Iterator[None]:
    """Where there is not enough memory for tables, have the error name them.

    Args:
        tables: Of each its name, R, D, and the bytes of a row as stored, optimizer state included.
        remedy: What to do about it.

    Raises:
        RuntimeError: There is not enough, as torch raises it: on a GPU ``torch.OutOfMemoryError``.
        MemoryError: The system says so itself, for the file of a table.

    Example:
        >>> try:
        ...     with memory_of_tables([("item", 10**12, 64, 256)], "shard it"):
        ...         torch.empty(10**12, 64)
        ... except RuntimeError as error:
        ...     print(str(error).partition(": ")[2])
        1,000,000,000,000 rows of 64 columns need 256,000,000,000,000 bytes; shard it
    """
    try:
        yield
    except (RuntimeError, MemoryError, OSError) as error:
        if not _lacks_memory(error):
            raise

        name, rows, columns, row_bytes = max(tables, key=lambda table: table[1] * table[3])
        total = sum(rows * row_bytes for _, rows, _, row_bytes in tables)
        others = f" ({total:,} with the tables of its group)" if len(tables) > 1 else ""
        error_type = MemoryError if isinstance(error, OSError) else type(error)
        raise error_type(
            f"not enough memory for table {name!r}: {rows:,} rows of {columns} columns need "
            f"{rows * row_bytes:,} bytes{others}; {remedy}"
        ) from error


def _lacks_memory(error: Exception) -> bool:
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    known = isinstance(error, (MemoryError, torch.OutOfMemoryError))
    return known or "can't allocate memory" in str(error) or "not enough memory" in str(error)
