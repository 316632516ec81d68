"""What the planner knows about a table: its size, who reads it and how often, and what updates it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tutorec._kernels.optimizer_spec import OptimizerSpec
from tutorec._kernels.packed import PackedTable


@dataclass(frozen=True)
class CachedRows:
    """How much of a table that is in a file is in memory as well.

    Args:
        load_factor: The part of its rows, 0 to 1.
        miss_rate: The part of the lookups, 0 to 1, whose row is not in memory.
    """

    load_factor: float
    miss_rate: float


@dataclass(frozen=True)
class TableFacts:
    """A table of a collection, as numbers.

    Args:
        path: Of its collection in the model; ``""`` for the model itself.
        name: Of the table.
        rows: R.
        columns: D.
        element_bytes: Of one number of a row; 0 where rows are packed.
        features: Input features that read it.
        pooled: Whether the rows of a bag become one.
        weighted: Whether each id comes with a weight.
        samples: Bags of each feature in one rank's batch, B.
        ids: Expected ids of each feature in one rank's batch, N = B * pooling factor.
        optimizer: What a fused kernel would apply to it; None where nothing is known of it.
        row_wire_bytes: Of a number of a row that travels forward: 4, or 2 where a codec narrows it.
        gradient_wire_bytes: Of a number of a gradient that travels back, likewise.
        packed: The table as a quantized collection holds it; None where rows are numbers side by side.
        cache: Of a table in a file; None where all rows are in memory.

    Example:
        >>> TableFacts("", "item", 8, 4, features=("a", "b"), samples=(2.0, 2.0), ids=(6.0, 2.0)).total_ids
        8.0
    """

    path: str
    name: str
    rows: int
    columns: int
    element_bytes: int = 4
    features: tuple[str, ...] = ()
    pooled: bool = True
    weighted: bool = False
    samples: tuple[float, ...] = ()
    ids: tuple[float, ...] = ()
    optimizer: OptimizerSpec | None = None
    row_wire_bytes: int = 4
    gradient_wire_bytes: int = 4
    packed: PackedTable | None = None
    cache: CachedRows | None = None

    def row_bytes(self, columns: int) -> int:
        """Bytes of a row of so many columns, as it is stored.

        Example:
            >>> TableFacts("", "item", 8, 64).row_bytes(64)
            256
        """
        if self.packed is not None:
            return replace(self.packed, columns=columns).layout.row_bytes
        return columns * self.element_bytes

    @property
    def total_samples(self) -> float:
        """Bags in one rank's batch, of all features together."""
        return float(sum(self.samples))

    @property
    def total_ids(self) -> float:
        """Expected ids in one rank's batch, of all features together."""
        return float(sum(self.ids))
