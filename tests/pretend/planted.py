"""Mistakes that a GPU box refuses, and what it allows; prints what happened to each as JSON."""

import io
import json
import os
import tempfile
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from tutorec.sparse.deferred import raise_deferred_id_errors
from tutorec.sparse.id_check import check_ids
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor

cuda = torch.device("cuda")


def all_reduce_over(backend: str, tensor: torch.Tensor) -> str:
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(backend, init_method=f"file://{folder}/meet", rank=0, world_size=1)
        try:
            dist.all_reduce(tensor)
            return dist.get_backend()
        finally:
            dist.destroy_process_group()


def in_a_fork() -> str:
    torch.ones(1, device=cuda)
    read, write = os.pipe()
    if os.fork() == 0:
        try:
            torch.ones(1, device=cuda)
        except RuntimeError as error:
            os.write(write, str(error).encode())
        os._exit(0)
    os.close(write)
    os.wait()
    raise RuntimeError(os.read(read, 1000).decode())


def in_another_thread() -> None:
    """A thread begins on device 0, whatever the others have set."""
    errors = []

    def add() -> None:
        try:
            torch.ones(2, device=cuda) + there
        except RuntimeError as error:
            errors.append(error)

    with torch.cuda.device(1):
        there = torch.ones(2, device=cuda)
        thread = threading.Thread(target=add)
        thread.start()
        thread.join()
    raise errors[0]


def streams() -> list[bool]:
    default, side = torch.cuda.current_stream(), torch.cuda.Stream()
    with torch.cuda.stream(side), torch.cuda.stream(side):
        inside = torch.cuda.current_stream()
    return [inside is side, torch.cuda.current_stream() is default]


def from_a_side_stream(recorded: bool, through: Callable[[Any], Any] = lambda made: made) -> float:
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        made = through(torch.zeros(4, device=cuda) + 1)
    torch.cuda.current_stream().wait_stream(side)
    if recorded:
        made.record_stream(torch.cuda.current_stream())
    return (made * 2).sum().item()


def read_by_the_program() -> list[float]:
    with torch.cuda.stream(torch.cuda.Stream()):
        made = torch.zeros(4, device=cuda) + 1
    assert made[0].item() == 1 and made.cpu().sum() == 4
    return made.tolist()


def saved_and_loaded(**options: Any) -> str:
    buffer = io.BytesIO()
    torch.save({"rows": torch.ones(2, device="cuda:1")}, buffer)
    buffer.seek(0)
    return str(torch.load(buffer, **options)["rows"].device)


def an_id_outside() -> None:
    batch = KeyedJaggedTensor(["item"], torch.tensor([3, 9]), lengths=torch.tensor([1, 1])).to(cuda)
    check_ids(batch, [("item", "items", 8)])  # found there, and told at the next sync point
    batch.unsync().sync()


def an_id_outside_on_a_side_stream() -> None:
    with torch.cuda.stream(torch.cuda.Stream()):
        batch = KeyedJaggedTensor(["item"], torch.tensor([3, 9]), lengths=torch.tensor([1, 1]))
        check_ids(batch.to(cuda), [("item", "items", 8)])
    raise_deferred_id_errors()


def checked_on_two_streams() -> list[int]:
    def safe() -> torch.Tensor:
        batch = KeyedJaggedTensor(["item"], torch.tensor([3, 1]), lengths=torch.tensor([1, 1]))
        return check_ids(batch.to(cuda), [("item", "goods", 8)]).values()

    with torch.cuda.stream(torch.cuda.Stream()):
        safe()
    on_main = safe().tolist()
    raise_deferred_id_errors()
    return on_main


def gradients() -> list[str]:
    on_cpu, on_gpu = (
        torch.ones(2, requires_grad=True),
        torch.ones(2, device=cuda, requires_grad=True),
    )
    (on_cpu.to(cuda) * on_gpu).sum().backward()
    return [str(on_cpu.grad.device), str(on_gpu.grad.device)]


def bags_of_ids() -> list[Any]:
    """Three bags of two ids, and where their sums are."""
    bag = torch.nn.EmbeddingBag(4, 1, mode="sum", device=cuda)
    with torch.no_grad():
        bag.weight.copy_(torch.arange(4.0, device=cuda)[:, None])
    rows = bag(torch.tensor([[0, 1], [1, 2], [3, 3]], device=cuda))
    return [rows.flatten().tolist(), str(rows.device)]


def moved_module() -> list[Any]:
    layer = nn.Linear(2, 2)
    before = layer.weight
    layer.to(cuda)
    return [
        layer.weight is before,
        isinstance(layer.weight, nn.Parameter),
        str(layer(torch.ones(1, 2, device=cuda)).device),
    ]


CASES: dict[str, Callable[[], Any]] = {
    # refused
    "an operator with a GPU's and the CPU's tensor": lambda: (
        torch.ones(2, device=cuda) + torch.ones(2)
    ),
    "an operator with tensors of two GPUs": lambda: (
        torch.ones(2, device="cuda:0") + torch.ones(2, device="cuda:1")
    ),
    "a layer on the CPU, its input on a GPU": lambda: nn.Linear(2, 2)(
        torch.ones(1, 2, device=cuda)
    ),
    "index_select by the CPU's index": lambda: torch.ones(2, device=cuda).index_select(
        0, torch.tensor([1])
    ),
    "a CPU tensor indexed by a GPU's": lambda: torch.ones(2)[torch.tensor([1], device=cuda)],
    "numpy of a GPU's tensor": lambda: torch.ones(2, device=cuda).numpy(),
    "an array of GPU's numbers": lambda: np.array([torch.ones((), device=cuda)]),
    "a GPU's tensor pinned": lambda: torch.ones(2, device=cuda).pin_memory(),
    "a pinned tensor made on a GPU": lambda: torch.empty(2, device=cuda, pin_memory=True),
    "a GPU that is not there": lambda: torch.ones(2, device="cuda:2"),
    "the CPU's tensor over NCCL": lambda: all_reduce_over("nccl", torch.ones(2)),
    "a GPU's tensor over gloo for the CPU": lambda: all_reduce_over(
        "cpu:gloo", torch.ones(2, device=cuda)
    ),
    "another rank's GPU over NCCL": lambda: all_reduce_over("nccl", torch.ones(2, device="cuda:1")),
    "16-bit integers over NCCL": lambda: all_reduce_over(
        "nccl", torch.ones(2, dtype=torch.int16, device=cuda)
    ),
    "columns of a matrix over NCCL": lambda: all_reduce_over(
        "nccl", torch.ones(4, 4, device=cuda)[:, :2]
    ),
    "a thread that has not set its device": in_another_thread,
    "memory of another stream": lambda: from_a_side_stream(False),
    "a part of it": lambda: from_a_side_stream(False, lambda made: made[1:].view(3, 1)),
    "a batch that was moved on another stream": lambda: from_a_side_stream(
        False, lambda made: made.cpu().to(cuda)
    ),
    "a GPU used in a fork": in_a_fork,
    "an id that is no row of a GPU's table": an_id_outside,
    "such an id on a side stream": an_id_outside_on_a_side_stream,
    "a stream that is a number": lambda: torch.ones(2, device=cuda).record_stream(0),
    "events without timing": lambda: torch.cuda.Event().elapsed_time(torch.cuda.Event()),
    # allowed
    "a GPU's tensor indexed by the CPU's": lambda: str(
        torch.ones(2, device=cuda)[torch.tensor([1])].device
    ),
    "a number of the CPU": lambda: str((torch.ones(2, device=cuda) * torch.tensor(2.0)).device),
    "a list of a GPU's tensor": lambda: torch.arange(2, device=cuda).tolist(),
    "both over one group": lambda: [
        all_reduce_over("cpu:gloo,cuda:nccl", tensor)
        for tensor in (torch.ones(2), torch.ones(2, device=cuda))
    ],
    "a block of a stream": streams,
    "memory of another stream, recorded": lambda: from_a_side_stream(True, lambda made: made[1:]),
    "memory of another stream, read by the program": read_by_the_program,
    "ids checked on two streams": checked_on_two_streams,
    "a generator of a GPU": lambda: [
        str(generator.device) for generator in (torch.Generator("cuda:1"), torch.Generator())
    ],
    "a batch is pinned": lambda: torch.ones(2).pin_memory().is_pinned(),
    "gradients arrive where their tensors are": gradients,
    "a module moves and keeps its parameters": moved_module,
    "loaded where it was saved": saved_and_loaded,
    "loaded on the CPU": lambda: saved_and_loaded(map_location="cpu"),
    "bags of ids in two dimensions": bags_of_ids,
    "printed": lambda: repr(torch.ones(2, device="cuda:1")),
}


def happened(case: Callable[[], Any]) -> Any:
    try:
        return case()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    print(json.dumps({name: happened(case) for name, case in CASES.items()}))
