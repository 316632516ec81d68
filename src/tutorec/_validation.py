"""The switch for the checks of ids and lengths: on by default, one value per process.

The checks cost a few passes over integers, which is little compared with a lookup that reads a
whole row for each of them. Whoever has measured otherwise switches them off with
``tutorec.validation(False)`` or ``TUTOREC_VALIDATE=0``.
"""

import os
from contextlib import AbstractContextManager, ExitStack

_OFF = frozenset({"0", "false", "no", "off"})
_enabled: bool = os.environ.get("TUTOREC_VALIDATE", "1").strip().lower() not in _OFF


def validation_enabled() -> bool:
    """Whether ids and lengths are checked in this process."""
    return _enabled


def validation(on: bool) -> AbstractContextManager[object, None]:
    """Switch the checks of ids and lengths on or off in this process.

    The call itself switches; used in a ``with`` statement it switches back at the end. Ranks
    inherit the value that holds when their pool starts.

    Args:
        on: True to check (the default of a new process), False to trust the data: a lookup may then
            read, and an update write, whatever memory a bad id points to.

    Returns:
        A context manager that restores the value from before the call.

    Example:
        >>> with validation(False):
        ...     validation_enabled()
        False
        >>> validation_enabled()
        True
    """
    global _enabled
    restore = ExitStack[None]()
    restore.callback(validation, _enabled)
    _enabled = bool(on)
    return restore
