"""Choice of a number format per table, with the least total error for a budget of bytes.

Every table has a *menu*: for each format its bytes and its error. One entry is chosen from each
menu such that the bytes fit the budget and the sum of errors is minimal, up to a relative tolerance
of 1e-6. This is the multiple-choice knapsack problem (Kellerer, Pferschy and Pisinger, 2004,
"Knapsack Problems", chapter 11), solved as an integer program by HiGHS.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tutorec._check import require_finite, require_int
from tutorec._kernels.packed_layout import RowAlignment, row_layout
from tutorec._kernels.packed_layout import row_alignment as alignment_for
from tutorec.quant.packing import pack_rows, unpack_rows
from tutorec.quant.table_formats import enumerate_chunks, packed_type
from tutorec.quant.whole_model import float_tables, named_formats, shown_names
from tutorec.types import DataType, data_type_to_dtype

FORMATS: tuple[torch.dtype, ...] = (torch.quint2x4, torch.quint4x2, torch.int8, torch.float16)

# Improvements by a smaller fraction of the error are not searched for.
_CLOSE = 1e-6
# The scaled maximum error in the program: the solver's absolute tolerances are 1e-6 and 1e-7.
_SCALE = 1e6


@dataclass(frozen=True)
class MenuEntry:
    """One entry of a table's menu.

    Attributes:
        dtype: The format.
        bytes: Bytes of all rows.
        error: The error of the format; see ``table_menu``.
    """

    dtype: torch.dtype
    bytes: int
    error: float


def table_menu(
    model: nn.Module,
    dtypes: Sequence[Any] = FORMATS,
    *,
    lookups: Mapping[str, float] | None = None,
    sample_rows: int = 65_536,
    row_alignment: RowAlignment = "fast",
) -> dict[str, list[MenuEntry]]:
    """Bytes and error of each table of a float model in each format.

    The error of a format is the mean squared distance of a row [D] from its quantized value, times
    the rows of the table that a sample looks up: the expected squared error of a sample, if errors
    of rows are independent.

    Args:
        model: A collection, or a model with collections, not quantized.
        dtypes: The formats.
        lookups: Rows that a sample looks up in a table, by its name; by default one per feature.
        sample_rows: Maximum number of rows, evenly spaced, from which errors are computed.
        row_alignment: As passed to ``tutorec.quantize``. With a small budget use ``"small"``: at 64
            columns an int4 row takes 36 bytes, with ``"fast"`` 64, almost as many as int8.

    Returns:
        For each table, by name (with the path of its collection if the name is not unique), an
        entry per format.

    Raises:
        KeyError: ``lookups`` names an unknown table.
        TypeError: A format has a wrong type.
        ValueError: There is nothing to quantize, a format is not supported, lookups are negative,
            or a value is not finite.

    Example:
        >>> from tutorec.modules.embedding_configs import EmbeddingBagConfig
        >>> from tutorec.modules.embedding_modules import EmbeddingBagCollection
        >>> ebc = EmbeddingBagCollection([EmbeddingBagConfig(10, 64, "item")])
        >>> [entry.bytes for entry in table_menu(ebc)["item"]]
        [320, 640, 680, 1280]
    """
    tables = float_tables(model)
    require_int("sample_rows", sample_rows, 1)
    if not dtypes:
        raise ValueError("dtypes is empty: give at least one format to choose from")

    lookup_counts = named_formats(tables, lookups or {})
    for name, count in lookup_counts.items():
        require_finite(f"lookups of table {name!r}", count, 0)

    menus = {}
    for name, table in zip(shown_names(tables), tables, strict=True):
        weight = _sample(table.weight, sample_rows)
        rows, columns = table.weight.shape
        entries = []
        for dtype in dtypes:
            data_type = packed_type(dtype, table.full_name)
            alignment = alignment_for(columns, data_type, row_alignment, table.weight.device.type)
            size = rows * row_layout(columns, data_type, alignment).row_bytes
            squares = _squared_error(weight, data_type, table.full_name)
            count = lookup_counts.get(table.full_name, table.features)
            entries.append(MenuEntry(data_type_to_dtype(data_type), size, count * squares))
        menus[name] = entries

    return menus


def choose_dtypes(
    model: nn.Module,
    budget_bytes: int,
    *,
    dtypes: Sequence[Any] = FORMATS,
    lookups: Mapping[str, float] | None = None,
    sample_rows: int = 65_536,
    row_alignment: RowAlignment = "fast",
) -> dict[str, torch.dtype]:
    """Choose the number format of each table with the least total error within a budget of bytes.

    Args:
        model: A collection, or a model with collections, not quantized.
        budget_bytes: Maximum bytes of the packed rows of all tables.
        dtypes: The formats to choose from.
        lookups: As in ``table_menu``.
        sample_rows: As in ``table_menu``.
        row_alignment: As in ``table_menu``.

    Returns:
        A format per table, for ``tutorec.quantize(model, per_table=...)``.

    Raises:
        KeyError: ``lookups`` names an unknown table.
        TypeError: A format has a wrong type.
        ValueError: Even the smallest formats exceed the budget, or as in ``table_menu``.

    Example:
        >>> from tutorec.modules.embedding_configs import EmbeddingBagConfig
        >>> from tutorec.modules.embedding_modules import EmbeddingBagCollection
        >>> tables = [
        ...     EmbeddingBagConfig(100, 64, "small"),
        ...     EmbeddingBagConfig(10_000, 64, "large"),
        ... ]
        >>> choose_dtypes(
        ...     EmbeddingBagCollection(tables), 600_000, row_alignment="small"
        ... )  # 36 and 128 bytes a row
        {'small': torch.float16, 'large': torch.quint4x2}
    """
    require_finite("budget_bytes", budget_bytes)
    menus = table_menu(
        model, dtypes, lookups=lookups, sample_rows=sample_rows, row_alignment=row_alignment
    )
    return {name: entry.dtype for name, entry in cheapest_within(menus, budget_bytes).items()}


def cheapest_within(
    menus: Mapping[str, Sequence[MenuEntry]], budget_bytes: int
) -> dict[str, MenuEntry]:
    """One entry of each menu with the least sum of errors within the budget.

    Args:
        menus: The entries of each table.
        budget_bytes: Maximum bytes of the chosen entries.

    Raises:
        ValueError: No choice fits.

    Example:
        >>> menus = {
        ...     "a": [MenuEntry(torch.int8, 1, 4.0), MenuEntry(torch.float16, 2, 1.0)],
        ...     "b": [MenuEntry(torch.int8, 1, 2.0)],
        ... }
        >>> [entry.bytes for entry in cheapest_within(menus, 3).values()]
        [2, 1]
    """
    smallest = {
        name: min(menu, key=lambda entry: (entry.bytes, entry.error))
        for name, menu in menus.items()
    }
    sizes = {name: entry.bytes for name, entry in smallest.items()}
    least = sum(sizes.values())
    limit = budget_bytes
    if least > budget_bytes:
        raise ValueError(
            f"the tables take at least {least:,} bytes, and the budget is {budget_bytes:,}: {sizes}"
        )

    # A variable that is 1 up to the solver's tolerance may hide some bytes of a large table.
    while menus and limit > least:
        chosen = dict(zip(menus, _choose(list(menus.values()), limit), strict=True))
        excess = sum(entry.bytes for entry in chosen.values()) - budget_bytes
        if excess <= 0:
            return chosen
        limit -= excess

    return smallest


def _choose(menus: Sequence[Sequence[MenuEntry]], limit: int) -> list[MenuEntry]:
    """One entry of each menu: an integer program with a binary variable per entry."""
    import numpy as np
    from scipy.optimize import Bounds, LinearConstraint, milp

    entries = [entry for menu in menus for entry in menu]
    errors = np.array([entry.error for entry in entries])
    sizes = np.array([[float(entry.bytes) for entry in entries]])
    table = np.repeat(np.arange(len(menus)), [len(menu) for menu in menus])
    is_entry = table == np.arange(len(menus))[:, None]  # [tables, entries]

    result = milp(
        errors * (_SCALE / max(errors.max(), 1e-300)),
        integrality=np.ones(len(entries)),
        bounds=Bounds(0, 1),
        constraints=[
            LinearConstraint(is_entry.astype(float), 1, 1),
            LinearConstraint(sizes, -np.inf, limit),
        ],
        options={"mip_rel_gap": _CLOSE},
    )

    chosen = np.where(is_entry, result.x, -1).argmax(axis=1)
    return [entries[int(index)] for index in chosen]


def _sample(weight: Tensor, rows: int) -> Tensor:
    """At most ``rows`` rows of a table, evenly spaced."""
    weight = weight.detach()
    if weight.is_meta:
        raise ValueError("a table on the meta device has no values to compare: load the model")
    if weight.shape[0] <= rows:
        return weight

    indices = torch.arange(rows, device=weight.device) * weight.shape[0] // rows
    return weight.index_select(0, indices)


def _squared_error(weight: Tensor, data_type: DataType, name: str) -> float:
    """Mean over rows of the squared distance of a row from its quantized value."""
    total = 0.0
    for _, rows in enumerate_chunks(weight):
        numbers = rows.float()
        packed = pack_rows(numbers, data_type, name=name)
        read = unpack_rows(packed, numbers.shape[1], data_type)
        total += float((numbers - read).square_().sum(dtype=torch.float64))

    return total / max(weight.shape[0], 1)
