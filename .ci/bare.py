"""Run a notebook's first cell as a hosted notebook does: torch and a kernel, no tutorec.

Builds the wheel, makes the environment in a temporary folder, then runs the named chapters there
(default: all) with what the first cell installs replaced by the wheel. Run it with the project's
environment: `make bare`.
"""

from __future__ import annotations

import re
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
print("".join(o.get("text", "") for o in notebook.cells[1].get("outputs", [])))
"""


def call(*command: str | Path, cwd: Path = ROOT) -> str:
    """Run a command to its end and return what it printed."""
    return subprocess.run(
        list(map(str, command)), cwd=cwd, check=True, stdout=subprocess.PIPE, text=True
    ).stdout


def main(chapters: list[str]) -> None:
    """Run the chapters whose numbers are given."""
    call("make", "wheel")
    wheel = next((ROOT / "dist").glob("*.whl"))
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        call(sys.executable, "-m", "venv", here / "venv")
        python = here / "venv/bin/python"
        call(python, "-m", "pip", "install", "-qq", *HOSTED)
        (here / "run.py").write_text(RUN, encoding="utf-8")
        for source in sorted((ROOT / "notebooks").glob("*.ipynb")):
            if chapters and source.name[:2] not in chapters:
                continue
            text, count = re.subn(
                r"tutorec @ git\+https://[\w./-]+|(?<=%pip install -q )\.\.",
                wheel.as_uri(),
                source.read_text(encoding="utf-8"),
            )
            assert count == 1, (
                f"{source.name}: expected one line that installs in the first cell, found {count}"
            )
            (here / source.name).write_text(text, encoding="utf-8")
            call(python, "-m", "pip", "uninstall", "-qq", "-y", "tutorec")
            start = time.perf_counter()
            print(call(python, "run.py", source.name, cwd=here).strip())
            print(
                (
                    f"== {source.name} ran where tutorec was absent, in "
                    f"{time.perf_counter() - start:.0f} s"
                ),
                flush=True,
            )


if __name__ == "__main__":
    main(sys.argv[1:])
