"""A look at gradients that nobody keeps: those of tables which backward updates as it goes."""

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
    """Watch the gradients of tables that are updated during backward.

    Inside the block the mapping fills: name of the weights, as in the unsharded model -> gradient ``[R, D]``, a
    coalesced sparse tensor that holds the touched rows. It is the gradient that the step is made with: ids that repeat
    are summed and, where there are ranks, so are their gradients, divided as `set_gradient_division` says. Several
    backward passes add up. Of a sharded table every rank sees its own rows and columns, the others are zero, so that
    the ranks' sum is the whole; of a table that every rank has a copy of each sees all.

    The step is the same with and without the block, and afterwards the model keeps nothing: gradients live as long as
    the caller's mapping. Both forward and backward belong inside the block. Tables with ordinary gradients
    (``dense`` kernel, no optimizer in backward) have them in ``.grad`` and are not watched.

    Args:
        model: A `DistributedModelParallel`, a sharded collection, or a model with tables under
            ``apply_optimizer_in_backward``.

    Yields:
        The mapping; a name that it does not have is a KeyError that says what there is.

    Raises:
        ValueError: No table of the model is updated during backward, or the model is being watched already.

    Example:
        >>> import torch, tutorec
        >>> from tutorec.optim import apply_optimizer_in_backward, debug_grads
        >>> config = tutorec.EmbeddingBagConfig(4, 2, "item", feature_names=["item"])
        >>> ebc = tutorec.EmbeddingBagCollection([config])
        >>> apply_optimizer_in_backward(torch.optim.SGD, ebc.parameters(), {"lr": 0.1})
        >>> batch = tutorec.KeyedJaggedTensor(["item"], torch.tensor([3, 1, 3]), lengths=torch.tensor([2, 1]))
        >>> with debug_grads(ebc) as grads: ebc(batch).values().sum().backward()
        >>> grads["embedding_bags.item.weight"].to_dense()[:, 0].tolist()
        [0.0, 1.0, 0.0, 2.0]
    """
    seen = _Gradients()
    watched = [*_watch_sharded(model, seen), *_watch_unsharded(model, seen)]
    if not watched:
        raise ValueError(
            f"no table of this {type(model).__name__} is updated during backward, so that there is nothing to watch: "
            "read parameter.grad, or call apply_optimizer_in_backward, or shard tables with the fused kernel"
        )
    busy = [one for one in watched if getattr(one.place, one.attribute, None) is not None]
    if busy:
        raise ValueError(f"debug_grads watches {busy[0].what!r} already: leave the inner block out")
    try:
        for one in watched:
            setattr(one.place, one.attribute, one.listener)
        yield seen
    finally:
        for one in watched:
            one.stop()


@dataclass(frozen=True)
class _Place:
    """Where the rows and columns that somebody holds lie in a table [rows, columns]."""

    name: str
    rows: int
    columns: int
    first_row: int = 0
    first_column: int = 0


@dataclass(frozen=True)
class _Watched:
    """An operator or a parameter that reports its gradients while an attribute of it is set."""

    place: Any
    attribute: str
    what: str
    listener: Any

    def stop(self) -> None:
        """Report no more."""
        setattr(self.place, self.attribute, None)


@dataclass
class _Gradients(Mapping[str, Tensor]):
    """Name -> the sum of what was reported."""

    names: dict[str, None] = field(default_factory=dict)
    held: dict[str, Tensor] = field(default_factory=dict)

    def add(self, place: _Place, rows: Tensor, sums: Tensor) -> None:
        """Take in the gradients ``[U, D_mine]`` of rows ``[U]``, counted within what is held."""
        whole = sums.detach()
        if place.columns != sums.shape[1]:
            whole = sums.new_zeros(sums.shape[0], place.columns)
            whole[:, place.first_column : place.first_column + sums.shape[1]] = sums
        ids = (rows.long() + place.first_row).unsqueeze(0)
        gradient = torch.sparse_coo_tensor(ids, whole.clone(), (place.rows, place.columns), check_invariants=False)
        before = self.held.get(place.name)
        self.held[place.name] = (gradient if before is None else before + gradient).coalesce()

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.held:
            if name in self.names:
                raise KeyError(
                    f"no gradient of {name!r} was seen: forward and backward both belong inside the block of "
                    "debug_grads, and this rank must hold rows of the table"
                )
            raise KeyError(f"{name!r} is no table that backward updates; there are {[*self.names]}")
        return self.held[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.held)

    def __len__(self) -> int:
        return len(self.held)

    def __repr__(self) -> str:
        return (
            f"{{{', '.join(f'{name!r}: {grad._nnz()} rows of {grad.shape[0]}' for name, grad in self.held.items())}}}"
        )


def _watch_sharded(model: nn.Module, seen: _Gradients) -> Iterator[_Watched]:
    for path, part in model.named_modules():
        # A whole model may be one, of which the collections inside know where their pieces lie.
        if not isinstance(part, FusedOptimizerModule) or any(_inner_parts(part)):
            continue
        prefix = _bare(model, f"{path}." if path else "")
        places = _places(part, prefix)
        for optimizer in _leaves(part.fused_optimizer):
            of_tables = [
                places.get(id(parameter)) or _Place(prefix + name, *parameter.shape)
                for name, parameter in optimizer.params.items()
            ]
            seen.names.update(dict.fromkeys(place.name for place in of_tables))

            def listener(table: int, rows: Tensor, sums: Tensor, of_tables: list[_Place] = of_tables) -> None:
                seen.add(of_tables[table], rows, sums)

            yield _Watched(optimizer.operator, "gradient_listener", of_tables[0].name, listener)


def _inner_parts(part: Any) -> Iterator[bool]:
    return (True for inner in part.modules() if inner is not part and isinstance(inner, FusedOptimizerModule))


def _watch_unsharded(model: nn.Module, seen: _Gradients) -> Iterator[_Watched]:
    for name, parameter in model.named_parameters():
        optimizers = getattr(parameter, "_in_backward_optimizers", ())
        if parameter.dim() != 2 or not optimizers or any(isinstance(one, KeyedOptimizer) for one in optimizers):
            continue
        place = _Place(_bare(model, name), *parameter.shape)
        seen.names[place.name] = None

        def listener(rows: Tensor, sums: Tensor, place: _Place = place) -> None:
            seen.add(place, rows, sums)

        yield _Watched(parameter, GRADIENT_LISTENER, place.name, listener)


def _places(part: Any, prefix: str) -> dict[int, _Place]:
    """Of each parameter of a sharded collection, by its id, where its rows and columns lie in the table."""
    held = part.held_tables() if hasattr(part, "held_tables") else ()
    return {
        id(rows): _Place(prefix + one.name, one.table.rows, one.table.columns, piece.row_offset, piece.column_offset)
        for one in held
        for piece, rows in zip(one.pieces, one.rows, strict=True)
    }


def _leaves(optimizer: KeyedOptimizer) -> Iterator[EmbeddingFusedOptimizer]:
    if isinstance(optimizer, CombinedOptimizer):
        for _, inner in optimizer.optimizers:
            yield from _leaves(inner)
    elif isinstance(optimizer, EmbeddingFusedOptimizer) and optimizer.params:
        yield optimizer


def _bare(model: nn.Module, name: str) -> str:
    """The name without what wrappers put into it; a part that the model's author calls "module" keeps its name."""
    kept: list[str] = []
    inside: Any = model
    for part in name.split("."):
        wraps = part == "_dmp_wrapped_module" or (part == "module" and isinstance(inside, DistributedDataParallel))
        kept += [] if wraps else [part]
        inside = getattr(inside, part, None)
    return ".".join(kept)


__all__ = ["debug_grads"]
