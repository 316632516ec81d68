"""Checkpoints of a model with table replicas: one replica is saved, all are loaded.

Saving averages the replicas first with `DMPCollection.sync`; otherwise the updates of unsaved
replicas since the last sync would be lost. The result is the checkpoint of a
`DistributedModelParallel` over the first group's ranks, which any model can load.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

import torch.distributed as dist
from torch import nn

from tutorec.distributed.checkpoint.contents import group_of
from tutorec.distributed.checkpoint.ranks import RankBarrier
from tutorec.distributed.model_parallel import DMPCollection
from tutorec.errors import CheckpointError

Path = TypeVar("Path")
Rest = ParamSpec("Rest")
Out = TypeVar("Out")
_Call = Callable[Concatenate[Path, nn.Module, Rest], Out]


def saved_by_the_first(save: _Call[Path, Rest, None]) -> _Call[Path, Rest, None]:
    """Decorator of a save: with replicas, the ranks of the first one save and the others wait."""

    @wraps(save)
    def of_replicas(path: Path, model: nn.Module, *args: Rest.args, **kwargs: Rest.kwargs) -> None:
        if not isinstance(model, DMPCollection):
            save(path, model, *args, **kwargs)
            return
        model.sync()
        _in_all_replicas(
            model,
            f"saving {path}",
            lambda: save(path, model, *args, **kwargs) if model.replica == 0 else None,
        )

    return of_replicas


def loaded_by_all(load: _Call[Path, Rest, Out]) -> _Call[Path, Rest, Out]:
    """Decorator of a load: with replicas, each one loads, and all fail if one fails."""

    @wraps(load)
    def of_replicas(path: Path, model: nn.Module, *args: Rest.args, **kwargs: Rest.kwargs) -> Out:
        if not isinstance(model, DMPCollection):
            return load(path, model, *args, **kwargs)
        return _in_all_replicas(
            model, f"loading {path}", lambda: load(path, model, *args, **kwargs)
        )

    return of_replicas


def all_ranks_of(model: nn.Module) -> dist.ProcessGroup | None:
    """The ranks that share a model, including all replicas."""
    return model.dense_group if isinstance(model, DMPCollection) else group_of(model)


def _in_all_replicas(model: DMPCollection, doing: str, act: Callable[[], Out]) -> Out:
    """Call ``act``; an error on one replica's ranks is raised on all ranks."""
    problem, result = None, None
    try:
        result = act()
    except Exception as error:  # any error: the other ranks must not wait for this rank
        problem = error
    texts = RankBarrier(model.dense_group, doing).gather(None if problem is None else f"{problem}")
    if problem is not None:
        raise problem
    if failed := [(rank, text) for rank, text in enumerate(texts) if text is not None]:
        rank, text = failed[0]
        raise CheckpointError(f"{doing} was aborted: rank {rank} of another replica failed: {text}")
    return result  # pyright: ignore[reportReturnType]


__all__ = ["all_ranks_of", "loaded_by_all", "saved_by_the_first"]
