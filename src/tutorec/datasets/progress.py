"""A progress bar for work on files; silent unless it is wanted."""

from __future__ import annotations

import os
import sys
from typing import Any


class ProgressBar:
    """A bar on stderr: a context manager.

    Args:
        title: in front of the bar.
        total: units of the whole work.
        unit: what is counted; "B" is shown in powers of 1,000.
        wanted: show it; by default only on a terminal outside of CI.

    Example:
        >>> from tutorec.datasets.progress import ProgressBar
        >>> with ProgressBar("reading", total=10, wanted=False) as bar:
        ...     bar.at(10)
    """

    def __init__(self, title: str, total: int, unit: str = "B", wanted: bool | None = None) -> None:
        self._options = {"desc": title, "total": total, "unit": unit, "unit_scale": unit == "B"}
        self._wanted = (
            sys.stderr.isatty() and not os.environ.get("CI") if wanted is None else wanted
        )
        self._bar: Any = None

    def __enter__(self) -> ProgressBar:
        if self._wanted:
            from tqdm import tqdm  # only here: the import costs more than the library's own

            self._bar = tqdm(**self._options)
        return self

    def at(self, done: int) -> None:
        """Move the bar to ``done`` units."""
        if self._bar is not None:
            self._bar.update(done - self._bar.n)

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.close()
