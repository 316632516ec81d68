"""A number format for each table, so that all tables together fit a number of bytes and lose as little as can be.

Every table has a *menu*: for each format the bytes that it takes and the error that it makes. Exactly one entry is to
be chosen from each menu; the sum of the bytes is at most the budget, and the sum of the errors is the least that there
is, up to a millionth of itself. It is the multiple-choice knapsack problem:

1. *Entries that nobody chooses* go: those for which another one takes no more bytes and makes no more error.
2. *A lower bound* comes from the continuous form of the problem, in which a table may be packed partly in one format
   and partly in the next. Only the corners of a menu's convex hull count there, and steps from corner to corner are
   bought in the order of error saved per byte until the budget is spent. The steps that fit whole give a choice, too.
3. *Table by table*, all choices for the tables so far are kept as (bytes, error), less those that another one beats in
   both, and those whose error, with the lower bound of the tables to come within the bytes that are left, is no better
   than the best choice known. Each one, with the choice of step 2 for the tables to come, may be a better one.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from tutorec._kernels.packed_layout import RowAlignment, row_layout
from tutorec._kernels.packed_layout import row_alignment as alignment_for
from tutorec.quant.packing import pack_rows, unpack_rows
from tutorec.quant.table_formats import enumerate_chunks, packed_type
from tutorec.quant.whole_model import FloatTable, float_tables, named_formats
from tutorec.types import data_type_to_dtype

FORMATS: tuple[torch.dtype, ...] = (torch.quint2x4, torch.quint4x2, torch.int8, torch.float16)

# A choice that is better by less is not looked for: where many are as good, that would take for ever.
_CLOSE = 1e-6
# Sums of floats in another order differ by so much, as a part of their largest.
_ROUNDING = 1e-13


@dataclass(frozen=True)
class Entry:
    """One line of a table's menu.

    Attributes:
        dtype: The format.
        bytes: Of all rows.
        error: What choosing it costs; see ``table_menu``.
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
) -> dict[str, list[Entry]]:
    """What each table of a float model would take and lose in each format.

    The error of a format is the mean squared distance of a row [D] from the row that is read back, times the rows of
    the table that a sample looks up: how far what a sample gets is off, squared, if errors of rows are independent.

    Args:
        model: A collection, or a model with collections in it, not quantized.
        dtypes: The formats.
        lookups: Rows that a sample looks up in a table, by its name; by default one for each of its features.
        sample_rows: Errors are those of so many rows, evenly spaced, where a table has more.
        row_alignment: As ``tutorec.quantize`` will be given it. Where bytes are short, ``"small"``: at 64 columns an
            int4 row takes 36 bytes, with ``"fast"`` 64, hardly less than one of int8.

    Returns:
        For each table, by its name (with the path of its collection where it alone is not unique), an entry for each
        format.

    Raises:
        KeyError: ``lookups`` names a table that there is not.
        TypeError: ``model`` is no module, or a format is none.
        ValueError: There is nothing to quantize, a format cannot be had, lookups are negative, or a number is not
            finite.

    Example:
        >>> from tutorec.modules.embedding_configs import EmbeddingBagConfig
        >>> from tutorec.modules.embedding_modules import EmbeddingBagCollection
        >>> ebc = EmbeddingBagCollection([EmbeddingBagConfig(10, 64, "item")])
        >>> [entry.bytes for entry in table_menu(ebc)["item"]]
        [320, 640, 680, 1280]
    """
    tables = float_tables(model)
    if isinstance(sample_rows, bool) or not isinstance(sample_rows, int):
        raise TypeError(f"sample_rows={sample_rows!r} is a {type(sample_rows).__name__} and no number of rows")
    if sample_rows < 1 or not dtypes:
        raise ValueError(f"sample_rows={sample_rows} and {len(dtypes)} dtypes: there must be at least one of each")
    asked = named_formats(tables, lookups or {})
    wrong = {
        name: count for name, count in asked.items() if not isinstance(count, Real) or not 0 <= float(count) < math.inf
    }
    if wrong:
        raise ValueError(
            f"lookups are rows of a table that a sample looks up, finite numbers that are not negative: got {wrong}"
        )
    names = [table.name for table in tables]
    menus = {}
    for table in tables:
        weight = _sample(table.weight, sample_rows)
        rows, columns = table.weight.shape
        entries = []
        for dtype in dtypes:
            kind = packed_type(dtype, table.full_name)
            alignment = alignment_for(columns, kind, row_alignment, table.weight.device.type)
            size = rows * row_layout(columns, kind, alignment).row_bytes
            loss = asked.get(table.full_name, table.features) * _squared_error(weight, table, dtype)
            entries.append(Entry(data_type_to_dtype(kind), size, loss))
        menus[table.name if names.count(table.name) == 1 else table.full_name] = entries
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
    """The number format of each table with the least error in all that fits a number of bytes.

    Args:
        model: A collection, or a model with collections in it, not quantized.
        budget_bytes: For the packed rows of all tables.
        dtypes: The formats to choose from.
        lookups: As in ``table_menu``.
        sample_rows: As in ``table_menu``.
        row_alignment: As in ``table_menu``.

    Returns:
        A format for each table, as ``tutorec.quantize(model, per_table=...)`` takes it.

    Raises:
        KeyError: ``lookups`` names a table that there is not.
        TypeError: ``model`` is no module, a format is none, or the budget no number.
        ValueError: Even the smallest formats do not fit, or as in ``table_menu``.

    Example:
        >>> from tutorec.modules.embedding_configs import EmbeddingBagConfig
        >>> from tutorec.modules.embedding_modules import EmbeddingBagCollection
        >>> tables = [EmbeddingBagConfig(100, 64, "small"), EmbeddingBagConfig(10_000, 64, "large")]
        >>> choose_dtypes(EmbeddingBagCollection(tables), 600_000, row_alignment="small")  # 36 and 128 bytes a row
        {'small': torch.float16, 'large': torch.quint4x2}
    """
    if isinstance(budget_bytes, bool) or not isinstance(budget_bytes, Real) or budget_bytes != budget_bytes:
        raise TypeError(f"budget_bytes={budget_bytes!r} is a {type(budget_bytes).__name__} and no number of bytes")
    menus = table_menu(model, dtypes, lookups=lookups, sample_rows=sample_rows, row_alignment=row_alignment)
    return {name: entry.dtype for name, entry in cheapest_within(menus, budget_bytes).items()}


def cheapest_within(menus: Mapping[str, Sequence[Entry]], budget_bytes: int) -> dict[str, Entry]:
    """One entry of each menu with the least sum of errors among those whose bytes fit the budget.

    Args:
        menus: The entries of each table.
        budget_bytes: The most that the chosen entries may take together.

    Raises:
        ValueError: Nothing fits.

    Example:
        >>> menus = {"a": [Entry(torch.int8, 1, 4.0), Entry(torch.float16, 2, 1.0)], "b": [Entry(torch.int8, 1, 2.0)]}
        >>> [entry.bytes for entry in cheapest_within(menus, 3).values()]
        [2, 1]
    """
    useful = {name: _useful(entries) for name, entries in menus.items()}
    least = sum(entries[0].bytes for entries in useful.values())
    if least > budget_bytes:
        sizes = {name: entries[0].bytes for name, entries in useful.items()}
        raise ValueError(
            f"the tables take at least {least:,} bytes, and the budget is {budget_bytes:,}: {sizes}; allow {least:,} "
            "bytes, offer smaller formats, or make tables smaller"
        )
    # Tables with the most at stake come first, so that the bound tells good choices from bad ones early.
    order = sorted(useful, key=lambda name: useful[name][-1].error - useful[name][0].error)
    rests = [_Rest({name: useful[name] for name in order[position:]}) for position in range(len(order) + 1)]
    frontier = [_Choice(0, 0.0, None, None)]
    best, decided, least_error = frontier[0], 0, rests[0].reached(budget_bytes)
    for position, name in enumerate(order, start=1):
        rest = rests[position]
        grown = _undominated([choice.with_entry(entry) for choice in frontier for entry in useful[name]])
        grown = [choice for choice in grown if rest.fits(budget_bytes - choice.bytes)]
        for choice in grown:
            error = choice.error + rest.reached(budget_bytes - choice.bytes)
            if error < least_error:
                best, decided, least_error = choice, position, error
        worth = least_error * (1 - _CLOSE)
        frontier = [choice for choice in grown if choice.error + rest.bound(budget_bytes - choice.bytes) < worth]
    found = rests[decided].choice(budget_bytes - best.bytes)
    found.update(zip(order, best.entries(), strict=False))
    return {name: found[name] for name in menus}


@dataclass(frozen=True)
class _Choice:
    """An entry for each of the first tables: its sums, the choice that it was made of, and the entry added to that."""

    bytes: int
    error: float
    before: _Choice | None
    last: Entry | None

    def with_entry(self, entry: Entry) -> _Choice:
        return _Choice(self.bytes + entry.bytes, self.error + entry.error, self, entry)

    def entries(self) -> list[Entry]:
        found: list[Entry] = []
        choice = self
        while choice.before is not None and choice.last is not None:
            found.append(choice.last)
            choice = choice.before
        return found[::-1]


class _Rest:
    """The tables still to come: a bound on their error within so many bytes, and a choice that comes near it.

    Args:
        menus: Their useful entries.
    """

    def __init__(self, menus: Mapping[str, Sequence[Entry]]) -> None:
        self._smallest = {name: entries[0] for name, entries in menus.items()}
        self._bytes = sum(entry.bytes for entry in self._smallest.values())
        self._error = sum(entry.error for entry in self._smallest.values())
        steps = [(*step, name) for name, entries in menus.items() for step in _steps(entries)]
        self._steps = sorted(steps, key=lambda step: step[1] / step[0], reverse=True)
        self._sizes = [*accumulate((step[0] for step in self._steps), initial=0)]
        self._saved = [*accumulate((step[1] for step in self._steps), initial=0.0)]

    def fits(self, budget: int) -> bool:
        """Whether the smallest entries fit."""
        return self._bytes <= budget

    def bound(self, budget: int) -> float:
        """No choice within the budget has less error."""
        left, place = budget - self._bytes, self._place(budget)
        error = self._error - self._saved[place]
        if place < len(self._steps):
            size, saved, *_ = self._steps[place]
            error -= saved * (left - self._sizes[place]) / size
        return error - _ROUNDING * self._error

    def reached(self, budget: int) -> float:
        """The error of ``choice``."""
        return self._error - self._saved[self._place(budget)]

    def choice(self, budget: int) -> dict[str, Entry]:
        """What the whole steps that fit lead to."""
        return self._smallest | {name: entry for _, _, entry, name in self._steps[: self._place(budget)]}

    def _place(self, budget: int) -> int:
        return bisect_right(self._sizes, budget - self._bytes) - 1


def _steps(entries: Sequence[Entry]) -> list[tuple[int, float, Entry]]:
    """(bytes more, error less, where to) from corner to corner of a menu's convex hull, the steepest first."""
    corners: list[Entry] = []
    for entry in entries:
        while len(corners) > 1 and _slope(corners[-2], corners[-1]) <= _slope(corners[-2], entry):
            corners.pop()
        corners.append(entry)
    pairs = pairwise(corners)
    return [(later.bytes - former.bytes, former.error - later.error, later) for former, later in pairs]


def _slope(former: Entry, later: Entry) -> float:
    return (former.error - later.error) / (later.bytes - former.bytes)


def _useful(entries: Sequence[Entry]) -> list[Entry]:
    """Entries by bytes, each with less error than all before it."""
    kept: list[Entry] = []
    for entry in sorted(entries, key=lambda entry: (entry.bytes, entry.error)):
        if not kept or entry.error < kept[-1].error:
            kept.append(entry)
    return kept


def _undominated(choices: Sequence[_Choice]) -> list[_Choice]:
    """Choices by bytes, each with less error than all before it."""
    kept: list[_Choice] = []
    for choice in sorted(choices, key=lambda choice: (choice.bytes, choice.error)):
        if not kept or choice.error < kept[-1].error:
            kept.append(choice)
    return kept


def _sample(weight: Tensor, rows: int) -> Tensor:
    """At most so many rows of a table, evenly spaced."""
    weight = weight.detach()
    if weight.is_meta:
        raise ValueError("a table on the meta device has no numbers, so that its errors cannot be told; load the model")
    if weight.shape[0] <= rows:
        return weight
    places = torch.arange(rows, device=weight.device) * weight.shape[0] // rows
    return weight.index_select(0, places)


def _squared_error(weight: Tensor, table: FloatTable, dtype: Any) -> float:
    """Mean over rows of the squared distance of a row from what is read back."""
    kind = packed_type(dtype, table.full_name)
    total = 0.0
    for _, rows in enumerate_chunks(weight):
        numbers = rows.float()
        packed = pack_rows(numbers, kind, name=table.full_name)
        read = unpack_rows(packed, numbers.shape[1], kind)
        total += float((numbers - read).square_().sum(dtype=torch.float64))
    return total / max(weight.shape[0], 1)
