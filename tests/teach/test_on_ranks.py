"""What a reader wrote runs on ranks, and what goes wrong there is a message."""

import pytest
import torch.distributed as dist

from tutorec.teach.on_ranks import on_ranks


def ask(rank):
    return rank, dist.get_world_size()


def fail(rank):
    if rank == 1:
        raise KeyError("product")
    dist.barrier()


def test_a_function_runs_on_every_rank():
    assert on_ranks(2, ask) == [(0, 2), (1, 2)]


def test_a_function_that_fails_on_a_rank_is_a_message_with_the_rank():
    with pytest.raises(ValueError, match=r"(?s)On 2 ranks.*rank 1.*KeyError"):
        on_ranks(2, fail)
