from __future__ import annotations

import random
import socket
import unittest
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tutorec import test_utils


def test_a_free_port_can_be_listened_to() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", test_utils.get_free_port()))


@pytest.mark.parametrize("symbol", ["__asan_init", "__tsan_init", None])
def test_tests_are_skipped_under_a_sanitizer_alone(
    symbol: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(test_utils, "_has_symbol", lambda name: name == symbol)
    ran = []

    @test_utils.skip_if_asan_class
    class Whole(unittest.TestCase):
        def test_it(self) -> None:
            ran.append("class")

    class One(unittest.TestCase):
        @test_utils.skip_if_asan
        def test_it(self) -> None:
            ran.append("method")

    result = unittest.TestResult()
    for case in (Whole, One):
        case("test_it").run(result)
    assert ran == ([] if symbol else ["class", "method"])
    assert len(result.skipped) == (2 if symbol else 0)


def test_this_python_says_whether_it_has_a_symbol() -> None:
    assert test_utils._has_symbol("malloc") and not test_utils._has_symbol(
        "no_such_symbol_anywhere"
    )


def test_a_seeded_function_says_its_seed_and_draws_from_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def draw(first: int) -> tuple[int, float, float, float]:
        return first, torch.rand(1).item(), random.random(), float(np.random.rand())

    drawn = test_utils.seed_and_log(draw)(7)
    seed = int(capsys.readouterr().out.removeprefix("Using random seed: "))
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    assert drawn == draw(7)


def test_a_group_of_one_process_needs_no_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_PORT", raising=False)
    test_utils.init_process_group_single_rank(timeout=timedelta(seconds=30))
    try:
        one = torch.ones(1)
        dist.all_reduce(one)
        assert (dist.get_world_size(), one.item()) == (1, 1.0)
    finally:
        dist.destroy_process_group()
