"""The library under measurement, by name: a case is written once and runs in both."""

from __future__ import annotations

import gc
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from tutorec.bench.harness import Sample, time_call

OURS = "tutorec"


@dataclass(frozen=True)
class Library:
    """Names of a library by path below its root; both libraries have the same paths.

    Example:
        >>> from tutorec.bench.peer import Library
        >>> Library("tutorec").get("sparse.jagged_tensor.KeyedJaggedTensor").__name__
        'KeyedJaggedTensor'
    """

    root: str

    def get(self, path: str) -> Any:
        """What ``root.path`` is; the last part of the path is a name in a module.

        Raises:
            ImportError: no such module.
            AttributeError: the module lacks the name.
        """
        module, _, name = path.rpartition(".")
        return getattr(self.module(module), name)

    def module(self, path: str) -> Any:
        """The module ``root.path``, even where a package has a function of that name."""
        with warnings.catch_warnings():
            # what a peer warns of at its import concerns nobody here
            warnings.simplefilter("ignore")
            import_module(f"{self.root}.{path}")
        return sys.modules[f"{self.root}.{path}"]


def libraries(peer: str | None) -> list[Library]:
    """Ours, and the peer when one is named.

    Raises:
        ValueError: the peer is not installed for this Python.
    """
    if peer is None:
        return [Library(OURS)]
    if find_spec(peer) is None:
        version = sys.version.split()[0]
        raise ValueError(
            f"--vs {peer}: no such package for Python {version}; install it beside {OURS}, or "
            "leave --vs out"
        )
    return [Library(OURS), Library(peer)]


def chosen(known: Sequence[str], wanted: Sequence[str] | None, option: str) -> list[str]:
    """The names asked for, in the order known; all when none was asked for.

    Raises:
        ValueError: a name is not known; the message lists those that are.

    Example:
        >>> from tutorec.bench.peer import chosen
        >>> chosen(["tiny", "mid", "large"], ["mid", "tiny"], "--sizes")
        ['tiny', 'mid']
    """
    unknown = sorted(set(wanted or ()) - set(known))
    if unknown:
        raise ValueError(f"{option} {','.join(unknown)}: there are {', '.join(known)}")
    return [name for name in known if wanted is None or name in wanted]


def finish(result: Tensor) -> None:
    """Wait until a result's device has finished, and read the result's last number.

    Args:
        result: any tensor but an empty one; on the CPU it is there already.
    """
    float(result.detach().flatten()[-1])
    if result.is_cuda:
        torch.cuda.synchronize(result.device)


def time_each(call: Callable[[Any], object], fresh: Sequence[Any]) -> Sample:
    """Mean CPU and wall seconds of a call over objects that were made before the clock started.

    Python's cyclic collector rests meanwhile: it would charge one variant for the garbage of
    another.

    Args:
        call: what is measured.
        fresh: one argument for each call; nothing has looked at any of them.

    Returns:
        Seconds of one call.
    """

    def all_of_them() -> None:
        for one in fresh:
            call(one)

    gc.disable()
    try:
        sample = time_call(all_of_them)
    finally:
        gc.enable()
    return Sample(sample.cpu / len(fresh), sample.wall / len(fresh))
