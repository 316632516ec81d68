"""Models that answer requests: quantized, sharded, as a graph, as a file that a process without Python loads."""

from importlib import import_module

_SUBMODULES = ("cpp_loader", "export", "file_digest", "modules", "scripting", "serving")


def __getattr__(name: str) -> object:
    """Load a submodule at its first use."""
    if name not in _SUBMODULES:
        raise AttributeError(f"module 'tutorec.inference' has no attribute {name!r}")
    return import_module(f"tutorec.inference.{name}")


def __dir__() -> list[str]:
    """The submodules, loaded or not."""
    return sorted({*globals(), *_SUBMODULES})
