"""Pickling of what caller and ranks exchange: functions with constants, arguments, values."""

from __future__ import annotations

import hashlib
import inspect
import io
import os
import pickle
import re
import sys
import sysconfig
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

_LIBRARY = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_NEVER_SHIPPED = (sysconfig.get_path("stdlib") + os.sep, _LIBRARY + os.sep)
# Immutable, or sent by other means: functions and classes as code, modules by name.
_NOT_SHARED = (
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    type,
    FunctionType,
    BuiltinFunctionType,
    ModuleType,
)
_INSTALLED = re.compile(r"[/\\](?:site|dist)-packages[/\\]")


def call_arguments(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    rank: int,
    world_size: int,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of one rank's call; ``rank`` and ``world_size`` are added if missing.

    Positional arguments go to the other parameters, in order. Only when there are more of them than
    that do they bind as in a plain call.

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
    parameters = signature.parameters
    filled = {
        n: known[n]
        for n, p in parameters.items()
        if n in known and p.kind in named and n not in kwargs
    }
    try:
        others = signature.replace(parameters=[p for n, p in parameters.items() if n not in filled])
        values = others.bind(*args, **kwargs).arguments
    except TypeError as error:
        try:
            values = signature.bind_partial(*args, **kwargs).arguments
            signature.bind(
                *args, **kwargs, **{name: filled[name] for name in filled if name not in values}
            )
        except TypeError:
            raise TypeError(f"{name_of(fn)}{signature}: {error}") from None

    values = {**filled, **values}
    in_order = {name: values[name] for name in parameters if name in values}
    bound = inspect.BoundArguments(signature, in_order)  # pyright: ignore[reportArgumentType]
    bound.apply_defaults()

    return bound.args, bound.kwargs


def name_of(fn: Any) -> str:
    """A function's name for messages."""
    return getattr(fn, "__qualname__", None) or type(fn).__name__


def _importable(module: ModuleType) -> bool:
    """Whether a rank, which has this process's ``sys.path``, finds ``module`` under its name."""
    file = getattr(module, "__file__", None)
    if (
        file is None
        or module.__name__ == "__main__"
        or file.startswith(_NEVER_SHIPPED)
        or _INSTALLED.search(file)
    ):
        return True

    top, *rest = module.__name__.split(".")
    spec = next(filter(None, (finder.find_spec(top, None) for finder in sys.meta_path)), None)
    if spec is None:
        return False
    if not rest:
        return spec.origin is not None and os.path.realpath(spec.origin) == os.path.realpath(file)

    stem = os.path.realpath(
        os.path.join(os.path.dirname(file), os.path.basename(file).partition(".")[0])
    )
    folders = [
        os.path.realpath(os.path.join(location, *rest))
        for location in spec.submodule_search_locations or []
    ]
    return any(stem in (folder, os.path.join(folder, "__init__")) for folder in folders)


@dataclass(frozen=True)
class FunctionPayload:
    """A pickled function.

    Args:
        key: Hash of the payload, by which ranks remember the function. It stays when a constant
            gets another value.
        payload: The function with the names of the constants that it uses.
        constants: For the name of each constant: the hash of its payload, and the payload.
    """

    key: str
    payload: bytes
    constants: dict[str, tuple[str, bytes]]


class _Globals:
    """The caller's globals, sent apart from functions so that all of them share one copy.

    Args:
        namespaces: Dictionaries of globals; the first name of an object counts.
    """

    def __init__(self, *namespaces: Mapping[str, Any]) -> None:
        self.payloads: dict[str, tuple[str, bytes]] = {}
        self._names: dict[int, str] = {}
        self._open: set[int] = set()
        for number, namespace in enumerate(namespaces):
            for name, value in list(namespace.items()):
                if not name.startswith("_") and not isinstance(value, _NOT_SHARED):
                    self._names.setdefault(id(value), f"{number}.{name}")

    def reference(self, obj: Any) -> tuple[str, str] | None:
        """The name of the constant that ``obj`` is, and its hash if another constant uses it."""
        name = self._names.get(id(obj))
        if name is None or id(obj) in self._open:
            return None

        if name not in self.payloads:
            self._open.add(id(obj))
            try:
                payload = dump(obj, self)
            except (TypeError, pickle.PicklingError) as error:
                known = f"{name.partition('.')[2]!r}, a {type(obj).__name__},"
                raise TypeError(
                    f"the global {known} cannot be sent to the ranks: {error}; "
                    "make it inside of the function, or on the ranks once, with world.keep"
                ) from None
            finally:
                self._open.discard(id(obj))
            self.payloads[name] = (hashlib.sha256(payload).hexdigest(), payload)

        return name, self.payloads[name][0] if self._open else ""


def dump(obj: Any, constants: _Globals | None = None) -> bytes:
    """Pickle ``obj`` for ranks, with definitions from cells, scripts and test modules."""
    import cloudpickle

    registered: list[ModuleType] = []

    class Pickler(cloudpickle.Pickler):
        def persistent_id(self, obj: Any) -> tuple[str, str] | None:
            return None if constants is None else constants.reference(obj)

        def reducer_override(self, obj: Any) -> Any:
            if _lives_on_gpu(obj):
                # Another process may have no such device, and must not start one to read a message.
                copy = obj.detach().cpu().requires_grad_(obj.requires_grad)
                return copy.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
            if isinstance(obj, CodeType):
                # cloudpickle 3.1.3 replaces the file by `<dynamic-code>`: a traceback of the rank
                # would name neither the file nor the line of source.
                make, arguments, *_ = self.dispatch_table[CodeType](obj)
                return _code_of_file, (obj.co_filename, make, arguments)

            if isinstance(obj, FunctionType | type):
                module = sys.modules.get(obj.__module__ or "")
                # Who registers a module takes it out again: a constant is dumped while the function
                # that uses it is.
                known = cloudpickle.list_registry_pickle_by_value()
                if module is not None and module.__name__ not in known and not _importable(module):
                    cloudpickle.register_pickle_by_value(module)
                    registered.append(module)

            return super().reducer_override(obj)

    buffer = io.BytesIO()
    try:
        Pickler(buffer).dump(obj)
    finally:
        for module in registered:
            cloudpickle.unregister_pickle_by_value(module)
    return buffer.getvalue()


def _code_of_file(path: str, make: Callable[..., CodeType], arguments: tuple[Any, ...]) -> CodeType:
    """The code of a function that was defined in the file, or notebook cell, of this name."""
    return make(*arguments).replace(co_filename=path)


def _lives_on_gpu(obj: Any) -> bool:
    """Whether ``obj`` is a GPU tensor; a Parameter is not: its inner tensor follows."""
    torch = sys.modules.get("torch")
    return (
        torch is not None
        and isinstance(obj, torch.Tensor)
        and obj.is_cuda
        and not isinstance(obj, torch.nn.Parameter)
    )


def dump_function(fn: Callable[..., Any]) -> FunctionPayload:
    """Pickle a function and, apart from it, the global objects that it uses."""
    inner = fn
    while not isinstance(inner, FunctionType) and (
        hasattr(inner, "func") or hasattr(inner, "__func__")
    ):
        inner = getattr(inner, "func", None) or getattr(inner, "__func__")  # noqa: B009

    constants = _Globals(getattr(inner, "__globals__", {}), sys.modules["__main__"].__dict__)
    payload = dump(fn, constants)
    return FunctionPayload(hashlib.sha256(payload).hexdigest(), payload, constants.payloads)


def dump_value(value: Any) -> bytes:
    """Pickle what a rank returns.

    Raises:
        TypeError: It cannot be pickled; the message names the type and says ``keep``.
    """
    try:
        return dump(value)
    except Exception as error:
        type_name = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
        type_name = type_name.removeprefix("__main__.")
        raise TypeError(
            f"the rank returned a {type_name}, which cannot be pickled: {type(error).__name__}: "
            f"{error}\n"
            "return plain values and tensors, or leave the object on its rank: return "
            "world.keep(obj), and pass the handle to a later run"
        ) from None


class Constants:
    """A rank's constants: one object per name, until the caller sends another value."""

    def __init__(self) -> None:
        self._payloads: dict[str, tuple[str, bytes]] = {}
        self._objects: dict[str, tuple[str, Any]] = {}

    def receive(self, payloads: Mapping[str, tuple[str, bytes]]) -> None:
        """Take new values."""
        self._payloads.update(payloads)

    def find(self, reference: tuple[str, str]) -> Any:
        """The object that :meth:`_Globals.reference` named."""
        name, key = reference
        if name in self._payloads:
            new, payload = self._payloads.pop(name)
            self._objects[name] = (new, load(payload, self))

        have, obj = self._objects[name]
        assert key in ("", have), f"constant {name} is {have}, and {key} is requested"
        return obj


def load(payload: bytes, constants: Constants | None = None) -> Any:
    """Rebuild what :func:`dump` pickled."""

    class Unpickler(pickle.Unpickler):
        def persistent_load(self, pid: Any) -> Any:
            assert constants is not None, f"constant {pid} travels with functions only"
            return constants.find(pid)

    return Unpickler(io.BytesIO(payload)).load()
