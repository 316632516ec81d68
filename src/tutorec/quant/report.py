"""Report of a quantized model: bytes, error bound and measured error of each table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tutorec._text import TextTable, bytes_text, several
from tutorec.modules.embedding_collection import EmbeddingCollection
from tutorec.modules.embedding_modules import EmbeddingBagCollection
from tutorec.quant.accuracy import measured_errors, promised_error
from tutorec.quant.packed_tables import PackedTables
from tutorec.quant.preparing import weight_of
from tutorec.quant.whole_model import shown_names, tables_of
from tutorec.types import DataType

_HEAD = ("table", "format", "rows", "before", "after", "saved", "possible error", "largest", "mean")
_NOT_KEPT = (
    "- not measured: the float table was not kept. tutorec.quantize(model, ..., "
    "measure=True) measures while it packs."
)


@dataclass(frozen=True)
class TableAccuracy:
    """One quantized table compared with its float table; errors are absolute errors of elements.

    Attributes:
        path: Path of the collection in the model; empty if the model is the collection.
        name: Name of the table.
        data_type: Number format of the packed rows.
        rows: R.
        columns: D.
        bytes_before: Bytes of the float table.
        bytes_after: Bytes of the packed rows.
        bound: Upper bound on the error.
        largest: The maximum error, or None if it was not measured.
        mean: The mean error, or None if it was not measured.
    """

    path: str
    name: str
    data_type: DataType
    rows: int
    columns: int
    bytes_before: int
    bytes_after: int
    bound: float
    largest: float | None
    mean: float | None

    @property
    def bytes_saved(self) -> int:
        """Bytes saved by quantization."""
        return self.bytes_before - self.bytes_after

    @property
    def full_name(self) -> str:
        """Path and name."""
        return f"{self.path}.{self.name}" if self.path else self.name

    def cells(self, name: str) -> tuple[str, ...]:
        """A row of the report, with the given name."""
        sizes = (
            bytes_text(self.bytes_before),
            bytes_text(self.bytes_after),
            _share(self.bytes_saved, self.bytes_before),
        )
        errors = (_number(error) for error in (self.bound, self.largest, self.mean))
        return (name, str(self.data_type), f"{self.rows:,}", *sizes, *errors)


@dataclass(frozen=True)
class AccuracyReport:
    """The tables of a quantized model, with sums; prints as a table, in a notebook as HTML.

    Attributes:
        tables: One entry per table, in model order.
    """

    tables: tuple[TableAccuracy, ...]

    @property
    def bytes_before(self) -> int:
        """Bytes of all float tables."""
        return sum(table.bytes_before for table in self.tables)

    @property
    def bytes_after(self) -> int:
        """Bytes of all packed rows."""
        return sum(table.bytes_after for table in self.tables)

    def __getitem__(self, name: str) -> TableAccuracy:
        """A table by its full name, or by its own if that is unique."""
        matches = [table for table in self.tables if name == table.full_name]
        matches = matches or [table for table in self.tables if name == table.name]
        if len(matches) != 1:
            raise KeyError(f"{len(matches)} tables are called {name!r}, among {self.names()}")
        return matches[0]

    def names(self) -> list[str]:
        """The tables' names; with the path of the collection if the name is not unique."""
        return shown_names(self.tables)

    def __str__(self) -> str:
        return "\n".join([str(self._table()), *self._notes()])

    def _repr_html_(self) -> str:
        return self._table().html(self._caption()) + "".join(
            f"<p>{note}</p>" for note in self._notes()
        )

    def _table(self) -> TextTable:
        before = self.bytes_before
        after = self.bytes_after
        sizes = bytes_text(before), bytes_text(after), _share(before - after, before)
        sums = ("all", *[""] * 2, *sizes, *[""] * 3)
        lines = [table.cells(name) for table, name in zip(self.tables, self.names(), strict=True)]
        return TextTable(_HEAD, [*lines, sums], right=range(2, len(_HEAD)))

    def _caption(self) -> str:
        before = bytes_text(self.bytes_before)
        after = bytes_text(self.bytes_after)
        return f"{several(len(self.tables), 'table')}: {before} became {after}"

    def _notes(self) -> list[str]:
        return [_NOT_KEPT] if any(table.largest is None for table in self.tables) else []


def accuracy_report(float_model: nn.Module | None, quantized: nn.Module) -> AccuracyReport:
    """Compare a quantized model with its float model, table by table.

    Args:
        float_model: The model that was quantized, or None if it is not available. Errors are then
            those measured by ``tutorec.quantize(model, ..., measure=True)``, if any.
        quantized: The quantized model, not sharded.

    Returns:
        The report; print it.

    Raises:
        ValueError: The second model has no quantized collection, or the first does not have its
            tables as floats.

    Example:
        >>> import torch, tutorec
        >>> from tutorec.modules.embedding_configs import EmbeddingBagConfig
        >>> model = nn.Sequential(
        ...     EmbeddingBagCollection([EmbeddingBagConfig(100, 64, "item_table")])
        ... )
        >>> report = accuracy_report(model, tutorec.quantize(model, torch.int8))
        >>> report["item_table"].bytes_before, report["item_table"].bytes_after
        (25600, 6800)
        >>> report["item_table"].largest <= report["item_table"].bound
        True
    """
    tables = tuple(_tables(float_model, quantized))
    if not any(isinstance(module, PackedTables) for module in quantized.modules()):
        name = type(quantized).__name__
        raise ValueError(
            f"{name} has no complete quantized collection: give (float model, quantized model)"
        )
    return AccuracyReport(tables)


@torch.no_grad()
def _tables(float_model: nn.Module | None, quantized: nn.Module) -> Iterator[TableAccuracy]:
    for path, module in quantized.named_modules():
        if not isinstance(module, PackedTables):
            continue
        floats = {} if float_model is None else _float_tables(float_model, path, module)

        for name in module.table_names():
            table = module.packed_table(name)
            rows = module.packed_rows(name)
            weight = floats.get(name)
            largest, mean = module.errors.get(name, (None, None))
            if weight is not None and not weight.is_meta and not rows.is_meta:
                largest, mean = measured_errors(weight, rows, table)
            dtype = (
                weight.dtype if weight is not None else module.packed_from.get(name, torch.float32)
            )

            yield TableAccuracy(
                path=path,
                name=name,
                data_type=table.data_type,
                rows=table.rows,
                columns=table.columns,
                bytes_before=table.rows * table.columns * dtype.itemsize,
                bytes_after=rows.numel(),
                bound=float("nan") if rows.is_meta else promised_error(rows, table),
                largest=largest,
                mean=mean,
            )


def _float_tables(float_model: nn.Module, path: str, quantized: PackedTables) -> dict[str, Tensor]:
    """The float tables at a path of the model."""
    where = f"at {path!r}" if path else "as the model itself"
    try:
        module = float_model.get_submodule(path)
    except AttributeError:
        module = None

    if isinstance(module, PackedTables):
        remedy = "tutorec.quantize(model, ..., inplace=True, measure=True) measures while it packs"
        raise ValueError(f"the float model is quantized {where}, perhaps in place: {remedy}")
    if not isinstance(module, EmbeddingBagCollection | EmbeddingCollection):
        tables = quantized.table_names()
        raise ValueError(f"the float model has no collection {where} with the tables {tables}")

    weights = {name: weight_of(table) for name, table in tables_of(module)[0].items()}
    for name in quantized.table_names():
        table = quantized.packed_table(name)
        shape = list(weights[name].shape) if name in weights else None
        if shape is None or shape[1] != table.columns or shape[0] < table.rows:
            sizes = (
                f"{[table.rows, table.columns]} in the quantized model and {shape} in the float one"
            )
            raise ValueError(
                f"table {name!r} {where} is {sizes}; give the model that was quantized, or None"
            )
    return weights


def _share(saved: int, total: int) -> str:
    return f"{100 * saved / total:.0f} %" if total else "-"


def _number(error: float | None) -> str:
    return "-" if error is None else f"{error:.3g}"
