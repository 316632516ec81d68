"""The last moments of a process whose group is still there: time for torch's threads to let go of tensors.

A thread of gloo that has ended a collective drops the tensors of it a moment later, and needs the interpreter for that.
If Python is going just then, the thread is ended in a place that C++ does not allow, and the process aborts with
"terminate called without an active exception": on a busy machine two in a hundred scripts whose last step is a
collective, whatever they trained before. ``destroy_process_group`` does not help where a model still holds the group.
"""

from __future__ import annotations

import atexit
import time
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch.distributed

__all__ = ["give_threads_time"]

_SECONDS = 0.05
_groups: weakref.WeakSet[torch.distributed.ProcessGroup] = weakref.WeakSet()


def give_threads_time(group: torch.distributed.ProcessGroup) -> None:
    """Wait a moment at the end of this process if the group is still there, with the interpreter free for others."""
    _groups.add(group)


@atexit.register
def _wait() -> None:
    if _groups:
        time.sleep(_SECONDS)
