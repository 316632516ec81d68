"""Pretended GPUs are for machines without fbgemm's CUDA kernels, which read real memory only."""

import pytest

from tutorec._kernels.backend import backend


@pytest.fixture(autouse=True)
def pretended_kernels_only() -> None:
    if backend().serves("cuda"):
        pytest.skip("fbgemm's CUDA kernels are installed, and take no pretended tensors")
