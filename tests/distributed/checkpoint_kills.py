"""Saves that are killed, in processes forked from one that has imported everything: a kill costs
little.

Run as ``python -c "from distributed.checkpoint_kills import ..."`` in a process of its own, whose
torch has no threads.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tutorec.distributed import comm
from tutorec.distributed.checkpoint import (
    CheckpointManager,
    latest_checkpoint,
    load_checkpoint,
    read_info,
    read_state_dict,
    save_checkpoint,
)
from tutorec.distributed.checkpoint.folder import Folder
from tutorec.distributed.checkpoint.manifest import read_manifest, unlisted_files
from tutorec.distributed.core.env import ShardingEnv
from tutorec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from tutorec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from tutorec.errors import CheckpointError
from tutorec.modules.embedding_configs import EmbeddingBagConfig
from tutorec.modules.embedding_modules import EmbeddingBagCollection
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor


def tables(rows: int = 6000) -> EmbeddingBagCollection:
    return EmbeddingBagCollection(
        [
            EmbeddingBagConfig(
                num_embeddings=rows, embedding_dim=16, name=f"t{table}", feature_names=[f"f{table}"]
            )
            for table in range(3)
        ]
    )


def model_of(world_size: int, rank: int, rows: int = 6000, **cache: Any) -> Any:
    """Three tables cut by rows under row-wise Adagrad, without a process group where the world is
    one rank.

    One is in memory, one in a file with a cache, and one in a file alone.
    They are on the CPU: a process that is forked from one that has used a GPU has none.
    """
    ebc = tables(rows)
    env = ShardingEnv(world_size, rank, dist.group.WORLD if world_size > 1 else None)
    kernels = ("fused", "fused_uvm_caching", "fused_uvm")
    words = {f"t{table}": row_wise(compute_kernel=kernel) for table, kernel in enumerate(kernels)}
    plan = construct_module_sharding_plan(ebc, words, local_size=world_size, world_size=world_size)
    sharder = EmbeddingBagCollectionSharder({"optimizer": "exact_row_wise_adagrad", **cache})
    return sharder.shard(ebc, plan, env, torch.device("cpu"))


def fill(model: Any, number: float) -> None:
    """Every number of weights and state becomes this one, so that a mixture of two checkpoints
    would show.
    """
    assert isinstance(model, nn.Module), "a sharded collection"
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(number)
        for state in model.fused_optimizer.state.values():
            for tensor in state.values():
                tensor.fill_(number)


def whole_step(path: Path, least: int) -> int:
    """The step of a checkpoint, which must be whole, of one save, and not older than one known to
    be complete.
    """
    step = read_info(path).step
    tensors = _tensors(read_state_dict(path))
    numbers = {float(number) for tensor in tensors for number in (tensor.min(), tensor.max())}
    assert step is not None
    assert step >= least, f"the checkpoint is of step {step}, and one of step {least} was complete"
    assert len(tensors) == 6
    assert numbers == {float(step)}, f"the checkpoint of step {step} holds {numbers}"
    assert latest_checkpoint(path.parent) == path
    return step


def leftovers(path: Path) -> list[str]:
    """Files of a checkpoint's folder that no manifest names any more, or not yet."""
    return unlisted_files(Folder.from_path(path))


def _warm(folder: str) -> None:
    """Load what a first save loads, once for all processes that are forked."""
    torch.set_num_threads(1)
    _save_once(Path(folder) / "warm" / "model", 1)
    shutil.rmtree(Path(folder) / "warm")


def drawn_kills(folder: str, kills: int, seed: int) -> dict[str, Any]:
    """Two ranks save without end; at a drawn moment a drawn one is killed. What was found after
    each kill.
    """
    _warm(folder)
    path, marker, draw = Path(folder) / "model", Path(folder) / "done", random.Random(seed)
    done, under_way, messages = 0, 0, []
    for _ in range(kills):
        marker.unlink(missing_ok=True)
        processes = [_forked(_save_without_end, path, marker, rank, done + 1) for rank in range(2)]
        _wait_for(marker, processes)
        time.sleep(draw.random() * 0.05)
        killed = draw.randrange(2)
        os.kill(processes[killed], signal.SIGKILL)
        for process in processes:
            os.waitpid(process, 0)
        under_way += bool(leftovers(path))
        messages.append(
            (killed, processes[killed], Path(f"{marker}.error{1 - killed}").read_text())
        )
        done = whole_step(path, max(done + 1, int(marker.read_text() or 0)))
    return {"done": done, "under_way": under_way, "messages": messages}


def _save_without_end(path: Path, marker: Path, rank: int, first: int) -> None:
    store = dist.FileStore(f"{marker}.store{first}", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    model = model_of(2, rank)
    try:
        for step in range(first, first + 10_000):
            fill(model, step)
            save_checkpoint(path, model, step=step)
            if rank == 0:
                marker.write_text(str(step))
    except CheckpointError as error:
        Path(f"{marker}.error{rank}").write_text(str(error))


def managed_kills(folder: str, kills: int, seed: int) -> dict[str, Any]:
    """Two ranks save in the background without end; at a drawn moment a drawn one is killed."""
    _warm(folder)
    run, marker, draw = Path(folder) / "run", Path(folder) / "done", random.Random(seed)
    done, kept = 0, []
    for number in range(kills):
        marker.unlink(missing_ok=True)
        processes = [
            _forked(_manage_without_end, run, marker, rank, number, done + 1) for rank in range(2)
        ]
        _wait_for(marker, processes)
        time.sleep(draw.random() * 0.05)
        os.kill(processes[draw.randrange(2)], signal.SIGKILL)
        for process in processes:
            os.waitpid(process, 0)
        done = _whole(CheckpointManager(run).latest(), int(marker.read_text() or 0))
        kept.append(len(CheckpointManager(run).steps()))
    return {"done": done, "kept": kept}


def _whole(path: Path | str | None, least: int) -> int:
    assert isinstance(path, Path), "there is a whole checkpoint"
    return whole_step(path, least)


def _manage_without_end(run: Path, marker: Path, rank: int, number: int, first: int) -> None:
    store = dist.FileStore(f"{marker}.managed{number}", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    model, manager = model_of(2, rank, rows=600), CheckpointManager(run, keep=2, asynchronous=True)
    for step in range(first, first + 10_000):
        fill(model, step)
        manager.save(model, step=step)
        if rank == 0 and step > first:
            marker.write_text(str(step - 1))


def loads_beside_savers(folder: str, loads: int) -> dict[str, int]:
    """Load again and again while two ranks replace the checkpoint without end; what was found."""
    _warm(folder)
    path, marker = Path(folder) / "model", Path(folder) / "done"
    processes = [_forked(_save_without_end, path, marker, rank, 1) for rank in range(2)]
    _wait_for(marker, processes)
    found = {"loads": 0, "mixed": 0, "replaced": 0}
    steps = set()
    model = model_of(1, 0)
    try:
        for number in range(loads):
            try:
                if number % 2:
                    step, numbers = load_checkpoint(path, model).step, numbers_of(model)
                else:
                    stored = read_state_dict(path)["model"].values()
                    numbers = {float(n) for tensor in stored for n in (tensor.min(), tensor.max())}
                    step = int(min(numbers))
                found["mixed"] += numbers != {float(step or 0)}
                steps.add(step)
            except CheckpointError:
                found["replaced"] += 1
            found["loads"] += 1
    finally:
        for process in processes:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
    return found | {"steps": len(steps)}


def numbers_of(model: Any) -> set[float]:
    """The least and the largest of all weights and states."""
    tensors = [
        *model.parameters(),
        *(t for s in model.fused_optimizer.state.values() for t in s.values()),
    ]
    return {
        float(number)
        for tensor in tensors
        for number in (tensor.detach().min(), tensor.detach().max())
    }


def kills_at_every_step(folder: str) -> dict[str, Any]:
    """Saves over a checkpoint that die at the n-th time that something reaches the disk, is renamed
    or removed.
    """
    _warm(folder)
    path, steps, under_way, ended = Path(folder) / "model", [], 0, False
    _run(_save_once, path, 1)
    while not ended and len(steps) < 60:
        call = len(steps) + 1
        ended = _run(_save_and_die, path, call + 1, call)
        under_way += bool(leftovers(path))
        steps.append(whole_step(path, 1))
    unknown = (
        {each.name for each in path.iterdir()}
        - {"manifest.json", ".metadata"}
        - set(read_manifest(Folder.from_path(path)).files)
    )
    left = [*sorted(each.name for each in path.parent.iterdir()), *unknown]
    return {"steps": steps, "under_way": under_way, "left": left}


def training_kills(folder: str) -> dict[str, Any]:
    """A process that dies in a backward after its checkpoint, and one that goes on from there."""
    _warm(folder)
    path, files, never = (Path(folder) / name for name in ("model", "files", "never killed"))
    files.mkdir()
    assert _run(_train, never, files, 6, -1)
    ended = _run(_train, path, files, 3, 5)
    left = sorted(each.name for each in files.iterdir())
    step = read_info(path).step
    assert _run(_train, path, files, 6, -1)
    stored = [_tensors(read_state_dict(each)) for each in (path, never)]
    same = all(torch.equal(one, other) for one, other in zip(*stored, strict=True))
    return {"ended": ended, "step": step, "left": left, "tensors": len(stored[0]), "same": same}


def _tensors(stored: dict[str, Any]) -> list[torch.Tensor]:
    states = stored["optimizer"]["state"].values()
    return [*stored["model"].values(), *(tensor for state in states for tensor in state.values())]


def _train(path: Path, files: Path, save_at: int, die_at: int) -> None:
    """Train from the checkpoint, or from the beginning, until it is saved, or the process dies."""
    torch.manual_seed(0)
    model = model_of(1, 0, rows=60, cache_load_factor=0.2, cache_folder=str(files))
    first = (load_checkpoint(path, model).step or 0) if path.exists() else 0
    for step in range(first, max(save_at, die_at)):
        draw = torch.Generator().manual_seed(step)
        ids = torch.randint(0, 60, (24,), generator=draw)
        lengths = torch.full((12,), 2)
        pooled = model(KeyedJaggedTensor(["f0", "f1", "f2"], ids, lengths=lengths)).values()
        if step + 1 == die_at:
            pooled.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
        (pooled * torch.linspace(-1, 1, pooled.shape[1])).sum().backward()
        if step + 1 == save_at:
            save_checkpoint(path, model, step=save_at)


def kill_in_an_exchange(folder: str) -> list[str]:
    """Two ranks save, and one is killed in an exchange of that; what the other is told."""
    torch.set_num_threads(1)
    store = Path(folder) / "store"
    for process in [_forked(_kill_rank_1_in_an_exchange, store, rank) for rank in range(2)]:
        os.waitpid(process, 0)
    return [Path(f"{store}.said0").read_text()]


def _kill_rank_1_in_an_exchange(store: Path, rank: int) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(str(store), 2), rank=rank, world_size=2)
    dist.barrier()
    if rank == 1:
        comm.observers.append(lambda issue: os.kill(os.getpid(), signal.SIGKILL))
    try:
        save_checkpoint(store.with_name("model"), nn.Linear(2, 1))
    except CheckpointError as error:
        Path(f"{store}.said{rank}").write_text(str(error))


def _save_once(path: Path, step: int) -> None:
    model = model_of(1, 0, rows=40)
    fill(model, step)
    save_checkpoint(path, model, step=step)


def _save_and_die(path: Path, step: int, call: int) -> None:
    left = call

    def watched(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return run

    for owner, name in ((os, "fsync"), (os, "replace"), (os, "makedirs"), (os, "remove")):
        setattr(owner, name, watched(getattr(owner, name)))
    _save_once(path, step)


def _run(function: Callable[..., None], *args: Any) -> bool:
    """Whether the function came to its end in a process of its own."""
    return os.waitpid(_forked(function, *args), 0)[1] == 0


def _wait_for(marker: Path, processes: list[int]) -> None:
    """Wait until the processes have saved; one that ends before is an error, and would be waited
    for forever.
    """
    while not marker.exists():
        for process in processes:
            assert os.waitpid(process, os.WNOHANG)[0] == 0, (
                "a process ended before it had saved; it says why above"
            )
        time.sleep(0.001)


def _forked(function: Callable[..., None], *args: Any) -> int:
    sys.stdout.flush()
    process = os.fork()
    if process:
        return process
    try:
        function(*args)
    except BaseException as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        os._exit(1)
    os._exit(0)
