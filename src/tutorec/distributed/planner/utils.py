"""Helpers for authors of planner components, under the names of TorchRec's ``planner.utils``."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from tutorec.distributed.planner.enumerators import sharder_name as sharder_name
from tutorec.distributed.planner.options import ShardingOption
from tutorec.distributed.planner.topology import Storage

_MIB = 1024**2
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


def bytes_to_mb(num_bytes: float) -> float:
    """Bytes in units of 2 ** 20.

    Example:
        >>> bytes_to_mb(2**19)
        0.5

    Source:
        TorchRec's ``bytes_to_mb``.
    """
    return num_bytes / _MIB


def gb_to_bytes(gb: float) -> int:
    """Units of 2 ** 30 bytes in bytes.

    Example:
        >>> gb_to_bytes(0.5) == 2**29
        True

    Source:
        TorchRec's ``gb_to_bytes``.
    """
    return int(gb * _GIB)


def mb_to_bytes(mb: float) -> int:
    """Units of 2 ** 20 bytes in bytes.

    Example:
        >>> mb_to_bytes(0.5)
        524288

    Source:
        TorchRec's ``mb_to_bytes``.
    """
    return int(mb * _MIB)


def prod(iterable: Iterable[int]) -> int:
    """The product of numbers; 1 if there are none.

    Example:
        >>> prod([2, 3, 4])
        24

    Source:
        TorchRec's ``prod``.
    """
    return math.prod(iterable)


def storage_repr_in_gb(storage: Storage | None) -> str:
    """Text of a storage in units of 2 ** 30 bytes.

    Example:
        >>> storage_repr_in_gb(Storage(hbm=2**30, ddr=2**29))
        'Storage(hbm = 1.0 GB, ddr = 0.5 GB)'

    Source:
        TorchRec's ``storage_repr_in_gb``.
    """
    if storage is None:
        return ""
    names = ["hbm", "ddr"] + (["ssd"] if storage.ssd else [])
    texts = (f"{name} = {round(bytes_to_gb(getattr(storage, name)), 3)} GB" for name in names)
    return f"Storage({', '.join(texts)})"


def reset_shard_rank(proposal: Sequence[ShardingOption]) -> None:
    """Reset the ranks of an option's shards, so that they can be placed again.

    Source:
        TorchRec's ``reset_shard_rank``.
    """
    for option in proposal:
        for shard in option.shards:
            shard.rank = None
