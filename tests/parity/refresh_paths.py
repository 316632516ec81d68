"""Set the lines of the manifest to `now` or `later` as the library is: python
tests/parity/refresh_paths.py
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from parity.test_paths import MANIFEST, entries, importable

if __name__ == "__main__":
    text = MANIFEST.read_text(encoding="utf-8")
    head = [line for line in text.splitlines() if line.startswith("#")]
    before = {name: when for when, name in entries(text)}
    marks = {
        name: "now" if importable(name, "tutorec") else before[name].replace("now", "later")
        for name in before
    }
    lines = [f"{marks[name]:5}  {name}" for name in sorted(marks)]
    MANIFEST.write_text("\n".join([*head, *lines]) + "\n", encoding="utf-8")
    print(f"{sum(line.startswith('now') for line in lines)} of {len(lines)} names are here")
