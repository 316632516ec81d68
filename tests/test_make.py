"""What `make` would do for a chapter or a page that is named in one of several ways; `make gpu` and
what it writes.
"""

from __future__ import annotations

import importlib.util
import json
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

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
        ("page", ["page_equivalence", "page_own_data", "page_server", "page_two_tower"]),
    ],
)
def test_a_notebook_may_be_named_by_number_or_by_name(name: str, notebooks: list[str]) -> None:
    found = made("-n", "nb", f"NB={name}").stdout.splitlines()[-1].split()
    paths = [word for word in found if word.endswith(".ipynb")]
    assert paths == [f"notebooks/{each}.ipynb" for each in notebooks]


def test_each_notebook_runs_once_and_those_that_take_times_run_alone() -> None:
    commands = [line for line in made("-n", "notebooks").stdout.splitlines() if "--nbmake" in line]
    alone, together = [
        [Path(word).stem for word in line.split() if word.endswith(".ipynb")] for line in commands
    ]
    assert "-n" in commands[1].split()
    assert "-n" not in commands[0].split()
    assert sorted(alone + together) == sorted(p.stem for p in (ROOT / "notebooks").glob("*.ipynb"))
    assert {"06_anatomy", "17b_cache_or_file", "page_server"} <= set(alone)


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


def gpu_folder(tmp_path: Path, smi: str, python: str) -> dict[str, str]:
    """A folder in which `.ci/gpu` runs, with another nvidia-smi and python3; its environment."""
    for name in (".ci/gpu", "requirements.txt", "pyproject.toml"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "bin").mkdir()
    for name, text in (("nvidia-smi", smi), ("python3", python)):
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    kept = {name: value for name, value in os.environ.items() if name != "PYTHON"}
    return {**kept, "PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"}


# Stands for an interpreter and for that of the environment which it makes; notes its arguments.
_PYTHON = r"""
echo "$@" >>calls.txt
case "$*" in
  *"-m venv"*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
  *-r*) for last; do :; done; cat "$last" >pinned.txt ;;
  *torch.version.cuda*) echo "$BUILD" ;;
  *cuda.is_available*) exit "$BLIND" ;;
esac
"""
_EIGHT = "for i in 0 1 2 3 4 5 6 7; do echo GPU $i; done"


def run_gpu(tmp_path: Path, environment: dict[str, str], *parts: str) -> tuple[int, str, list[str]]:
    """Exit status, standard error, and the calls of Python."""
    (tmp_path / "calls.txt").write_text("")
    done = subprocess.run(
        [".ci/gpu", *parts],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stderr, (tmp_path / "calls.txt").read_text().splitlines()


def test_make_gpu_makes_an_environment_with_the_cuda_wheels_once(tmp_path: Path) -> None:
    environment = gpu_folder(tmp_path, _EIGHT, _PYTHON) | {"BUILD": "2.13.0+cpu "}
    status, error, calls = run_gpu(tmp_path, environment)
    assert status == 2 and "pip found torch 2.13.0+cpu , a build for the CPU" in error
    assert not any(".ci/gpu.py" in call for call in calls)
    pinned = (tmp_path / "pinned.txt").read_text()
    assert "\nfbgemm-gpu==1.8.0" in pinned and "fbgemm-gpu-cpu" not in pinned
    environment["BUILD"] = "2.13.0 13.0"
    status, _, calls = run_gpu(tmp_path, environment, "tests", "bench")
    assert status == 0 and calls[-1] == ".ci/gpu.py tests bench"
    assert run_gpu(tmp_path, environment)[2] == [".ci/gpu.py"]  # nothing is installed again
    (tmp_path / "requirements.txt").write_text("torch==2.14.0\n")
    assert any("-m venv" in call for call in run_gpu(tmp_path, environment)[2])


@pytest.mark.parametrize("blind", ["0", "1"])
def test_make_gpu_uses_an_interpreter_whose_torch_sees_the_gpus_as_it_is(
    tmp_path: Path, blind: str
) -> None:
    environment = gpu_folder(tmp_path, _EIGHT, _PYTHON)
    environment |= {"PYTHON": "python3", "BLIND": blind, "BUILD": "2.13.0 13.0"}
    status, _, calls = run_gpu(tmp_path, environment)
    assert status == 0 and calls[-1] == ".ci/gpu.py"
    assert any("-m venv" in call for call in calls) == (blind == "1")


def test_make_gpu_refuses_an_old_python_with_a_line(tmp_path: Path) -> None:
    environment = gpu_folder(tmp_path, _EIGHT, "exit 1") | {"PYTHON": "python3"}
    status, error, _ = run_gpu(tmp_path, environment)
    assert status == 2 and error.startswith("make gpu: python3 is not Python 3.11 or newer")


def test_make_gpu_reads_a_slow_list_of_gpus_to_its_end(tmp_path: Path) -> None:
    """A reader that left after the first line ended nvidia-smi by a signal, as if it had failed."""
    environment = gpu_folder(tmp_path, "echo GPU 0; sleep 0.2; echo GPU 1", _PYTHON)
    assert run_gpu(tmp_path, environment | {"PYTHON": "python3", "BLIND": "0"})[0] == 0


# Stands for the Python of an environment, and makes environments; notes its arguments.
_VENV_PYTHON = r"""#!/bin/sh
echo "$@" >>calls.txt
case "$*" in
  -) exec "$REAL_PYTHON" - ;;
  *"-m venv"*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" && cp "$0" "$3/bin/pytest" ;;
  *"pip list"*) echo torch==2.13.0; echo cloudpickle==3.1.3 ;;
esac
"""


def test_make_unpinned_keeps_its_environment_until_the_project_changes(tmp_path: Path) -> None:
    for name in (".ci/unpinned", "pyproject.toml", "notebooks/04_processes.ipynb"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/python").write_text(_VENV_PYTHON)
    (tmp_path / ".venv/bin/python").chmod(0o755)

    def run(*tests: str) -> list[str]:
        (tmp_path / "calls.txt").write_text("")
        environment = {**os.environ, "REAL_PYTHON": sys.executable, "JOBS": "3"}
        subprocess.run([".ci/unpinned", *tests], cwd=tmp_path, env=environment, check=True)
        return (tmp_path / "calls.txt").read_text().splitlines()

    made_once = [call for call in run() if "venv" in call or "install" in call]
    assert made_once[0] == "-m venv .venv-unpinned"
    assert ".[cpu,tensordict,parquet]" in made_once[1] and "==" not in made_once[1]
    again = run()
    assert not any("venv" in call or "install" in call for call in again)
    # the notebooks that are not there are left out
    units, chapters = again[-2:]
    assert " tests -n 3 " in units and "not slow" in units
    assert chapters.endswith("--nbmake-timeout=120 notebooks/04_processes.ipynb")

    assert " tests/a tests/b -n 3 " in run("tests/a", "tests/b")[-2]

    text = (tmp_path / "pyproject.toml").read_text().replace('"cloudpickle>=', '"cloudpickle>3,>=')
    (tmp_path / "pyproject.toml").write_text(text)
    assert "-m venv .venv-unpinned" in run()


_JUNIT = """<testsuites><testsuite>
<testcase name="one[1-nccl]"/>
<testcase name="two"><skipped message="needs 2 GPUs"/></testcase>
<testcase name="three"><failure message="no"/></testcase>
<testcase name="four"><error message="no"/></testcase>
</testsuite></testsuites>"""
_CHAPTERS = """<testsuites><testsuite>
<testcase name="05_first.ipynb"/><testcase name="04_ranks.ipynb"/>
<testcase name="09_planner.ipynb"><failure message="no"/></testcase>
</testsuite></testsuites>"""
_CONTEXT = {
    "date": "2026-01-02T10:00:00+00:00",
    "versions": {"torch": "2.13.0"},
    "hardware": {"gpus": ["A", "B"], "driver": "570.1", "cuda": "13.0", "load": 1.0},
    "backend": "a wheel fits",
}
_HEAD = [
    ("run on (UTC)", "2026-01-02T10:00:00+00:00"),
    ("GPUs", "A, B"),
    ("driver, CUDA", "570.1, 13.0"),
    ("packages", "torch 2.13.0"),
    ("kernels", "a wheel fits"),
]
_TESTS = ("tests", "1 passed, 1 skipped, 2 failed: `four`, `three`")
_OF_CHAPTERS = ("chapters", "2 passed, 0 skipped, 1 failed: `09_planner`")


@pytest.fixture
def gpu_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module of `.ci/gpu.py` on a machine with two GPUs, whose commands do nothing but leave
    the files that they would leave; one case of the benchmark leaves none.
    """
    monkeypatch.syspath_prepend(ROOT)  # as .ci/gpu does
    spec = importlib.util.spec_from_file_location("ci_gpu", ROOT / ".ci/gpu.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    script.called = []

    def call(*words: str) -> int:
        script.called.append(words)
        if "benchmarks" in words:
            case, path = words[words.index("--cases") + 1], Path(words[-1])
            ratio = {"median": 1.5, "low": 1.25, "high": 1.75, "rounds": 30}
            row = {"title": f"{case}: peer / tutorec", "ratio": ratio}
            report = {"settings": {}, "comparisons": [row], "notes": [f"{case}: 5 GB/s"]}
            if case != "int8":
                path.write_text(json.dumps({**report, "samples": {"not": "kept"}}))
        elif script.leaves_results:
            path = Path(words[-1].removeprefix("--junitxml="))
            path.write_text(_CHAPTERS if "notebooks" in words else _JUNIT)
        return 4

    script.leaves_results = True
    monkeypatch.setattr(script, "call", call)
    monkeypatch.setattr(script, "ROOT", tmp_path)
    monkeypatch.setattr(script, "RESULT", tmp_path / "data/gpu.json")
    monkeypatch.setattr(script, "CASES", ("forward", "int8"))
    monkeypatch.setattr(script, "machine", lambda _: json.loads(json.dumps(_CONTEXT)))
    monkeypatch.setattr(script, "gpus", lambda: _CONTEXT["hardware"])
    monkeypatch.setattr(script, "doctor", lambda: SimpleNamespace(reason="a wheel fits"))
    cuda = SimpleNamespace(is_available=lambda: True, device_count=lambda: 2)
    version = SimpleNamespace(cuda="13.0")
    monkeypatch.setattr(
        script, "torch", SimpleNamespace(cuda=cuda, version=version, __version__="2.13.0")
    )
    return script


def shown(script: Any) -> list[tuple[str, str]]:
    """What the status page shows of the file."""
    page = runpy.run_path(str(ROOT / "book/_ext/tables.py"))
    return page["gpu_rows"](json.loads(script.RESULT.read_text()))


def test_what_make_gpu_writes_is_what_the_status_page_shows(gpu_script: Any) -> None:
    assert gpu_script.main([]) == 1
    assert shown(gpu_script) == [
        *_HEAD,
        _TESTS,
        _OF_CHAPTERS,
        ("`bench gpu`, forward: peer / tutorec", "1.50 [1.25, 1.75]"),
        ("`bench gpu`", "forward: 5 GB/s"),
        ("`bench gpu`, int8", "did not end"),
    ]


def test_make_gpu_keeps_the_other_parts_of_the_day_and_the_machine(gpu_script: Any) -> None:
    assert gpu_script.main(["chapters"]) == 1
    assert shown(gpu_script) == [
        *_HEAD,
        ("tests", "not run"),
        _OF_CHAPTERS,
        ("benchmark", "not run"),
    ]
    gpu_script.main(["tests"])
    assert shown(gpu_script) == [*_HEAD, _TESTS, _OF_CHAPTERS, ("benchmark", "not run")]
    other = {**_CONTEXT, "versions": {"torch": "2.14.0"}}
    gpu_script.machine = lambda _: json.loads(json.dumps(other))
    gpu_script.main(["tests"])
    assert ("chapters", "not run") in shown(gpu_script)


def test_make_gpu_records_that_pytest_left_no_results(gpu_script: Any) -> None:
    gpu_script.leaves_results = False
    assert gpu_script.main(["tests"]) == 1
    assert (
        "tests",
        "0 passed, 0 skipped, 1 failed: `pytest (exit status 4, no results)`",
    ) in shown(gpu_script)


def test_make_gpu_refuses_an_unknown_part_and_a_torch_without_gpus(
    gpu_script: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gpu_script.main(["unit"]) == 2
    gpu_script.torch.cuda.is_available = lambda: False
    assert gpu_script.main([]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "make gpu: 'unit' is not one of tests, chapters, bench",
        (
            "make gpu: torch 2.13.0 is built for CUDA 13.0 and finds no device (driver 570.1); "
            "nothing was run"
        ),
    ]
    assert not gpu_script.called and not gpu_script.RESULT.exists()


@pytest.mark.parametrize(
    ("cores", "ranks", "workers"), [(16, 1, "8"), (16, 2, "4"), (32, 8, "2"), (8, 8, "1")]
)
def test_make_gpu_runs_fewer_tests_at_once_where_each_starts_more_ranks(
    gpu_script: Any, monkeypatch: pytest.MonkeyPatch, cores: int, ranks: int, workers: str
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    assert gpu_script.side_by_side(ranks) == workers


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
    assert {"torch==2.6.*", "tensordict"} <= set(oldest)
    assert not any(line.startswith(("fbgemm", "tensordict==")) for line in oldest)
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
