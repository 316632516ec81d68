"""Run every case in torchrec and store what it returned; run by `make parity`, in its own environment."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from parity.compare import differences, run  # noqa: E402  found through the line above

GOLDEN = HERE / "golden/cases.json"
FOR_THE_BOOK = HERE.parents[1] / "book/data/parity.json"


def main() -> None:
    versions = {name: importlib.metadata.version(name) for name in ("torchrec", "torch", "fbgemm-gpu-cpu")}
    theirs, ours = run("torchrec"), run("tutorec")
    failed = {
        name: result["error"] for name, result in theirs.items() if isinstance(result, dict) and "error" in result
    }
    if failed:
        raise SystemExit(f"torchrec failed on {failed}; nothing was written")
    date = datetime.datetime.now(tz=datetime.UTC).strftime("%Y-%m-%d")
    GOLDEN.parent.mkdir(parents=True, exist_ok=True)
    golden = {"versions": versions, "date": date, "cases": theirs}
    GOLDEN.write_text(json.dumps(golden, indent=None, sort_keys=True) + "\n", encoding="utf-8")
    found = {name: differences(name, theirs[name], ours.get(name)) or ["equal"] for name in theirs}
    FOR_THE_BOOK.parent.mkdir(parents=True, exist_ok=True)
    summary = {"versions": versions | {"tutorec": importlib.metadata.version("tutorec")}, "date": date, "cases": found}
    FOR_THE_BOOK.write_text(json.dumps(summary, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    for name, said in found.items():
        print(f"{name:34} {said[0]}" + (f" (and {len(said) - 1} more)" if len(said) > 1 else ""))


if __name__ == "__main__":
    main()
