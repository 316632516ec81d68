"""Quantized collections: the bytes of their rows, what they return, and their names."""

from __future__ import annotations

from typing import Any

from registry import case, jagged, numbers, of

FORMATS = ("qint8", "quint4x2", "quint2x4", "float16")


def quant_config(
    root: str, dtype: str, per_table: dict[str, str] | None = None, output: str = "float"
) -> Any:
    import torch
    from torch.ao.quantization import PlaceholderObserver

    return of(root, "modules.embedding_configs").QuantConfig(
        activation=PlaceholderObserver.with_args(dtype=getattr(torch, output)),
        weight=PlaceholderObserver.with_args(dtype=getattr(torch, dtype)),
        per_table_weight_dtype={table: getattr(torch, name) for table, name in per_table.items()}
        if per_table
        else None,
    )


def float_tables(
    root: str, kind: str, columns: int, pooling: str | None = None, weighted: bool = False
) -> Any:
    """Two tables whose rows span different ranges, one of them constant."""
    import torch

    configs, modules = of(root, "modules.embedding_configs"), of(root, "modules.embedding_modules")
    more: dict[str, Any] = (
        {} if pooling is None else {"pooling": getattr(configs.PoolingType, pooling)}
    )
    config = configs.EmbeddingBagConfig if kind == "bags" else configs.EmbeddingConfig
    tables = [
        config(
            name=f"t_{name}",
            embedding_dim=columns,
            num_embeddings=rows,
            feature_names=[name],
            **more,
        )
        for name, rows in (("item", 10), ("user", 6))
    ]
    made = (
        modules.EmbeddingBagCollection(
            tables=tables, is_weighted=weighted, device=torch.device("cpu")
        )
        if kind == "bags"
        else modules.EmbeddingCollection(tables=tables, device=torch.device("cpu"))
    )
    with torch.no_grad():
        for name, weight in made.named_parameters():
            rows = torch.sin(torch.arange(weight.numel()) * 0.7 + len(name)).view_as(weight)
            weight.copy_(rows * 10.0 ** (torch.arange(weight.shape[0]) - 6)[:, None])
            weight[3] = 0.1
    return made


def quantized(root: str, kind: str, made: Any, config: Any) -> Any:
    name = "EmbeddingBagCollection" if kind == "bags" else "EmbeddingCollection"
    made.qconfig = config
    return getattr(of(root, "quant.embedding_modules"), name).from_float(made)


def rows_and_results(root: str, dtype: str, columns: int, **arguments: Any) -> Any:
    made = float_tables(root, "bags", columns, **arguments)
    quant = quantized(root, "bags", made, quant_config(root, dtype))
    out = quant(jagged(root, arguments.get("weighted", False)))
    return [out.keys(), out.length_per_key(), numbers(out.values())]


@case
def quantized_pooled(root: str) -> Any:
    """Every format and pooling; widths that every format takes."""
    found = {
        f"{dtype} {columns} {pooling}": rows_and_results(root, dtype, columns, pooling=pooling)
        for dtype in FORMATS
        for columns, pooling in ((8, "SUM"), (16, "MEAN"))
    }
    return found | {"weighted": rows_and_results(root, "qint8", 8, pooling="SUM", weighted=True)}


@case
def quantized_bytes(root: str) -> Any:
    """Payload, scale and bias of int8 rows as the module keeps them: packed by one library, read by
    the other.
    """
    found = {}
    for columns in (4, 12, 64):
        made = float_tables(root, "bags", columns)
        quant = quantized(root, "bags", made, quant_config(root, "qint8"))
        found[str(columns)] = {
            name: [list(rows.shape), rows[:, : 4 + columns].int().tolist()]
            for name, rows in sorted(quant.state_dict().items())
        }
    return found


@case
def quantized_names(root: str) -> Any:
    made = quantized(root, "bags", float_tables(root, "bags", 8), quant_config(root, "qint8"))
    return [str(made), sorted(made.state_dict()), str(made.output_dtype()), made.is_weighted()]


@case
def quantized_formats_per_table(root: str) -> Any:
    config = quant_config(root, "qint8", {"t_user": "float16"}, output="float16")
    made = quantized(root, "bags", float_tables(root, "bags", 8), config)
    out = made(jagged(root))
    kinds = [[table.name, str(table.data_type)] for table in made.embedding_bag_configs()]
    return [
        kinds,
        str(out.values().dtype),
        [[round(x, 2) for x in row] for row in out.values().float().tolist()],
    ]


@case
def quantized_sequences(root: str) -> Any:
    found = {}
    for dtype in ("qint8", "float16"):
        made = quantized(root, "rows", float_tables(root, "rows", 8), quant_config(root, dtype))
        found[dtype] = {
            name: [numbers(one.values()), one.lengths().tolist()]
            for name, one in sorted(made(jagged(root)).items())
        }
    return found
