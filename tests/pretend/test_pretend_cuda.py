"""The pretended GPU box refuses what a GPU box refuses: each mistake is made once."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from pretend.boxes import HERE, on_box

MIXED = "RuntimeError: Expected all tensors to be on the same device"
UNRECORDED = "RuntimeError: .* another stream has made, and no record_stream keeps its memory"
REFUSED = {
    "an operator with a GPU's and the CPU's tensor": f"{MIXED}.* cpu and cuda:0",
    "an operator with tensors of two GPUs": f"{MIXED}.* cuda:0 and cuda:1",
    "a layer on the CPU, its input on a GPU": MIXED,
    "index_select by the CPU's index": MIXED,
    "a CPU tensor indexed by a GPU's": MIXED,
    "numpy of a GPU's tensor": "TypeError: can't convert cuda:0 device type tensor to numpy",
    "an array of GPU's numbers": "TypeError: can't convert cuda:0 device type tensor to numpy",
    "a GPU's tensor pinned": "RuntimeError: cannot pin",
    "a pinned tensor made on a GPU": "RuntimeError: Only dense CPU tensors can be pinned",
    "a GPU that is not there": "RuntimeError: CUDA error: invalid device ordinal",
    "the CPU's tensor over NCCL": "RuntimeError: No backend type associated with device type cpu",
    (
        "a GPU's tensor over gloo for the CPU"
    ): "RuntimeError: No backend type associated with device type cuda",
    "another rank's GPU over NCCL": "RuntimeError: .*Duplicate GPU",
    "16-bit integers over NCCL": "RuntimeError: .* is not supported for NCCL process group",
    "columns of a matrix over NCCL": "RuntimeError: Tensors must be contiguous",
    "a thread that has not set its device": f"{MIXED}.* cuda:0 and cuda:1",
    "memory of another stream": UNRECORDED,
    "a part of it": UNRECORDED,
    "a batch that was moved on another stream": UNRECORDED,
    "a GPU used in a fork": "RuntimeError: Cannot re-initialize CUDA in forked subprocess",
    (
        "an id that is no row of a GPU's table"
    ): "ValueError: table 'items' has 8 rows .* sample 1, holds id 9",
    "such an id on a side stream": "ValueError: table 'items' has 8 rows .* sample 1, holds id 9",
    "a stream that is a number": "TypeError: record_stream takes a torch.cuda.Stream",
    (
        "events without timing"
    ): "RuntimeError: Both events must be created with argument 'enable_timing=True'",
}
ALLOWED = {
    "a GPU's tensor indexed by the CPU's": "cuda:0",
    "a number of the CPU": "cuda:0",
    "a list of a GPU's tensor": [0, 1],
    "both over one group": ["cpu:gloo,cuda:nccl"] * 2,
    "a block of a stream": [True, True],
    "memory of another stream, recorded": 6.0,
    "memory of another stream, read by the program": [1.0, 1.0, 1.0, 1.0],
    "ids checked on two streams": [3, 1],
    "a generator of a GPU": ["cuda:1", "cpu"],
    "a batch is pinned": True,
    "gradients arrive where their tensors are": ["cpu", "cuda:0"],
    "bags of ids in two dimensions": [[1.0, 3.0, 6.0], "cuda:0"],
    "a module moves and keeps its parameters": [True, True, "cuda:0"],
    "loaded where it was saved": "cuda:1",
    "loaded on the CPU": "cpu",
    "printed": "tensor([1., 1.], device='cuda:1')",
}


@pytest.fixture(scope="module")
def happened() -> dict[str, Any]:
    return json.loads(on_box(2, [HERE / "planted.py"]))


@pytest.mark.parametrize("mistake", REFUSED)
def test_a_mistake_is_refused_as_on_a_gpu_box(happened, mistake):
    assert re.match(REFUSED[mistake], str(happened[mistake])), happened[mistake]


@pytest.mark.parametrize("use", ALLOWED)
def test_what_a_gpu_box_allows_is_allowed(happened, use):
    assert happened[use] == ALLOWED[use]


def test_every_planted_case_is_judged(happened):
    assert happened.keys() == REFUSED.keys() | ALLOWED.keys()
