"""Models as TorchScript: a file that holds code and weights, and that a process without Python runs.

torch 2.13 deprecates ``torch.jit``; what comes after it, ``export.py``, needs a compiler for each model before C++ can
run it. TorchScript is called here alone, so that no caller sees the warning at each call.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from tutorec._kernels.backend import backend
from tutorec.fx.tracer import symbolic_trace
from tutorec.inference.file_digest import check_digest, digested_file

__all__ = ["load_scripted", "save_scripted", "script_model"]


def script_model(model: nn.Module, leaf_modules: Sequence[str] | None = None) -> torch.jit.ScriptModule:
    """A model as TorchScript: traced into a graph, which is then compiled.

    Args:
        model: What is to answer requests.
        leaf_modules: Names of classes whose modules are compiled as they are written, not traced through.

    Returns:
        A module that gives the model's results, and that `save_scripted` writes to a file.

    Example:
        >>> import torch
        >>> scripted = script_model(torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.Sigmoid()).eval())
        >>> scripted(torch.zeros(3, 2)).shape
        torch.Size([3, 1])
    """
    graph = symbolic_trace(model, leaf_modules=leaf_modules)
    with _without_deprecation():
        return torch.jit.script(graph)


def save_scripted(scripted: torch.jit.ScriptModule, path: str | Path) -> None:
    """Write a scripted model to a file, whole or not at all, with a digest that `load_scripted` and C++ check.

    ``torch.jit.load`` reads the file, too, and does not look at the digest.

    Args:
        scripted: What `script_model` gives.
        path: Of the file, in a folder that exists.

    Raises:
        FileNotFoundError: There is no such folder.
    """
    with digested_file(path) as draft, _without_deprecation():
        torch.jit.save(scripted, str(draft))


def load_scripted(path: str | Path, device: torch.device | str | None = None) -> torch.jit.ScriptModule:
    """Read a scripted model, after the operators that it may call.

    The file is a program. Loading it runs no Python, but the model may call every operator of torch, also those that
    read and write files: load only files that you or somebody you trust wrote.

    Args:
        path: A file by `save_scripted`, whose digest is checked, or by ``torch.jit.save``, which writes none: damage
            to such a file may go unnoticed.
        device: Where its tensors go; by default where they were.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file is damaged, or holds no scripted model.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"there is no scripted model {str(path)!r}; save_scripted(model, path) writes one")
    backend()  # loads fbgemm's operators, where there is fbgemm
    check_digest(path)
    try:
        with _without_deprecation():
            return torch.jit.load(str(path), map_location=None if device is None else torch.device(device))
    except RuntimeError as error:
        raise ValueError(f"{str(path)!r} holds no scripted model; write it with save_scripted: {error}") from error


@contextmanager
def _without_deprecation() -> Iterator[None]:
    """Leave out what torch says about TorchScript itself, and about its own class of traced modules."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r".torch\.jit\.\w+. is deprecated")
        warnings.filterwarnings(
            "ignore", message="The TorchScript type system doesn't support instance-level annotations"
        )
        yield
