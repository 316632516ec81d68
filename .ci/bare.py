"""Run a notebook's first cell as a hosted notebook does: torch and a kernel, no tutorec.

Builds the wheel and makes the environment in a temporary folder. Each notebook runs in a folder of
its own, beside the wheel and as it is stored. Run it with the project's environment: `make bare`,
`make bare NB=05`.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# What a hosted notebook brings with it; nbclient is the hand that presses the run button.
HOSTED = ("torch==2.13.0", "numpy==2.4.6", "ipykernel==7.4.0", "nbclient==0.11.0", "pip")
RUN = """
import sys, nbformat
from nbclient import NotebookClient
notebook = nbformat.read(sys.argv[1], as_version=4)
resources = {"metadata": {"path": "."}}
NotebookClient(notebook, timeout=300, kernel_name="python3", resources=resources).execute()
first = next(cell for cell in notebook.cells if cell.cell_type == "code")
print("".join(o.get("text", "") for o in first.get("outputs", [])))
"""


def call(*command: str | Path, cwd: Path = ROOT) -> str:
    """Run a command to its end and return what it printed."""
    return subprocess.run(
        list(map(str, command)), cwd=cwd, check=True, stdout=subprocess.PIPE, text=True
    ).stdout


def main(chapters: list[str]) -> None:
    """Run the notebooks whose names begin as given; all if none is."""
    call("make", "wheel")
    wheel = next((ROOT / "dist").glob("*.whl"))
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        call(sys.executable, "-m", "venv", here / "venv")
        python = here / "venv/bin/python"
        call(python, "-m", "pip", "install", "-qq", *HOSTED)
        (here / "run.py").write_text(RUN, encoding="utf-8")
        for source in sorted((ROOT / "notebooks").glob("*.ipynb")):
            if chapters and not source.name.startswith(tuple(chapters)):
                continue
            alone = here / source.stem
            alone.mkdir()
            for file in (source, wheel, here / "run.py"):
                shutil.copy(file, alone)
            call(python, "-m", "pip", "uninstall", "-qq", "-y", "tutorec")
            start = time.perf_counter()
            print(call(python, "run.py", source.name, cwd=alone).strip())
            print(
                (
                    f"== {source.name} ran where tutorec was absent, in "
                    f"{time.perf_counter() - start:.0f} s"
                ),
                flush=True,
            )


if __name__ == "__main__":
    main(sys.argv[1:])
