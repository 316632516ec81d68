"""Parameters of tables that are larger than memory.

A table with the kernel ``fused_uvm`` or ``fused_uvm_caching`` is stored in the slower memory tier:
a file for tables on the CPU, host memory for tables on CUDA. With ``fused_uvm_caching`` the faster
tier (host memory, or GPU memory) holds a cache of some rows, which lookups read and updates write.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from math import ceil
from typing import Any, NamedTuple, cast

from tutorec._kernels.caches.row_cache import CacheAlgorithm as AlgorithmName
from tutorec._kernels.caches.row_cache import CacheSpec
from tutorec.distributed.plan.json import StoredCache
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
# Keys of fused_params, and the fields of CacheParams that they set for all tables of a sharder.
CACHE_KEYS = {
    "cache_algorithm": "algorithm",
    "cache_load_factor": "load_factor",
    "cache_reserved_memory": "reserved_memory",
    "cache_precision": "precision",
    "cache_folder": "folder",
}


class CacheAlgorithm(Enum):
    """Eviction policy: the least recently used row (LRU) or the least frequently used row (LFU).

    Names and values are those of fbgemm's enum, whose members are also accepted.
    """

    LRU = 0
    LFU = 1


class CacheStatistics(ABC):
    """Access statistics of a table, for the planner.

    Source:
        TorchRec's ``torchrec.distributed.types.CacheStatistics``.
    """

    @property
    @abstractmethod
    def expected_lookups(self) -> float:
        """Number of distinct rows that a batch of all ranks looks up."""

    @abstractmethod
    def expected_miss_rate(self, clf: float) -> float:
        """Fraction of ``expected_lookups`` that miss a cache with load factor ``clf``; 1 for 0."""

    @property
    @abstractmethod
    def cacheability(self) -> float:
        """How poorly a table can be cached: the area under its miss rate curve, 0 to 1."""


@dataclass(unsafe_hash=True)
class CacheParams:
    """Cache of a table with the kernel ``fused_uvm_caching``.

    Args:
        algorithm: Eviction policy, `CacheAlgorithm.LRU` by default. LFU has a higher hit rate while
            the popularity of rows is stable. It counts all uses since the start, so LRU recovers
            sooner after a change.
        load_factor: Fraction of the rows that is cached, above 0 and at most 1; 0.2 by default.
        reserved_memory: Bytes of GPU memory that fbgemm's cache leaves free, 0 by default; CUDA
            only.
        precision: Data type of cached rows, which must be that of the table: ``DataType.FP32``.
        prefetch_pipeline: Whether fbgemm's cache keeps the rows of several batches; on CUDA
            ``prefetch`` has no effect without it. CUDA and LRU only; on the CPU ``prefetch`` needs
            no setting.
        stats: Access statistics, for the planner. A saved plan has the algorithm, the load factor
            and the folder only.
        folder: Folder of the file, for both kernels; by default the system's temporary folder,
            which may be in memory. The file holds every row, its optimizer state, and the row's
            cache slot. Its space is reserved when the table is built and freed when the process
            ends. Keyword only; TorchRec has no such field.

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
    """Settings of TorchRec's tables in RocksDB and on parameter servers; accepted without effect.

    The kernels that use them (``key_value``, ``ssd_virtual_table``, ...) are not implemented, and a
    plan with one of them is refused. For a table larger than memory use `CacheParams`.

    Source:
        TorchRec's ``torchrec.distributed.types.KeyValueParams``, which documents the fields.
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
    """The cache of one table, as a lookup needs it.

    Attributes:
        load_factor: Fraction of the rows that is cached; 0 for ``fused_uvm``.
        algorithm: Eviction policy.
        folder: Folder of the file; None for the system's temporary folder.
        reserved_memory: Bytes of GPU memory that the cache leaves free.
        prefetch_pipeline: Whether a GPU's cache holds rows of coming batches.
    """

    load_factor: float
    algorithm: AlgorithmName
    folder: str | None
    reserved_memory: float = 0.0
    prefetch_pipeline: bool = False


def is_fp32(data_type: Any) -> bool:
    """Whether a `DataType`, fbgemm ``SparseType`` or torch dtype is float32; None is, too.

    Example:
        >>> is_fp32(None), is_fp32(DataType.FP32), is_fp32("fp16")
        (True, True, False)
    """
    return data_type is None or str(getattr(data_type, "value", data_type)).upper() in (
        "FP32",
        "TORCH.FLOAT32",
    )


def sharder_cache(fused_params: Mapping[str, Any] | None) -> CacheParams:
    """The cache parameters in the ``fused_params`` of a sharder.

    Example:
        >>> sharder_cache({"cache_load_factor": 0.1, "lr": 0.5}).load_factor
        0.1
    """
    return CacheParams(
        **{
            CACHE_KEYS[key]: value
            for key, value in (fused_params or {}).items()
            if key in CACHE_KEYS
        }
    )


def table_cache(
    table: str, params: CacheParams | None, fused_params: Mapping[str, Any] | None, has_cache: bool
) -> TableCache:
    """The cache of a table from the plan and the sharder's ``fused_params``, checked.

    Args:
        table: Name of the table.
        params: Cache parameters of the plan.
        fused_params: The sharder's; its `CACHE_KEYS` apply where the plan sets nothing.
        has_cache: Whether rows are cached at all (``fused_uvm_caching``).

    Raises:
        ValueError: The algorithm is unknown, or a number is out of range.

    Example:
        >>> table_cache(
        ...     "item", CacheParams(load_factor=0.5), {"cache_folder": "/data"}, has_cache=True
        ... )
        TableCache(load_factor=0.5, algorithm='lru', folder='/data', reserved_memory=0.0, ...)
    """
    overrides = (
        {parameter.name: getattr(params, parameter.name) for parameter in fields(CacheParams)}
        if params is not None
        else {}
    )
    cache = replace(
        sharder_cache(fused_params),
        **{name: value for name, value in overrides.items() if value is not None},
    )

    factor = _LOAD_FACTOR if cache.load_factor is None else cache.load_factor
    if not 0 < factor <= 1:
        raise ValueError(
            f"table {table!r}: load_factor={factor} of its cache is the fraction of its rows in "
            "memory; choose a number above 0 and at most 1"
        )
    if not is_fp32(cache.precision):
        raise ValueError(
            f"table {table!r}: precision={cache.precision} of its cache is not that of its rows, "
            "DataType.FP32; leave precision out"
        )

    algorithm = _algorithm_name(CacheAlgorithm.LRU if cache.algorithm is None else cache.algorithm)
    if algorithm not in ("lru", "lfu"):
        raise ValueError(
            f"table {table!r}: algorithm={cache.algorithm!r} of its cache is neither LRU nor LFU"
        )
    ahead = bool(cache.prefetch_pipeline) and has_cache
    if ahead and algorithm == "lfu":
        raise ValueError(
            f"table {table!r}: prefetch_pipeline=True of its cache needs "
            "algorithm=CacheAlgorithm.LRU, not LFU"
        )

    factor = factor if has_cache else 0.0
    return TableCache(factor, algorithm, cache.folder, float(cache.reserved_memory or 0.0), ahead)


def cache_spec(tables: Sequence[tuple[TableCache, int]]) -> CacheSpec:
    """The caches of one operator's tables, which may differ in load factor only.

    Args:
        tables: The cache and the number of rows of each table.

    Example:
        >>> cache_spec([(TableCache(0.1, "lru", None), 25)]).rows
        (3,)
    """
    first = tables[0][0]
    slots = (
        tuple(ceil(cache.load_factor * rows) for cache, rows in tables) if first.load_factor else ()
    )
    return CacheSpec(slots, *first[1:])


def _algorithm_name(algorithm: Any) -> AlgorithmName:
    # fbgemm's enum is recognized by member names, so that fbgemm need not be imported.
    return cast(AlgorithmName, str(getattr(algorithm, "name", algorithm)).lower())
