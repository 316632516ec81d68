"""The training script of chapter 20 in both libraries: what it prints on two ranks, and when it is
started again.

The script stands in the chapter, as the cells that `CELLS` names; each of them binds one text. The
first is a whole run, which saves its weights; the others are the same script with lines that load
these weights.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

NOTEBOOK = Path(__file__).resolve().parents[2] / "notebooks/20_side_by_side.ipynb"
# cell of the notebook, which is the name of a run -> the name that it binds
CELLS = {"script": "SCRIPT", "loaded-before": "LOADED_BEFORE", "loaded-after": "LOADED_AFTER"}
RANKS = 2


def scripts() -> dict[str, str]:
    """The texts, in TorchRec's names."""
    cells = {
        cell["id"]: "".join(cell["source"])
        for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    }
    bound: dict[str, str] = {}
    for cell in CELLS:
        exec(cells[cell], bound)
    return {cell: bound[name] for cell, name in CELLS.items()}


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def losses(root: str) -> dict[str, list[float]]:
    """What rank 0 prints in each run, with one process for each rank."""
    words = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={RANKS}",
        "train.py",
    ]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    printed: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, text in scripts().items():
            own = Path(folder, name)
            # the others start with what the first has saved
            shutil.copytree(Path(folder, next(iter(printed))), own) if printed else own.mkdir()
            (own / "train.py").write_text(text.replace("torchrec", root), encoding="utf-8")
            done = subprocess.run(
                words, cwd=own, env=environment, capture_output=True, text=True, check=False
            )
            if done.returncode:
                raise RuntimeError(
                    f"{name} in {root} ended with {done.returncode}:\n{done.stderr[-3000:]}"
                )
            printed[name] = [float(line) for line in done.stdout.split()]
    return printed
