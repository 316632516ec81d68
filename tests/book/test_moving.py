"""The page on moving: programs run after the renaming, the report is what the command prints,
tables are whole.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from policy.tree import ROOT

from tutorec._migrate import migrate

sys.path.insert(0, str(ROOT / "book/_ext"))
import tables

PAGE = (ROOT / "book/moving.md").read_text(encoding="utf-8")


def block(start: str) -> str:
    """A block of the page by its first line."""
    (found,) = [
        text for text in re.findall(r"```\w+\n(.*?)```", PAGE, re.DOTALL) if text.startswith(start)
    ]
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "printed"),
    [
        (
            "plan.py",
            (
                r"item  \| row_wise +\| fused .*user  \| \[0, 32\] +\| \[100000, 32\] \| "
                r"rank:1/cuda:1$"
            ),
        ),
        ("serve.py", r"^True$"),
    ],
)
def test_programs_run_after_the_renaming(tmp_path: Path, name: str, printed: str):
    file = tmp_path / name
    file.write_text(block(f"# {name}"), encoding="utf-8")
    report = migrate(file, write=True)
    assert report.complete, str(report)
    ran = subprocess.run([sys.executable, file], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert re.search(printed, ran.stdout.strip(), re.DOTALL), ran.stdout


def test_the_report_of_the_page_is_what_the_command_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    cell = "%matplotlib inline\nfrom torchrec.metrics.ctr import CTRMetric"
    notebook = {"cells": [{"cell_type": "code", "source": cell}], "metadata": {}, "nbformat": 4}
    files = {
        "eval.ipynb": json.dumps(notebook),
        "plan.py": "from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology\n"
        "from torchrec.distributed.planner.types import SharderData\n"
        "planner = EmbeddingShardingPlanner(topology=Topology(world_size=8, "
        "compute_device='cuda'))\n",
        "train.py": "import torchrec.distributed as trec_dist\n\n\ndef pipeline(*words):\n"
        "    return trec_dist.TrainPipelineSparseDist(*words, enable_inplace_copy_batch=True)\n",
    }
    for name, text in files.items():
        (tmp_path / "my_project" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "my_project" / name).write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    shown, printed = (
        block("my_project/").splitlines(),
        str(migrate(Path("my_project"))).splitlines(),
    )
    assert len(shown) == len(printed)
    for line, full in zip(shown, printed, strict=True):
        assert full == line or (line.endswith("...") and full.startswith(line.removesuffix("...")))


def test_the_tables_have_every_name_once():
    rows = tables.used_rows(
        "# a comment\n 3  2 torchrec.DataType\n 2  1 torchrec.metrics.ctr.CTR\n 1  1 "
        "torchrec.fx.Tracer\n"
    )
    assert rows == [
        ("`(the root)`", "1", "1", "3", "3"),
        ("`fx`", "1", "1", "1", "1"),
        ("`metrics`", "1", "0", "2", "0"),
        ("all", "3", "2", "6", "4 (67 %)"),
    ]
    blocks = tomllib.loads(tables.ABSENT_NAMES.read_text(encoding="utf-8"))["absent"]
    cells = tables.absent_rows(blocks)
    assert len(cells) == len(blocks)
    assert all(
        text.count("`") % 2 == 0 and "``" not in text and "|" not in text for _, text in cells
    )
    used = tables.used_rows(tables.USED_NAMES.read_text(encoding="utf-8"))
    assert used[-1][1] == "310"
    assert "310 things of TorchRec" in PAGE
