"""Packages whose names and submodules are loaded when they are first used (PEP 562)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module

_NO_NAMES: Mapping[str, str] = {}


def lazy_package(
    package: str, defined_in: Mapping[str, str] = _NO_NAMES
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """The ``__getattr__`` and the ``__dir__`` of a package.

    A name of ``defined_in`` is imported from its module, any other public name is looked for among
    the submodules. The error for a name that only TorchRec has says what to use instead;
    ``from package import name`` drops that text, and ``tutorec migrate`` says the same.

    Args:
        package: Its ``__name__``.
        defined_in: Public name -> the module that defines it, absolute or relative to the package
            (``".keyed"``).

    Example:
        >>> import tutorec.modules
        >>> load, names = lazy_package("tutorec.modules")
        >>> load("mlp").__name__, "mlp" in names()
        ('tutorec.modules.mlp', True)
    """

    def load(name: str) -> object:
        if name in defined_in:
            value: object = getattr(import_module(defined_in[name], package), name)
        elif name in _submodules(package):
            value = import_module(f"{package}.{name}")
        else:
            raise _missing(package, name)
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *defined_in, *_submodules(package)})

    return load, names


def _missing(package: str, name: str) -> AttributeError:
    """The error for a missing name, which says what to use instead of a name of TorchRec."""
    message = f"module {package!r} has no attribute {name!r}"
    # Python and its tools look for many names of two underscores; the table has none of them.
    if not name.startswith("__"):
        from tutorec._torchrec_names import instead_of  # a program without errors needs no table

        remedy = instead_of(f"{package}.{name}".removeprefix("tutorec."))
        if remedy is not None:
            message = f"{message}. TorchRec has it and tutorec does not: {remedy}"

    return AttributeError(message)


def _submodules(package: str) -> set[str]:
    """The public ones that there are to import, loaded or not."""
    from pkgutil import iter_modules  # at the first use: `import tutorec` needs it not

    return {
        module.name
        for module in iter_modules(sys.modules[package].__path__)
        if not module.name.startswith("_")
    }
