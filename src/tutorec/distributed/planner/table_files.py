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
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tutorec._check import did_you_mean
from tutorec.distributed.planner.options import ParameterConstraints
from tutorec.errors import bad_input
from tutorec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from tutorec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from tutorec.types import DataType

_TOP = ("batch_size", "fused_params", "tables")
_TABLE = (
    "name num_embeddings embedding_dim feature_names data_type pooling is_weighted module".split()
)
_LISTS = "sharding_types compute_kernels pooling_factors num_poolings batch_sizes pin".split()
_CONSTRAINTS = (*_LISTS, "min_partition", "colocate")
_MOST = {
    "num_embeddings": 10**15,
    "embedding_dim": 10**6,
}  # with more columns, too many column shardings would be listed


@dataclass(frozen=True, eq=False)
class TableFile:
    """The content of a table file.

    Args:
        model: Its tables in their collections, on the meta device; nothing is allocated.
        constraints: Table name -> its constraints.
        batch_size: B per rank, if given.
        fused_params: The optimizer for the sharders, if given.
        names: Path and name of each table.
    """

    model: nn.Module
    constraints: dict[str, ParameterConstraints]
    batch_size: int | None
    fused_params: dict[str, Any] | None
    names: tuple[str, ...] = ()


def load_tables(path: str | os.PathLike[str]) -> TableFile:
    """Read a table file.

    Args:
        path: Path of the file.

    Raises:
        PlannerError: It is not YAML, or a table is invalid.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise bad_input(
            f"{os.fspath(path)} is not text in UTF-8: {error}; write it as YAML"
        ) from None
    return tables_of(text, os.fspath(path))


def tables_of(text: str, source: str = "the text") -> TableFile:
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
        tables = [
            _table(entry, f"entry {number} of tables") for number, entry in enumerate(entries, 1)
        ]
        names = [table.config.name for table in tables]
        for name in names:
            if names.count(name) > 1:
                raise bad_input(f"{names.count(name)} tables have the name {name!r}: rename one")
        fused = top.get("fused_params")
        return TableFile(
            _model(tables),
            {table.config.name: table.constraints for table in tables if table.constraints},
            _number(top.get("batch_size")),
            None
            if fused is None
            else {key: _number(value) for key, value in _mapping(fused, "fused_params").items()},
            tuple(f"{table.path}.{table.config.name}".strip(".") for table in tables),
        )
    except (ValueError, TypeError, RuntimeError, OverflowError, KeyError) as error:
        raise bad_input(f"{source}: {error.args[0] if error.args else error}") from None


def _load(text: str) -> Any:
    """Parse YAML into dicts and lists; refuses duplicate keys, which YAML's loader ignores."""
    import yaml

    class Loader(yaml.SafeLoader):
        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            keys = [key.value for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
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
    except RecursionError:
        raise bad_input(
            "this is not a list of tables: its lists and mappings are nested too deep"
        ) from None


def _mapping(value: object, what: str, known: Sequence[str] = ()) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise bad_input(
            f"{what} is {value!r}, not a mapping: write keys and values, as 'name: item'"
        )
    for key in value:
        if known and key not in known:
            hint = did_you_mean(key, known) or f"; it takes {', '.join(known)}"
            raise bad_input(f"{what} has the key {key!r}{hint}")
    return value


def _number(value: Any) -> Any:
    """Convert a number that YAML reads as a string, such as 1e8, also in lists; integers to int."""
    if isinstance(value, list):
        return [_number(each) for each in value]
    try:
        number = float(value) if isinstance(value, str) else value
    except ValueError:
        return value
    return int(number) if isinstance(number, float) and number.is_integer() else number


@dataclass(frozen=True, eq=False)
class _Table:
    config: EmbeddingBagConfig | EmbeddingConfig
    weighted: bool
    path: str
    constraints: ParameterConstraints | None


def _table(entry: object, what: str) -> _Table:
    given = _mapping(entry, what, (*_TABLE, *_CONSTRAINTS))
    for key in ("name", "num_embeddings", "embedding_dim"):
        if key not in given:
            raise bad_input(f"{what} lacks {key!r}")
    name, path, weighted = given["name"], given.get("module", ""), given.get("is_weighted", False)
    features = given.get("feature_names", [name])
    features = features if isinstance(features, list) else [features]
    for text in (name, path, *features):
        if not isinstance(text, str):  # YAML reads no, 7 and 1:20 as other types than str
            raise bad_input(f"{what}: {text!r} is not a name: write it in quotes")
    if weighted not in (True, False):
        raise bad_input(f"table {name!r}: is_weighted is {weighted!r}: write true or false")
    pooling = _member(PoolingType, given.get("pooling", "SUM"), name)
    fields = {
        "num_embeddings": _number(given["num_embeddings"]),
        "embedding_dim": _number(given["embedding_dim"]),
        "name": name,
        "data_type": _member(DataType, given.get("data_type", "FP32"), name),
        "feature_names": features,
    }
    config = (
        EmbeddingConfig(**fields)
        if pooling is PoolingType.NONE
        else EmbeddingBagConfig(**fields, pooling=pooling)
    )
    for key, most in _MOST.items():
        if fields[key] > most:
            raise bad_input(f"table {name!r}: {key} is {fields[key]:,}: give at most {most:,}")
    constraints = {}
    for key in _CONSTRAINTS:
        if (value := _number(given.get(key))) is not None:
            constraints[key] = [value] if key in _LISTS and not isinstance(value, list) else value
    return _Table(
        config, weighted, path, ParameterConstraints(**constraints) if constraints else None
    )


def _member(kind: Any, value: Any, table: str) -> Any:
    """A member of an enumeration, by its value in any letter case."""
    for member in kind:
        if member.value == str(value).upper():
            return member
    raise bad_input(
        f"table {table!r}: {value!r} is not one of {', '.join(member.value for member in kind)}"
    )


def _model(tables: Iterable[_Table]) -> nn.Module:
    """The tables in their collections, each at its path; without a path, the collection."""
    by_path: dict[str, list[_Table]] = {}
    for table in tables:
        by_path.setdefault(table.path, []).append(table)
    root = nn.Module()
    for path, members in sorted(by_path.items()):
        collection = _collection(members)
        if not path and len(by_path) == 1:
            return collection
        *parents, last = names = path.split(".")
        for name in names:
            if path and (not name or hasattr(nn.Module(), name)):
                raise bad_input(
                    f"module {path!r}: {name!r} is empty or an attribute of every module: "
                    "write 'sparse.bags'"
                )
        module = root
        for name in parents:
            if not hasattr(module, name):
                module.add_module(name, nn.Module())
            module = module.get_submodule(name)
        if not path or isinstance(module, (EmbeddingBagCollection, EmbeddingCollection)):
            raise bad_input(
                f"table {members[0].config.name!r}: module {path!r} and another one are inside "
                "one another"
            )
        module.add_module(last, collection)
    return root


def _collection(members: list[_Table]) -> nn.Module:
    if len({(type(member.config), member.weighted) for member in members}) > 1:
        names = ", ".join(repr(member.config.name) for member in members)
        raise bad_input(
            f"tables {names} differ in is_weighted, or in whether they pool: give them "
            "different modules"
        )
    configs: list[Any] = [member.config for member in members]
    meta = torch.device("meta")
    if isinstance(members[0].config, EmbeddingConfig):
        return EmbeddingCollection(configs, device=meta)
    return EmbeddingBagCollection(configs, is_weighted=members[0].weighted, device=meta)
