"""Fixtures of every test: pools of ranks that are started once, one thread, the same seeds."""

from __future__ import annotations

import gc
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

from tutorec.spmd import Ranks

# Plans of tests and chapters are made with the preset's speeds, whatever this machine was measured
# at.
os.environ["TUTOREC_CALIBRATION"] = str(Path(__file__).parent / "not-calibrated.json")

# How long a test may wait for what must happen: it goes on at once when it has happened, also on a
# busy machine.
PATIENCE_SECONDS = 120.0

# A test that hangs is ended after this time, where pytest-timeout is installed.
TEST_SECONDS = 900.0

# One profile for every property test: no clock decides, and a run draws what every run draws.
settings.register_profile(
    "repeatable",
    max_examples=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[
        HealthCheck.too_slow,
        HealthCheck.filter_too_much,
        HealthCheck.data_too_large,
    ],
)
# `make random` draws anew, and more; a failure prints the line that repeats it.
settings.register_profile(
    "random",
    settings.get_profile("repeatable"),
    derandomize=False,
    print_blob=True,
    max_examples=100,
)
# `make quick`: the first of the examples.
settings.register_profile("quick", settings.get_profile("repeatable"), max_examples=12)
settings.load_profile("repeatable")
# Hypothesis also draws numbers from the source of the modules imported so far, which depend on the
# tests run before.
providers._get_local_constants = providers.Constants


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """The time limit of a test; not in pyproject.toml, which other environments read, too."""
    given = "PYTEST_TIMEOUT" in os.environ
    if config.pluginmanager.hasplugin("timeout") and not given and config.option.timeout is None:
        config.option.timeout = TEST_SECONDS


def _import_what_is_slow() -> None:
    import scipy.optimize  # noqa: F401
    import torch._dynamo  # noqa: F401


gc.disable()  # while tests are collected: a tenth of that time


def pytest_collection_finish() -> None:
    """What exists by now stays, and the garbage collector need not look at it again and again."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def _same_seeds() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[..., Ranks]]:
    """``ranks(2)``, ``ranks(4)``, ``ranks(4, hosts=2)``: a pool that lives as long as the session.

    A test that breaks its ranks breaks no other: a pool starts new ones after a failure, a closed
    one is made anew.
    """
    pools: dict[tuple[int, int], Ranks] = {}
    # Many pools: what a rank that ends has imported, later ones have at once.
    if "PYTEST_XDIST_WORKER" in os.environ:
        with Ranks(1, timeout=PATIENCE_SECONDS) as first:
            first.run(_import_what_is_slow)

    def pool(world_size: int, hosts: int = 1) -> Ranks:
        key = (world_size, hosts)
        if key not in pools or pools[key].closed:
            pools[key] = Ranks(world_size, hosts=hosts, timeout=PATIENCE_SECONDS)
        return pools[key]

    yield pool
    for each in pools.values():
        each.close()


@pytest.fixture(scope="session")
def still_running() -> Callable[..., list[int]]:
    """``still_running(pids)``: those that run; ``still_running(pids, PATIENCE_SECONDS)`` waits for
    them to end.
    """

    def runs(pid: int) -> bool:
        try:
            os.kill(pid, 0)
            stat = Path(f"/proc/{pid}/stat").read_text() if sys.platform == "linux" else ") R"
        except (ProcessLookupError, FileNotFoundError):
            return False
        return stat.rpartition(")")[2].split()[0] != "Z"  # Ended, only not collected by its parent.

    def check(pids: Sequence[int], seconds: float = 0.0) -> list[int]:
        deadline = time.monotonic() + seconds
        while (left := [pid for pid in pids if runs(pid)]) and time.monotonic() < deadline:
            time.sleep(0.05)
        return left

    return check
