"""What `make` would do for a chapter or a page that is named in one of several ways; `make gpu` and
what it writes.
"""

from __future__ import annotations

import json
import os
import runpy
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="there is no make here")


def made(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    # As from a shell: tests run under `make test` too, whose settings a make inside would take
    # over.
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))
    }
    environment |= variables
    return subprocess.run(
        ["make", *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    ("name", "notebooks"),
    [
        ("05", ["05_first_training"]),
        ("page_two_tower", ["page_two_tower"]),
        ("page_two_tower.ipynb", ["page_two_tower"]),
        ("notebooks/11_optimizers.ipynb", ["11_optimizers"]),
        ("page", ["page_equivalence", "page_sharding_demo", "page_two_tower"]),
    ],
)
def test_a_notebook_may_be_named_by_number_or_by_name(name: str, notebooks: list[str]) -> None:
    found = made("-n", "nb", f"NB={name}").stdout.splitlines()[-1].split()
    paths = [word for word in found if word.endswith(".ipynb")]
    assert paths == [f"notebooks/{each}.ipynb" for each in notebooks]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "which chapter? make nb NB=05"),
        (["NB=99"], "no notebooks/99_*.ipynb and no notebooks/99.ipynb; there are"),
    ],
)
def test_a_notebook_that_is_not_there_is_said(arguments: list[str], said: str) -> None:
    done = made("-o", "venv", "nb", *arguments)
    assert done.returncode == 2 and said in done.stderr


@pytest.mark.parametrize("answer", ["echo No devices were found; exit 6", "exit 127"])
def test_make_gpu_stops_with_one_line_where_there_is_no_gpu(answer: str, tmp_path: Path) -> None:
    command = tmp_path / "nvidia-smi"
    command.write_text(f"#!/bin/sh\n{answer}\n")
    command.chmod(0o755)
    done = made("gpu", PATH=f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    line, *others = done.stderr.splitlines()
    assert (
        line == "make gpu: there is no NVIDIA GPU here (nvidia-smi -L lists none); nothing was run"
    )
    assert (
        done.returncode == 2
        and not done.stdout
        and all(other.startswith("make:") for other in others)
    )


_JUNIT = """<testsuites><testsuite>
<testcase name="one[1-nccl]"/>
<testcase name="two"><skipped message="needs 2 GPUs"/></testcase>
<testcase name="three"><failure message="no"/></testcase>
<testcase name="four"><error message="no"/></testcase>
</testsuite></testsuites>"""


def test_what_make_gpu_writes_is_what_the_status_page_shows(tmp_path: Path) -> None:
    script, page = (
        runpy.run_path(str(ROOT / ".ci/gpu.py")),
        runpy.run_path(str(ROOT / "book/_ext/tables.py")),
    )
    (tmp_path / "tests.xml").write_text(_JUNIT)
    tests = script["outcomes"](tmp_path / "tests.xml")
    assert tests == {"passed": ["one[1-nccl]"], "skipped": ["two"], "failed": ["three", "four"]}
    chapters = {
        "passed": ["05_first.ipynb", "04_ranks.ipynb"],
        "skipped": [],
        "failed": ["09_planner.ipynb"],
    }
    ratio = {
        "title": "forward: peer / tutorec",
        "ratio": {"median": 1.5, "low": 1.25, "high": 1.75, "rounds": 30},
    }
    bench = {
        "settings": {},
        "comparisons": [ratio],
        "notes": ["forward: 5 GB/s"],
        "samples": {"not": "kept"},
    }
    hardware = {"gpus": ["A", "B"], "driver": "570.1", "cuda": "13.0"}
    context = {
        "date": "2026-01-02",
        "versions": {"torch": "2.13.0"},
        "hardware": hardware,
        "backend": "a wheel fits",
    }
    written = json.loads(json.dumps(script["summary"](tests, chapters, bench, context)))
    assert page["gpu_rows"](written) == [
        ("run on (UTC)", "2026-01-02"),
        ("GPUs", "A, B"),
        ("driver, CUDA", "570.1, 13.0"),
        ("packages", "torch 2.13.0"),
        ("kernels", "a wheel fits"),
        ("tests", "1 passed, 1 skipped, 2 failed: `four`, `three`"),
        ("chapters", "2 passed, 0 skipped, 1 failed: `09_planner`"),
        ("`bench gpu`, forward: peer / tutorec", "1.50 [1.25, 1.75]"),
        ("`bench gpu`", "forward: 5 GB/s"),
    ]
    unfinished = script["summary"](tests, chapters, None, context)
    assert page["gpu_rows"](unfinished)[-1] == ("benchmark", "did not end")


def test_the_status_page_says_that_no_whole_run_is_recorded_until_one_is() -> None:
    page = runpy.run_path(str(ROOT / "book/_ext/tables.py"))
    [(title, text)] = page["gpu_rows"](None)
    assert title == "run as a whole" and text.startswith("not yet; ")


def test_what_make_versions_writes_is_what_the_status_page_shows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / ".ci"))
    script, page = (
        runpy.run_path(str(ROOT / ".ci/versions.py")),
        runpy.run_path(str(ROOT / "book/_ext/tables.py")),
    )
    oldest = script["requirements"]("2.6").splitlines()
    assert "torch==2.6.*" in oldest and not any(
        line.startswith(("fbgemm", "tensordict")) for line in oldest
    )
    served = script["requirements"]("2.14").splitlines()
    assert {"torch==2.14.*", "fbgemm-gpu-cpu==1.9.*"} <= set(served)
    assert [line for line in served if line.startswith("torch==")] == ["torch==2.14.*"]
    run = {"date": "2030-01-02", "passed": 8, "skipped": 0, "failed": 1, "failures": ["04"]}
    facts = {"python": "3.12.1", "torch": "2.14.1", "backend": "fbgemm", "kernels": "a pair"}
    assert page["torch_rows"]({"2.14": {**facts, "chapters": run}}) == [
        (
            "2.14.1",
            "3.12.1",
            "a pair",
            "not run",
            "8 passed, 0 skipped, 1 failed: `04` (2030-01-02)",
            "not run",
        )
    ]
    assert page["torch_rows"]({})[0][0] == "none yet"


def test_the_promised_torch_is_no_newer_than_the_pinned_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / ".ci"))
    script = runpy.run_path(str(ROOT / ".ci/versions.py"))
    floor, pinned = (
        tuple(map(int, script[name]().split("."))) for name in ("promised_floor", "pinned")
    )
    assert floor <= pinned
