"""The quick start, every chapter, the examples and the parity of sharding on pretended GPU boxes.

With 2 GPUs all of it runs by default, with 1 and 8 the short part; `pytest -m full tests/pretend` runs the rest.
"""

from __future__ import annotations

import pytest
from pretend.boxes import HERE, ROOT, on_box, pytest_on_box

pytestmark = pytest.mark.timeout(900)
NOTEBOOKS = sorted(path.name for path in (ROOT / "notebooks").glob("*.ipynb"))
PARITY = "tests/distributed/sharding/test_parity.py"


@pytest.mark.parametrize("gpus", [1, 2, 8])
def test_the_quick_start_runs(gpus):
    pytest_on_box(gpus, "tests/test_readme.py")


@pytest.mark.slow
@pytest.mark.parametrize("notebook", NOTEBOOKS)
@pytest.mark.parametrize("gpus", [pytest.param(1, marks=pytest.mark.full), 2, pytest.param(8, marks=pytest.mark.full)])
def test_a_chapter_runs(notebook, gpus):
    pytest_on_box(gpus, "--nbmake", "--nbmake-timeout=600", f"notebooks/{notebook}")


@pytest.mark.slow
@pytest.mark.parametrize("example", ["dlrm", "two_tower"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_an_example_runs_under_torchrun(example, ranks):
    small = "--rows 600 --test-rows 100 --users 20 --items 30 --batch-size 100 --no-progress".split()
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    assert "steps, " in on_box(2, [*launch, "-m", f"tutorec.examples.{example}", *small])


@pytest.mark.slow
@pytest.mark.parametrize(("gpus", "cases"), [(1, "-1-"), (8, "-2- or -4-")])
def test_sharded_tables_equal_unsharded_ones(gpus, cases):
    pytest_on_box(gpus, PARITY, "-k", f"equal_unsharded and ({cases}) and not module")


@pytest.mark.slow
def test_a_script_with_a_group_of_nccl_alone_keeps_its_tensors_on_gpus():
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    printed = on_box(2, [*launch, HERE / "nccl_script.py"])
    assert printed.count("on the GPUs: the loss fell by 10.2221") == 2
    assert printed.count("on the CPU: No backend type associated with device type cpu") == 2
