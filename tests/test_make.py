"""What `make` would do for a chapter or a page that is named in one of several ways."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="there is no make here")


def made(*arguments: str) -> subprocess.CompletedProcess[str]:
    # As from a shell: tests run under `make test` too, whose settings a make inside would take over.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    return subprocess.run(["make", *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("name", "notebooks"),
    [
        ("05", ["05_first_training"]),
        ("page_two_tower", ["page_two_tower"]),
        ("page_two_tower.ipynb", ["page_two_tower"]),
        ("notebooks/11_optimizers.ipynb", ["11_optimizers"]),
        ("page", ["page_equivalence", "page_two_tower"]),
    ],
)
def test_a_notebook_may_be_named_by_number_or_by_name(name: str, notebooks: list[str]) -> None:
    found = made("-n", "nb", f"NB={name}").stdout.splitlines()[-1].split()
    paths = [word for word in found if word.endswith(".ipynb")]
    assert paths == [f"notebooks/{each}.ipynb" for each in notebooks]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [([], "which chapter? make nb NB=05"), (["NB=99"], "no notebooks/99_*.ipynb and no notebooks/99.ipynb; there are")],
)
def test_a_notebook_that_is_not_there_is_said(arguments: list[str], said: str) -> None:
    done = made("-o", "venv", "nb", *arguments)
    assert done.returncode == 2 and said in done.stderr
