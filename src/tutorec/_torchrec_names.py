"""What TorchRec has and tutorec does not: an import error says what to use instead.

The table is ``_torchrec_names.toml``; this module is loaded with ``tutorec``, the table when
something is missing. A finder in front of Python's sees every module of the library as it is
loaded, and gives it a ``__getattr__`` (PEP 562) that is asked for names that the module does not
have. Names that TorchRec does not have either get Python's own error.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import cache, partial
from importlib.machinery import ModuleSpec, PathFinder
from types import FrameType, ModuleType

__all__ = ["absent_names", "elsewhere", "instead_of"]

_ROOT = "tutorec"


@cache
def absent_names() -> dict[str, str]:
    """What to use instead, by dotted name below the root; a module's name covers all inside it."""
    import tomllib
    from pathlib import Path

    blocks = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))[
        "absent"
    ]
    return {name: block["instead"] for block in blocks for name in block["names"]}


def instead_of(name: str) -> str | None:
    """What to use instead of a name of TorchRec, given below the root, or None if not in the table.

    Example:
        >>> instead_of("pt2.checks.is_pt2_compiling") == instead_of("pt2")
        True
        >>> instead_of("modules.no_such_module") is None
        True
    """
    table, parts = absent_names(), name.split(".")
    around = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((table[path] for path in around if path in table), None)


@cache
def _modules_of_names() -> dict[str, str]:
    """The module with the shortest path that defines or lists a public name, by name."""
    import re
    from pathlib import Path

    public = re.compile(
        r"^(?:class|def) ([A-Za-z]\w*)|^__all__ = \[(.*?)\]", re.DOTALL | re.MULTILINE
    )
    root, modules = Path(__file__).parent, dict[str, str]()
    for file in sorted(root.rglob("*.py"), key=lambda file: (len(file.parts), file)):
        path = file.relative_to(root).with_suffix("").parts
        module = ".".join((_ROOT, *path)).removesuffix(".__init__")
        if "._" not in module:
            for defined, listed in public.findall(file.read_text("utf-8")):
                for name in [defined, *re.findall(r"\w+", listed)]:
                    modules.setdefault(name, module)
    modules.pop("", None)
    return modules


def elsewhere(name: str) -> str | None:
    """Where a name is that a module of TorchRec imports from another one, or what to use instead.

    Args:
        name: Below the root, in a module that has it neither here nor in the table.

    Example:
        >>> elsewhere("distributed.comm.KeyedJaggedTensor")
        'import it from tutorec.'
        >>> elsewhere("distributed.comm.nothing") is None
        True
    """
    last = name.rpartition(".")[2]
    if last in _modules_of_names():
        return f"import it from {_modules_of_names()[last]}."
    sentences = {text for path, text in absent_names().items() if path.endswith(f".{last}")}
    return sentences.pop() if len(sentences) == 1 else None


def _sentence(fullname: str) -> str | None:
    # Python, inspect, doctest and copy ask for many names of two underscores; the table has none of
    # them.
    text = None if "__" in fullname else instead_of(fullname.removeprefix(f"{_ROOT}."))
    return text and f"TorchRec has it and tutorec does not: {text}"


class _Finder:
    """Finds modules of the library as Python does, and TorchRec's beside them."""

    @staticmethod
    def find_spec(
        fullname: str, path: Sequence[str] | None = None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith(f"{_ROOT}."):
            return None
        spec = PathFinder.find_spec(fullname, path)
        if spec is not None and spec.loader is not None:
            # The loader keeps its class, which inspect, runpy and torch.package look at.
            spec.loader.exec_module = partial(_execute, spec.loader.exec_module)
        # importlib.util.find_spec asks whether there is such a module; only an import is told what
        # to use instead.
        elif (
            spec is None
            and sys._getframe(2).f_code.co_name != "find_spec"
            and (text := _sentence(fullname))
        ):
            raise ModuleNotFoundError(f"No module named {fullname!r}. {text}", name=fullname)
        return spec


def _execute(execute: Callable[[ModuleType], None], module: ModuleType) -> None:
    execute(module)
    _answer_for(module)


def _answer_for(module: ModuleType) -> None:
    """Give a module that was executed the ``__getattr__`` below, around its own."""
    previous = module.__dict__.get("__getattr__")
    if not isinstance(previous, partial):  # executed again by importlib.reload
        module.__dict__["__getattr__"] = partial(_get, module, previous)


def _get(module: ModuleType, previous: Callable[[str], object] | None, name: str) -> object:
    """The module's own answer for a missing name, or an error that says what to use instead."""
    missing: AttributeError | None = None
    if previous is not None:
        try:
            return previous(name)
        except AttributeError as error:
            missing = error
    message, text = (
        f"module {module.__name__!r} has no attribute {name!r}",
        _sentence(f"{module.__name__}.{name}"),
    )
    imports = _imports_from(sys._getframe(1))
    if text is None and imports and not name.startswith("__"):
        text = elsewhere(f"{module.__name__}.{name}")
        text = text and text[0].upper() + text[1:]
    if text is None:
        raise missing or AttributeError(message, name=name, obj=module)
    if imports:
        file = getattr(module, "__file__", None)
        message = (
            f"cannot import name {name!r} from {module.__name__!r} ({file or 'unknown location'})"
        )
        raise ImportError(f"{message}. {text}", name=module.__name__, path=file) from None
    raise AttributeError(f"{message}. {text}", name=name, obj=module) from None


def _imports_from(frame: FrameType) -> bool:
    """Whether the frame executes ``from module import name``, which drops an error's text."""
    from opcode import opmap

    return frame.f_code.co_code[frame.f_lasti] == opmap["IMPORT_FROM"]


# Other finders that somebody has put in front of Python's, as profilers and test tools do, stay in
# front.
sys.meta_path.insert(sys.meta_path.index(PathFinder), _Finder)
_answer_for(sys.modules[_ROOT])
