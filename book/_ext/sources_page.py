"""Write book/sources.md from tests/book/sources.yml: which cell shows which printed result of the documents.

`python book/_ext/sources_page.py` writes the page; with `--check` it only says whether the page is current.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
YML = ROOT / "tests/book/sources.yml"
PAGE = ROOT / "book/sources.md"


def main() -> int:
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
