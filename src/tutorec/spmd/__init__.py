"""N processes from a notebook cell or a test: one function, one group, one value each.

SPMD, *single program, multiple data*, is how distributed PyTorch runs: W processes, the *ranks*,
execute one function, each on its own part of the data, and meet in collectives. Usually
``torchrun`` starts them. :class:`Ranks` starts them from where you are, keeps them between calls,
and brings back what they return.

What a rank prints goes to the standard output of the process that started it, and is lost where
that is not shown (under pytest and nbmake, for example): return what you want to see.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tutorec._lazy import lazy_package

if TYPE_CHECKING:
    from tutorec.spmd.held import held_bytes
    from tutorec.spmd.once import run_ranks
    from tutorec.spmd.pool import Ranks
    from tutorec.spmd.rank import device
    from tutorec.spmd.worker import Kept, init

_DEFINED_IN = {
    "Kept": ".worker",
    "Ranks": ".pool",
    "device": ".rank",
    "held_bytes": ".held",
    "init": ".worker",
    "run_ranks": ".once",
}

__all__ = ["Kept", "Ranks", "device", "held_bytes", "init", "run_ranks"]

__getattr__, __dir__ = lazy_package(__name__, _DEFINED_IN)
