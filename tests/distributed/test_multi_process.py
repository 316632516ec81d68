from __future__ import annotations

import multiprocessing
import os
import unittest
from collections.abc import MutableMapping

import pytest
import torch
import torch.distributed as dist

from tutorec.distributed.comm import get_local_rank, get_local_size
from tutorec.distributed.test_utils.multi_process import MultiProcessContext, MultiProcessTestBase

GLOO = "gloo"


def _sum_in_a_group(
    rank: int, world_size: int, backend: str, local_size: int | None = None
) -> None:
    assert not dist.is_initialized()
    with MultiProcessContext(rank, world_size, backend, local_size) as ctx:
        assert ctx.pg is not None and (ctx.pg.rank(), ctx.pg.size()) == (rank, world_size)
        total = torch.tensor([rank + 1.0])
        dist.all_reduce(total, group=ctx.pg)
        assert total.item() == world_size * (world_size + 1) / 2
        on_host = local_size or world_size
        assert (get_local_size(), get_local_rank()) == (on_host, rank % on_host)
        assert torch.are_deterministic_algorithms_enabled()
    assert not dist.is_initialized() and not torch.are_deterministic_algorithms_enabled()


def _start_a_group_by_hand(rank: int, world_size: int) -> None:
    dist.init_process_group(rank=rank, world_size=world_size, backend=GLOO)
    dist.barrier()
    dist.destroy_process_group()


def _fail_on_rank_1(rank: int, world_size: int, backend: str) -> None:
    with MultiProcessContext(rank, world_size, backend):
        if rank == 1:
            raise KeyError("item of rank 1")
        dist.barrier()  # which rank 1 does not reach


def _die_on_rank_1(rank: int, world_size: int) -> None:
    if rank == 1:
        os._exit(3)


def _check_own(rank: int, world_size: int, own: int) -> None:
    assert (own, world_size) == (10 * rank, 2)


def _answer(rank: int, world_size: int, answers: MutableMapping[int, int]) -> None:
    answers[rank] = world_size


class Programs(MultiProcessTestBase):
    """The tests that the tests below run."""

    __test__ = False

    def in_context(self) -> None:
        self._run_multi_process_test(callable=_sum_in_a_group, world_size=2, backend=GLOO)

    def on_two_hosts(self) -> None:
        self._run_multi_process_test(
            callable=_sum_in_a_group, world_size=2, backend=GLOO, local_size=1
        )

    def by_hand(self) -> None:
        self._run_multi_process_test(callable=_start_a_group_by_hand)

    def fails(self) -> None:
        self._run_multi_process_test(callable=_fail_on_rank_1, backend=GLOO)

    def dies(self) -> None:
        self._run_multi_process_test(callable=_die_on_rank_1)

    def into_a_shared_dict(self) -> None:
        with multiprocessing.Manager() as manager:
            answers = manager.dict()
            self._run_multi_process_test(callable=_answer, answers=answers)
            assert dict(answers) == {0: 2, 1: 2}

    def each_its_own(self) -> None:
        arguments = [{"own": 0}, {"own": 10}]
        self._run_multi_process_test_per_rank(
            callable=_check_own, world_size=2, kwargs_per_rank=arguments
        )


def _run(name: str) -> unittest.TestResult:
    before = dict(os.environ)
    result = unittest.TestResult()
    Programs(name).run(result)
    assert dict(os.environ) == before
    assert not torch.are_deterministic_algorithms_enabled()
    return result


@pytest.mark.parametrize(
    "name", ["in_context", "on_two_hosts", "by_hand", "into_a_shared_dict", "each_its_own"]
)
def test_a_function_runs_on_every_rank(name: str) -> None:
    result = _run(name)
    assert result.wasSuccessful(), result.failures + result.errors
    assert result.testsRun == 1


def test_the_rank_that_raised_is_named_and_the_others_are_ended() -> None:
    [(_, text)] = _run("fails").failures
    assert (
        "rank 1 raised in" in text
        and "KeyError: 'item of rank 1'" in text
        and "_fail_on_rank_1" in text
    )


def test_the_rank_that_died_is_named() -> None:
    [(_, text)] = _run("dies").failures
    assert "rank 1" in text and "code 3" in text


def test_ranks_may_be_fresh_interpreters(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(
        Programs,
        "_run_multi_process_test",
        lambda self, **_: asked.append(os.environ.get("TUTOREC_RANKS_START")),
    )
    for mode in ("spawn", "forkserver"):
        Programs("in_context", mp_init_mode=mode).run(unittest.TestResult())
    assert asked == ["spawn", os.environ.get("TUTOREC_RANKS_START")]
