"""What travels between the caller and its ranks: functions, arguments, values and handles of kept objects."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import io
import os
import pickle
import re
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import FunctionType, ModuleType
from typing import Any

__all__ = ["Kept", "RankSide", "RankWorld", "call_arguments", "dump", "dump_function", "dump_value"]

_NEVER_SHIPPED = (sysconfig.get_path("stdlib") + os.sep, os.path.dirname(os.path.abspath(__file__)) + os.sep)
_INSTALLED = re.compile(r"[/\\](?:site|dist)-packages[/\\]")


@dataclass
class RankSide:
    """What a rank process knows about itself.

    Args:
        token: Names the pool and its generation; a handle of another one is refused.
        rank: This process's rank.
        world_size: W, ranks in the pool.
        kept: Objects kept by :meth:`RankWorld.keep`, by key.
        run: Number of the run in progress, from 1.
        places: How often each place in the code has called ``keep`` in this run.
    """

    token: str
    rank: int
    world_size: int
    kept: dict[str, Any] = field(default_factory=dict)
    run: int = 0
    places: dict[str, int] = field(default_factory=dict)


# The rank that this process is, if it is one; and the generations of pools that this process owns and that still run.
_side: list[RankSide] = []
live_tokens: set[str] = set()


def become_rank(side: RankSide) -> None:
    """Make this process the rank ``side``."""
    _side[:] = [side]


def rank_side() -> RankSide | None:
    """The rank that this process is, or None in a caller's process."""
    return _side[0] if _side else None


@dataclass(frozen=True)
class Kept:
    """A handle of an object that lives on the ranks: passed to a later ``run`` it is that object, on each rank its own.

    Handles are made by ``world.keep(obj)`` inside a run. Ranks that keep at the same place of the code make the
    same handle, so that the one that any rank returned stands for the objects of all.

    Args:
        token: The pool's generation.
        key: The run and the place in the code that kept the object.
        kind: Type name of the object, for the printed form.
        where: The run and the place as a reader knows them.
    """

    token: str
    key: str
    kind: str = field(compare=False)
    where: str = field(compare=False)

    def __repr__(self) -> str:
        ended = "" if self.token in live_tokens or rank_side() is not None else ", ranks ended"
        return f"<{self.kind} kept on the ranks by {self.where}{ended}>"

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str, str, str, str]]:
        side = rank_side()
        if self.token not in live_tokens and (side is None or side.token != self.token):
            raise ValueError(
                f"{self!r} is a handle of ranks that have ended (the pool was closed, or a rank failed and all were "
                "restarted), so what it stood for is lost: run the function that keeps it again"
            )
        return _restore_kept, (self.token, self.key, self.kind, self.where)


def _restore_kept(token: str, key: str, kind: str, where: str) -> Any:
    """The kept object itself on a rank of the pool, the handle elsewhere."""
    side = rank_side()
    if side is None or token in live_tokens:
        return Kept(token, key, kind, where)
    if side.token != token:
        raise ValueError(f"the handle of a {kind} kept by {where} belongs to another pool of ranks than this one")
    if key not in side.kept:
        raise ValueError(
            f"rank {side.rank} did not keep the {kind} that another rank kept by {where}: call keep on every rank"
        )
    return side.kept[key]


class RankWorld:
    """What the pool's ``world`` is inside a run: this rank's view of it.

    Args:
        side: The rank that this process is.
        hosts: Simulated hosts.
    """

    def __init__(self, side: RankSide, hosts: int) -> None:
        self._side = side
        self.rank: int = side.rank
        self.world_size: int = side.world_size
        self.hosts: int = hosts

    def __repr__(self) -> str:
        return f"<rank {self.rank} of {self.world_size}>"

    def keep(self, obj: Any) -> Kept:
        """Keep ``obj`` on this rank and return a handle that later runs resolve to it."""
        side = self._side
        frame = sys._getframe(1)
        # The place, not a mere count: ranks that keep in different order or number still mean the same objects.
        place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        nth = side.places[place] = side.places.get(place, 0) + 1
        key = f"{side.run}:{place}:{nth}"
        side.kept[key] = obj
        where = f"run {side.run} in {frame.f_code.co_name}, line {frame.f_lineno}" + (
            f", number {nth}" if nth > 1 else ""
        )
        return Kept(side.token, key, type(obj).__name__, where)

    def run(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Refuse: a rank is already inside a run."""
        raise RuntimeError(
            f"run() was called inside rank {self.rank}: call {_name(fn)}() directly, or start Ranks there"
        )


def restore_world(token: str, hosts: int) -> RankWorld:
    """This rank's view of the pool that was pickled."""
    side = rank_side()
    if side is None or side.token != token:
        raise ValueError("a Ranks object travels to its own ranks only: start another Ranks where it is needed")
    return RankWorld(side, hosts)


def _name(fn: Any) -> str:
    """A function's name for messages."""
    return getattr(fn, "__qualname__", None) or type(fn).__name__


def call_arguments(
    fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], rank: int, world_size: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of one rank's call: ``rank`` and ``world_size`` are filled in where the call leaves them out.

    Positional arguments go to the other parameters, in order. Only when there are more of them than that do they bind
    as in a plain call.

    Args:
        fn: What will be called.
        args: The caller's positional arguments.
        kwargs: The caller's keyword arguments.
        rank: Value for a parameter named ``rank``.
        world_size: Value for a parameter named ``world_size``.

    Raises:
        TypeError: The arguments do not fit the function.

    Example:
        >>> call_arguments(lambda rank, world_size, x: None, (7,), {}, rank=1, world_size=2)
        ((1, 2, 7), {})
        >>> call_arguments(lambda x, rank: None, (7, 0), {}, rank=1, world_size=2)
        ((7, 0), {})
    """
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # Some builtins have none.
        return args, dict(kwargs)
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    known = {"rank": rank, "world_size": world_size}
    free = [
        p.name for p in signature.parameters.values() if p.name in known and p.kind in named and p.name not in kwargs
    ]
    others = signature.replace(parameters=[p for p in signature.parameters.values() if p.name not in free])
    try:
        given = others.bind(*args, **kwargs).arguments
    except TypeError as error:
        try:
            given = signature.bind_partial(*args, **kwargs).arguments
            filled = {name: known[name] for name in free if name not in given}
            signature.bind(*args, **kwargs, **filled)
        except TypeError:
            raise TypeError(f"{_name(fn)}{signature}: {error}") from None
        given = {**given, **filled}
    else:
        given = {**given, **{name: known[name] for name in free}}
    merged = {name: given[name] for name in signature.parameters if name in given}
    bound = inspect.BoundArguments(signature, merged)  # pyright: ignore[reportArgumentType]
    bound.apply_defaults()
    return bound.args, bound.kwargs


@contextlib.contextmanager
def _by_value() -> Iterator[Callable[[io.BytesIO], Any]]:
    """A cloudpickle pickler that also ships what stands in modules that a rank could not import, tests for example."""
    import cloudpickle

    registered: list[ModuleType] = []

    class Pickler(cloudpickle.Pickler):
        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, FunctionType | type):
                module = sys.modules.get(obj.__module__ or "")
                if module is not None and module not in registered and not _importable(module):
                    cloudpickle.register_pickle_by_value(module)
                    registered.append(module)
            return super().reducer_override(obj)

    try:
        yield Pickler
    finally:
        for module in registered:
            cloudpickle.unregister_pickle_by_value(module)


def _importable(module: ModuleType) -> bool:
    """Whether a rank, which has this process's ``sys.path``, finds ``module`` under its name."""
    file = getattr(module, "__file__", None)
    if file is None or module.__name__ == "__main__" or file.startswith(_NEVER_SHIPPED) or _INSTALLED.search(file):
        return True
    top, *rest = module.__name__.split(".")
    for finder in sys.meta_path:
        spec = finder.find_spec(top, None)
        if spec is not None:
            break
    else:
        return False
    if not rest:
        return spec.origin is not None and os.path.realpath(spec.origin) == os.path.realpath(file)
    stem = os.path.realpath(os.path.join(os.path.dirname(file), os.path.basename(file).partition(".")[0]))
    folders = [os.path.realpath(os.path.join(place, *rest)) for place in spec.submodule_search_locations or []]
    return any(stem in (folder, os.path.join(folder, "__init__")) for folder in folders)


def dump(obj: Any) -> bytes:
    """Pickle ``obj`` for ranks, definitions from cells and scripts included."""
    buffer = io.BytesIO()
    with _by_value() as make_pickler:
        make_pickler(buffer).dump(obj)
    return buffer.getvalue()


def dump_function(fn: Callable[..., Any]) -> tuple[str, bytes]:
    """Pickle a function with what it refers to; return the hash that names the payload, and the payload."""
    payload = dump(fn)
    return hashlib.sha256(payload).hexdigest(), payload


def dump_value(value: Any) -> bytes:
    """Pickle what a rank returns.

    Raises:
        TypeError: It cannot be pickled; the message names the type and says ``keep``.
    """
    try:
        return dump(value)
    except Exception as error:
        path, culprit = _unpicklable(value)
        kind = f"{type(culprit).__module__}.{type(culprit).__qualname__}".removeprefix("builtins.")
        kind = kind.removeprefix("__main__.")
        inside = f" (in {path} of the returned {type(value).__name__})" if path else ""
        raise TypeError(
            f"the rank returned a {kind}{inside}, which cannot be pickled: {type(error).__name__}: {error}\n"
            "return plain values and tensors, or leave the object on its rank: return world.keep(obj), "
            "and pass the handle to a later run"
        ) from None


def _unpicklable(value: Any, depth: int = 4) -> tuple[str, Any]:
    """The innermost part of ``value`` that cannot be pickled, and the way to it."""
    if isinstance(value, Mapping):
        parts = [(f"[{key!r}]", part) for key, part in value.items()]
    elif isinstance(value, list | tuple | set | frozenset):
        parts = [(f"[{index}]", part) for index, part in enumerate(value)]
    else:
        parts = []
    for step, part in parts if depth else []:
        try:
            dump(part)
        except Exception:
            path, culprit = _unpicklable(part, depth - 1)
            return step + path, culprit
    return "", value


def load(payload: bytes) -> Any:
    """Rebuild what :func:`dump` pickled."""
    return pickle.loads(payload)
