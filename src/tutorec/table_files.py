"""Reading of the tables to plan from a YAML file.

.. code-block:: yaml

    batch_size: 512                     # samples per rank; only the tables are required
    fused_params: {optimizer: exact_row_wise_adagrad, learning_rate: 0.02}
    tables:
      - name: item
        num_embeddings: 100_000_000     # or 1e8
        embedding_dim: 64
        feature_names: [item, seen]     # [item] by default
        pooling_factors: [1, 20]        # mean ids per bag, for each feature
      - name: user
        num_embeddings: 5_000_000
        embedding_dim: 128
        sharding_types: [table_wise, column_wise]
        min_partition: 32

Keys of a table are fields of `EmbeddingBagConfig` (``name``, ``num_embeddings``, ``embedding_dim``,
``feature_names``, ``data_type``, ``pooling``) and of `ParameterConstraints` (``sharding_types``,
``compute_kernels``, ``min_partition``, ``pooling_factors``, ``num_poolings``, ``batch_sizes``,
``is_weighted``, ``pin``, ``colocate``), and ``module``: the path of the table's collection in the
model. Without ``module`` the model is the collection. A ``pooling`` of ``NONE`` makes it an
`EmbeddingCollection`. YAML's anchors and merge keys (``<<: *wide``) avoid repetition.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tutorec._check import did_you_mean, require_one_of
from tutorec.distributed.planner.options import ParameterConstraints
from tutorec.errors import bad_input
from tutorec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from tutorec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from tutorec.types import DataType

_TOP = ("batch_size", "fused_params", "tables")
_TABLE = "name num_embeddings embedding_dim feature_names data_type pooling module".split()
_CONSTRAINTS = (
    "sharding_types compute_kernels pooling_factors num_poolings batch_sizes pin min_partition "
    "colocate is_weighted"
).split()
_LISTS = ("feature_names", *_CONSTRAINTS[:6])
# With more columns there would be too many column shardings to list.
_LARGEST = {"num_embeddings": 10**15, "embedding_dim": 10**6}

_Config = EmbeddingBagConfig | EmbeddingConfig


@dataclass(frozen=True, eq=False)
class TableFile:
    """The content of a table file.

    Args:
        model: Its tables in their collections, on the meta device; nothing is allocated.
        constraints: Table name -> its constraints.
        batch_size: B per rank, if given.
        fused_params: The optimizer for the sharders, if given.
    """

    model: nn.Module
    constraints: dict[str, ParameterConstraints]
    batch_size: int | None
    fused_params: dict[str, Any] | None


def load_tables(path: str | os.PathLike[str]) -> TableFile:
    """Read a table file.

    Args:
        path: Path of the file.

    Raises:
        PlannerError: It is not YAML, or a table is invalid.
    """
    return tables_of(Path(path).read_bytes(), os.fspath(path))


def tables_of(text: str | bytes, source: str = "the text") -> TableFile:
    """Read the text of a table file.

    Args:
        text: YAML.
        source: Name of the file, for messages.

    Raises:
        PlannerError: It is not YAML, or a table is invalid.

    Example:
        >>> item = "{name: item, num_embeddings: 1e3, embedding_dim: 4, min_partition: 4}"
        >>> file = tables_of(f"tables: [{item}]")
        >>> (
        ...     file.model.embedding_bag_configs()[0].feature_names,
        ...     file.constraints["item"].min_partition,
        ... )
        (['item'], 4)
    """
    try:
        top = _mapping(_load(text), "the file", _TOP)
        entries = top.get("tables")
        if not isinstance(entries, list) or not entries:
            raise bad_input(
                "the file lists no tables: give 'tables:' with name, num_embeddings and "
                "embedding_dim of each"
            )

        constraints: dict[str, ParameterConstraints] = {}
        modules: dict[str, list[_Config]] = {}
        for number, entry in enumerate(entries, 1):
            path, config, constraint = _table(entry, f"entry {number} of tables")
            if config.name in constraints:
                raise bad_input(f"2 tables have the name {config.name!r}: rename one")
            constraints[config.name] = constraint
            modules.setdefault(path, []).append(config)

        fused_params = top.get("fused_params")
        if fused_params is not None:
            fused_params = _mapping(fused_params, "fused_params")
            fused_params = {key: _number(value) for key, value in fused_params.items()}

        batch_size = _number(top.get("batch_size"))
        return TableFile(_model(modules), constraints, batch_size, fused_params)
    except (ValueError, TypeError, RuntimeError, OverflowError, KeyError) as error:
        raise bad_input(f"{source}: {error.args[0] if error.args else error}") from None


def _load(text: str | bytes) -> Any:
    """Parse YAML into dicts and lists; refuses duplicate keys, which YAML's loader ignores."""
    import yaml

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            keys = [key.value for key, _ in node.value]
            for key, _ in node.value:
                if keys.count(key.value) > 1:
                    raise bad_input(
                        f"line {key.start_mark.line + 1}: {key.value!r} is given "
                        f"{keys.count(key.value)} times"
                    )
            return super().construct_mapping(node, deep)

    try:
        return yaml.load(text, Loader)
    except yaml.YAMLError as error:
        raise bad_input(f"this is not YAML: {' '.join(str(error).split())}") from None


def _mapping(value: object, label: str, known: Sequence[str] = ()) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise bad_input(
            f"{label} is {value!r}, not a mapping: write keys and values, as 'name: item'"
        )

    for key in value:
        if known and key not in known:
            hint = did_you_mean(key, known) or f"; it takes {', '.join(known)}"
            raise bad_input(f"{label} has the key {key!r}{hint}")

    return value


def _number(value: Any) -> Any:
    """Convert a number that YAML reads as a string, such as 1e8, also in lists; integers to int."""
    if isinstance(value, list):
        return [_number(item) for item in value]

    try:
        number = float(value) if isinstance(value, str) else value
    except ValueError:
        return value
    return int(number) if isinstance(number, float) and number.is_integer() else number


def _table(entry: object, label: str) -> tuple[str, _Config, ParameterConstraints]:
    """The path, configuration and constraints of a table."""
    values: dict[str, Any] = {}
    for key, value in _mapping(entry, label, (*_TABLE, *_CONSTRAINTS)).items():
        if value is not None:
            is_scalar = key in _LISTS and not isinstance(value, list)
            values[key] = [value] if is_scalar else value

    for key in ("name", "num_embeddings", "embedding_dim"):
        if key not in values:
            raise bad_input(f"{label} lacks {key!r}")

    name = values["name"]
    path = values.get("module", "")
    features = values.get("feature_names", [name])
    for text in (name, path, *features):
        if not isinstance(text, str):  # YAML reads no, 7 and 1:20 as other types than str
            raise bad_input(f"{label}: {text!r} is not a name: write it in quotes")

    require_one_of(f"table {name!r}: is_weighted", values.get("is_weighted", False), (True, False))
    pooling = _member(PoolingType, values.get("pooling", "SUM"), name)
    fields = {
        "num_embeddings": _number(values["num_embeddings"]),
        "embedding_dim": _number(values["embedding_dim"]),
        "name": name,
        "data_type": _member(DataType, values.get("data_type", "FP32"), name),
        "feature_names": features,
    }
    if pooling is PoolingType.NONE:
        config = EmbeddingConfig(**fields)
    else:
        config = EmbeddingBagConfig(**fields, pooling=pooling)

    for key, largest in _LARGEST.items():
        if fields[key] > largest:
            raise bad_input(f"table {name!r}: {key} is {fields[key]:,}: give at most {largest:,}")

    constraints = {key: _number(values[key]) for key in _CONSTRAINTS if key in values}
    return path, config, ParameterConstraints(**constraints)


def _member(enumeration: Any, value: Any, table: str) -> Any:
    """A member of an enumeration, by its value in any letter case."""
    for member in enumeration:
        if member.value == str(value).upper():
            return member

    values = ", ".join(member.value for member in enumeration)
    raise bad_input(f"table {table!r}: {value!r} is not one of {values}")


def _model(modules: Mapping[str, list[_Config]]) -> nn.Module:
    """The tables in their collections, each at its path; without a path, the collection."""
    root = nn.Module()
    for path, configs in sorted(modules.items()):
        collection = _collection(configs)
        if not path and len(modules) == 1:
            return collection

        *parents, last = path.split(".")
        module = root
        for name in parents:
            if name not in dict(module.named_children()):
                module.add_module(name, nn.Module())
            module = module.get_submodule(name)

        if not path or isinstance(module, (EmbeddingBagCollection, EmbeddingCollection)):
            raise bad_input(
                f"table {configs[0].name!r}: module {path!r} and another one are inside one another"
            )
        module.add_module(last, collection)

    return root


def _collection(configs: list[Any]) -> nn.Module:
    config_types = {type(config) for config in configs}
    if len(config_types) > 1:
        names = ", ".join(repr(config.name) for config in configs)
        raise bad_input(f"tables {names} differ in whether they pool: give them different modules")

    pools = EmbeddingConfig not in config_types
    collection_type = EmbeddingBagCollection if pools else EmbeddingCollection
    return collection_type(configs, device=torch.device("meta"))
