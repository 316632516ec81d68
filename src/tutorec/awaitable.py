"""Values that are still on their way.

A collective is *issued* at once and *collected* later; in between the rank can compute. What the
issuing call returns is an `Awaitable`: ``wait()`` gives the value, each time it is called, and
computes it once. A `LazyAwaitable` goes one step further: it may be used in place of its value, and
waits by itself the moment the value is touched.
"""

from __future__ import annotations

import operator
import sys
from abc import ABC, ABCMeta, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar, cast

# Covariant: a promise of a subclass is a promise of the class.
W = TypeVar("W", covariant=True)
K = TypeVar("K")
V = TypeVar("V")

_UNSET: Any = object()


class Awaitable(ABC, Generic[W]):
    """A value that is ready later: subclasses say in ``_wait_impl`` how to get it.

    TorchRec's ``Awaitable`` computes again at a second ``wait()``; this one remembers.

    Example:
        >>> class Later(Awaitable[int]):
        ...     def _wait_impl(self) -> int:
        ...         print("computing")
        ...         return 7
        >>> later = Later()
        >>> later.wait(), later.wait()
        computing
        (7, 7)
    """

    # A class attribute, so that a subclass that forgets `super().__init__()` still works.
    _awaited: Any = _UNSET
    _callbacks: list[Callable[[Any], Any]] | None = None

    def wait(self) -> W:
        """The value; blocks until it is there, and goes through the callbacks."""
        value = self._awaited
        if value is _UNSET:
            value = self._awaited = self._wait_impl()

        if self._callbacks:
            callbacks = self._callbacks
            self._callbacks = None
            for callback in callbacks:
                value = self._awaited = callback(value)
        return value

    @property
    def callbacks(self) -> list[Callable[[Any], Any]]:
        """Functions that ``wait()`` applies to the value, in order; each is called only once.

        Example:
            >>> ready = NoWait(3)
            >>> ready.callbacks.append(lambda value: value + 1)
            >>> ready.wait(), ready.wait()
            (4, 4)
        """
        if self._callbacks is None:
            self._callbacks = []
        return self._callbacks

    @abstractmethod
    def _wait_impl(self) -> W:
        """Compute the value; called once."""


class NoWait(Awaitable[W]):
    """An awaitable whose value is already here.

    Example:
        >>> NoWait(3).wait()
        3
    """

    def __init__(self, obj: W) -> None:
        self._awaited = obj

    def _wait_impl(self) -> W:
        return self._awaited


class WaitAll(Awaitable[list[Any]]):
    """The values of several awaitables, which are waited for in order.

    Args:
        awaited: What it waits for.

    Example:
        >>> WaitAll([NoWait(1), NoWait(2)]).wait()
        [1, 2]
    """

    def __init__(self, awaited: Sequence[Awaitable[Any]]) -> None:
        self._waiting_for = awaited

    def _wait_impl(self) -> list[Any]:
        return [awaitable.wait() for awaitable in self._waiting_for]


class _Mapped(Awaitable[W]):
    """The awaitable that `map_awaitable` returns."""

    def __init__(self, function: Callable[..., W], awaited: tuple[Awaitable[Any], ...]) -> None:
        self._steps: tuple[Callable[..., W], tuple[Awaitable[Any], ...]] | None = (
            function,
            awaited,
        )

    def _wait_impl(self) -> W:
        assert self._steps is not None, "a value is computed once; wait() remembers it"
        function, awaited = self._steps
        value = function(*[awaitable.wait() for awaitable in awaited])
        self._steps = None  # the inputs are not kept once the value is computed
        return value


def map_awaitable(function: Callable[..., W], *awaited: Awaitable[Any]) -> Awaitable[W]:
    """An awaitable of ``function(value, ...)``: waits for the values in order, calls it once.

    Args:
        function: Takes one value of each awaitable.
        awaited: What it waits for.

    Example:
        >>> map_awaitable(lambda first, second: first + second, NoWait(1), NoWait(2)).wait()
        3
    """
    return _Mapped(function, awaited)


def proxies_in(value: Any) -> list[Any]:
    """The proxies of torch.fx among nested lists, tuples and dicts of arguments, in their order."""
    from torch.fx.node import map_aggregate
    from torch.fx.proxy import Proxy

    proxies: list[Any] = []
    map_aggregate(value, lambda leaf: proxies.append(leaf) if isinstance(leaf, Proxy) else None)
    return proxies


class _NodeWhenTraced(ABCMeta):
    """Lazy values made of proxies are calls in the graph (torch.fx's ``ProxyableClassMeta``)."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        fx = sys.modules.get("torch.fx._symbolic_trace")
        # The second name is that of older versions of torch.
        if fx is not None and getattr(fx, "is_fx_symbolic_tracing", fx.is_fx_tracing)():
            proxies = proxies_in((args, kwargs))
            if proxies:
                return proxies[0].tracer.create_proxy("call_function", cls, args, kwargs)

        return super().__call__(*args, **kwargs)


class LazyAwaitable(Awaitable[W], metaclass=_NodeWhenTraced):
    """An awaitable that behaves as its value and waits when the value is first used.

    Reading an attribute, an operator, indexing, iterating, ``len`` and every torch function wait.
    Printing does not: a lazy value can be looked at without ending the overlap that it exists for.
    One that traced code makes of proxies is a call in the graph.

    Example:
        >>> import torch
        >>> class Ones(LazyAwaitable[torch.Tensor]):
        ...     def __init__(self, *size: int) -> None:
        ...         super().__init__()
        ...         self._size = size
        ...
        ...     def _wait_impl(self) -> torch.Tensor:
        ...         return torch.ones(self._size)
        >>> Ones(3, 2).shape  # an attribute: waits
        torch.Size([3, 2])
        >>> torch.cat([Ones(1), torch.zeros(1)]) + Ones(2)
        tensor([2., 1.])
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    @property
    def _result(self) -> W | None:
        """TorchRec's name for the value; None before it was waited for."""
        return None if self._awaited is _UNSET else self._awaited

    def __getattr__(self, name: str) -> Any:
        # Reached only when normal look-up has failed. Special names never wait: copy, pickle and
        # IPython probe for them on objects that may be half built.
        if name.startswith("__"):
            raise AttributeError(name)

        # An object that lacks its own private attribute is half built; waiting would hide that
        # behind a worse error.
        if name.startswith("_") and self._awaited is _UNSET:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.wait(), name)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call ``func`` with every lazy value among its arguments replaced by the value."""
        return func(*_waited(args), **_waited(kwargs or {}))

    def __fx_create_arg__(self, tracer: Any) -> Any:
        """What a traced graph uses in place of this value, as in ``proxy - lazy``."""
        return tracer.create_arg(self.wait())


class LazyNoWait(NoWait[W], LazyAwaitable[W]):
    """A lazy awaitable whose value is already here.

    Example:
        >>> LazyNoWait([1, 2])[0]
        1
    """


class LazyGetItemMixin(Generic[K, V]):
    """Makes indexing a lazy collection lazy too: ``lazy[key]`` waits when the item is used.

    A class names it before `LazyAwaitable`.

    Example:
        >>> class Both(LazyGetItemMixin[str, int], LazyNoWait[dict[str, int]]):
        ...     pass
        >>> item = Both({"one": 1, "two": 2})["two"]
        >>> type(item).__name__, item + 1
        ('GetItemLazyAwaitable', 3)

    Source:
        TorchRec's ``torchrec.distributed.types.LazyGetItemMixin``.
    """

    def __getitem__(self, key: K) -> LazyAwaitable[V]:
        return GetItemLazyAwaitable(cast(Any, self), key)


class GetItemLazyAwaitable(LazyAwaitable[W], Generic[W, V, K]):
    """An item of a lazy collection; see `LazyGetItemMixin`.

    Args:
        parent: The collection.
        key: Of the item.
    """

    def __init__(self, parent: LazyAwaitable[V], key: K) -> None:
        super().__init__()
        self._parent = parent
        self._key = key

    def _wait_impl(self) -> W:
        return cast(Any, self._parent.wait())[self._key]


def _waited(value: Any) -> Any:
    """``value`` with every lazy awaitable in it, also in lists, tuples and dicts, awaited."""
    if isinstance(value, LazyAwaitable):
        return value.wait()
    if type(value) in (list, tuple):
        return cast(Any, type(value))(_waited(item) for item in value)
    if isinstance(value, Mapping):
        return {key: _waited(item) for key, item in value.items()}
    return value


def _forwarding_method(apply: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: LazyAwaitable[Any], *args: Any) -> Any:
        return apply(self.wait(), *_waited(args))

    return method


# Python looks operators up on the class, never through __getattr__, so each needs a method of its
# own.
for _name in "add sub mul truediv floordiv mod pow matmul and or xor".split():
    _operator = getattr(operator, f"__{_name}__")
    setattr(LazyAwaitable, f"__{_name}__", _forwarding_method(_operator))
    _reflected = lambda value, other, apply=_operator: apply(other, value)  # noqa: E731
    setattr(LazyAwaitable, f"__r{_name}__", _forwarding_method(_reflected))
for _name in "neg pos abs invert eq ne lt le gt ge getitem setitem contains".split():
    setattr(LazyAwaitable, f"__{_name}__", _forwarding_method(getattr(operator, f"__{_name}__")))
for _builtin in (len, iter, float, int, bool):
    setattr(LazyAwaitable, f"__{_builtin.__name__}__", _forwarding_method(_builtin))
# A class that defines equality loses its hash; an awaitable is hashed as the object that it is.
LazyAwaitable.__hash__ = object.__hash__  # pyright: ignore[reportAttributeAccessIssue]

__all__ = [
    "Awaitable",
    "GetItemLazyAwaitable",
    "LazyAwaitable",
    "LazyGetItemMixin",
    "LazyNoWait",
    "NoWait",
    "map_awaitable",
]
