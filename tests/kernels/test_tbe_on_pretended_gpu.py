"""The adapters of CUDA tables on a pretended GPU, in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from kernels.implementations import needs_fbgemm

from tutorec._kernels.backend import backend

TESTS = Path(__file__).resolve().parents[1]


@pytest.mark.slow
@needs_fbgemm
@pytest.mark.skipif(backend().serves("cuda"), reason="the CUDA kernels are there")
def test_cuda_tables_mix_no_devices_and_equal_the_cpu():
    folders = [TESTS.parent / "src", TESTS, TESTS / "pretend" / "site"]
    settings = {
        "PYTHONPATH": os.pathsep.join(map(str, folders)),
        "TUTOREC_PRETEND_GPUS": "1",
        "OMP_NUM_THREADS": "1",
    }
    script = TESTS / "kernels" / "on_pretended_gpu.py"
    done = subprocess.run(
        [sys.executable, script],
        env=os.environ | settings,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "97 cases are equal\n"
