"""Quantization of a whole model: each collection is replaced by a quantized one."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tutorec._check import require_one_of
from tutorec._kernels.memory import return_freed_memory
from tutorec._kernels.packed_layout import ROW_ALIGNMENT, RowAlignment, row_layout
from tutorec._kernels.packed_layout import row_alignment as alignment_for
from tutorec.modules.embedding_collection import EmbeddingCollection
from tutorec.modules.embedding_configs import QuantConfig
from tutorec.modules.embedding_modules import EmbeddingBagCollection
from tutorec.quant.accuracy import measured_errors
from tutorec.quant.embedding_collection import EmbeddingCollection as QuantEmbeddingCollection
from tutorec.quant.embedding_modules import EmbeddingBagCollection as QuantEmbeddingBagCollection
from tutorec.quant.packed_tables import PackedTables
from tutorec.quant.packing import OnNonfinite, check_numbers
from tutorec.quant.preparing import alignment_of, weight_of
from tutorec.quant.table_formats import output_type, packed_type

_Float = EmbeddingBagCollection | EmbeddingCollection
QUANTIZED: dict[type[nn.Module], type[Any]] = {
    EmbeddingBagCollection: QuantEmbeddingBagCollection,
    EmbeddingCollection: QuantEmbeddingCollection,
}
_WORTH_RETURNING = 1 << 24  # bytes of float tables; returning memory takes a millisecond
QUANTIZE_FIRST = (
    "load checkpoint.full_state_dict(model) into an unsharded one, quantize it, and call "
    "shard_quant_model"
)
# Classes of these modules are bases of models that are not sharded.
_FOR_ANY_MODEL = ("tutorec.distributed.utils", "tutorec.distributed.test_utils")
_HOOKS = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
)


@dataclass(frozen=True)
class FloatTable:
    """A table of a model that is to be quantized.

    Attributes:
        path: Path of its collection in the model; empty if the model is the collection.
        name: Name of the table.
        module: The module with its weight.
        features: Number of features that look rows up in it.
    """

    path: str
    name: str
    module: nn.Module
    features: int

    @property
    def weight(self) -> Tensor:
        """Its values [R, D]."""
        return weight_of(self.module)

    @property
    def full_name(self) -> str:
        """Path and name."""
        return f"{self.path}.{self.name}" if self.path else self.name


def quantize(
    model: nn.Module,
    dtype: Any = torch.int8,
    *,
    per_table: Mapping[str, Any] | None = None,
    output_dtype: torch.dtype = torch.float,
    inplace: bool = False,
    on_nonfinite: OnNonfinite = "raise",
    row_alignment: RowAlignment | None = None,
    measure: bool = False,
) -> nn.Module:
    """Quantize all collections of a model for inference; the rest of the model stays float.

    The result is frozen: none of its parameters requires gradients.

    Tables are packed one after the other. With ``inplace=True`` each float table is released as
    soon as it is packed, so peak memory is that of the float model plus one packed table; other
    references to a float table keep it alive. Otherwise the model is copied without its tables, and
    the float model is not changed: it shares no parameter with the result, and can be trained on.

    Args:
        model: A collection, or a model with collections, not sharded.
        dtype: Format of the tables: ``torch.int8``, ``torch.quint4x2``, ``torch.quint2x4``,
            ``torch.float16``, ``torch.float32``.
        per_table: Other formats for some tables, by name; ``path.of.collection.name`` for names
            that are not unique.
        output_dtype: Dtype of the collections' results.
        inplace: Whether the model itself is changed, and frozen. If the model *is* a collection,
            use the returned one.
        on_nonfinite: ``"raise"``, or ``"keep"``: a row with NaN or infinity is packed, and is read
            as NaN.
        row_alignment: Padding of rows. ``"fast"`` (the default) uses the fewest bytes at which
            fbgemm's CPU kernels prefetch every cache line of a row; with 64 columns 68 bytes in
            int8 and 64 in int4. ``"small"`` uses the fewest bytes of the format, 68 and 36; a
            random lookup in int4 then takes about 1.7 times as long. A number pads to a multiple of
            that many bytes; TorchRec uses 16 (80 and 48 bytes). On CUDA it is always 16.
        measure: Whether errors are measured while tables are packed, for ``accuracy_report``
            without the float model.

    Returns:
        The model with quantized collections, frozen.

    Raises:
        KeyError: ``per_table`` names an unknown table.
        TypeError: A format has a wrong type.
        ValueError: There is no collection, one is already quantized or sharded, a table cannot be
            packed (then nothing is changed), or a format is not supported.

    Example:
        >>> import torch, tutorec
        >>> from tutorec.modules.embedding_configs import EmbeddingBagConfig
        >>> ebc = EmbeddingBagCollection(
        ...     [EmbeddingBagConfig(100, 64, "item_table", feature_names=["item"])]
        ... )
        >>> model = torch.nn.Sequential(ebc)
        >>> tutorec.quantize(model, torch.int8)[0].embedding_bags["item_table"].weight.shape
        torch.Size([100, 68])

    See Also:
        TorchRec uses ``torch.ao.quantization.quantize_dynamic``; see
        ``tutorec.quant.embedding_modules.EmbeddingBagCollection.from_float``.
    """
    return swap_collections(
        model,
        QuantConfig(output_dtype, dtype, dict(per_table or {})),
        QUANTIZED,
        inplace=inplace,
        on_nonfinite=on_nonfinite,
        row_alignment=row_alignment,
        measure=measure,
        default_alignment="fast",
    )


def swap_collections(
    model: nn.Module,
    config: QuantConfig,
    classes: Mapping[type[nn.Module], type[Any]],
    *,
    inplace: bool,
    on_nonfinite: OnNonfinite = "raise",
    row_alignment: RowAlignment | None = None,
    measure: bool = False,
    default_alignment: RowAlignment = ROW_ALIGNMENT,
) -> nn.Module:
    """Replace the collections of a model by quantized ones; ``quantize`` for any classes.

    Args:
        model: A collection, or a model with collections.
        config: The number formats; tables are named as in ``quantize``.
        classes: The quantized class of each float class; collections of other classes are not
            changed.
        inplace: Whether the model itself is changed.
        on_nonfinite: What to do with values that are not finite.
        row_alignment: As in ``quantize``; by default the float collection's option.
        measure: Whether errors are measured.
        default_alignment: Alignment if neither sets one.

    Returns:
        The model with quantized collections, frozen.

    Raises:
        KeyError: The config names an unknown table.
        TypeError: A format has a wrong type.
        ValueError: As in ``quantize``.
    """
    require_one_of("on_nonfinite", on_nonfinite, ("raise", "keep"))
    tables = float_tables(model, classes)
    named = named_formats(tables, config.per_table_weight_dtype or {})
    formats = {
        table.full_name: packed_type(named.get(table.full_name, config.weight), table.full_name)
        for table in tables
    }
    output_dtype = output_type(config.activation)

    collections = dict(_collections(model, classes))
    alignments = {
        path: alignment_of(module, row_alignment, default_alignment)
        for path, module in collections.items()
    }

    for table in tables:
        columns = table.weight.shape[1]
        data_type = formats[table.full_name]
        layout = row_layout(
            columns, data_type, alignment_for(columns, data_type, alignments[table.path])
        )
        if on_nonfinite == "raise":
            check_numbers(table.weight, layout, table.full_name)

    given_up = _GivenUp(model, tables, classes) if inplace else None
    replaced: dict[int, PackedTables] = {}
    for path, collection in collections.items():
        path_tables = [table for table in tables if table.path == path]
        qconfig = QuantConfig(
            output_dtype,
            config.weight,
            {table.name: formats[table.full_name] for table in path_tables},
        )
        quantized = classes[type(collection)].without_rows(collection, qconfig, alignments[path])
        for table in path_tables:
            quantized.pack(table.name, table.weight, "keep")  # numbers are checked above
            if measure and not table.weight.is_meta:
                packed = quantized.packed_rows(table.name), quantized.packed_table(table.name)
                quantized.errors[table.name] = measured_errors(table.weight, *packed)
            if given_up is not None:
                given_up.done_with(table.module)
        replaced[id(collection)] = _with_habits_of(collection, quantized)

    if id(model) in replaced:
        return replaced[id(model)].requires_grad_(False)
    if not inplace:
        return copy.deepcopy(model, memo=dict(replaced)).requires_grad_(False)
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if id(child) in replaced:
                parent._modules[name] = replaced[id(child)]
    return model.requires_grad_(False)


def float_tables(
    model: nn.Module, classes: Collection[type[nn.Module]] = tuple(QUANTIZED)
) -> list[FloatTable]:
    """The tables of a model's collections, after checking that they can be quantized.

    Args:
        model: A collection, or a model with collections.
        classes: Classes of the collections.

    Raises:
        ValueError: It has no collection, or a quantized, sharded or derived one.

    Example:
        >>> from tutorec.modules.embedding_configs import EmbeddingBagConfig
        >>> ebc = EmbeddingBagCollection([EmbeddingBagConfig(10, 4, "item")])
        >>> [table.full_name for table in float_tables(nn.Sequential(ebc))]
        ['0.item']
    """
    for path, module in model.named_modules():
        _check_kind(path, module, classes)
    collections = [
        (path, *tables_of(collection)) for path, collection in _collections(model, classes)
    ]
    if not collections:
        names = " and no ".join(cls.__name__ for cls in classes)
        raise ValueError(f"{type(model).__name__} has no {names}, so there is nothing to quantize")

    return [
        FloatTable(path, config.name, table_modules[config.name], len(config.feature_names))
        for path, table_modules, configs in collections
        for config in configs
    ]


def shown_names(tables: Sequence[Any]) -> list[str]:
    """Names of tables; with the path of the collection if the name is not unique."""
    names = [table.name for table in tables]
    return [table.name if names.count(table.name) == 1 else table.full_name for table in tables]


def named_formats(tables: Sequence[FloatTable], per_table: Mapping[str, Any]) -> dict[str, Any]:
    """Options per table, from the caller's names to full names.

    Args:
        tables: The tables of a model.
        per_table: Options by a table's name, which may match several tables, or by its full name,
            which takes precedence.

    Raises:
        KeyError: There is no such table.
    """
    known = {table.name for table in tables} | {table.full_name for table in tables}
    unknown = [name for name in per_table if name not in known]
    if unknown:
        raise KeyError(
            f"there are no tables {unknown}; the tables are {[table.full_name for table in tables]}"
        )

    return {
        table.full_name: per_table.get(table.full_name, per_table.get(table.name))
        for table in tables
        if table.full_name in per_table or table.name in per_table
    }


def _collections(
    model: nn.Module, classes: Collection[type[nn.Module]]
) -> Iterator[tuple[str, _Float]]:
    """The float collections of a model, each once."""
    for path, module in model.named_modules():
        if type(module) in classes:
            yield path, module  # pyright: ignore[reportReturnType]


def tables_of(collection: _Float) -> tuple[nn.ModuleDict, Sequence[Any]]:
    """The modules with a float collection's weights, by table, and the tables' configs."""
    if isinstance(collection, EmbeddingBagCollection):
        return collection.embedding_bags, collection.embedding_bag_configs()
    return collection.embeddings, collection.embedding_configs()


def _with_habits_of(collection: nn.Module, quantized: PackedTables) -> PackedTables:
    """Copy forward hooks and the training mode from the float collection to the quantized one."""
    for name in _HOOKS:
        getattr(quantized, name).update(getattr(collection, name))
    return quantized.train(collection.training)


def spread_over_devices(path: str, module: nn.Module) -> str | None:
    """The beginning of a message about a sharded module; None for another one."""
    cls = type(module)
    where = repr(path) if path else "the model"
    bases = [
        ancestor.__module__
        for ancestor in cls.__mro__
        if not ancestor.__module__.startswith(_FOR_ANY_MODEL)
    ]
    if any(base.startswith("tutorec.distributed") for base in bases):
        return f"{where} is a {cls.__name__}, whose tables are spread over devices"
    return None


def _check_kind(path: str, module: nn.Module, classes: Collection[type[nn.Module]]) -> None:
    """Raise for a submodule that this function cannot quantize and must not skip."""
    cls = type(module)
    where = repr(path) if path else "the model"
    if isinstance(module, PackedTables):
        tables = module.table_names()
        raise ValueError(f"{where} is already quantized, tables {tables}: quantize the float model")

    spread = spread_over_devices(path, module)
    if spread is not None:
        raise ValueError(f"{spread}: {QUANTIZE_FIRST}")
    if isinstance(module, nn.parallel.DistributedDataParallel):
        raise ValueError(f"{where} is wrapped in DistributedDataParallel; quantize its .module")

    derived = next((base for base in classes if isinstance(module, base)), None)
    if derived is not None and cls not in classes:
        differs = f"a subclass of {derived.__name__} whose forward may differ"
        raise ValueError(
            f"{where} is a {cls.__name__}, {differs}; call torch.ao.quantization.quantize_dynamic"
        )


class _GivenUp:
    """Releases the float tables of a model once they are no longer needed.

    Args:
        model: The model.
        tables: Its tables that are packed. One in two collections is needed until both are packed,
            and one that the model uses outside its collections is kept.
        classes: Classes of the collections.
    """

    def __init__(
        self, model: nn.Module, tables: Sequence[FloatTable], classes: Collection[type[nn.Module]]
    ) -> None:
        self._needed = Counter(id(table.module) for table in tables)
        self._needed.update(_outside(model, classes, set()))
        self._freed = 0

    def done_with(self, table: nn.Module) -> None:
        """Mark a table as packed for one of its collections."""
        self._needed[id(table)] -= 1
        weight = table._parameters.get("weight")
        if self._needed[id(table)] == 0 and weight is not None:
            # A meta tensor takes no memory, and a lookup in the float collection raises.
            table._parameters["weight"] = nn.Parameter(
                weight.detach().to("meta"), requires_grad=False
            )
            self._freed += weight.nbytes
        del weight

        if self._freed >= _WORTH_RETURNING:
            return_freed_memory()
            self._freed = 0


def _outside(module: nn.Module, classes: Collection[type[nn.Module]], seen: set[int]) -> set[int]:
    """Ids of all modules of a model that are reached without entering a collection."""
    if type(module) not in classes and id(module) not in seen:
        seen.add(id(module))
        for child in module.children():
            _outside(child, classes, seen)
    return seen
