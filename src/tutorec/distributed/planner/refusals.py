"""Ways to shard a table that a planner does not consider, with the reason."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Refusal:
    """One way to shard one table that is no option.

    Args:
        path: Of the table's collection in the model.
        table: Its name.
        sharding_type: `ShardingType` value.
        compute_kernel: `EmbeddingComputeKernel` value; ``""`` where the type itself is refused.
        reason: Why, as the end of a sentence: "the table may only be row_wise".

    Example:
        >>> print(Refusal("", "item", "grid_shard", "", "it is taken only where it is asked for"))
        item: grid_shard: it is taken only where it is asked for
    """

    path: str
    table: str
    sharding_type: str
    compute_kernel: str
    reason: str

    def __str__(self) -> str:
        kernel = f" with {self.compute_kernel}" if self.compute_kernel else ""
        return f"{self.table}: {self.sharding_type}{kernel}: {self.reason}"
