"""Train a sharded and an unsharded collection, and measure how far apart their results are.

The unsharded side is a collection in this process, trained on the batches of all ranks with plain
autograd and with the update written out here, as the book's page on semantics states it. Nothing of
the sharded road is used for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from tutorec.distributed.core.env import ShardingEnv
from tutorec.distributed.embedding import EmbeddingCollectionSharder
from tutorec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from tutorec.distributed.sharding_plan import (
    ParameterShardingGenerator,
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    grid_shard,
    row_wise,
    table_column_wise,
    table_row_wise,
    table_wise,
)
from tutorec.modules.embedding_collection import EmbeddingCollection
from tutorec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from tutorec.modules.embedding_modules import EmbeddingBagCollection
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor
from tutorec.spmd.devices import device
from tutorec.spmd.pool import Ranks

__all__ = ["KINDS", "LOOKUPS", "OPTIMIZERS", "Case", "Distance", "measure"]

KINDS = (
    "data_parallel",
    "table_wise",
    "column_wise",
    "table_column_wise",
    "row_wise",
    "table_row_wise",
    "grid_shard",
)
LOOKUPS = ("SUM", "MEAN", "SUM, weighted", "rows")
OPTIMIZERS = ("sgd", "adagrad", "rowwise_adagrad", "adam", "partial_rowwise_adam")
_RATE, _EPS, _BETA1, _BETA2, _DECAY = 0.1, 1e-3, 0.9, 0.999, 0.1
_ADAMS = ("adam", "partial_rowwise_adam")
# Rows, columns, features; the ranks are more than the rows of the last one.
_TABLES = {
    "item": (64, 8, ("item", "clicked")),
    "user": (41, 12, ("user",)),
    "shop": (3, 4, ("shop",)),
}
_CUT = ("column_wise", "table_column_wise", "grid_shard")


@dataclass(frozen=True)
class Case:
    """One comparison.

    Attributes:
        kind: how all tables are sharded, one of ``KINDS``.
        lookup: what is computed, one of ``LOOKUPS``; ``"rows"`` pools nothing.
        optimizer: what backward applies, one of ``OPTIMIZERS``.
    """

    kind: str
    lookup: str
    optimizer: str


@dataclass(frozen=True)
class Distance:
    """How far apart the two are after training, as parts of the largest number compared.

    Attributes:
        outputs: of all steps.
        weights: of all tables, against their largest change.
        state: of the optimizer, each kind of it against its largest number; 0 for SGD, which has
            none.
    """

    outputs: float
    weights: float
    state: float

    @property
    def largest(self) -> float:
        """Of the three."""
        return max(self.outputs, self.weights, self.state)


_States = dict[str, Tensor]
# Table, first row, first column, rows, state by name.
_Piece = tuple[str, int, int, Tensor, _States]
_Result = tuple[list[Tensor], list[_Piece]]


def measure(world: Ranks, cases: Sequence[Case], steps: int = 3) -> dict[Case, Distance]:
    """Train each case on the ranks and in this process, and compare.

    Args:
        world: the ranks, on one host or several.
        cases: what to compare.
        steps: of training.

    Returns:
        For each case the largest differences.
    """
    of_ranks = world.run(_train, list(cases), steps)
    return {
        case: _compare(case, [results[index] for results in of_ranks], world.world_size, steps)
        for index, case in enumerate(cases)
    }


def _train(rank: int, world_size: int, cases: Sequence[Case], steps: int) -> list[_Result]:
    """Every case on one rank: its outputs, and what it holds in the end."""
    group = torch.distributed.group.WORLD
    assert group is not None, "ranks of a pool have a process group"
    env = ShardingEnv.from_process_group(group)
    return [_train_one(case, env, steps) for case in cases]


def _train_one(case: Case, env: ShardingEnv, steps: int) -> _Result:
    collection = _collection(case)
    generators = {name: _word(case.kind, index, env) for index, name in enumerate(_TABLES)}
    plan = construct_module_sharding_plan(collection, generators, local_size=env.local_size)
    params: dict[str, Any] = {"optimizer": case.optimizer, "learning_rate": _RATE, "eps": _EPS}
    if case.optimizer in _ADAMS:
        params |= {"beta1": _BETA1, "beta2": _BETA2, "weight_decay": _DECAY}
    sharder: Any = (
        EmbeddingCollectionSharder if case.lookup == "rows" else EmbeddingBagCollectionSharder
    )
    sharded = sharder(params).shard(collection, plan, env)
    outputs = []
    for step in range(steps):
        out = _flat(sharded(_batch(case, env.rank, step).to(device())))
        outputs.append(out.detach())
        (out * _coefficients(out, env.rank, step)).sum().backward()
    pieces: list[_Piece] = []
    for name, parameter in sharded.named_parameters():
        _, table, which = name.split(".")
        of_rank = [
            piece
            for piece in next(t for t in sharded._tables if t.name == table).pieces
            if piece.rank == env.rank
        ]
        piece = of_rank[int(which.removeprefix("weight").removeprefix("_") or 0)]
        [optimizer] = cast(Any, parameter)._in_backward_optimizers
        kept = {
            key.removeprefix(f"{table}."): state.clone()
            for key, state in optimizer.state[parameter].items()
        }
        pieces.append(
            (table, piece.row_offset, piece.column_offset, parameter.detach().clone(), kept)
        )
    return outputs, pieces


def _compare(case: Case, results: Sequence[_Result], world_size: int, steps: int) -> Distance:
    """The ranks' results against the collection trained here on the batches of all ranks."""
    collection = _collection(case)
    tables = {name.split(".")[1]: parameter for name, parameter in collection.named_parameters()}
    before = {name: weight.detach().clone() for name, weight in tables.items()}
    reference = _Reference(case, tables)
    outputs: list[tuple[Tensor, Tensor]] = []
    for step in range(steps):
        loss, batches = torch.zeros(()), [_batch(case, rank, step) for rank in range(world_size)]
        for rank, (rank_outputs, _) in enumerate(results):
            out = _flat(collection(batches[rank]))
            outputs.append((rank_outputs[step], out.detach()))
            loss = loss + (out * _coefficients(out, rank, step)).sum()
        gradients = torch.autograd.grad(loss / world_size, list(tables.values()))
        reference.update(dict(zip(tables, gradients, strict=True)), batches)
    largest_change = max(
        float((tables[name].detach() - before[name]).abs().max()) for name in tables
    )
    weights, states = [0.0], [0.0]
    for table, row, column, rows, kept in (piece for _, pieces in results for piece in pieces):
        whole = tables[table].detach()[row : row + rows.shape[0], column : column + rows.shape[1]]
        weights.append(_largest(rows - whole) / largest_change)
        expected = reference.states_of_piece(table, row, column, rows.shape)
        assert kept.keys() == expected.keys(), f"{table}: {sorted(kept)}, not {sorted(expected)}"
        states += [
            _largest(state - expected[key]) / reference.largest(key) for key, state in kept.items()
        ]
    scale = max(_largest(expected) for _, expected in outputs)
    return Distance(max(_largest(a - b) for a, b in outputs) / scale, max(weights), max(states))


class _Reference:
    """The textbook form of each optimizer, applied to the rows of the batch, slice by slice.

    Args:
        case: says which.
        tables: name -> weights [R, D], which are moved.
    """

    def __init__(self, case: Case, tables: Mapping[str, Tensor]) -> None:
        self._case, self._tables, self._steps = case, tables, 0
        # Of a slice, by its first column: what is kept, [R] or [R, columns].
        self._states: dict[tuple[str, int], _States] = {}
        for name, weight in tables.items():
            for columns in self._slices(weight):
                part = torch.zeros_like(weight[:, columns])
                self._states[name, columns.start] = self._new(part, part.new_zeros(part.shape[0]))

    def _slices(self, weight: Tensor) -> list[slice]:
        middle, end = weight.shape[1] // 2, weight.shape[1]
        return (
            [slice(0, middle), slice(middle, end)] if self._case.kind in _CUT else [slice(0, end)]
        )

    def _new(self, elements: Tensor, rows: Tensor) -> _States:
        """What the optimizer keeps; both are zeros."""
        optimizer = self._case.optimizer
        if optimizer == "sgd":
            return {}
        squares = rows if optimizer in ("rowwise_adagrad", "partial_rowwise_adam") else elements
        return (
            {"momentum1": elements.clone(), "exp_avg_sq": squares}
            if optimizer in _ADAMS
            else {"momentum1": squares}
        )

    @torch.no_grad()
    def update(self, gradients: Mapping[str, Tensor], batches: Sequence[KeyedJaggedTensor]) -> None:
        """One step with the mean gradients [R, D] of the ranks' batches."""
        self._steps += 1
        for name, (_, _, features) in _TABLES.items():
            ids = torch.cat(
                [batch[feature].values() for batch in batches for feature in features]
            ).unique()
            weight = self._tables[name]
            for columns in self._slices(weight):
                self._move(
                    weight[:, columns],
                    gradients[name][:, columns],
                    self._states[name, columns.start],
                    ids,
                )

    def _move(self, weight: Tensor, gradient: Tensor, states: _States, rows: Tensor) -> None:
        g, state = gradient[rows], {key: kept[rows] for key, kept in states.items()}
        squares = g.square()
        if states and [*states.values()][-1].dim() == 1:
            squares = squares.mean(dim=1)
        if self._case.optimizer in _ADAMS:
            state["momentum1"] = _BETA1 * state["momentum1"] + (1 - _BETA1) * g
            state["exp_avg_sq"] = _BETA2 * state["exp_avg_sq"] + (1 - _BETA2) * squares
            root = (state["exp_avg_sq"] / (1 - _BETA2**self._steps)).sqrt() + _EPS
            g = (
                state["momentum1"] / (1 - _BETA1**self._steps) / root.view(len(rows), -1)
                + _DECAY * weight[rows]
            )
        elif states:
            state["momentum1"] = state["momentum1"] + squares
            g = g / (state["momentum1"].sqrt() + _EPS).view(len(rows), -1)
        weight[rows] -= _RATE * g
        for key, kept in state.items():
            states[key][rows] = kept

    def states_of_piece(self, table: str, row: int, column: int, shape: Sequence[int]) -> _States:
        """What is to be kept of the rows and columns of a piece."""
        first = max(start for name, start in self._states if name == table and start <= column)
        rows, columns = slice(row, row + shape[0]), slice(column - first, column - first + shape[1])
        kept = {
            key: state[rows] if state.dim() == 1 else state[rows, columns]
            for key, state in self._states[table, first].items()
        }
        return (
            {**kept, "step": torch.tensor(float(self._steps))}
            if self._case.optimizer in _ADAMS
            else kept
        )

    def largest(self, key: str) -> float:
        """The largest number of a kind of state."""
        return (
            float(self._steps)
            if key == "step"
            else max(_largest(of[key]) for of in self._states.values())
        )


def _word(kind: str, table: int, env: ShardingEnv) -> ParameterShardingGenerator:
    """How a table is cut; tables begin at different ranks and hosts."""
    ranks, hosts = env.world_size, env.world_size // env.local_size
    host = table % hosts
    first, last = host * env.local_size, (host + 1) * env.local_size - 1
    if kind == "table_wise":
        return table_wise(table % ranks)
    if kind == "column_wise":
        return column_wise(ranks=[(table + 1) % ranks, table % ranks])
    if kind == "table_column_wise":
        return table_column_wise(ranks=[first, last])
    if kind == "table_row_wise":
        return table_row_wise(host)
    if kind == "grid_shard":
        return grid_shard([host, (host + 1) % hosts])
    return row_wise() if kind == "row_wise" else data_parallel()


def _collection(case: Case) -> EmbeddingBagCollection | EmbeddingCollection:
    torch.manual_seed(0)
    if case.lookup == "rows":
        rows = [
            EmbeddingConfig(r, d, name, feature_names=list(read))
            for name, (r, d, read) in _TABLES.items()
        ]
        return EmbeddingCollection(rows)
    pooling = PoolingType.MEAN if case.lookup == "MEAN" else PoolingType.SUM
    bags = [
        EmbeddingBagConfig(r, d, name, feature_names=list(read), pooling=pooling)
        for name, (r, d, read) in _TABLES.items()
    ]
    return EmbeddingBagCollection(bags, is_weighted="weighted" in case.lookup)


def _batch(case: Case, rank: int, step: int) -> KeyedJaggedTensor:
    """Bags of 0 to 4 ids; ranks have different numbers of samples, sometimes none."""
    draw = torch.Generator().manual_seed(100 * step + rank)
    samples = 0 if (rank + step) % 5 == 4 else 4 + rank
    features = {feature: rows for rows, _, read in _TABLES.values() for feature in read}
    lengths = torch.randint(0, 5, (len(features), samples), generator=draw)
    counts = lengths.sum(dim=1).tolist()
    ids = [
        torch.randint(rows, (n,), generator=draw)
        for rows, n in zip(features.values(), counts, strict=True)
    ]
    values = torch.cat(ids)
    weights = torch.rand(values.shape, generator=draw) if "weighted" in case.lookup else None
    return KeyedJaggedTensor(
        list(features), values, weights, lengths=lengths.view(-1), stride=samples
    )


def _flat(result: Any) -> Tensor:
    """Every number of a result."""
    output = result.wait() if hasattr(result, "wait") else result
    if isinstance(output, dict):
        return torch.cat([one.values().reshape(-1) for one in output.values()])
    return output.values()


def _coefficients(like: Tensor, rank: int, step: int) -> Tensor:
    """What outputs are multiplied by to make a loss whose gradient differs everywhere."""
    return torch.rand(
        like.shape, generator=torch.Generator().manual_seed(7 + 100 * step + rank)
    ).to(like.device)


def _largest(numbers: Tensor) -> float:
    return float(numbers.abs().max()) if numbers.numel() else 0.0
