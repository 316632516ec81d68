"""The bytes of one exchange between all ranks, in a low-rank form for thousands of ranks.

The bytes from rank s to rank d are a product with few terms, ``left[s] . right[:, d]``, between the
ranks that the exchange connects. Sums over destinations, hosts and local ranks are sums over
``right``; the W x W matrix is computed only on request.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Any

import numpy as np

from tutorec.distributed.simulate.ids import Floats

# Maximum number of ranks of a matrix, which has W * W elements.
MATRIX_RANKS = 512


class Reach(Enum):
    """The ranks that an exchange connects."""

    ALL = "all ranks"
    HOST = "the ranks of a host"
    PEERS = "the ranks of one local number, on every host"


@dataclass(frozen=True, eq=False)
class Exchange:
    """One collective of a step: bytes from each rank to each.

    Args:
        stage: Its name in the traffic counter.
        path: Path of the collection in the model.
        left: ``[W, K]``.
        right: ``[K, W]``; rank s sends ``left[s] . right[:, d]`` bytes to a connected rank d.
        local_size: L, ranks per host.
        reach: The ranks that it connects.

    Example:
        >>> one = Exchange(
        ...     "output rows",
        ...     "",
        ...     np.array([[8.0], [0.0]]),
        ...     np.array([[1.0, 1.0]]),
        ...     local_size=1,
        ... )
        >>> one.matrix().tolist()  # rank 0 sends 8 bytes to rank 1, on another host
        [[0.0, 8.0], [0.0, 0.0]]
        >>> one.sent[1].tolist(), one.received[1].tolist()
        ([8.0, 0.0], [0.0, 8.0])
    """

    stage: str
    path: str
    left: Floats
    right: Floats
    local_size: int
    reach: Reach = Reach.ALL

    @property
    def connects(self) -> bool:
        """Whether some rank has another rank to send to."""
        world_size = len(self.left)
        local_size = self.local_size
        return {
            Reach.ALL: world_size,
            Reach.HOST: local_size,
            Reach.PEERS: world_size // local_size,
        }[self.reach] > 1

    @cached_property
    def sent(self) -> Floats:
        """Bytes that each rank sends ``[2, W]``: inside its host, and to other hosts."""
        return _sums(self.left, self.right, self.local_size, self.reach)

    @cached_property
    def received(self) -> Floats:
        """Bytes that each rank receives ``[2, W]``: inside its host, and from other hosts."""
        return _sums(self.right.T, self.left.T, self.local_size, self.reach)

    def matrix(self) -> Floats:
        """Bytes from each rank to each, ``[W, W]``.

        Raises:
            ValueError: There are more than 512 ranks.
        """
        world_size = len(self.left)
        if world_size > MATRIX_RANKS:
            raise ValueError(
                f"a matrix of {world_size} x {world_size} ranks is too large, at most "
                f"{MATRIX_RANKS}: use the sums by rank (sent, received) or by host"
            )

        sent = self.left @ self.right
        if self.reach is not Reach.ALL:
            host, number = np.divmod(np.arange(world_size), self.local_size)
            group = host if self.reach is Reach.HOST else number
            sent[group[:, None] != group] = 0.0

        np.fill_diagonal(sent, 0.0)
        return sent


def link_ms(topology: Any, link_bytes: Floats) -> Floats:
    """Milliseconds of bytes on the links of each rank ``[2, W]``, inside its host and across."""
    bandwidths = np.array([[topology.intra_host_bw], [topology.inter_host_bw]])
    return link_bytes / bandwidths


def bytes_on_links(both: Floats, crossing: bool | None) -> Floats:
    """Bytes ``[2, W]`` inside hosts and across -> those of one kind, or of both (None)."""
    return both.sum(axis=0) if crossing is None else both[int(crossing)]


def _sums(left: Floats, right: Floats, local_size: int, reach: Reach) -> Floats:
    """Row sums of the matrix, inside the host and across hosts."""
    by_host = left.reshape(-1, local_size, left.shape[1])
    host_columns = right.reshape(len(right), -1, local_size)
    to_self = np.einsum("rk,kr->r", left, right)
    inside = across = np.zeros(len(left))
    if reach is Reach.PEERS:
        across = np.einsum("hlk,kl->hl", by_host, host_columns.sum(axis=1)).reshape(-1) - to_self
    else:
        to_host = np.einsum("hlk,kh->hl", by_host, host_columns.sum(axis=2)).reshape(-1)
        inside = to_host - to_self
        if reach is Reach.ALL:
            across = left @ right.sum(axis=1) - to_host

    # Differences of expected numbers may miss 0 by a rounding error.
    return np.maximum(np.stack([inside, across]), 0.0)
