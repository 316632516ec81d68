"""Importing this module, as ``tutorec.sparse`` does, loads fbgemm's operators where the backend has them.

So ``torch.ops.fbgemm.asynchronous_complete_cumsum`` is there after the first import of a jagged type or of a
collection, as after ``import torchrec``. It takes 12 ms; ``import tutorec`` alone loads nothing.
"""

from contextlib import suppress

from tutorec._kernels.backend import backend
from tutorec.errors import BackendError

# A backend that was demanded and cannot be had is named by the first operation, not by an import.
with suppress(BackendError, ValueError):
    backend()
