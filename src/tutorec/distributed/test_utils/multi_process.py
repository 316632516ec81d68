"""Test cases that run one function on several ranks, in the form of TorchRec's tests.

::

    class MyTest(MultiProcessTestBase):
        def test_it(self):
            self._run_multi_process_test(callable=check, world_size=2, backend="gloo")


    def check(rank, world_size, backend):
        with MultiProcessContext(rank, world_size, backend) as ctx:
            ...  # ctx.pg, ctx.device

Ranks run in `tutorec.spmd.Ranks`: when one fails, dies or stalls, all are stopped and the test's
failure names it. The function starts its own process group.
"""

from __future__ import annotations

import multiprocessing
import os
import unittest
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from tutorec.errors import RankError
from tutorec.spmd.pool import Ranks
from tutorec.spmd.start import METHOD_VARIABLE
from tutorec.test_utils import get_free_port, init_distributed_single_host, seed_and_log

_TIMEOUT_SECONDS = 600.0


class MultiProcessContext:
    """Context manager with a rank's process group and device.

    Args:
        rank: This process.
        world_size: W, ranks.
        backend: As in `init_distributed_single_host`.
        local_size: Ranks per simulated host; by default all ranks.
        use_deterministic_algorithms: Whether torch uses deterministic algorithms only.
        disable_cuda_tf_32: Whether matrix products on a GPU use float32 instead of TF32.

    Attributes:
        device: ``cuda:rank`` where there is a GPU for each rank, else the CPU.
        pg: The default process group.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        backend: str = "gloo",
        local_size: int | None = None,
        use_deterministic_algorithms: bool = True,
        disable_cuda_tf_32: bool = True,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.backend = backend
        self.local_size = local_size
        self.disable_cuda_tf_32 = disable_cuda_tf_32

        self.device = torch.device("cpu")
        self.pg: dist.ProcessGroup | None = None
        if torch.cuda.is_available() and world_size <= torch.cuda.device_count():
            self.device = torch.device("cuda", rank)
            torch.cuda.set_device(self.device)

        if disable_cuda_tf_32 or use_deterministic_algorithms:
            _allow_tf32(False)
        if use_deterministic_algorithms:
            torch.use_deterministic_algorithms(True)

    def __enter__(self) -> MultiProcessContext:
        self.pg = init_distributed_single_host(
            self.rank, self.world_size, self.backend, self.local_size
        )
        return self

    def __exit__(self, *exception: object) -> None:
        self.pg = None
        dist.destroy_process_group()
        torch.use_deterministic_algorithms(False)
        if self.disable_cuda_tf_32:
            _allow_tf32(True)


class MultiProcessTestBase(unittest.TestCase):
    """A test case that runs functions on several ranks.

    Args:
        methodName: The test.
        mp_init_mode: ``"spawn"`` starts every rank as a new interpreter. Otherwise `Ranks` chooses:
            it forks ranks from a server if that is safe.
    """

    def __init__(self, methodName: str = "runTest", mp_init_mode: str = "forkserver") -> None:
        super().__init__(methodName)
        self._mp_init_mode = mp_init_mode

    @seed_and_log
    def setUp(self) -> None:
        """Set the rendezvous of the ranks and deterministic algorithms until the test ends."""
        start_method = {METHOD_VARIABLE: "spawn"} if self._mp_init_mode == "spawn" else {}
        rendezvous = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(get_free_port())}
        gpu_variables = {"NCCL_SOCKET_IFNAME": "lo", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
        environment = patch.dict(os.environ, rendezvous | gpu_variables | start_method)
        environment.start()

        self.addCleanup(environment.stop)
        self.addCleanup(
            torch.use_deterministic_algorithms, torch.are_deterministic_algorithms_enabled()
        )
        torch.use_deterministic_algorithms(True)

    def _run_multi_process_test(
        self, *, callable: Callable[..., None], world_size: int = 2, **kwargs: Any
    ) -> None:
        """Call ``callable(rank=, world_size=, **kwargs)`` on every rank; errors name the rank."""
        self._run_multi_process_test_per_rank(
            callable=callable, world_size=world_size, kwargs_per_rank=[kwargs] * world_size
        )

    def _run_multi_process_test_per_rank(
        self,
        *,
        callable: Callable[..., None],
        world_size: int,
        kwargs_per_rank: list[dict[str, Any]],
    ) -> None:
        """The same, with different arguments per rank."""
        # A failure shows the test, not this method.
        __tracebackhide__ = True
        try:
            with Ranks(world_size, timeout=_TIMEOUT_SECONDS) as world:
                world.run(_take_key, bytes(multiprocessing.current_process().authkey))
                world.run(_call_outside_of_a_group, callable, kwargs_per_rank)
        except RankError as error:
            raise self.failureException(str(error)) from None


def _take_key(key: bytes) -> None:
    """Let arguments be objects of a ``multiprocessing.Manager`` of the caller."""
    multiprocessing.current_process().authkey = key


def _call_outside_of_a_group(
    function: Callable[..., None], kwargs_per_rank: list[dict[str, Any]], rank: int, world_size: int
) -> None:
    """The function of a rank; it runs outside the pool's process group."""
    dist.destroy_process_group()
    function(**{"rank": rank, "world_size": world_size, **kwargs_per_rank[rank]})


def _allow_tf32(allow: bool) -> None:
    torch.backends.cudnn.allow_tf32 = allow
    torch.backends.cuda.matmul.allow_tf32 = allow
