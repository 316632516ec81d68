"""Run every case in torchrec and store what it returned; run by `make parity`, in its own
environment.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from parity.compare import CASES, RANK_CASES, differences, run  # noqa: E402  found through the line above

# The script that runs the cases -> what torchrec returned.
GOLDEN = {CASES: HERE / "golden/cases.json", RANK_CASES: HERE / "golden/ranks.json"}
FOR_THE_BOOK = HERE.parents[1] / "book/data/parity.json"


def errors(results: dict[str, Any]) -> list[str]:
    """Cases that ended in an error; of several ranks on any of them."""
    found = []
    for name, result in results.items():
        of_ranks = result if isinstance(result, list) else [result]
        found += [
            f"{name}: {part['error']}"
            for part in of_ranks
            if isinstance(part, dict) and "error" in part
        ]
    return found


def main() -> None:
    versions = {
        name: importlib.metadata.version(name) for name in ("torchrec", "torch", "fbgemm-gpu-cpu")
    }
    theirs = {script: run("torchrec", script) for script in GOLDEN}
    failed = [failure for results in theirs.values() for failure in errors(results)]
    if failed:
        raise SystemExit(f"torchrec failed on {failed}; nothing was written")
    date = datetime.datetime.now(tz=datetime.UTC).strftime("%Y-%m-%d")
    found = {}
    for script, path in GOLDEN.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        golden = {"versions": versions, "date": date, "cases": theirs[script]}
        path.write_text(json.dumps(golden, indent=None, sort_keys=True) + "\n", encoding="utf-8")
        ours = run("tutorec", script)
        found |= {
            name: differences(name, result, ours.get(name)) or ["equal"]
            for name, result in theirs[script].items()
        }
    FOR_THE_BOOK.parent.mkdir(parents=True, exist_ok=True)
    summary = {
        "versions": versions | {"tutorec": importlib.metadata.version("tutorec")},
        "date": date,
        "cases": found,
    }
    FOR_THE_BOOK.write_text(json.dumps(summary, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    for name, said in found.items():
        print(f"{name:34} {said[0]}" + (f" (and {len(said) - 1} more)" if len(said) > 1 else ""))


if __name__ == "__main__":
    main()
