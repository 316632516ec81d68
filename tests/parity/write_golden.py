"""Run every case in both libraries and store what came out; run by `make parity`, in its own
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
sys.path[:0] = [str(HERE.parent), str(HERE)]
import cases  # noqa: E402  found through the line above
from parity.compare import CASES, RANK_CASES, differences, distance, run  # noqa: E402
from parity.moved_script import SCRIPTS, digest, printed, project  # noqa: E402
from parity.names import used_names  # noqa: E402

from tutorec._calibration import processor_name  # noqa: E402

# The script that runs the cases -> what torchrec returned.
GOLDEN = {CASES: HERE / "golden/cases.json", RANK_CASES: HERE / "golden/ranks.json"}
ANSWERS = HERE / "answer.py"
FOR_THE_BOOK = HERE.parents[1] / "src/tutorec/teach/data/parity.json"
LIBRARIES = ("torchrec", "tutorec")
# Module of the cases -> what chapter 20 calls them.
GROUPS = {
    "jagged_cases": "jagged batches",
    "module_cases": "unsharded collections",
    "model_cases": "models",
    "metric_cases": "metrics",
    "optimizer_cases": "optimizers",
    "quant_cases": "quantized collections",
    "sharded_cases": "plans and steps, one rank",
}
OF_RANKS = "sharded training, two ranks"


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


def compared(script: Path, theirs: dict[str, Any]) -> dict[str, Any]:
    """Case to its group, its count of numbers, how many of them are equal, and the largest
    difference, by backend.
    """
    found = {
        name: {"group": GROUPS[cases.CASES[name].__module__] if script == CASES else OF_RANKS}
        for name in theirs
    }
    for backend in ("fbgemm", "torch"):
        ours = run("tutorec", script, TUTOREC_BACKEND=backend)
        for name, result in theirs.items():
            if wrong := differences(name, result, ours.get(name)):
                raise SystemExit(
                    f"tutorec differs on {backend}; nothing was written for the book: {wrong[0]}"
                )
            count, equal, apart = distance(result, ours[name])
            found[name] |= {"numbers": count, backend: [equal, apart]}
    return found


def runs(date: str) -> dict[str, Any]:
    """What the scripts of chapter 20 print in each library, and on which day and processor."""
    lines = {root: printed(root) for root in LIBRARIES}
    by_script = {name: {root: lines[root][name] for root in LIBRARIES} for name in SCRIPTS}
    cpu = processor_name()
    return {"sha256": digest(project()), "date": date, "cpu": cpu, "printed": by_script}


def main() -> None:
    packages = (*LIBRARIES, "torch", "fbgemm-gpu-cpu")
    versions = {name: importlib.metadata.version(name) for name in packages}
    theirs = {script: run("torchrec", script) for script in GOLDEN}
    failed = [failure for results in theirs.values() for failure in errors(results)]
    if failed:
        raise SystemExit(f"torchrec failed on {failed}; nothing was written")
    date = datetime.datetime.now(tz=datetime.UTC).strftime("%Y-%m-%d")
    for script, path in GOLDEN.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        of_peer = {name: version for name, version in versions.items() if name != "tutorec"}
        golden = {"versions": of_peer, "date": date, "cases": theirs[script]}
        path.write_text(json.dumps(golden, indent=None, sort_keys=True) + "\n", encoding="utf-8")
    of_cases = {}
    for script in GOLDEN:
        of_cases |= compared(script, theirs[script])
    answered = {root: run(root, ANSWERS) for root in LIBRARIES}
    summary = {
        "versions": versions,
        "date": date,
        "cases": of_cases,
        "runs": runs(date),
        "answers": {
            question: {root: answered[root][question] for root in LIBRARIES}
            for question in answered["torchrec"]
        },
        "names": used_names(),
    }
    FOR_THE_BOOK.parent.mkdir(parents=True, exist_ok=True)
    FOR_THE_BOOK.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    for name, case in of_cases.items():
        equal, apart = case["fbgemm"]
        print(
            f"{name:40} {equal} of {case['numbers']} numbers equal, the others within {apart:.1e}"
        )


if __name__ == "__main__":
    main()
