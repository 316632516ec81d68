"""Models as TorchScript: a file with code and weights that a process without Python can run.

torch 2.13 deprecates ``torch.jit``. Its successor, ``export.py``, needs a compiler for each model
before C++ can run it. All calls of TorchScript are in this module, so that callers do not see the
deprecation warning.
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


def script_model(
    model: nn.Module, leaf_modules: Sequence[str] | None = None
) -> torch.jit.ScriptModule:
    """Convert a model to TorchScript: trace it into a graph and compile the graph.

    The parameters of the result share memory with the model's and require no gradients; those of
    the model stay as they are.

    Args:
        model: The model.
        leaf_modules: Names of classes whose modules are compiled as they are, not traced.

    Returns:
        A module with the model's results, which `save_scripted` can write to a file.

    Example:
        >>> import torch
        >>> scripted = script_model(
        ...     torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.Sigmoid()).eval()
        ... )
        >>> scripted(torch.zeros(3, 2)).shape
        torch.Size([3, 1])
    """
    graph = symbolic_trace(model, leaf_modules=leaf_modules)
    with _without_deprecation():
        scripted = torch.jit.script(graph)
    # A tensor of its own for each: the model may be trained on.
    frozen = {
        id(weight): (weight, nn.Parameter(weight.detach(), False))
        for weight in scripted.parameters()
    }
    for module in scripted.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            setattr(module, name, frozen[id(parameter)][1])

    return scripted


def save_scripted(scripted: torch.jit.ScriptModule, path: str | Path) -> None:
    """Write a scripted model to a file atomically, with a digest that readers can check.

    `load_scripted` and the C++ loader check the digest; ``torch.jit.load`` can read the file, too,
    but does not.

    Args:
        scripted: The result of `script_model`.
        path: Path of the file, in an existing folder.

    Raises:
        FileNotFoundError: There is no such folder.
    """
    with digested_file(path) as draft, _without_deprecation():
        torch.jit.save(scripted, str(draft))


def load_scripted(
    path: str | Path, device: torch.device | str | None = None
) -> torch.jit.ScriptModule:
    """Load a scripted model, frozen, and the operators that it may call.

    The file is a program. Loading it runs no Python, but the model may call any torch operator,
    including those that read and write files. Load only files from sources that you trust.

    Args:
        path: A file by `save_scripted`, whose digest is checked, or by ``torch.jit.save``, which
            has none: damage may go unnoticed.
        device: Device of its tensors; by default as saved.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file is damaged, or is not a scripted model.
    """
    backend()  # loads fbgemm's operators, if fbgemm is installed
    check_digest(path)
    try:
        with _without_deprecation():
            scripted = torch.jit.load(
                str(path), map_location=None if device is None else torch.device(device)
            )
    except RuntimeError as error:
        raise ValueError(
            f"{str(path)!r} holds no scripted model; write it with save_scripted: {error}"
        ) from error

    for parameter in scripted.parameters():
        parameter.requires_grad_(False)
    return scripted


@contextmanager
def _without_deprecation() -> Iterator[None]:
    """Suppress torch's warnings about TorchScript and about its own class of traced modules."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r".torch\.jit\.\w+. is deprecated")
        warnings.filterwarnings(
            "ignore",
            message="The TorchScript type system doesn't support instance-level annotations",
        )
        yield
