"""Run what needs a GPU and write the results to book/data/gpu.json for book/status.md.

Three parts: the tests under tests/gpu, every chapter, and `python -m benchmarks gpu` case by
case, beside torchrec where it is installed. By default all of them; arguments name some. The file
is written after each part, and after each case of the benchmark, whatever fails. It keeps what it
holds of other parts if they ran on the same day with the same hardware and packages. The exit
status is 1 when a test or a chapter failed or a case of the benchmark did not end.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import CASES, gpus
from benchmarks.harness import machine
from tutorec._doctor import doctor

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "book/data/gpu.json"
PARTS = ("tests", "chapters", "bench")
# Where NCCL does not work, every test of a rank on each GPU fails, some of them by their timeout.
MOST_FAILURES = 20


def outcomes(junit: Path) -> dict[str, list[str]]:
    """Names of the tests that passed, were skipped and failed, of a file that pytest wrote."""
    found: dict[str, list[str]] = {"passed": [], "skipped": [], "failed": []}
    for case in ET.parse(junit).iter("testcase"):
        kinds = {child.tag for child in case}
        kind = (
            "failed"
            if kinds & {"failure", "error"}
            else "skipped"
            if "skipped" in kinds
            else "passed"
        )
        found[kind].append(case.get("name", ""))
    return found


def chapter_of(case: str) -> str:
    """The notebook that a test of nbmake is named after."""
    return Path(case).stem


def side_by_side(ranks: int) -> str:
    """How many tests or chapters run at once, at most eight; each may start so many ranks."""
    return str(max(1, min(8, (os.cpu_count() or 2) // (2 * ranks))))


def recorded(context: dict[str, Any]) -> dict[str, Any]:
    """What the file holds of other parts, if it is of today, this hardware and these packages."""

    def facts(run: dict[str, Any]) -> tuple[Any, ...]:
        hardware = {name: value for name, value in run["hardware"].items() if name != "load"}
        return run["date"][:10], run["versions"], hardware, run["backend"]

    run = json.loads(RESULT.read_text(encoding="utf-8")) if RESULT.exists() else None
    if run is None or facts(run) != facts(context):
        return dict(context)
    return run | context


def write(run: dict[str, Any]) -> None:
    """Write the file."""
    RESULT.parent.mkdir(parents=True, exist_ok=True)
    RESULT.write_text(json.dumps(run, indent=1) + "\n", encoding="utf-8")


def call(*words: str) -> int:
    """Run a command with this Python in the repository, print its output, return its status."""
    print(f"== {' '.join(words)}", flush=True)
    return subprocess.run([sys.executable, *words], cwd=ROOT, check=False).returncode


def pytest(*words: str) -> dict[str, list[str]]:
    """The outcomes of a run of pytest, which may fail."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "junit.xml"
        status = call("-m", "pytest", "-q", *words, f"--junitxml={path}")
        if path.exists():
            return outcomes(path)
    return {"passed": [], "skipped": [], "failed": [f"pytest (exit status {status}, no results)"]}


def run_tests(run: dict[str, Any]) -> None:
    """tests/gpu: counts, and names of failures."""
    ranks = max(1, torch.cuda.device_count())
    found = pytest("-n", side_by_side(ranks), f"--maxfail={MOST_FAILURES}", "tests/gpu")
    counts = {kind: len(names) for kind, names in found.items()}
    run["tests"] = {**counts, "failures": sorted(found["failed"])}


def run_chapters(run: dict[str, Any]) -> None:
    """Every notebook: names."""
    found = pytest("-n", side_by_side(1), "--nbmake", "--nbmake-timeout=300", "notebooks")
    run["chapters"] = {kind: sorted(map(chapter_of, names)) for kind, names in found.items()}


def run_bench(run: dict[str, Any]) -> None:
    """The benchmark: its rows without their samples, and the cases that did not end."""
    peer = ["--vs", "torchrec"] if find_spec("torchrec") else []
    bench = run["bench"] = {"settings": {}, "comparisons": [], "notes": [], "unfinished": []}
    for case in CASES:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "bench.json"
            call("-m", "benchmarks", "gpu", "--cases", case, *peer, "--json", str(path))
            report = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
        if report is None:
            bench["unfinished"].append(case)
        else:
            bench["settings"] = report["settings"]
            bench["comparisons"] += report["comparisons"]
            bench["notes"] += report["notes"]
        write(run)


def failed(run: dict[str, Any], parts: Sequence[str]) -> bool:
    """Whether something failed in these parts."""
    bad = {
        "tests": lambda part: part["failed"],
        "chapters": lambda part: part["failed"],
        "bench": lambda part: part["unfinished"],
    }
    return any(bad[name](run[name]) for name in parts)


def main(words: Sequence[str]) -> int:
    """Run the parts and write the file."""
    if unknown := [word for word in words if word not in PARTS]:
        print(f"make gpu: {unknown[0]!r} is not one of {', '.join(PARTS)}", file=sys.stderr)
        return 2
    if not torch.cuda.is_available():
        built = f"is built for CUDA {torch.version.cuda}" if torch.version.cuda else "has no CUDA"
        print(
            f"make gpu: torch {torch.__version__} {built} and finds no device (driver "
            f"{gpus()['driver']}); nothing was run",
            file=sys.stderr,
        )
        return 2
    context = machine(("torchrec",))
    context["hardware"] |= gpus()
    context["backend"] = doctor().reason
    run = recorded(context)
    parts = [part for part in PARTS if part in words or not words]
    for part in parts:
        {"tests": run_tests, "chapters": run_chapters, "bench": run_bench}[part](run)
        write(run)
    print(
        f"== written: {RESULT.relative_to(ROOT)}; commit it, and the page book/status.md shows it"
    )
    return int(failed(run, parts))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
