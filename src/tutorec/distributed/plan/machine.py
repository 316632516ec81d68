"""The ranks for which hand-written plans are made; it checks ranks and hosts that plans name."""

from __future__ import annotations

from dataclasses import dataclass

from tutorec._check import is_int


@dataclass(frozen=True)
class Machine:
    """The ranks for which a plan is made.

    Args:
        world_size: W, number of ranks.
        local_size: Ranks per host.
        device_type: ``"cpu"`` or ``"cuda"``.

    Raises:
        ValueError: A number of ranks is less than 1, or the device type is unknown.
    """

    world_size: int
    local_size: int
    device_type: str

    def __post_init__(self) -> None:
        for name, number in (("world_size", self.world_size), ("local_size", self.local_size)):
            if not is_int(number, 1):
                raise ValueError(f"{name} is a number of ranks, at least 1, got {number!r}")

    def checked_rank(self, rank: int) -> int:
        """Return the rank if it exists; raise otherwise."""
        if not is_int(rank):
            raise TypeError(f"a rank is an integer from 0 to {self.world_size - 1}, got {rank!r}")
        if not 0 <= rank < self.world_size:
            raise ValueError(
                f"the world has {self.world_size} ranks, 0 to {self.world_size - 1}; "
                "pass world_size= to plan for another world"
            )
        return rank

    def checked_host(self, host: int) -> int:
        """Return the host if it exists; raise otherwise."""
        hosts = self.world_size // self.local_size
        if not is_int(host):
            raise TypeError(f"a host is an integer from 0 to {hosts - 1}, got {host!r}")
        if self.world_size % self.local_size:
            raise ValueError(
                f"{self.world_size} ranks cannot be divided into hosts of {self.local_size} ranks; "
                "pass local_size= and world_size= that divide"
            )
        if not 0 <= host < hosts:
            raise ValueError(
                f"host {host} does not exist; the {hosts} hosts are 0 to {hosts - 1}: "
                f"the world has {self.world_size} ranks, {self.local_size} per host; "
                "pass local_size= and world_size= to plan for other hosts"
            )
        return host
