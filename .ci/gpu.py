"""Run what needs a GPU and write the results to book/data/gpu.json for book/status.md.

Tests under tests/gpu, every chapter, then `python -m tutorec bench gpu`, beside torchrec where it
is installed. The file is written whatever fails; the exit status is 1 when a test or a chapter
failed or the benchmark did not end.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from tutorec._doctor import doctor
from tutorec.bench.gpu import gpus
from tutorec.bench.harness import machine

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "book/data/gpu.json"
# Eight at once at most: each chapter and each test starts ranks of its own.
PYTEST = ("-m", "pytest", "-q", "-n", str(max(1, min(8, (os.cpu_count() or 2) // 2))))
TESTS = (*PYTEST, "tests/gpu")
CHAPTERS = (*PYTEST, "--nbmake", "--nbmake-timeout=300", "notebooks")


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


def summary(
    tests: dict[str, list[str]],
    chapters: dict[str, list[str]],
    bench: dict[str, Any] | None,
    context: dict[str, Any],
) -> dict[str, Any]:
    """The JSON: counts, names of failures, rows of the benchmark without their samples."""
    kept = ("settings", "comparisons", "notes")
    return {
        **context,
        "tests": {kind: len(names) for kind, names in tests.items()}
        | {"failures": sorted(tests["failed"])},
        "chapters": {kind: sorted(map(chapter_of, names)) for kind, names in chapters.items()},
        "bench": None if bench is None else {name: bench[name] for name in kept},
    }


def call(*words: str) -> int:
    """Run a command with this Python in the repository, print its output, return its status."""
    print(f"== {' '.join(words)}", flush=True)
    return subprocess.run([sys.executable, *words], cwd=ROOT, check=False).returncode


def junit_of(words: tuple[str, ...], path: Path) -> dict[str, list[str]]:
    """The outcomes of a run of pytest, which may fail."""
    call(*words, f"--junitxml={path}")
    if not path.exists():
        raise SystemExit(f"make gpu: {' '.join(words)} wrote no results; nothing was recorded")
    return outcomes(path)


def main() -> int:
    """Run everything and write the file."""
    if not torch.cuda.is_available():
        print(
            f"make gpu: torch {torch.__version__} finds no CUDA device; nothing was run",
            file=sys.stderr,
        )
        return 2
    context = machine(("torchrec",))
    context["hardware"] |= gpus()
    context["backend"] = doctor().reason
    with tempfile.TemporaryDirectory() as folder:
        tests = junit_of(TESTS, Path(folder) / "tests.xml")
        chapters = junit_of(CHAPTERS, Path(folder) / "chapters.xml")
        path = Path(folder) / "bench.json"
        peer = ["--vs", "torchrec"] if find_spec("torchrec") else []
        call("-m", "tutorec", "bench", "gpu", *peer, "--json", str(path))
        bench = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
    RESULT.write_text(
        json.dumps(summary(tests, chapters, bench, context), indent=1) + "\n", encoding="utf-8"
    )
    print(
        f"== written: {RESULT.relative_to(ROOT)}; commit it, and the page book/status.md shows it"
    )
    return int(bool(tests["failed"] or chapters["failed"] or bench is None))


if __name__ == "__main__":
    raise SystemExit(main())
