"""Counting of the bytes that leave this rank.

The counter sees the tensors passed to ``torch.distributed`` and uses no formula, so its results can
be compared with predictions. It counts between global ranks, also for subgroups, and distinguishes
bytes that stay on a host from bytes that cross hosts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from tutorec.distributed import comm
from tutorec.distributed.core.env import get_local_size


@dataclass
class Traffic:
    """Bytes sent by this rank, by stage and destination; or by all ranks, from `merge`.

    Args:
        bytes: (stage, source, destination) -> bytes. Ranks are global ranks.
        issues: Stage -> number of collectives issued.
        local_size: L, consecutive ranks per host; None for one host.

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
        """Total bytes sent.

        Args:
            stage: Count this stage only; None for all.
            crossing: True for bytes between hosts, False for bytes inside a host, None for both.
        """
        return sum(count for _, _, count in self._chosen(stage, crossing))

    def by_stage(self, *, crossing: bool | None = None) -> dict[str, int]:
        """Bytes sent in each stage; ``crossing`` as in `total`."""
        return {stage: self.total(stage, crossing=crossing) for stage in self.issues}

    def row(
        self, world_size: int, stage: str | None = None, *, crossing: bool | None = None
    ) -> list[int]:
        """Bytes sent to each rank, ``[W]``, this rank's row of `matrix`. Options as in `total`."""
        to = Counter[int]()
        for _, destination, count in self._chosen(stage, crossing):
            to[destination] += count
        return [to[rank] for rank in range(world_size)]

    def matrix(
        self, world_size: int, stage: str | None = None, *, crossing: bool | None = None
    ) -> list[list[int]]:
        """Bytes from each rank to each rank, ``[W][W]``, after `merge`. Arguments as in `total`.

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
        """Merge the traffic of several ranks.

        Bytes are added. A collective that all ranks issue counts once: the number of issues of a
        stage is the maximum over ranks.

        Raises:
            ValueError: The ranks have different ``local_size``.
        """
        counted = list(of_ranks)
        sizes = {traffic.local_size for traffic in counted}
        if len(sizes) > 1:
            raise ValueError(
                f"traffic counted with {' and '.join(map(str, sorted(sizes, key=str)))} ranks per "
                "host cannot be merged: count it on ranks that were started together, or set the "
                "same local_size on each part"
            )

        merged = cls(local_size=sizes.pop() if sizes else None)
        for traffic in counted:
            merged.bytes.update(traffic.bytes)
            merged.issues |= traffic.issues
        return merged

    def _chosen(self, stage: str | None, crossing: bool | None) -> Iterator[tuple[int, int, int]]:
        """(source, destination, bytes) of a stage, between hosts or inside them."""
        for (counted_stage, source, destination), count in self.bytes.items():
            if stage in (None, counted_stage) and crossing in (
                None,
                self._crosses(source, destination),
            ):
                yield source, destination, count

    def _crosses(self, source: int, destination: int) -> bool:
        return (
            self.local_size is not None
            and source // self.local_size != destination // self.local_size
        )


@contextmanager
def count_traffic() -> Iterator[Traffic]:
    """Count what this rank sends inside the ``with`` block. Nested blocks count independently.

    ``LOCAL_WORLD_SIZE``, which `Ranks` and torchrun set, gives the ranks that share a host.

    Example:
        >>> with count_traffic() as traffic:
        ...     pass  # sharded_module(features)
        >>> traffic.total()
        0
    """
    group = comm.default_group()
    traffic = Traffic(local_size=get_local_size(group.size()) if group is not None else None)
    comm.observers.append(traffic.record)
    try:
        yield traffic
    finally:
        comm.observers.remove(traffic.record)
