"""Count the bytes that leave this rank.

The counter sees tensors that are handed to ``torch.distributed`` and knows no formula, so that what it says can be
compared with what a formula predicts. It counts between ranks of the program, also what a subgroup sends, and tells
what stays on a host from what crosses to another.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from tutorec.distributed import comm


@dataclass
class Traffic:
    """What left this rank, by stage and destination; or what left all of them, by `merge`.

    Args:
        bytes: (stage, source, destination) -> bytes. Ranks are those of the whole program.
        issues: stage -> how many collectives were issued.
        local_size: L: that many consecutive ranks share a host; None: all do.

    Example:
        >>> traffic = Traffic(local_size=2)
        >>> traffic.record(comm.Issue("input ids", source=0, sent=((1, 80), (2, 5), (3, 7))))
        >>> traffic.total(), traffic.by_stage(), traffic.row(world_size=4)
        (92, {'input ids': 92}, [0, 80, 5, 7])
        >>> traffic.total(crossing=True), traffic.total(crossing=False)
        (12, 80)
    """

    bytes: Counter[tuple[str, int, int]] = field(default_factory=Counter)
    issues: Counter[str] = field(default_factory=Counter)
    local_size: int | None = None

    def record(self, issue: comm.Issue) -> None:
        """Add one collective."""
        self.issues[issue.stage] += 1
        for destination, count in issue.sent:
            self.bytes[issue.stage, issue.source, destination] += count

    def total(self, stage: str | None = None, *, crossing: bool | None = None) -> int:
        """Bytes sent.

        Args:
            stage: Those of one stage; None: of all.
            crossing: True: those that leave their host; False: those that stay on it; None: both.
        """
        return sum(count for _, _, count in self._chosen(stage, crossing))

    def by_stage(self, *, crossing: bool | None = None) -> dict[str, int]:
        """Bytes sent in each stage; ``crossing`` as in `total`."""
        return {stage: self.total(stage, crossing=crossing) for stage in self.issues}

    def row(self, world_size: int, stage: str | None = None, *, crossing: bool | None = None) -> list[int]:
        """Bytes sent to each rank, W numbers: this rank's row of the traffic matrix. Arguments as in `total`."""
        to = Counter[int]()
        for _, destination, count in self._chosen(stage, crossing):
            to[destination] += count
        return [to[rank] for rank in range(world_size)]

    def matrix(self, world_size: int, stage: str | None = None, *, crossing: bool | None = None) -> list[list[int]]:
        """Bytes that each rank sent to each, W rows of W numbers, where `merge` put them. Arguments as in `total`.

        Example:
            >>> sent = [Traffic(), Traffic()]
            >>> sent[0].record(comm.Issue("output rows", source=0, sent=((1, 8),)))
            >>> sent[1].record(comm.Issue("output rows", source=1, sent=((0, 4),)))
            >>> Traffic.merge(sent).matrix(world_size=2)
            [[0, 8], [4, 0]]
        """
        sent = [[0] * world_size for _ in range(world_size)]
        for source, destination, count in self._chosen(stage, crossing):
            sent[source][destination] += count
        return sent

    @classmethod
    def merge(cls, of_ranks: Iterable[Traffic]) -> Traffic:
        """The traffic of several ranks as one.

        Bytes add up. A collective that all of them issued is one collective: of each stage stays the most that a rank
        issued.

        Raises:
            ValueError: They do not agree on how many ranks share a host.
        """
        parts = list(of_ranks)
        sizes = {part.local_size for part in parts}
        if len(sizes) > 1:
            raise ValueError(
                f"traffic counted with {' and '.join(map(str, sorted(sizes, key=str)))} ranks per host cannot be "
                "merged: count it on ranks that were started together, or set the same local_size on each part"
            )
        merged = cls(local_size=sizes.pop() if sizes else None)
        for part in parts:
            merged.bytes.update(part.bytes)
            merged.issues |= part.issues
        return merged

    def _chosen(self, stage: str | None, crossing: bool | None) -> Iterator[tuple[int, int, int]]:
        """(source, destination, bytes) of a stage, on one side of the hosts' walls."""
        for (of, source, destination), count in self.bytes.items():
            if stage in (None, of) and crossing in (None, self._crosses(source, destination)):
                yield source, destination, count

    def _crosses(self, source: int, destination: int) -> bool:
        return self.local_size is not None and source // self.local_size != destination // self.local_size


@contextmanager
def count_traffic() -> Iterator[Traffic]:
    """Count what this rank sends inside the ``with`` block. Blocks may be nested; each counts for itself.

    Which ranks share a host is known from ``LOCAL_WORLD_SIZE``, which `Ranks` and torchrun set.

    Example:
        >>> with count_traffic() as traffic:
        ...     pass  # sharded_module(features)
        >>> traffic.total()
        0
    """
    group = comm.default_group()
    traffic = Traffic(local_size=comm.get_local_size(group.size()) if group is not None else None)
    comm.observers.append(traffic.record)
    try:
        yield traffic
    finally:
        comm.observers.remove(traffic.record)
