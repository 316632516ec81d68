"""Count the bytes that leave this rank.

The counter sees tensors that are handed to ``torch.distributed`` and knows no formula, so that what it says can be
compared with what a formula predicts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from tutorec.distributed import comm


@dataclass
class Traffic:
    """What left this rank, by stage and destination.

    Args:
        bytes: (stage, source, destination) -> bytes. The source is this rank.
        issues: stage -> how many collectives were issued.

    Example:
        >>> traffic = Traffic()
        >>> traffic.record(comm.Issue("input ids", source=0, sent=((1, 80),)))
        >>> traffic.total(), traffic.by_stage(), traffic.row(world_size=2)
        (80, {'input ids': 80}, [0, 80])
    """

    bytes: Counter[tuple[str, int, int]] = field(default_factory=Counter)
    issues: Counter[str] = field(default_factory=Counter)

    def record(self, issue: comm.Issue) -> None:
        """Add one collective."""
        self.issues[issue.stage] += 1
        for destination, count in issue.sent:
            self.bytes[issue.stage, issue.source, destination] += count

    def total(self, stage: str | None = None) -> int:
        """Bytes sent, in all or in one stage."""
        return sum(count for (of, _, _), count in self.bytes.items() if stage in (None, of))

    def by_stage(self) -> dict[str, int]:
        """Bytes sent in each stage."""
        return {stage: self.total(stage) for stage in self.issues}

    def row(self, world_size: int, stage: str | None = None) -> list[int]:
        """Bytes sent to each rank: this rank's row of the traffic matrix, W numbers."""
        to = Counter[int]()
        for (of, _, destination), count in self.bytes.items():
            if stage in (None, of):
                to[destination] += count
        return [to[rank] for rank in range(world_size)]


@contextmanager
def count_traffic() -> Iterator[Traffic]:
    """Count what this rank sends inside the ``with`` block. Blocks may be nested; each counts for itself.

    Example:
        >>> with count_traffic() as traffic:
        ...     pass  # sharded_module(features)
        >>> traffic.total()
        0
    """
    traffic = Traffic()
    comm.observers.append(traffic.record)
    try:
        yield traffic
    finally:
        comm.observers.remove(traffic.record)
