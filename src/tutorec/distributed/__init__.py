"""Tables over several ranks. Names are imported when they are first asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tutorec.distributed.model_parallel import DistributedModelParallel
    from tutorec.distributed.traffic import count_traffic

_LAZY = {
    "DistributedModelParallel": "tutorec.distributed.model_parallel",
    "count_traffic": "tutorec.distributed.traffic",
}

__all__ = ["DistributedModelParallel", "count_traffic"]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
