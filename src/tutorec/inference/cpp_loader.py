"""The C++ loader: built here against the installed torch, and run on a scripted model and a request.

``cpp/loader.cpp`` is what a server written in C++ does with a model of ours. It is compiled once for each version of
torch and of the source, and kept in a folder of the user's; nothing is downloaded.
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
    """What is missing here to build the loader, with a remedy; None where nothing is."""
    if sys.platform == "win32":
        return "the C++ loader opens operator libraries as Linux and macOS do, and is not built on Windows"
    absent = [] if shutil.which("cmake") else ["cmake"]
    if not any(map(shutil.which, [os.environ.get("CXX", "c++"), "c++", "g++", "clang++"])):
        absent.append("C++ compiler")
    if not absent:
        return None
    remedy = "apt install cmake g++, or conda install cmake cxx-compiler"
    return f"the C++ loader cannot be built here: no {' and no '.join(absent)}; {remedy}"


def build_loader(folder: str | Path | None = None) -> Path:
    """The loader's program, built if it is not there yet: about twenty seconds on one core.

    Args:
        folder: Where it is built; by default one for this torch and this source in the user's cache, which is
            ``TUTOREC_CACHE``, else the system's folder for caches: ``~/.cache/tutorec`` on Linux.

    Raises:
        BackendError: cmake or a compiler is missing, the folder cannot be made, the folder or the program belongs to
            another user or can be written by others, or the build fails; the message ends in what the tools said.
    """
    folder = _default_folder() if folder is None else Path(folder)
    program = folder / _PROGRAM
    if folder.exists():
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
        raise BackendError(
            f"the C++ loader has no folder: {error}; name another, build_loader(folder), or set TUTOREC_CACHE"
        ) from error
    # Built beside its place and moved there whole: two processes may build at once, and one may be interrupted.
    with TemporaryDirectory(dir=folder.parent, prefix="building_") as building:
        _run(["cmake", "-S", str(SOURCE), "-B", building, f"-DTORCH={Path(torch.__file__).parent}"])
        _run(["cmake", "--build", building])
        (Path(building) / _PROGRAM).chmod(0o700)
        folder.mkdir(mode=0o700, exist_ok=True)
        _check_own(folder)
        os.replace(Path(building) / _PROGRAM, program)
    return program


def score_with_loader(
    model: str | Path, request: Mapping[str, Tensor] | str | Path, loader: str | Path | None = None
) -> Tensor | tuple[Tensor, ...]:
    """What a scripted model answers to one request in a process without Python.

    Args:
        model: File of a scripted model.
        request: Tensors by the names of the model's inputs, see `request_of`; or a file with their text.
        loader: The program; by default `build_loader` finds or builds it.

    Returns:
        What the model answers, equal bit for bit to what it answers here on as many threads.

    Raises:
        BackendError: The loader cannot be built.
        ValueError: The loader gave up: a file is missing or damaged, or the request does not fit the model.
    """
    loader = build_loader() if loader is None else loader
    with TemporaryDirectory(prefix="tutorec_request_") as folder:
        if isinstance(request, Mapping):
            path = Path(folder) / "request.txt"
            path.write_text(tensors_to_text(request) + "\n")
            request = path
        # The order of a sum depends on the number of threads.
        environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
        command = [str(loader), str(model), str(request), *operator_libraries()]
        ran = subprocess.run(
            command, capture_output=True, encoding="utf-8", errors="replace", check=False, env=environment
        )
    if ran.returncode != 0:
        raise ValueError(ran.stderr.strip() or f"the loader {str(loader)!r} ended with code {ran.returncode}")
    answers = tuple(tensors_from_text(ran.stdout).values())
    return answers[0] if len(answers) == 1 else answers


def _default_folder() -> Path:
    """A folder for this torch, this compiler's kind of library and this source."""
    facts = [torch.__version__, torch.__file__, sys.platform]
    facts += [path.read_text() for path in sorted(SOURCE.iterdir()) if path.is_file()]
    return cache_folder() / f"loader_{hashlib.sha256(repr(facts).encode()).hexdigest()[:16]}"


def _check_own(path: Path) -> None:
    """Check that nobody else can have written what is to be run.

    Raises:
        BackendError: The file or folder is another user's, or others may write to it.
    """
    if not hasattr(os, "getuid"):
        return
    status = path.stat()
    if status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise BackendError(
            f"the C++ loader would be run from {path}, which belongs to user {status.st_uid} with mode "
            f"{stat.S_IMODE(status.st_mode):o}: only you, user {os.getuid()}, may be able to write there. Remove it or "
            "name another folder, build_loader(folder)"
        )


def _run(command: list[str]) -> None:
    """Run a tool of the build.

    Raises:
        BackendError: It fails.
    """
    ran = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", check=False
    )
    if ran.returncode != 0:
        raise BackendError(f"{' '.join(command)} failed:\n{ran.stdout[-4000:]}")
