"""Tables that the build fills in, so that no page can disagree with what was built.

``{versions-table}``  what executed this book: versions, backend, machine, date
``{gpu-table}``       what `make gpu` last ran on a GPU (data/gpu.json), or that nothing was run
``{torch-table}``     what `make versions` last ran on which torch (data/versions.json)
``{names-table}``     names that projects import from TorchRec: how many are here, by package
``{absent-table}``    the names of TorchRec that are not here, and what to use instead
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import re
import time
import tomllib
from collections import defaultdict
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

USED_NAMES = Path(__file__).resolve().parents[2] / "tests/parity/used_names.txt"
ABSENT_NAMES = Path(__file__).resolve().parents[2] / "src/tutorec/_torchrec_names.toml"
GPU_RUN = Path(__file__).resolve().parents[1] / "data/gpu.json"
TORCH_RUNS = Path(__file__).resolve().parents[1] / "data/versions.json"
PACKAGES = (
    "tutorec",
    "torch",
    "fbgemm-gpu-cpu",
    "fbgemm-gpu",
    "numpy",
    "multiprocess",
    "cloudpickle",
    "jupyter-book",
    "Sphinx",
)


def build_date() -> str:
    """Today in UTC, or the day that SOURCE_DATE_EPOCH names when a build is to be repeatable."""
    seconds = float(os.environ.get("SOURCE_DATE_EPOCH", time.time()))
    return datetime.datetime.fromtimestamp(seconds, tz=datetime.UTC).strftime("%Y-%m-%d")


def installed(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def backend_and_reason() -> tuple[str, str]:
    from tutorec._kernels.backend import backend

    choice = backend()
    return choice.name, choice.reason


def used_rows(text: str) -> list[tuple[str, ...]]:
    """Package, names that projects import from it, how many exist here, weighted by projects.

    A name is here unless a sentence says what to use instead: tests/test_torchrec_names.py holds
    names to that.
    """
    from tutorec._torchrec_names import instead_of

    counts: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0, 0, 0])
    for projects, _families, name in (
        line.split() for line in text.splitlines() if not line.startswith("#")
    ):
        path = name.removeprefix("torchrec.")
        parts = path.split(".")
        inner = (
            parts[1:2]
            if parts[0] == "distributed" and parts[1:2] in (["planner"], ["train_pipeline"])
            else []
        )
        package = ".".join([parts[0], *inner]) if len(parts) > 1 else "(the root)"
        here = int(instead_of(path) is None)
        for row in (package, "all"):
            added = (1, here, int(projects), int(projects) * here)
            counts[row] = [before + more for before, more in zip(counts[row], added, strict=True)]
    total = counts.pop("all")
    share = f"{total[3]} ({100 * total[3] / total[2]:.0f} %)"
    rows = [(f"`{package}`", *map(str, counts[package])) for package in sorted(counts)]
    return [*rows, ("all", *map(str, total[:3]), share)]


def absent_rows(blocks: list[dict[str, Any]]) -> list[tuple[str, ...]]:
    """Names that share a sentence, and the sentence."""
    call = r"[A-Za-z_][\w.]*\((?:[^()]|\([^()]*\))*\)(?:\.\w+\([^()]*\))*"
    name = (
        r"\.?\w+(?:[._]\w+|\[\w+\])+(?:=\w+)?|python -m [\w. "
        r"-]*--help|(?!TorchRec)[A-Z]\w*[a-z][A-Z]\w*|[A-Z]{2,}[a-z]\w*|'\w+'"
    )
    code = re.compile(f"{call}|{name}")
    return [
        (
            ", ".join(f"`{name}`" for name in block["names"]),
            code.sub(lambda found: f"`{found[0]}`", block["instead"]),
        )
        for block in blocks
    ]


def gpu_rows(run: dict[str, Any] | None) -> list[tuple[str, str]]:
    """What one run of `make gpu` found; None where none was recorded."""
    if run is None:
        return [
            (
                "run as a whole",
                "not yet; `make gpu` on a machine with a GPU runs tests, chapters and benchmark",
            )
        ]
    hardware, tests, chapters, bench = (
        run.get(part) for part in ("hardware", "tests", "chapters", "bench")
    )
    rows = [
        ("run on (UTC)", run["date"]),
        ("GPUs", ", ".join(hardware["gpus"])),
        ("driver, CUDA", f"{hardware['driver']}, {hardware['cuda']}"),
        ("packages", ", ".join(f"{name} {version}" for name, version in run["versions"].items())),
        ("kernels", run["backend"]),
        (
            "tests",
            "not run"
            if tests is None
            else _counts(
                {kind: tests[kind] for kind in ("passed", "skipped", "failed")}, tests["failures"]
            ),
        ),
        (
            "chapters",
            "not run"
            if chapters is None
            else _counts(
                {kind: len(names) for kind, names in chapters.items()}, chapters["failed"]
            ),
        ),
    ]
    if bench is None:
        return [*rows, ("benchmark", "not run")]
    rows += [
        (
            f"`bench gpu`, {c['title']}",
            f"{c['ratio']['median']:.2f} [{c['ratio']['low']:.2f}, {c['ratio']['high']:.2f}]",
        )
        for c in bench["comparisons"]
    ]
    rows += [("`bench gpu`", note) for note in bench["notes"]]
    return rows + [(f"`bench gpu`, {case}", "did not end") for case in bench["unfinished"]]


def torch_rows(recorded: dict[str, dict[str, Any]]) -> list[tuple[str, ...]]:
    """A row for each torch of `make versions`: what ran, when, and which tests failed."""

    def cell(run: dict[str, Any] | None) -> str:
        if run is None:
            return "not run"
        counts = {kind: run[kind] for kind in ("passed", "skipped", "failed")}
        return f"{_counts(counts, run['failures'])} ({run['date']})"

    kinds = ("units", "chapters", "chapters_torch")
    if not recorded:
        return [("none yet", *[""] * 5)]
    return [
        (one["torch"], one["python"], one["kernels"], *(cell(one.get(kind)) for kind in kinds))
        for one in recorded.values()
    ]


def _counts(counts: dict[str, int], failures: list[str]) -> str:
    names = f": {', '.join(f'`{name}`' for name in failures)}" if failures else ""
    return ", ".join(f"{count} {kind}" for kind, count in counts.items()) + names


class GeneratedTable(SphinxDirective):
    """A table from rows of MyST text; subclasses say which."""

    header: tuple[str, ...] = ()

    def rows(self) -> list[tuple[str, ...]]:
        raise NotImplementedError(f"{type(self).__name__} has no rows")

    def run(self) -> list[nodes.Node]:
        lines = [
            "| " + " | ".join(cells) + " |"
            for cells in [self.header, ("---",) * len(self.header), *self.rows()]
        ]
        holder = nodes.container()
        self.state.nested_parse(
            StringList(lines, source=self.env.docname), self.content_offset, holder
        )
        for source in (USED_NAMES, ABSENT_NAMES, GPU_RUN, TORCH_RUNS):
            self.env.note_dependency(str(source))
        self.env.note_reread()
        return holder.children


class VersionsTable(GeneratedTable):
    header = ("what", "value")

    def rows(self) -> list[tuple[str, ...]]:
        backend, reason = backend_and_reason()
        rows = [("executed on (UTC)", build_date()), ("backend", f"`{backend}`: {reason}")]
        rows += [
            ("Python", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
        ]
        rows += [("processor cores", str(os.cpu_count()))]
        return rows + [
            (package, version) for package in PACKAGES if (version := installed(package))
        ]


class GpuTable(GeneratedTable):
    header = ("what", "value")

    def rows(self) -> list[tuple[str, ...]]:
        run = json.loads(GPU_RUN.read_text(encoding="utf-8")) if GPU_RUN.exists() else None
        return [tuple(cell.replace("|", "\\|") for cell in row) for row in gpu_rows(run)]


class TorchTable(GeneratedTable):
    header = ("torch", "Python", "kernels", "unit tests", "chapters", "chapters, plain torch")

    def rows(self) -> list[tuple[str, ...]]:
        return torch_rows(
            json.loads(TORCH_RUNS.read_text(encoding="utf-8")) if TORCH_RUNS.exists() else {}
        )


class NamesTable(GeneratedTable):
    header = (
        "package, after `torchrec.`",
        "names projects import",
        "names here",
        "uses",
        "uses here",
    )

    def rows(self) -> list[tuple[str, ...]]:
        return used_rows(USED_NAMES.read_text(encoding="utf-8"))


class AbsentTable(GeneratedTable):
    header = ("not here, after `torchrec.`", "what to use instead")

    def rows(self) -> list[tuple[str, ...]]:
        return absent_rows(tomllib.loads(ABSENT_NAMES.read_text(encoding="utf-8"))["absent"])


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("versions-table", VersionsTable)
    app.add_directive("gpu-table", GpuTable)
    app.add_directive("torch-table", TorchTable)
    app.add_directive("names-table", NamesTable)
    app.add_directive("absent-table", AbsentTable)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
