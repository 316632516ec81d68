"""Which kernels run here: fbgemm's or plain torch's, decided before anything of fbgemm is loaded.

Loading a wrong wheel leaves the process half-loaded, so the choice is made from package metadata
alone (``wheels.py``). Only then are the operator libraries loaded, by path and without fbgemm's
Python package, which costs half a second and is not needed on a CPU. Whatever goes wrong, ``import
tutorec`` works and :func:`backend` says why.

``TUTOREC_BACKEND`` = ``auto`` (default), ``torch`` or ``fbgemm``; a demanded fbgemm that cannot be
had is an error.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from typing import Any, cast

from tutorec._kernels.wheels import (
    ENV_VARIABLE,
    BackendChoice,
    BackendName,
    choose,
    refusal,
    reinstall_line,
)
from tutorec.errors import BackendError

__all__ = [
    "backend",
    "chosen",
    "fbgemm_module",
    "operator_libraries",
    "use_backend",
    "without_fbgemm_warnings",
]

# The libraries that hold the operators used here; those that they need are found through their
# RPATH.
_LIBRARIES = (
    "fbgemm_gpu_tbe_training_backward.so",
    "fbgemm_gpu_tbe_inference.so",
    "fbgemm_gpu_py.so",
)
# The operators, with the number of arguments that tutorec passes: another number means another
# fbgemm.
_OPERATORS = {
    "split_embedding_codegen_lookup_rowwise_adagrad_function_cpu": 25,
    "split_embedding_codegen_lookup_adagrad_function_cpu": 22,
    "split_embedding_codegen_lookup_sgd_function_cpu": 18,
    "dense_embedding_codegen_lookup_function": 20,
    "asynchronous_complete_cumsum": 1,
    "block_bucketize_sparse_features": 13,
    "jagged_to_padded_dense": 4,
    "bounds_check_indices": 13,
    "int_nbit_split_embedding_codegen_lookup_function": 23,
}


class Chosen:
    """What this process has chosen and loaded so far."""

    current: BackendChoice | None = None
    loaded: bool = False


chosen = Chosen()


def backend() -> BackendChoice:
    """The backend of this process: chosen and loaded at the first call, then remembered.

    Raises:
        BackendError: ``TUTOREC_BACKEND=fbgemm`` and fbgemm cannot be had.

    Example:
        >>> from tutorec._kernels.backend import backend
        >>> backend().name in ("fbgemm", "torch")
        True
    """
    if chosen.current is None:
        chosen.current = _load(
            choose(override=os.environ.get(ENV_VARIABLE)), os.environ.get(ENV_VARIABLE)
        )
    return chosen.current


@contextmanager
def use_backend(name: str) -> Iterator[BackendChoice]:
    """Use one backend inside a ``with`` block, for tests; operators built before keep their own.

    Args:
        name: ``"fbgemm"``, ``"torch"`` or ``"auto"``.

    Raises:
        BackendError: fbgemm is named and cannot be had.

    Example:
        >>> from tutorec._kernels.backend import backend, use_backend
        >>> with use_backend("torch"):
        ...     backend().name
        'torch'
    """
    before = chosen.current
    chosen.current = _load(choose(override=name), name)
    try:
        yield chosen.current
    finally:
        chosen.current = before


@contextmanager
def without_fbgemm_warnings() -> Iterator[None]:
    """Silence fbgemm's warnings of kernels that its wheel lacks and of its Adam at each call."""
    messages = r"[^F]*(Failed to import: fbgemm_gpu|\[FBGEMM_GPU\] NOTE: The training optimizer)"
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=messages)
        yield


def fbgemm_module(name: str) -> Any:
    """Import a module of fbgemm, which loads all its operators (0.5 s the first time).

    Args:
        name: With the package's.

    Raises:
        ImportError: There is no fbgemm.
    """
    backend()  # the shapes that are registered there come before fbgemm's
    # Each CUDA update says it once, on GPUs that are not B200s as well; it asks for nothing.
    warnings.filterwarnings("ignore", message="TBE B200 optimization", category=UserWarning)
    with without_fbgemm_warnings():
        return import_module(name)


def operator_libraries() -> list[str]:
    """Paths of the operator libraries that this process loaded, in order; none with torch.

    Another program that is to run a saved model loads them first.

    Example:
        >>> from tutorec._kernels.backend import operator_libraries, use_backend
        >>> with use_backend("torch"):
        ...     operator_libraries()
        []
    """
    if backend().name != "fbgemm":
        return []
    folder = _library_folder()
    return [os.path.join(folder, library) for library in _LIBRARIES]


def _load(choice: BackendChoice, override: str | None) -> BackendChoice:
    """Load the operator libraries of a choice; where that fails, fall back to torch and say why."""
    if choice.name != "fbgemm" or chosen.loaded:
        return choice
    try:
        _load_libraries()
    except (OSError, ImportError, RuntimeError) as error:
        text = str(error).strip()
        reason = (
            f"{choice.pair}, but its libraries do not load: "
            f"{text.splitlines()[0] if text else type(error).__name__}"
        )
        remedy = reinstall_line(choice.versions)
        fallen = replace(
            choice, name=cast(BackendName, "torch"), reason=reason, remedy=remedy, broken=True
        )
        if (override or "").strip().lower() == "fbgemm":
            raise BackendError(refusal(fallen)) from error
        return fallen
    chosen.loaded = True
    return choice


def _library_folder() -> str:
    from importlib.util import find_spec

    spec = find_spec("fbgemm_gpu")  # finds the folder, runs nothing
    if spec is None or spec.origin is None:
        raise ImportError(
            "the package folder 'fbgemm_gpu' is missing although its metadata is there: "
            "install it again"
        )
    return os.path.dirname(spec.origin)


def _load_libraries() -> None:
    """Load fbgemm's operators by path; fbgemm's own Python package can still be imported later."""
    import torch

    from tutorec._kernels.operator_shapes import register_shapes

    folder = _library_folder()
    for library in _LIBRARIES:
        torch.ops.load_library(os.path.join(folder, library))
    for name, expected in _OPERATORS.items():
        if not hasattr(torch.ops.fbgemm, name):
            raise ImportError(f"operator fbgemm::{name} is not in {' or '.join(_LIBRARIES)}")
        takes = len(getattr(torch.ops.fbgemm, name).default._schema.arguments)
        if takes != expected:
            raise ImportError(
                f"operator fbgemm::{name} takes {takes} arguments, and tutorec passes {expected}"
            )
    register_shapes()
