"""Tables that are larger than memory: what a caller says about their cache, and what a lookup is given.

A table with the kernel ``fused_uvm`` or ``fused_uvm_caching`` is stored in the slower tier of memory, which is a file
where tables live on the CPU, and the memory of the host where they live on CUDA. With ``fused_uvm_caching`` a part of
its rows, the cache, is in memory as well, or in that of the GPU: lookups read them and updates write them there.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from math import ceil
from typing import Any, NamedTuple, cast

from tutorec._kernels.row_file import CacheAlgorithm as AlgorithmName
from tutorec._kernels.row_file import CacheSpec
from tutorec.distributed.plan_json import StoredCache
from tutorec.types import DataType

__all__ = [
    "CACHE_KEYS",
    "CacheAlgorithm",
    "CacheParams",
    "CacheStatistics",
    "KeyValueParams",
    "TableCache",
    "cache_spec",
    "sharder_cache",
    "table_cache",
]

_LOAD_FACTOR = 0.2  # as in TorchRec and fbgemm
# Keys of fused_params, and the fields of CacheParams that they set for every table of a sharder.
CACHE_KEYS = {
    "cache_algorithm": "algorithm",
    "cache_load_factor": "load_factor",
    "cache_reserved_memory": "reserved_memory",
    "cache_precision": "precision",
    "cache_folder": "folder",
}


class CacheAlgorithm(Enum):
    """Which row leaves the cache first: the least recently used one, or the least frequently used one.

    The names and values are those of fbgemm's enum, whose members are accepted as well.
    """

    LRU = 0
    LFU = 1


class CacheStatistics(ABC):
    """How a table is accessed, for the planner.

    Source:
        TorchRec's ``torchrec.distributed.types.CacheStatistics``.
    """

    @property
    @abstractmethod
    def expected_lookups(self) -> int:
        """Distinct rows that a batch of all ranks looks up."""

    @abstractmethod
    def expected_miss_rate(self, clf: float) -> float:
        """The part of the lookups, 0 to 1, whose rows are not in a cache of the load factor ``clf``."""

    @property
    @abstractmethod
    def cacheability(self) -> float:
        """One number for how poorly a table can be cached: the area under its miss rates, 0 to 1."""


@dataclass(unsafe_hash=True)
class CacheParams:
    """The cache of a table with the kernel ``fused_uvm_caching``.

    Args:
        algorithm: `CacheAlgorithm.LRU` by default. LFU hits more often while popularity stays as it is; it counts uses
            since the beginning, so that after a change LRU recovers sooner.
        load_factor: The part of the rows that is in memory, above 0 and at most 1; by default 0.2.
        reserved_memory: Bytes of a GPU's memory that fbgemm's cache leaves free, 0 by default; effective on CUDA only.
        precision: Of the rows in the cache, which is that of the table: ``DataType.FP32``.
        prefetch_pipeline: Whether fbgemm's cache holds the rows of several batches in place, without which ``prefetch``
            has no effect there; effective on CUDA only, and under LRU only. On the CPU ``prefetch`` needs nothing.
        stats: How the table is accessed, for the planner. A saved plan has the algorithm, the load factor and the
            folder only.
        folder: Where the file is, for both kernels; by default in the system's folder for temporary files, which on
            some systems is in memory. The file has every row, its optimizer state and a place for each slot; its
            space is reserved when the table is made, and free when the process ends. Given by name; TorchRec has no
            such field.

    Example:
        >>> CacheParams(CacheAlgorithm.LFU, load_factor=0.1).load_factor
        0.1

    Source:
        TorchRec's ``torchrec.distributed.types.CacheParams``.
    """

    algorithm: CacheAlgorithm | None = None
    load_factor: float | None = None
    reserved_memory: float | None = None
    precision: DataType | None = None
    prefetch_pipeline: bool | None = None
    stats: CacheStatistics | None = field(default=None, hash=False)
    folder: str | None = field(default=None, kw_only=True)

    def _stored(self) -> StoredCache:
        algorithm = None if self.algorithm is None else _algorithm_name(self.algorithm)
        return StoredCache(algorithm, self.load_factor, self.folder)

    @classmethod
    def _from_stored(cls, stored: StoredCache) -> CacheParams:
        algorithm = None if stored.algorithm is None else CacheAlgorithm[stored.algorithm.upper()]
        return cls(algorithm, stored.load_factor, folder=stored.folder)


@dataclass(unsafe_hash=True)
class KeyValueParams:
    """Settings of TorchRec's tables in RocksDB and on parameter servers, for code that passes them on.

    The kernels that read them (``key_value``, ``ssd_virtual_table``, ...) are not built here, and a plan with one of
    them is refused by name; other kernels do not read them. A table larger than memory takes `CacheParams`.

    Source:
        TorchRec's ``torchrec.distributed.types.KeyValueParams``, which says what each field means.
    """

    ssd_storage_directory: str | None = None
    ssd_rocksdb_write_buffer_size: int | None = None
    ssd_rocksdb_shards: int | None = None
    gather_ssd_cache_stats: bool | None = None
    stats_reporter_config: Any = None
    use_passed_in_path: bool = True
    l2_cache_size: int | None = None
    max_l1_cache_size: int | None = None
    enable_async_update: bool | None = None
    bulk_init_chunk_size: int | None = None
    lazy_bulk_init_enabled: bool | None = None
    enable_raw_embedding_streaming: bool | None = None
    res_store_shards: int | None = None
    kvzch_tbe_config: Any = None
    load_ckpt_without_opt: bool = False
    ps_hosts: tuple[tuple[str, int], ...] | None = None
    ps_client_thread_num: int | None = None
    ps_max_key_per_request: int | None = None
    ps_max_local_index_length: int | None = None


class TableCache(NamedTuple):
    """What a lookup must know of one table.

    Attributes:
        load_factor: The part of the rows that is in memory; 0 of ``fused_uvm``.
        algorithm: Which row leaves first.
        folder: Where the file is; None for the system's folder for temporary files.
        reserved_memory: Bytes of a GPU's memory that a cache leaves free.
        prefetch_pipeline: Whether a GPU's cache takes rows of coming batches.
    """

    load_factor: float
    algorithm: AlgorithmName
    folder: str | None
    reserved_memory: float = 0.0
    prefetch_pipeline: bool = False


def is_fp32(data_type: Any) -> bool:
    """Whether it is float32 in any of its spellings, or not said: `DataType`, fbgemm's ``SparseType``, torch's dtype.

    Example:
        >>> is_fp32(None), is_fp32(DataType.FP32), is_fp32("fp16")
        (True, True, False)
    """
    return data_type is None or str(getattr(data_type, "value", data_type)).upper() in ("FP32", "TORCH.FLOAT32")


def sharder_cache(fused_params: Mapping[str, Any] | None) -> CacheParams:
    """What the ``fused_params`` of a sharder say about the caches of its tables.

    Example:
        >>> sharder_cache({"cache_load_factor": 0.1, "lr": 0.5}).load_factor
        0.1
    """
    return CacheParams(**{CACHE_KEYS[key]: value for key, value in (fused_params or {}).items() if key in CACHE_KEYS})


def table_cache(
    table: str, params: CacheParams | None, fused_params: Mapping[str, Any] | None, has_cache: bool
) -> TableCache:
    """What a plan and the sharder say about the cache of a table, checked.

    Args:
        table: Its name.
        params: Of the plan.
        fused_params: Of the sharder; keys of `CACHE_KEYS` hold where the plan says nothing.
        has_cache: Whether any of the rows are in memory.

    Raises:
        ValueError: There is no such algorithm, or a number is out of range.

    Example:
        >>> table_cache("item", CacheParams(load_factor=0.5), {"cache_folder": "/data"}, has_cache=True)
        TableCache(load_factor=0.5, algorithm='lru', folder='/data', reserved_memory=0.0, prefetch_pipeline=False)
    """
    given = {each.name: getattr(params, each.name) for each in fields(CacheParams)} if params is not None else {}
    asked = replace(sharder_cache(fused_params), **{name: value for name, value in given.items() if value is not None})
    factor = _LOAD_FACTOR if asked.load_factor is None else asked.load_factor
    if not 0 < factor <= 1:
        raise ValueError(
            f"table {table!r}: load_factor={factor} of its cache is the part of its rows that is in memory; choose a "
            "number above 0 and at most 1"
        )
    if not is_fp32(asked.precision):
        raise ValueError(
            f"table {table!r}: precision={asked.precision} of its cache is not that of its rows, DataType.FP32; leave "
            "precision out"
        )
    algorithm = _algorithm_name(CacheAlgorithm.LRU if asked.algorithm is None else asked.algorithm)
    if algorithm not in ("lru", "lfu"):
        raise ValueError(f"table {table!r}: algorithm={asked.algorithm!r} of its cache is neither LRU nor LFU")
    ahead = bool(asked.prefetch_pipeline) and has_cache
    if ahead and algorithm == "lfu":
        raise ValueError(
            f"table {table!r}: prefetch_pipeline=True of its cache needs algorithm=CacheAlgorithm.LRU, and it is LFU"
        )
    factor = factor if has_cache else 0.0
    return TableCache(factor, algorithm, asked.folder, float(asked.reserved_memory or 0.0), ahead)


def cache_spec(tables: Sequence[tuple[TableCache, int]]) -> CacheSpec:
    """The caches of the tables of one operator, which are alike but for their load factors.

    Args:
        tables: Of each table its cache and its rows.

    Example:
        >>> cache_spec([(TableCache(0.1, "lru", None), 25)]).rows
        (3,)
    """
    first = tables[0][0]
    slots = tuple(ceil(cache.load_factor * rows) for cache, rows in tables) if first.load_factor else ()
    return CacheSpec(slots, *first[1:])


def _algorithm_name(algorithm: Any) -> AlgorithmName:
    # fbgemm's enum is recognised by the names of its members, so that it need not be imported.
    return cast(AlgorithmName, str(getattr(algorithm, "name", algorithm)).lower())
