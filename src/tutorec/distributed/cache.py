"""Caches of table rows: their parameters, the cache itself to replay a log, predicted hit rates."""

from tutorec._kernels.caches.row_cache import CacheCounts, RowCache
from tutorec.distributed.core.cache_params import CacheAlgorithm, CacheParams, CacheStatistics
from tutorec.distributed.hit_rate import RowPopularity, hit_rate

__all__ = [
    "CacheAlgorithm",
    "CacheCounts",
    "CacheParams",
    "CacheStatistics",
    "RowCache",
    "RowPopularity",
    "hit_rate",
]
