"""Operations on single tables of a serving model: pruning, and access to packed rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from tutorec._check import require_int
from tutorec.distributed.quant_state import ShardedQuantModule
from tutorec.modules.embedding_collection import EmbeddingCollection
from tutorec.modules.embedding_modules import EmbeddingBagCollection
from tutorec.quant.packed_tables import PackedTables, check_packed
from tutorec.quant.preparing import MODULE_ATTR_EMB_CONFIG_NAME_TO_NUM_ROWS_POST_PRUNING_DICT
from tutorec.quant.whole_model import QUANTIZED, tables_of

__all__ = ["assign_weights_to_tbe", "get_table_to_weights_from_tbe", "set_pruning_data"]

Weights = dict[str, tuple[Tensor, Tensor | None]]


def set_pruning_data(
    model: nn.Module,
    tables_to_rows_post_pruning: Mapping[str, int],
    module_types: Sequence[type[nn.Module]] | None = None,
) -> nn.Module:
    """Set the number of first rows of some tables that quantization keeps.

    Args:
        model: A float collection, or a model with float collections.
        tables_to_rows_post_pruning: Table name -> rows to keep.
        module_types: The collections concerned; both by default.

    Returns:
        The model.

    Raises:
        KeyError: There is no such table.
        ValueError: A number is less than 1 or more than the table's rows.

    Example:
        >>> import torch, tutorec
        >>> from tutorec.modules.embedding_configs import EmbeddingBagConfig
        >>> ebc = EmbeddingBagCollection([EmbeddingBagConfig(10, 64, "item")])
        >>> tutorec.quantize(set_pruning_data(ebc, {"item": 6})).packed_rows("item").shape
        torch.Size([6, 68])

    Source:
        TorchRec's ``torchrec.inference.modules.set_pruning_data``, which ignores unknown names.
    """
    classes = tuple(module_types or QUANTIZED)
    collections = [
        (module, {config.name: config.num_embeddings for config in tables_of(module)[1]})
        for module in model.modules()
        if isinstance(module, EmbeddingBagCollection | EmbeddingCollection)
        and type(module) in classes
    ]
    known = {name for _, tables in collections for name in tables}
    unknown = sorted(set(tables_to_rows_post_pruning) - known)
    if unknown:
        raise KeyError(
            f"there are no tables {unknown} in float collections; the tables are {sorted(known)}"
        )

    for _, tables in collections:
        for name, rows in tables.items():
            require_int(
                f"rows that are left of table {name!r}",
                tables_to_rows_post_pruning.get(name, rows),
                1,
                rows,
            )

    for module, _ in collections:
        setattr(
            module,
            MODULE_ATTR_EMB_CONFIG_NAME_TO_NUM_ROWS_POST_PRUNING_DICT,
            dict(tables_to_rows_post_pruning),
        )

    return model


def get_table_to_weights_from_tbe(model: nn.Module) -> Weights:
    """The packed rows of all quantized tables of a model, sharded or not.

    Args:
        model: A quantized collection, or a model with quantized collections.

    Returns:
        Table name -> payload [R, bytes] and scale and bias [R, 4] (None for float formats), both
        uint8, in the form that quantized collections accept. They are views if the table is
        contiguous. If two collections have tables of the same name, the key is ``path.name``.

    Raises:
        ValueError: Nothing in the model is quantized.

    Example:
        >>> import torch, tutorec
        >>> from tutorec.modules.embedding_configs import EmbeddingBagConfig
        >>> model = tutorec.quantize(
        ...     EmbeddingBagCollection([EmbeddingBagConfig(10, 64, "item")])
        ... )
        >>> [tuple(part.shape) for part in get_table_to_weights_from_tbe(model)["item"]]
        [(10, 64), (10, 4)]

    Source:
        TorchRec's ``torchrec.inference.modules.get_table_to_weights_from_tbe``.
    """
    weights: Weights = {}
    for name, collection, table in _tables(model):
        rows = collection.packed_rows(table)
        layout = collection.packed_table(table).layout
        payload = rows[:, layout.scale_bytes : layout.scale_bytes + layout.payload_bytes]
        weights[name] = payload, rows[:, : layout.scale_bytes] if layout.scale_bytes else None

    return weights


def assign_weights_to_tbe(
    model: nn.Module, table_to_weight: Mapping[str, tuple[Tensor, Tensor | None]]
) -> None:
    """Write the packed rows of all quantized tables of a model, sharded or not.

    Args:
        model: A quantized collection, or a model with quantized collections.
        table_to_weight: As returned by `get_table_to_weights_from_tbe`; it may contain other
            tables, too.

    Raises:
        KeyError: A table's rows are missing. After any error nothing has been written.
        ValueError: Nothing in the model is quantized, or rows have another layout.

    Source:
        TorchRec's ``torchrec.inference.modules.assign_weights_to_tbe``.
    """
    tables = _tables(model)
    missing = [name for name, _, _ in tables if name not in table_to_weight]
    if missing:
        raise KeyError(f"no packed rows for the tables {missing}; some for {list(table_to_weight)}")

    for name, collection, table in tables:
        check_packed(name, collection.packed_table(table), *table_to_weight[name])
    for name, collection, table in tables:
        collection.write_rows(table, *table_to_weight[name])


def _tables(model: nn.Module) -> list[tuple[str, Any, str]]:
    """For each quantized table: name in the model, collection, name in the collection."""
    tables: list[tuple[str, Any, str]] = []
    for path, module in model.named_modules():
        if isinstance(module, PackedTables | ShardedQuantModule):
            tables += [(path, module, table) for table in module.table_names()]

    if not tables:
        raise ValueError(f"{type(model).__name__} is not quantized: tutorec.quantize(model) first")
    count = Counter(table for _, _, table in tables)
    return [
        (f"{path}.{table}" if path and count[table] > 1 else table, module, table)
        for path, module, table in tables
    ]
