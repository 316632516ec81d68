"""Sharding plans as JSON documents, checked when they are read.

A document also has a *fingerprint* of its tables: a digest of each table's module, name, rows and
columns. It shows whether two plans are for the same model, and it reveals a document in which a
table was lost or resized by accident.

::

    {
        "format": "tutorec sharding plan",
        "version": 1,
        "fingerprint": "5b0c...",
        "modules": {
            "sparse": {
                "item": {
                    "sharding_type": "row_wise",
                    "compute_kernel": "fused",
                    "rows": 8,
                    "columns": 4,
                    "ranks": [0, 1],
                    "shards": [
                        {"offsets": [0, 0], "sizes": [4, 4], "placement": "rank:0/cpu"},
                        ...,
                    ],
                }
            }
        },
    }
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

FORMAT = "tutorec sharding plan"
VERSION = 1


@dataclass(frozen=True)
class StoredShard:
    """A shard of a table: ``[row, column]``, ``[R, D]``, and its placement as text, or None."""

    offsets: list[int]
    sizes: list[int]
    placement: str | None


@dataclass(frozen=True)
class StoredCache:
    """The cache of a table: ``"lru"`` or ``"lfu"``, the load factor, and the file's folder."""

    algorithm: str | None
    load_factor: float | None
    folder: str | None


@dataclass(frozen=True)
class StoredTable:
    """The entry of a table.

    Args:
        sharding_type: As text.
        compute_kernel: As text.
        ranks: The rank of each shard, or None.
        shards: The shards; None if the plan lists none.
        shape: ``(R, D)`` of the table, or None if unknown.
        cache: The cache, for a table that has one.
    """

    sharding_type: str
    compute_kernel: str
    ranks: list[int] | None
    shards: list[StoredShard] | None
    shape: tuple[int, int] | None
    cache: StoredCache | None = None


# Path of a module -> table -> entry.
Stored = Mapping[str, Mapping[str, StoredTable]]


def fingerprint(modules: Stored) -> str:
    """Digest of module, name, rows and columns of every table, in any order.

    Example:
        >>> entry = StoredTable("table_wise", "fused", [0], None, (8, 4))
        >>> moved = StoredTable("table_wise", "fused", [1], None, (8, 4))
        >>> fingerprint({"": {"item": entry}}) == fingerprint({"": {"item": moved}})
        True
    """
    tables = sorted(
        (path, name, entry.shape or ())
        for path, of in modules.items()
        for name, entry in of.items()
    )
    return hashlib.blake2b(json.dumps(tables).encode(), digest_size=16).hexdigest()


def to_text(modules: Stored) -> str:
    """Write the document."""
    document = {
        "format": FORMAT,
        "version": VERSION,
        "fingerprint": fingerprint(modules),
        "modules": {
            path: {name: _entry(table) for name, table in of.items()}
            for path, of in modules.items()
        },
    }

    return json.dumps(document, indent=1) + "\n"


def from_text(text: str, source: str) -> dict[str, dict[str, StoredTable]]:
    """Read the entries of a document.

    Args:
        text: The document.
        source: Its name, for messages.

    Raises:
        ValueError: The document is damaged, is not a sharding plan, or has a later version.

    Example:
        >>> from_text("{", "plan.json")
        Traceback (most recent call last):
            ...
        ValueError: plan.json is not a whole JSON document: Expecting property name ...
    """
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{source} is not a whole JSON document: {error}; it is damaged, save the plan again"
        ) from None

    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise ValueError(
            f'{source} is JSON, but not a sharding plan: it lacks "format": "{FORMAT}"'
        )
    if document.get("version") != VERSION:
        raise ValueError(
            f"{source} is a sharding plan of version {document.get('version')}, and this tutorec "
            f"reads version {VERSION}: read it with the tutorec that wrote it, or "
            "plan again"
        )

    reader = _PlanReader(source)
    modules = {
        path: {
            name: reader.entry(f"module {path!r}, table {name!r}", entry)
            for name, entry in reader.value(
                f"module {path!r}", {"tables": of}, "tables", dict
            ).items()
        }
        for path, of in reader.value("the document", document, "modules", dict).items()
    }

    computed = fingerprint(modules)
    if document.get("fingerprint") != computed:
        tables = {
            f"{path}.{name}".strip("."): entry.shape
            for path, of in modules.items()
            for name, entry in of.items()
        }
        raise ValueError(
            f"{source} is damaged: its fingerprint is {document.get('fingerprint')}, and its "
            f"tables, of (rows, columns) {tables}, have {computed}; make the plan from the model"
        )
    return modules


def _entry(table: StoredTable) -> dict[str, Any]:
    rows, columns = table.shape or (None, None)
    shards = table.shards
    cache = {} if table.cache is None else {"cache": asdict(table.cache)}
    return {
        "sharding_type": table.sharding_type,
        "compute_kernel": table.compute_kernel,
        "rows": rows,
        "columns": columns,
        "ranks": table.ranks,
        "shards": None
        if shards is None
        else [{"offsets": s.offsets, "sizes": s.sizes, "placement": s.placement} for s in shards],
        **cache,
    }


class _PlanReader:
    """Reads entries; errors name the position of an invalid value.

    Args:
        source: Name of the document.
    """

    def __init__(self, source: str) -> None:
        self._source = source

    def value(self, where: str, holder: Mapping[str, Any], key: str, *kinds: type) -> Any:
        """Return ``holder[key]`` if it has one of the allowed types."""
        value = holder.get(key, self)
        if value is self:
            raise self._damaged(f"{where} lacks {key!r}")
        # Python's bool is an int, but a boolean is not valid here.
        if not isinstance(value, kinds) or isinstance(value, bool):
            names = " or ".join("null" if cls is type(None) else cls.__name__ for cls in kinds)
            raise self._damaged(f"{key!r} of {where} is {value!r}, not {names}")
        return value

    def numbers(
        self, where: str, holder: Mapping[str, Any], key: str, count: int | None
    ) -> list[int]:
        """Return ``holder[key]`` if it is a list of ``count`` integers."""
        values = self.value(where, holder, key, list)
        # Python's bool is an int, but not a number of a plan.
        valid = all(
            isinstance(value, int) and not isinstance(value, bool) and value >= 0
            for value in values
        )

        if not valid or count not in (None, len(values)):
            expected = "whole numbers" if count is None else f"{count} whole numbers"
            raise self._damaged(f"{key!r} of {where} is {values!r}, not {expected}")
        return values

    def entry(self, where: str, entry: Any) -> StoredTable:
        """Read the entry of one table."""
        if not isinstance(entry, dict):
            raise self._damaged(f"{where} is {entry!r}, not an entry of a plan")
        shards = self.value(where, entry, "shards", list, type(None))
        rows = self.value(where, entry, "rows", int, type(None))
        columns = self.value(where, entry, "columns", int, type(None))

        return StoredTable(
            sharding_type=self.value(where, entry, "sharding_type", str),
            compute_kernel=self.value(where, entry, "compute_kernel", str),
            ranks=None
            if self.value(where, entry, "ranks", list, type(None)) is None
            else self.numbers(where, entry, "ranks", None),
            shards=None
            if shards is None
            else [
                self._shard(f"shard {index} of {where}", shard)
                for index, shard in enumerate(shards)
            ],
            shape=None if rows is None or columns is None else (rows, columns),
            cache=self._cache(f"the cache of {where}", entry["cache"])
            if "cache" in entry
            else None,
        )

    def _damaged(self, problem: str) -> ValueError:
        return ValueError(f"{self._source} is damaged: {problem}")

    def _cache(self, where: str, cache: Any) -> StoredCache:
        if not isinstance(cache, dict) or cache.get("algorithm") not in (None, "lru", "lfu"):
            raise self._damaged(f"{where} is {cache!r}: its algorithm must be lru or lfu")

        return StoredCache(
            cache.get("algorithm"),
            self.value(where, cache, "load_factor", float, int, type(None)),
            self.value(where, cache, "folder", str, type(None)),
        )

    def _shard(self, where: str, shard: Any) -> StoredShard:
        if not isinstance(shard, dict):
            raise self._damaged(f"{where} is {shard!r}, not a shard")
        return StoredShard(
            self.numbers(where, shard, "offsets", 2),
            self.numbers(where, shard, "sizes", 2),
            self.value(where, shard, "placement", str, type(None)),
        )
