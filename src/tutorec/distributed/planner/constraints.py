"""What a person lays down for a table, where the planner is not to choose freely.

Corresponds to TorchRec's ``torchrec.distributed.planner.types.ParameterConstraints``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tutorec.distributed.cache_params import CacheParams

POOLING_FACTOR = 1.0


@dataclass
class ParameterConstraints:
    """Constraints of one table; passed to a planner as ``{table name: ParameterConstraints(...)}``.

    Args:
        sharding_types: `ShardingType` values that it may have; None: all.
        compute_kernels: `EmbeddingComputeKernel` values that it may have; None: all but those in files.
        min_partition: Least number of columns of a column-wise shard; 128 by default.
        pooling_factors: Ids of a sample, on average, for each feature of the table. A single number holds for all of
            its features.
        num_poolings: Bags of a sample, for each feature; 1 by default.
        batch_sizes: B of a rank, for each feature; the planner's batch size by default.
        is_weighted: Whether ids come with weights.
        cache_params: The cache of the kernel ``fused_uvm_caching``, which the table may then have: without a
            ``load_factor`` the planner chooses one, by ``stats`` where they are given, else as if all rows were looked
            up equally often.
        enforce_hbm: TorchRec's; no effect, as the cache and its optimizer state are always in the faster memory.
        stochastic_rounding: TorchRec's, for tables of 16 bits.
        bounds_check_mode: TorchRec's; ids are always checked here.
        feature_names: Features that read the table; those of its configuration by default.
        output_dtype: Type of the looked-up rows; float32 by default.
        device_group: ``"cpu"`` or ``"cuda"``: a planner for another device leaves the table out.
        key_value_params: TorchRec's, for tables on disk.
        use_virtual_table: TorchRec's, for tables on disk.
        pin: Ranks that may hold a piece of the table; None: all. tutorec's own.
        colocate: A word: tables with the same word are cut alike and lie on the same ranks. tutorec's own.

    Example:
        >>> ParameterConstraints(sharding_types=["row_wise"]).pooling_factors
        [1.0]

    Source:
        TorchRec's ``ParameterConstraints``.
    """

    sharding_types: list[str] | None = None
    compute_kernels: list[str] | None = None
    min_partition: int | None = None
    pooling_factors: list[float] = field(default_factory=lambda: [POOLING_FACTOR])
    num_poolings: list[float] | None = None
    batch_sizes: list[int] | None = None
    is_weighted: bool = False
    cache_params: CacheParams | None = None
    enforce_hbm: bool | None = None
    stochastic_rounding: bool | None = None
    bounds_check_mode: Any = None
    feature_names: list[str] | None = None
    output_dtype: Any = None
    device_group: str | None = None
    key_value_params: Any = None
    use_virtual_table: bool = False
    pin: Sequence[int] | None = None
    colocate: str | None = None

    def __hash__(self) -> int:
        # As in TorchRec: by value, and lists are none. Equal constraints print alike.
        return hash(repr(self))
