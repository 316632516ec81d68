"""Set every line of the manifest to `now` or `later` as the library is: python tests/parity/refresh_paths.py"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from parity.test_paths import MANIFEST, entries, importable

if __name__ == "__main__":
    text = MANIFEST.read_text(encoding="utf-8")
    head = [line for line in text.splitlines() if line.startswith("#")]
    names = sorted({name for _, name in entries(text)})
    lines = [f"{'now  ' if importable(name, 'tutorec') else 'later'}  {name}" for name in names]
    MANIFEST.write_text("\n".join([*head, *lines]) + "\n", encoding="utf-8")
    print(f"{sum(line.startswith('now') for line in lines)} of {len(lines)} names are here")
