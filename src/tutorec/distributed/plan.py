"""What a sharding plan is made of: for every table of every sharded module, how it is split and where the pieces lie.

A plan is plain data. It can be printed, compared, stored and used again; nothing in it refers to a process or a device
that must exist. `shard_geometry` computes the pieces, the planner or a person chooses among them.

Corresponds to TorchRec's ``torchrec.distributed.types``.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharding_spec.api import EnumerableShardingSpec, ShardingSpec


class ShardingType(enum.Enum):
    """How a table is divided over the ranks.

    Example:
        >>> ShardingType("table_wise") is ShardingType.TABLE_WISE
        True
    """

    DATA_PARALLEL = "data_parallel"
    TABLE_WISE = "table_wise"
    COLUMN_WISE = "column_wise"
    ROW_WISE = "row_wise"
    TABLE_ROW_WISE = "table_row_wise"
    TABLE_COLUMN_WISE = "table_column_wise"
    GRID_SHARD = "grid_shard"


class EmbeddingComputeKernel(enum.Enum):
    """How the rows of a shard are kept and updated.

    ``FUSED`` updates the rows during backward and never builds a gradient; ``DENSE`` leaves a gradient to look at. The
    names of 2022, ``batched_fused`` and ``batched_dense``, are accepted.

    Example:
        >>> EmbeddingComputeKernel("batched_fused").value
        'fused'
    """

    DENSE = "dense"
    FUSED = "fused"
    FUSED_UVM = "fused_uvm"
    FUSED_UVM_CACHING = "fused_uvm_caching"
    QUANT = "quant"
    QUANT_UVM = "quant_uvm"
    QUANT_UVM_CACHING = "quant_uvm_caching"

    @classmethod
    def _missing_(cls, value: object) -> EmbeddingComputeKernel | None:
        if isinstance(value, str) and value.startswith("batched_"):
            wanted = value.removeprefix("batched_")
            return next((kernel for kernel in cls if kernel.value == wanted), None)
        return None


@dataclass
class ParameterSharding:
    """How one table is sharded.

    Args:
        sharding_type: A ``ShardingType`` value, e.g. ``"table_wise"``.
        compute_kernel: An ``EmbeddingComputeKernel`` value, e.g. ``"fused"``.
        ranks: The ranks that hold a piece, in the order of the pieces.
        sharding_spec: The pieces: offsets ``[row, column]``, sizes ``[R, D]``, placement ``"rank:0/cpu"``. None for
            ``data_parallel``.
        shape: ``(R, D)`` of the table that the entry was made for, where it is known: what a stored plan is compared
            with. Not printed, and two entries that say the same are equal without it.

    Example:
        >>> ParameterSharding("table_wise", "fused", ranks=[1]).ranks
        [1]
    """

    sharding_type: str
    compute_kernel: str
    ranks: list[int] | None = None
    sharding_spec: ShardingSpec | None = None
    shape: tuple[int, int] | None = field(default=None, repr=False, compare=False)

    def shards(self) -> list[ShardMetadata]:
        """The pieces, empty where the plan lists none."""
        return list(self.sharding_spec.shards) if isinstance(self.sharding_spec, EnumerableShardingSpec) else []


class ModuleShardingPlan:
    """The plan of one module; what it looks like is the sharder's business."""


class EmbeddingModuleShardingPlan(ModuleShardingPlan, dict[str, ParameterSharding]):
    """The plan of one collection of tables: table name -> `ParameterSharding`.

    Example:
        >>> from tutorec.distributed.shard_geometry import table_wise_sharding
        >>> print(EmbeddingModuleShardingPlan(item=table_wise_sharding((8, 4), rank=0, device_type="cpu")))
        ... # doctest: +NORMALIZE_WHITESPACE
        <BLANKLINE>
        <BLANKLINE>
        param | sharding type | compute kernel | ranks
        ----- | ------------- | -------------- | -----
        item  | table_wise    | fused          | [0]
        <BLANKLINE>
        param | shard offsets | shard sizes | placement
        ----- | ------------- | ----------- | ----------
        item  | [0, 0]        | [8, 4]      | rank:0/cpu
    """

    def __str__(self) -> str:
        tables = [["param", "sharding type", "compute kernel", "ranks"]]
        pieces = [["param", "shard offsets", "shard sizes", "placement"]]
        for name, sharding in self.items():
            tables.append([name, sharding.sharding_type, sharding.compute_kernel, str(sharding.ranks)])
            if not sharding.shards():
                pieces.append([name, "None", "None", "None"])
            for shard in sharding.shards():
                pieces.append([name, str(shard.shard_offsets), str(shard.shard_sizes), str(shard.placement)])
        return f"\n\n{_as_text(tables)}\n\n{_as_text(pieces)}"


@dataclass
class ShardingPlan:
    """A plan for a whole model: path of the module in the model -> its plan. The model itself has the path ``""``.

    Example:
        >>> ShardingPlan({"": EmbeddingModuleShardingPlan()}).get_plan_for_module("sparse") is None
        True
    """

    plan: dict[str, EmbeddingModuleShardingPlan] = field(default_factory=dict)

    def get_plan_for_module(self, module_path: str) -> EmbeddingModuleShardingPlan | None:
        """The plan of the module at ``module_path``, or None."""
        return self.plan.get(module_path)

    def __str__(self) -> str:
        return "\n\n".join(f"module: {path}{module_plan}" for path, module_plan in self.plan.items())


def _as_text(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells as a text table; the first row is the header."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    head = " | ".join(f"{cell:^{width}}" for cell, width in zip(rows[0], widths, strict=True))
    rule = " | ".join("-" * width for width in widths)
    body = [" | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows[1:]]
    return "\n".join([head, rule, *body])
