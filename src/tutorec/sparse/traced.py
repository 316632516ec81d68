"""Jagged types that are made of proxies, as code makes them while torch.fx traces it.

They count as proxies themselves: a function under ``torch.fx.wrap`` that is given one, or is given
what a method of one returns, is one call in the graph, and the object is a call of its constructor
there. TorchRec intercepts each construction for that (``ProxyableClassMeta``); here a construction
in eager code pays one comparison of types.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.fx import Proxy

from tutorec.awaitable import proxies_in

_kinds: dict[type, type] = {}


class _SeenAsProxy:
    """What torch.fx asks of a proxy."""

    __slots__ = ()
    __class__: Any = Proxy  # isinstance(jagged, Proxy) looks here

    @property
    def tracer(self) -> Any:
        """The tracer of the first proxy among the parts."""
        return proxies_in([getattr(self, name) for name in type(self).__mro__[2].__slots__])[
            0
        ].tracer  # type: ignore[attr-defined]

    @property
    def node(self) -> Any:
        """The call of the constructor in the graph."""
        return self.__fx_create_arg__(self.tracer)  # type: ignore[attr-defined]


def kind_of(kind: type, values: Any) -> Any:
    """The class of a jagged type that holds these values: ``kind``, or its proxy variant.

    Args:
        kind: One of the jagged types.
        values: Its values: a tensor, or what stands for one.
    """
    if isinstance(values, Tensor) or not proxies_in(values):
        return kind
    if kind not in _kinds:
        _kinds[kind] = type(
            kind.__name__, (_SeenAsProxy, kind), {"__slots__": (), "__module__": kind.__module__}
        )
    return _kinds[kind]


def eager_kind(jagged: Any) -> type:
    """The class that a graph names: the jagged type itself."""
    kind = type(jagged)
    return kind.__mro__[2] if issubclass(kind, _SeenAsProxy) else kind


def object_text(jagged: object) -> str:
    """Python's default repr, with the class by its public path, and an address."""
    return f"<tutorec.sparse.jagged_tensor.{type(jagged).__name__} object at {hex(id(jagged))}>"
