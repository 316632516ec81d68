"""The C++ loader: built against the installed torch, and run on a scripted model and a request.

``cpp/loader.cpp`` shows how a C++ server loads and calls a model. It is compiled once per version
of torch and of its source, in a folder of the user's; nothing is downloaded.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from tutorec._calibration import cache_folder
from tutorec._kernels.backend import operator_libraries
from tutorec.errors import BackendError
from tutorec.inference.serving import tensors_from_text, tensors_to_text

__all__ = ["build_loader", "missing_tools", "score_with_loader"]

SOURCE = Path(__file__).parent / "cpp"
_PROGRAM = "tutorec_loader"


def missing_tools() -> str | None:
    """The reason why the loader cannot be built, with a remedy; None if it can."""
    if sys.platform == "win32":
        return (
            "the C++ loader opens operator libraries as Linux and macOS do, and is not built on "
            "Windows"
        )

    absent = [] if shutil.which("cmake") else ["cmake"]
    if not any(map(shutil.which, [os.environ.get("CXX", "c++"), "c++", "g++", "clang++"])):
        absent.append("C++ compiler")
    if not absent:
        return None
    remedy = "apt install cmake g++, or conda install cmake cxx-compiler"
    return f"the C++ loader cannot be built here: no {' and no '.join(absent)}; {remedy}"


def build_loader(folder: str | Path | None = None) -> Path:
    """Path of the loader program; builds it if necessary, in about 20 s on one core.

    Args:
        folder: Folder of the build; by default one for this torch and this source in the user's
            cache, which is ``TUTOREC_CACHE``, else the system's folder for caches:
            ``~/.cache/tutorec`` on Linux.

    Raises:
        BackendError: cmake or a compiler is missing, the folder cannot be created, the folder or
            the program belongs to another user or is writable by others, or the build fails; the
            message ends with the tools' output.
    """
    try:
        folder = _default_folder() if folder is None else Path(folder)
        exists = folder.exists()
    except OSError as error:
        raise BackendError(_no_folder(error)) from error

    program = folder / _PROGRAM
    if exists:
        _check_own(folder)
    if program.is_file():
        _check_own(program)
        return program
    missing = missing_tools()
    if missing is not None:
        raise BackendError(missing)
    try:
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise BackendError(_no_folder(error)) from error

    # Built in a temporary folder and moved: two processes may build at once, and a build may be
    # interrupted.
    with TemporaryDirectory(dir=folder.parent, prefix="building_") as building:
        _run(["cmake", "-S", str(SOURCE), "-B", building, f"-DTORCH={Path(torch.__file__).parent}"])
        _run(["cmake", "--build", building])
        (Path(building) / _PROGRAM).chmod(0o700)
        folder.mkdir(mode=0o700, exist_ok=True)
        _check_own(folder)
        os.replace(Path(building) / _PROGRAM, program)

    return program


def _no_folder(error: OSError) -> str:
    return (
        f"the C++ loader's folder cannot be created: {error}; "
        "choose another, build_loader(folder), or set TUTOREC_CACHE"
    )


def score_with_loader(
    model: str | Path, request: Mapping[str, Tensor] | str | Path, loader: str | Path | None = None
) -> Tensor | tuple[Tensor, ...]:
    """Run a scripted model on one request in a process without Python.

    Args:
        model: File of a scripted model.
        request: Tensors by the names of the model's inputs, see `request_of`; or a file with their
            text.
        loader: The program; by default that of `build_loader`.

    Returns:
        The model's result, equal bit for bit to that in Python with the same number of threads.

    Raises:
        BackendError: The loader cannot be built.
        ValueError: The loader failed: a file is missing or damaged, or the request does not fit the
            model.
    """
    loader = build_loader() if loader is None else loader
    with TemporaryDirectory(prefix="tutorec_request_") as folder:
        if isinstance(request, Mapping):
            path = Path(folder) / "request.txt"
            path.write_text(tensors_to_text(request) + "\n")
            request = path

        # The order of summation depends on the number of threads.
        environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
        command = [str(loader), str(model), str(request), *operator_libraries()]
        process = subprocess.run(
            command,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            check=False,
            env=environment,
        )

    if process.returncode != 0:
        raise ValueError(
            process.stderr.strip()
            or f"the loader {str(loader)!r} ended with code {process.returncode}"
        )
    results = tuple(tensors_from_text(process.stdout).values())
    return results[0] if len(results) == 1 else results


def _default_folder() -> Path:
    """The default folder, for this torch, this C++ library ABI and this source."""
    build_inputs = [torch.__version__, torch.__file__, sys.platform]
    build_inputs += [path.read_text() for path in sorted(SOURCE.iterdir()) if path.is_file()]
    return cache_folder() / f"loader_{hashlib.sha256(repr(build_inputs).encode()).hexdigest()[:16]}"


def _check_own(path: Path) -> None:
    """Check that only this user can have written a program before it is run.

    Raises:
        BackendError: The file or folder belongs to another user, or is writable by others.
    """
    if not hasattr(os, "getuid"):
        return

    status = path.stat()
    if status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise BackendError(
            f"the C++ loader would be run from {path}, which belongs to user {status.st_uid} with "
            f"mode {stat.S_IMODE(status.st_mode):o}: only you, user {os.getuid()}, may be able to "
            "write there. Remove it or name another folder, build_loader(folder)"
        )


def _run(command: list[str]) -> None:
    """Run a build tool.

    Raises:
        BackendError: It fails.
    """
    process = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    if process.returncode != 0:
        raise BackendError(f"{' '.join(command)} failed:\n{process.stdout[-4000:]}")
