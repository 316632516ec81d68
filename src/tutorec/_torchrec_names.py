"""Replacements for the names that TorchRec has and tutorec does not.

The table is ``_torchrec_names.toml``. The lazy packages, ``tutorec migrate`` and the book read it.
"""

from __future__ import annotations

import tomllib
from functools import cache
from pathlib import Path

__all__ = ["absent_names", "instead_of"]


@cache
def absent_names() -> dict[str, str]:
    """Dotted name below the root -> its replacement; a module covers all names in it."""
    text = Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
    remedies: dict[str, str] = {}
    for block in tomllib.loads(text)["absent"]:
        for name in block["names"]:
            remedies[name] = block["instead"]

    return remedies


def instead_of(name: str) -> str | None:
    """The replacement for a name of TorchRec; None if the table does not have it.

    Args:
        name: With dots, below the root.

    Example:
        >>> instead_of("pt2.checks.is_pt2_compiling") == instead_of("pt2")
        True
        >>> instead_of("modules.no_such_module") is None
        True
    """
    remedies = absent_names()
    while name and name not in remedies:
        name = name.rpartition(".")[0]

    return remedies.get(name)
