"""Access to the gradients of tables that backward updates, which are otherwise not kept."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tutorec.optim.fused import EmbeddingFusedOptimizer, FusedOptimizerModule
from tutorec.optim.keyed import CombinedOptimizer, KeyedOptimizer
from tutorec.optim.updating_lookup import GRADIENT_LISTENER


@contextmanager
def debug_grads(model: nn.Module) -> Iterator[Mapping[str, Tensor]]:
    """Record the gradients of tables that are updated during backward.

    Inside the block the mapping is filled: parameter name in the unsharded model -> gradient ``[R,
    D]``, a coalesced sparse tensor of the touched rows. It is the gradient of the update: repeated
    ids are summed, and so are the gradients of all ranks, divided as `set_gradient_division` says.
    Several backward passes accumulate. For a sharded table every rank has its own rows and columns
    and zeros elsewhere, so the sum over ranks is the whole gradient; for a replicated table every
    rank has the whole gradient.

    The step is the same with and without the block, and afterwards the model keeps no gradients.
    Both forward and backward must run inside the block. Tables with ordinary gradients (``dense``
    kernel, no optimizer in backward) have them in ``.grad`` and are not recorded.

    Args:
        model: A `DistributedModelParallel`, a sharded collection, or a model with tables under
            ``apply_optimizer_in_backward``.

    Yields:
        The mapping; a missing name raises a KeyError that lists the names.

    Raises:
        ValueError: No table is updated during backward, or gradients are already recorded.

    Example:
        >>> import torch, tutorec
        >>> from tutorec.optim import apply_optimizer_in_backward, debug_grads
        >>> config = tutorec.EmbeddingBagConfig(4, 2, "item", feature_names=["item"])
        >>> ebc = tutorec.EmbeddingBagCollection([config])
        >>> apply_optimizer_in_backward(torch.optim.SGD, ebc.parameters(), {"lr": 0.1})
        >>> batch = tutorec.KeyedJaggedTensor(
        ...     ["item"], torch.tensor([3, 1, 3]), lengths=torch.tensor([2, 1])
        ... )
        >>> with debug_grads(ebc) as grads:
        ...     ebc(batch).values().sum().backward()
        >>> grads["embedding_bags.item.weight"].to_dense()[:, 0].tolist()
        [0.0, 1.0, 0.0, 2.0]
    """
    seen = _Gradients()
    watched = [*_watch_sharded(model, seen), *_watch_unsharded(model, seen)]
    if not watched:
        raise ValueError(
            f"no table of this {type(model).__name__} is updated during backward, so that there is "
            "nothing to watch: read parameter.grad, or call apply_optimizer_in_backward, or shard "
            "tables with the fused kernel"
        )
    already_watched = [
        entry for entry in watched if getattr(entry.target, entry.attribute, None) is not None
    ]
    if already_watched:
        raise ValueError(
            f"debug_grads watches {already_watched[0].name!r} already: leave the inner block out"
        )

    try:
        for entry in watched:
            setattr(entry.target, entry.attribute, entry.listener)
        yield seen
    finally:
        for entry in watched:
            setattr(entry.target, entry.attribute, None)


@dataclass(frozen=True)
class _ShardPosition:
    """Position of the local rows and columns in a table [rows, columns]."""

    name: str
    rows: int
    columns: int
    first_row: int = 0
    first_column: int = 0


@dataclass(frozen=True)
class _Watched:
    """An operator or a parameter that reports its gradients while an attribute of it is set."""

    target: Any
    attribute: str
    name: str
    listener: Any


@dataclass
class _Gradients(Mapping[str, Tensor]):
    """Name -> the sum of the reported gradients."""

    names: dict[str, None] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)

    def add(self, position: _ShardPosition, rows: Tensor, sums: Tensor) -> None:
        """Add gradients ``[U, D_local]`` of local rows ``[U]``."""
        full_rows = sums.detach()
        if position.columns != sums.shape[1]:
            full_rows = sums.new_zeros(sums.shape[0], position.columns)
            full_rows[:, position.first_column : position.first_column + sums.shape[1]] = sums

        ids = (rows.long() + position.first_row).unsqueeze(0)
        gradient = torch.sparse_coo_tensor(
            ids, full_rows.clone(), (position.rows, position.columns), check_invariants=False
        )
        before = self.gradients.get(position.name)
        self.gradients[position.name] = (
            gradient if before is None else before + gradient
        ).coalesce()

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.gradients:
            if name in self.names:
                raise KeyError(
                    f"no gradient of {name!r} was seen: forward and backward both belong inside "
                    "the block of debug_grads, and this rank must hold rows of the table"
                )
            raise KeyError(f"{name!r} is not a table that backward updates: {[*self.names]}")
        return self.gradients[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.gradients)

    def __len__(self) -> int:
        return len(self.gradients)

    def __repr__(self) -> str:
        rows = (
            f"{k!r}: {grad._nnz()} rows of {grad.shape[0]}" for k, grad in self.gradients.items()
        )
        return f"{{{', '.join(rows)}}}"


def _watch_sharded(model: nn.Module, seen: _Gradients) -> Iterator[_Watched]:
    for path, module in model.named_modules():
        # The whole model may be a sharded collection, which knows the positions of its shards.
        fused = [inner for inner in module.modules() if isinstance(inner, FusedOptimizerModule)]
        if fused != [module]:
            continue
        prefix = _unwrapped_name(model, f"{path}." if path else "")
        positions = _shard_positions(module, prefix)
        for optimizer in _leaves(fused[0].fused_optimizer):
            table_positions = [
                positions.get(id(parameter)) or _ShardPosition(prefix + name, *parameter.shape)
                for name, parameter in optimizer.params.items()
            ]
            seen.names.update(dict.fromkeys(position.name for position in table_positions))

            def listener(
                table: int,
                rows: Tensor,
                sums: Tensor,
                table_positions: list[_ShardPosition] = table_positions,
            ) -> None:
                seen.add(table_positions[table], rows, sums)

            yield _Watched(
                optimizer.operator, "gradient_listener", table_positions[0].name, listener
            )


def _watch_unsharded(model: nn.Module, seen: _Gradients) -> Iterator[_Watched]:
    for name, parameter in model.named_parameters():
        optimizers = getattr(parameter, "_in_backward_optimizers", ())
        if (
            parameter.dim() != 2
            or not optimizers
            or any(isinstance(optimizer, KeyedOptimizer) for optimizer in optimizers)
        ):
            continue
        position = _ShardPosition(_unwrapped_name(model, name), *parameter.shape)
        seen.names[position.name] = None

        def listener(rows: Tensor, sums: Tensor, position: _ShardPosition = position) -> None:
            seen.add(position, rows, sums)

        yield _Watched(parameter, GRADIENT_LISTENER, position.name, listener)


def _shard_positions(module: Any, prefix: str) -> dict[int, _ShardPosition]:
    """Id of each parameter of a sharded collection -> position of its shard in the table."""
    tables = module.local_shards() if hasattr(module, "local_shards") else ()
    return {
        id(rows): _ShardPosition(
            prefix + local.name,
            local.table.rows,
            local.table.columns,
            shard.row_offset,
            shard.column_offset,
        )
        for local in tables
        for shard, rows in zip(local.shards, local.rows, strict=True)
    }


def _leaves(optimizer: KeyedOptimizer) -> Iterator[EmbeddingFusedOptimizer]:
    if isinstance(optimizer, CombinedOptimizer):
        for _, inner in optimizer.optimizers:
            yield from _leaves(inner)
    elif isinstance(optimizer, EmbeddingFusedOptimizer) and optimizer.params:
        yield optimizer


def _unwrapped_name(model: nn.Module, name: str) -> str:
    """The name without the segments that wrappers add; a submodule named "module" stays."""
    names: list[str] = []
    inside: Any = model
    for segment in name.split("."):
        wraps = segment == "_dmp_wrapped_module" or (
            segment == "module" and isinstance(inside, DistributedDataParallel)
        )
        names += [] if wraps else [segment]
        inside = getattr(inside, segment, None)
    return ".".join(names)


__all__ = ["debug_grads"]
