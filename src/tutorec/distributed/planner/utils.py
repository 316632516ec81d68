"""Helpers for authors of planner components, under the names of TorchRec's ``planner.utils``."""

from __future__ import annotations

from tutorec.distributed.planner.enumerators import sharder_name as sharder_name

_GIB = 1024**3


def bytes_to_gb(num_bytes: int) -> float:
    """Bytes in units of 2 ** 30.

    Example:
        >>> bytes_to_gb(3 * 2**29)
        1.5

    Source:
        TorchRec's ``bytes_to_gb``.
    """
    return num_bytes / _GIB
