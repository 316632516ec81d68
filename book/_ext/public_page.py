"""Reading of the page of public names, for the API pages and for `tests/policy/test_public.py`."""

from __future__ import annotations

import re

PAGE = "book/api/public.md"
_ROW = re.compile(r"^\| `([\w.]+)` \| [^|]+ \| ([^|]+) \|$", re.MULTILINE)


def public_names(text: str) -> set[str]:
    """Dotted names of the tables of the page."""
    names = set()
    for path, cell in _ROW.findall(text):
        module = path if path == "tutorec" else f"tutorec.{path}"
        names |= {f"{module}.{name}" for name in re.findall(r"`(\w+)`", cell)}
    return names
