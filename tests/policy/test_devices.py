"""Tests leave the device to the rank, so that those of ranks run on GPUs where there are some."""

from __future__ import annotations

import re

import pytest
from policy.tree import ROOT, assert_none

NAMED = re.compile(
    r"""torch\.device\(\s*["'](cpu|cuda)|\bdevice=["'](cpu|cuda)|\.to\(["'](cpu|cuda)|backend=["']gloo"""
)
# Tests of which a device is the subject, and those of one process without ranks.
ABOUT_A_DEVICE = {
    "tests/gpu/": "GPUs are the subject",
    "tests/pretend/": "pretended GPUs are the subject",
    "tests/policy/": "what other tests may write",
    "tests/kernels/": "operators by themselves, of one device and the other",
    "tests/modules/": "one process, on torch's default device",
    "tests/optim/": "one process, on torch's default device",
    "tests/sparse/": "one process, on torch's default device",
    "tests/parity/": "results of torchrec on the CPU",
    "tests/inference/": "served from the CPU: virtual devices are more than a box may have",
    "tests/distributed/quant_plans.py": "served from the CPU, as above",
    "tests/distributed/test_quant_embeddingbag.py": "served from the CPU, as above",
    "tests/distributed/planner/test_topology.py": "a topology is of a kind of device",
    "tests/distributed/test_calibration.py": "the processor is what is measured",
    "tests/distributed/test_sharding_plan.py": "a plan is for a kind of device",
    "tests/distributed/test_bad_inputs.py": (
        "a plan for another device; an id found at once, on the CPU"
    ),
    "tests/distributed/test_model_parallel.py": "a device that is not here",
    "tests/distributed/test_model_memory.py": "memory of the CPU is measured",
    "tests/distributed/checkpoint/test_memory.py": "memory of the CPU is measured",
    "tests/distributed/checkpoint_kills.py": "processes that are forked, which have no GPU",
}


def device_violations(label: str, text: str) -> list[str]:
    """Lines of a test that name a device."""
    if label.startswith(tuple(ABOUT_A_DEVICE)):
        return []
    return [
        f"{label}:{number}: names a device: {line.strip()[:60]}; use tutorec.spmd.device()"
        for number, line in enumerate(text.splitlines(), 1)
        if NAMED.search(line)
    ]


def test_tests_leave_the_device_to_the_rank():
    files = {
        path.relative_to(ROOT).as_posix(): path.read_text("utf-8")
        for path in (ROOT / "tests").rglob("*.py")
    }
    assert_none(
        [
            violation
            for label, text in sorted(files.items())
            for violation in device_violations(label, text)
        ]
    )
    unused = [
        place
        for place in ABOUT_A_DEVICE
        if not any(NAMED.search(files[f]) for f in files if f.startswith(place))
    ]
    assert not unused, f"these name no device any more: {unused}"


@pytest.mark.parametrize(
    "code",
    [
        'x.to(torch.device("cpu"))',
        "Ebc(device='cuda')",
        'm.to("cuda:0")',
        'Ranks(4, backend="gloo")',
    ],
)
def test_the_rule_rejects_what_it_is_there_for(code):
    assert device_violations("tests/distributed/test_new.py", code)
    assert not device_violations(
        "tests/distributed/test_new.py", 'x.to(device()); Topology(2, "cpu")'
    )
