"""Run unit tests and chapters on other versions of torch; write book/data/versions.json.

By default on the oldest torch that pyproject promises, the pinned one, the newest that an fbgemm
wheel serves, and the newest that there is. Each has an environment of its own,
`.venv-versions/<version>`: requirements.txt with another torch, the fbgemm wheel that belongs to it
(none where there is none), and tensordict where it takes that torch. A file that is there keeps
what this run does not repeat. Run it with the project's environment: `make versions`.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

from gpu import chapter_of, outcomes

from tutorec._kernels.wheels import _SERVED_MINORS, _fitting_minor, _torch_of

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "book/data/versions.json"
ENVIRONMENTS = ROOT / ".venv-versions"
CHAPTERS = ["--nbmake", "--nbmake-timeout=300", "notebooks"]
UNITS = ["tests", "--dist", "worksteal", "-m", "not html and not live and not full and not soak"]
RUNS = ("units", "chapters", "chapters_torch")
FACTS = """
import json, platform, torch
from tutorec._kernels.backend import backend
choice = backend()
facts = {"python": platform.python_version(), "torch": torch.__version__}
print(json.dumps(facts | {"backend": choice.name, "kernels": choice.reason}))
"""


def promised_floor() -> str:
    """The oldest torch that pyproject promises, for example 2.6."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return next(
        one.removeprefix("torch>=") for one in project["dependencies"] if one.startswith("torch>=")
    )


def pinned() -> str:
    """The torch of requirements.txt, for example 2.13."""
    match = re.search(
        r"^torch==(\d+\.\d+)", (ROOT / "requirements.txt").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert match is not None, "requirements.txt pins torch"
    return match[1]


def newest() -> str:
    """The newest torch that pip finds, for example 2.15."""
    command = [sys.executable, "-m", "pip", "index", "versions", "torch"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    match = re.search(r"Available versions: (\d+\.\d+)", listed)
    assert match is not None, f"pip index versions torch said: {listed[:200]}"
    return match[1]


def requirements(torch: str) -> str:
    """Requirements for pip: another torch, and the fbgemm wheel that belongs to it."""
    lines = [
        line
        for line in (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
        if line
    ]
    dropped = ("torch==", "fbgemm-gpu-cpu==", "tensordict==", "#", "-e")
    kept = [line for line in lines if not line.startswith(dropped)]
    fitting = _fitting_minor(f"{torch}.0")
    kept += [f"torch=={torch}.*", f"-e {ROOT}"]
    if fitting in _SERVED_MINORS:
        kept.append(f"fbgemm-gpu-cpu==1.{fitting}.*")
    # The pinned tensordict needs torch 2.11; for an older torch pip takes an older one.
    if tuple(map(int, torch.split("."))) >= (2, 11):
        kept += [line for line in lines if line.startswith("tensordict==")]
    else:
        kept.append("tensordict")
    return "\n".join(kept) + "\n"


def environment(torch: str) -> Path:
    """The Python of this torch's environment, which is made or updated when it is stale."""
    folder = ENVIRONMENTS / torch
    python, stamp, wanted = folder / "bin/python", folder / ".complete", requirements(torch)
    digest = hashlib.sha256(wanted.encode()).hexdigest()
    if not stamp.exists() or stamp.read_text() != digest:
        print(
            (
                f"== {folder.relative_to(ROOT)}: torch {torch} (several gigabytes where its wheel "
                "is a CUDA build)"
            ),
            flush=True,
        )
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        (folder / "requirements.txt").write_text(wanted, encoding="utf-8")
        subprocess.run(
            [python, "-m", "pip", "install", "-qq", "-r", folder / "requirements.txt"], check=True
        )
        stamp.write_text(digest)
    return python


def run(python: Path, kind: str, arguments: list[str]) -> dict[str, Any]:
    """Counts of one run of pytest, failures by name, and the day."""
    variables = {**os.environ, "OMP_NUM_THREADS": "1"} | (
        {"TUTOREC_BACKEND": "torch"} if kind == "chapters_torch" else {}
    )
    with tempfile.TemporaryDirectory() as folder:
        junit = Path(folder) / "junit.xml"
        command = [
            python,
            "-m",
            "pytest",
            "-q",
            *arguments,
            "-p",
            "no:cacheprovider",
            f"--junitxml={junit}",
        ]
        subprocess.run(command, cwd=ROOT, env=variables, check=False)
        if not junit.exists():
            raise SystemExit(
                f"make versions: pytest of {python} wrote no results for {kind}; nothing was "
                "recorded"
            )
        named = outcomes(junit)
    failed = sorted(chapter_of(name) if kind != "units" else name for name in named["failed"])
    counts = {name: len(cases) for name, cases in named.items()}
    return {
        "date": f"{datetime.datetime.now(tz=datetime.UTC):%Y-%m-%d}",
        **counts,
        "failures": failed,
    }


def main(words: list[str]) -> int:
    """Run what is asked for; the exit status is 1 when something failed."""
    parser = argparse.ArgumentParser(
        prog="make versions", description=(__doc__ or "").splitlines()[0]
    )
    served = _torch_of(_SERVED_MINORS[-1]).removeprefix("torch ")
    parser.add_argument(
        "torch",
        nargs="*",
        help=(
            f"2.15, oldest, pinned or newest; by default {promised_floor()}, {pinned()}, {served} "
            "and newest"
        ),
    )
    parser.add_argument(
        "--run", nargs="+", choices=RUNS, default=RUNS, help="by default all of them"
    )
    parser.add_argument("--jobs", default="2", help="processes of the unit tests")
    options = parser.parse_args(words)
    recorded = json.loads(RESULT.read_text(encoding="utf-8")) if RESULT.exists() else {}
    failed = False
    words_for = {"oldest": promised_floor, "pinned": pinned, "newest": newest}
    asked = [words_for[word]() if word in words_for else word for word in options.torch]
    for torch in dict.fromkeys(asked or [promised_floor(), pinned(), served, newest()]):
        python = environment(torch)
        facts = json.loads(subprocess.check_output([python, "-c", FACTS], cwd=ROOT, text=True))
        entry = recorded.setdefault(torch, {}) | facts
        for kind in options.run:
            if (
                kind == "chapters_torch"
                and facts["backend"] == "torch"
                and "chapters" in options.run
            ):
                continue  # the same run
            print(f"== torch {torch}: {kind}", flush=True)
            entry[kind] = run(
                python, kind, [*UNITS, "-n", options.jobs] if kind == "units" else CHAPTERS
            )
            failed |= bool(entry[kind]["failed"])
        recorded[torch] = entry
        ordered = sorted(recorded.items(), key=lambda item: tuple(map(int, item[0].split("."))))
        RESULT.write_text(json.dumps(dict(ordered), indent=1) + "\n", encoding="utf-8")
    print(
        f"== written: {RESULT.relative_to(ROOT)}; commit it, and the page book/status.md shows it"
    )
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
