"""Ranks called from notebook cells: under nbmake, two notebooks at once, in a kernel that is
interrupted or killed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytest.importorskip("nbclient")
pytest.importorskip("nbmake")

pytestmark = pytest.mark.slow

# Each cell is one of the things that the chapters do.
CELLS = [
    """
    import os, time
    import torch
    import torch.distributed as dist
    from tutorec.spmd import Ranks, init, run_ranks
    from tutorec.errors import RankError, RankTimeoutError
    OFFSET = 10
    class Counter:
        def __init__(self, start):
            self.count = start
    world = Ranks(2, timeout=600)
    """,
    """
    def total(rank, x):
        value = torch.tensor([x + rank + OFFSET])
        dist.all_reduce(value)
        return value.item()
    assert world.run(total, 1) == [23, 23], "globals and imports of an earlier cell"
    """,
    """
    def build(rank):
        return world.keep(Counter(rank)), Counter(rank)
    (state, mine), _ = world.run(build)
    assert isinstance(mine, Counter), "a class of a cell is the same class in the notebook"
    print(state)
    """,
    """
    def step():
        state.count += OFFSET
        return isinstance(state, Counter), state.count
    assert world.run(step) == [(True, 10), (True, 11)], "a handle as a global"
    assert world.run(step) == [(True, 20), (True, 21)]
    """,
    """
    def broken(rank):
        if rank == 1:
            raise ValueError("table 'item' has 0 rows")
        dist.barrier()
    try:
        world.run(broken)
    except RankError as error:
        message = str(error)
    print(message)
    assert "rank 1 raised in 'broken' (run 5): ValueError: table 'item' has 0 rows" in message
    assert "Cell In[5], line 3, in broken" in message
    assert 'raise ValueError("table' in message, "the cell's own line is shown"
    assert "ipykernel" not in message and "/" not in message, "no folder of this machine"
    """,
    """
    def dies(rank):
        if rank == 0:
            os._exit(1)
        dist.barrier()
    try:
        world.run(dies)
    except RankError as error:
        assert "rank 0 died in 'dies' (run 1): its process ended with exit code 1" in str(error)
    else:
        raise AssertionError("nobody noticed")
    """,
    """
    def stalls(rank):
        if rank == 1:
            time.sleep(100)
        dist.barrier()
    try:
        with Ranks(2, timeout=10) as short:
            short.run(stalls)
    except RankTimeoutError as error:
        print(error)
        assert "rank 1 stalled" in str(error) and "Cell In[7], line 3, in stalls" in str(error)
        assert "rank 0 only waits, in barrier" in str(error)
    else:
        raise AssertionError("nobody noticed")
    """,
    """
    assert world.run(lambda rank: rank) == [0, 1]
    assert init().size() == init().size() == 1
    assert run_ranks(total, 2, 5) == [31, 31]
    """,
]


def notebook(path: Path, cells: list[str]) -> Path:
    """Write a notebook as the chapters are stored: no outputs."""
    code = [
        {
            "cell_type": "code",
            "execution_count": None,
            "id": f"cell-{index}",
            "metadata": {},
            "outputs": [],
            "source": textwrap.dedent(cell).strip(),
        }
        for index, cell in enumerate(cells)
    ]
    kernel = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    path.write_text(
        json.dumps({"cells": code, "metadata": kernel, "nbformat": 4, "nbformat_minor": 5})
    )
    return path


def python(*command: object, folder: Path, expect: int = 0) -> str:
    """Run Python in ``folder``, outside of this pytest."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")
    }
    line = [sys.executable, *map(str, command)]
    done = subprocess.run(
        line, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == expect, done.stdout + done.stderr
    return done.stdout


def test_two_notebooks_at_once_pass_under_nbmake(tmp_path):
    # all of them run in the test of a plain kernel
    of_two = {"one": CELLS[:6], "two": [*CELLS[:4], CELLS[-1]]}
    paths = [notebook(tmp_path / f"{name}.ipynb", cells) for name, cells in of_two.items()]
    options = ["-p", "no:cacheprovider", "-n", "2", "--nbmake", "--nbmake-timeout=600"]
    assert "2 passed" in python("-m", "pytest", "-q", *options, *paths, folder=tmp_path)


def test_a_rank_that_fails_in_a_cell_fails_the_notebook(tmp_path):
    cells = ["from tutorec.spmd import run_ranks", "run_ranks(lambda rank: 1 / rank)"]
    path = notebook(tmp_path / "bad.ipynb", cells)
    text = python(
        "-m", "pytest", "-q", "-p", "no:cacheprovider", "--nbmake", path, folder=tmp_path, expect=1
    )
    assert ": rank 0 raised in '<lambda>' (run 1): ZeroDivisionError: division by zero" in text
    assert "_raise_failure" not in text, "the notebook shows the cell, not the machinery"


EXECUTE = """
    import sys
    import nbclient, nbformat
    notebook = nbformat.read(sys.argv[1], as_version=4)
    nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3").execute()
    for cell in notebook.cells:
        for output in cell.outputs:
            print(output.get("text", ""), end="")
"""


def test_a_notebook_passes_in_a_plain_kernel_and_shows_what_ranks_print(tmp_path):
    # The kernel of the book's build: no pytest in its environment, so that output of child
    # processes is shown.
    path = notebook(
        tmp_path / "plain.ipynb",
        [*CELLS, "world.run(lambda rank: print('printed by', rank)); world.close()"],
    )
    text = python("-c", textwrap.dedent(EXECUTE), path, folder=tmp_path)
    assert "<Counter kept on the ranks by run 2 in build, line 2>" in text
    assert "rank 1 stalled: 'stalls' (run 1) did not finish within 10 s" in text
    assert "printed by 0" in text


KERNEL = """
    import sys
    from jupyter_client.manager import start_new_kernel

    manager, client = start_new_kernel(kernel_name="python3")

    def run(code, reply=True):
        message = client.execute(code)
        if not reply:
            return message
        return wait(message)

    def wait(message):
        while True:
            reply = client.get_shell_msg(timeout=600)
            if reply["parent_header"].get("msg_id") == message:
                return reply["content"]

    def printed(code):
        message = client.execute(code)
        text = ""
        while True:
            got = client.get_iopub_msg(timeout=600)
            if got["parent_header"].get("msg_id") != message:
                continue
            if got["msg_type"] == "stream":
                text += got["content"]["text"]
            if got["msg_type"] == "status" and got["content"]["execution_state"] == "idle":
                # A kernel drops what arrives in the moment after a cell has failed: it is asked again.
                return printed(code) if wait(message)["status"] == "aborted" else text

    def started():
        # The cell says that it is in the run by writing a file, since its ranks are busy from then on.
        import pathlib, time
        while not pathlib.Path("started-0").exists():
            time.sleep(0.05)

    printed("import os, time, pathlib\\nfrom tutorec.spmd import Ranks\\nworld = Ranks(2)")
    printed("def work(rank):\\n    pathlib.Path(f'started-{rank}').touch()\\n    time.sleep(100)")
    print(printed("world.run(len, ()); print(*world.pids)").strip())
    message = run("world.run(work)", reply=False)
    started()
    if sys.argv[1] == "interrupt":
        manager.interrupt_kernel()
        print(wait(message)["ename"])
        print(printed("print(world.pids, world.run(lambda rank: rank))").strip())
        print(printed("print(*world.pids)").strip())
    manager.shutdown_kernel(now=True)
"""  # noqa: E501


@pytest.mark.skipif(sys.platform == "win32", reason="kernels are interrupted differently there")
def test_a_kernel_interrupt_ends_the_ranks_and_new_ones_start(tmp_path, still_running):
    lines = python("-c", textwrap.dedent(KERNEL), "interrupt", folder=tmp_path).splitlines()
    assert lines[1:3] == ["KeyboardInterrupt", "[] [0, 1]"]
    assert (
        still_running([int(pid) for line in (lines[0], lines[3]) for pid in line.split()], 10.0)
        == []
    )


@pytest.mark.skipif(sys.platform == "win32", reason="kernels are killed differently there")
def test_a_killed_kernel_leaves_no_rank(tmp_path, still_running):
    line = python("-c", textwrap.dedent(KERNEL), "kill", folder=tmp_path)
    pids = [int(pid) for pid in line.split()]
    assert len(pids) == 2
    assert still_running(pids, 10.0) == []
