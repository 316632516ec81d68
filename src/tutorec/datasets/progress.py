"""A progress bar for work on files; silent unless it is requested."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any


def progress_bar(title: str, shown: bool | None = None, **options: Any) -> Any:
    """A bar on stderr, a ``tqdm``: a context manager with ``update``, or around an iterable.

    Args:
        title: in front of the bar.
        shown: show it; by default only on a terminal outside CI.
        options: those of ``tqdm``: iterable, total, unit.

    Example:
        >>> from tutorec.datasets.progress import progress_bar
        >>> [part for part in progress_bar("reading", iterable=[3, 1], shown=False)]
        [3, 1]
    """
    from tqdm import tqdm  # only here: the import costs more than the library's own

    if shown is None:
        shown = sys.stderr.isatty() and not os.environ.get("CI")
    return tqdm(desc=title, disable=not shown, **options)


def byte_bar(title: str, *paths: Path, shown: bool | None = None) -> Any:
    """A bar over the bytes of files."""
    size = sum(path.stat().st_size for path in paths)
    return progress_bar(title, shown, total=size, unit="B", unit_scale=True)
