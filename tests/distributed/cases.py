"""Tables, batches and the global-batch reference that the tests of sharded modules share.

The reference is *fused semantics*: the update is made once per step with the mean over ranks of the
gradients of all ranks' samples; ids that repeat are summed first; rows that no rank has touched,
and their state, do not move. What is kept for a whole row is kept for each row of each slice of
columns.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing import assert_close

from tutorec._kernels.backend import use_backend
from tutorec.distributed.core.env import ShardingEnv
from tutorec.distributed.embeddingbag import (
    EmbeddingBagCollectionSharder,
    ShardedEmbeddingBagCollection,
)
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
from tutorec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from tutorec.modules.embedding_modules import EmbeddingBagCollection
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor
from tutorec.spmd import device

LEARNING_RATE = 0.05
EPS = 1e-3
BETA1, BETA2, DECAY = 0.9, 0.999, 0.1
ADAMS = ("adam", "partial_row_wise_adam")
OPTIMIZERS = ("exact_sgd", "exact_adagrad", "exact_row_wise_adagrad", *ADAMS)
States = dict[str, Tensor]  # name of a state, without its table's -> what is kept
Piece = tuple[list[int], Tensor, States]  # [first row, first column], rows, their state


def tables(pooling: PoolingType = PoolingType.SUM) -> list[EmbeddingBagConfig]:
    """Three tables: one read by two features, two that share a feature, one whose width is no
    multiple of 4.
    """
    return [
        EmbeddingBagConfig(
            num_embeddings=11,
            embedding_dim=8,
            name="t0",
            feature_names=["f0", "f1"],
            pooling=pooling,
        ),
        EmbeddingBagConfig(
            num_embeddings=7,
            embedding_dim=4,
            name="t1",
            feature_names=["f1", "f2"],
            pooling=pooling,
        ),
        EmbeddingBagConfig(
            num_embeddings=9, embedding_dim=6, name="t2", feature_names=["f3"], pooling=pooling
        ),
    ]


FEATURES = ("f3", "f1", "f0", "f2")  # no table's order
ROWS = 7  # ids below that are rows of every table


def collection(
    pooling: PoolingType = PoolingType.SUM, weighted: bool = False
) -> EmbeddingBagCollection:
    torch.manual_seed(7)
    return EmbeddingBagCollection(tables(pooling), is_weighted=weighted)


def home(table: int, world_size: int) -> int:
    """Where a table goes: from the last rank down, so that rank order is not table order; rank 0 of
    4 gets none.
    """
    return (world_size - 1 - table) % world_size


def word(
    kind: str, table: int, world_size: int, local_size: int, kernel: str = "fused"
) -> ParameterShardingGenerator:
    """How a table is cut by each type: never in rank order, so that no order can be right by
    chance.
    """
    hosts = world_size // local_size
    host = (hosts - 1 - table) % hosts
    first, last = host * local_size, (host + 1) * local_size - 1
    kind = kind_of(kind, table)
    return {
        "table_wise": lambda: table_wise(home(table, world_size), compute_kernel=kernel),
        "column_wise": lambda: column_wise(
            ranks=[(table + 1) % world_size, table % world_size], compute_kernel=kernel
        ),
        "table_column_wise": lambda: table_column_wise(ranks=[last, first], compute_kernel=kernel),
        "row_wise": lambda: row_wise(compute_kernel=kernel),
        "table_row_wise": lambda: table_row_wise(host, kernel),
        "grid_shard": lambda: grid_shard([host, (host + 1) % hosts], kernel),
        "data_parallel": lambda: data_parallel(kernel),
    }[kind]()


KINDS = (
    "row_wise",
    "grid_shard",
    "column_wise",
    "table_row_wise",
    "table_wise",
    "table_column_wise",
    "data_parallel",
)
MIXES = {"mixed": KINDS, "mixed with copies": ("data_parallel", "table_wise", "data_parallel")}
CUT_IN_TWO = ("column_wise", "table_column_wise", "grid_shard")


def kind_of(kind: str, table: int) -> str:
    """How a table is cut where a plan mixes types."""
    return MIXES[kind][table % len(MIXES[kind])] if kind in MIXES else kind


def column_slices(kind: str, table: int, columns: int) -> list[slice]:
    """The slices of columns that a table is cut into."""
    kind = kind_of(kind, table)
    return (
        [slice(0, columns // 2), slice(columns // 2, columns)]
        if kind in CUT_IN_TWO
        else [slice(0, columns)]
    )


def group() -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None, "tests of several ranks run inside a pool"
    return world


def optimizer_words(optimizer: str) -> dict[str, Any]:
    """The ``fused_params`` that the reference stands for."""
    decay = {"weight_decay": DECAY} if optimizer in ADAMS else {}
    return {"optimizer": optimizer, "learning_rate": LEARNING_RATE, "eps": EPS, **decay}


def shard(
    ebc: EmbeddingBagCollection,
    optimizer: str = "exact_sgd",
    kernel: str = "fused",
    kind: str = "table_wise",
    **fused_params: float,
) -> ShardedEmbeddingBagCollection:
    """The collection over the ranks of the pool, each table cut by one type of sharding, or by one
    after the other.
    """
    env = ShardingEnv.from_process_group(group())
    words = {
        config.name: word(kind, index, env.world_size, env.local_size, kernel)
        for index, config in enumerate(ebc.embedding_bag_configs())
    }
    params = {**optimizer_words(optimizer), **fused_params}
    plan = construct_module_sharding_plan(ebc, words, local_size=env.local_size)
    return EmbeddingBagCollectionSharder(params).shard(ebc, plan, env)


def serving(count: int) -> torch.device:
    """Where so many devices can serve: this process's GPUs, or else virtual ones on the CPU."""
    return device() if torch.cuda.device_count() >= count else torch.get_default_device()


def on_rank(made: Any) -> Any:
    """On the rank's own device; in the process of the test on the CPU, where what ranks return
    arrives.
    """
    return made.to(device()) if dist.is_initialized() else made


def operator_name(backend: str = "auto") -> str:
    """The class that looks rows up on the rank's own device, as it stands in printed forms."""
    with use_backend(backend) as chosen:
        serves = chosen.name == "fbgemm" and chosen.serves(device().type)
    return "SplitTableBatchedEmbeddingBagsCodegen" if serves else "TorchTableBatchedEmbeddingBags"


def batch(
    seed: int, samples: int, weighted: bool = False, dtype: torch.dtype = torch.int64
) -> KeyedJaggedTensor:
    """Bags of 0 to 3 ids out of few, so that ids repeat and bags are empty."""
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (len(FEATURES) * samples,), generator=draw)
    count = int(lengths.sum())
    values = torch.randint(0, ROWS, (count,), generator=draw).to(dtype)
    weights = torch.randint(1, 5, (count,), generator=draw) / 2 if weighted else None
    made = KeyedJaggedTensor(list(FEATURES), values, weights, lengths=lengths, stride=samples)
    return on_rank(made)


def samples_of(rank: int, step: int) -> int:
    """Ranks bring different numbers of samples; now and then one brings none."""
    return 0 if (rank + step) % 5 == 4 else 3 + rank


def coefficients(like: Tensor, seed: int) -> Tensor:
    """What the outputs are multiplied by to make a loss whose gradient differs everywhere."""
    return torch.rand(like.shape, generator=torch.Generator().manual_seed(1000 + seed)).to(
        like.device
    )


def seed_of(rank: int, step: int) -> int:
    return 100 * step + rank


@dataclass
class Reference:
    """The unsharded tables, trained on the batches of all ranks."""

    ebc: EmbeddingBagCollection
    optimizer: str
    world_size: int
    kind: str = "table_wise"
    # [R, D], and [slices, R] of what is kept for a row
    states: dict[str, States] = field(default_factory=dict)
    steps: int = 0
    weights_rtol: float = 1e-5

    def weights(self) -> dict[str, Tensor]:
        return {name: bag.get_parameter("weight") for name, bag in self.ebc.embedding_bags.items()}

    def outputs(self, batches: list[KeyedJaggedTensor]) -> list[Tensor]:
        return [self.ebc(each).values() for each in batches]

    def rows_of(self, batches: list[KeyedJaggedTensor]) -> dict[str, list[int]]:
        """The rows of each table that some rank looks up."""
        ids = [batch.to_dict() for batch in batches]
        found = {config.name: list(config.feature_names) for config in self.configs()}
        return {
            name: sorted(
                {
                    row
                    for of_rank in ids
                    for feature in features
                    for row in of_rank[feature].values().tolist()
                }
            )
            for name, features in found.items()
        }

    def configs(self) -> list[Any]:
        return list(self.ebc.embedding_bag_configs())

    @torch.no_grad()
    def update(
        self, gradients: dict[str, Tensor], rows: dict[str, list[int]] | None = None
    ) -> None:
        """Apply dense gradients of the sum of all ranks' losses to the rows of the batch; for SGD,
        to all rows.
        """
        assert rows is not None or self.optimizer == "exact_sgd", "which rows are in the batch?"
        self.steps += 1
        for index, (name, weight) in enumerate(self.weights().items()):
            slices = column_slices(self.kind, index, weight.shape[1])
            if name not in self.states:
                self.states[name] = new_states(self.optimizer, weight, len(slices))
            for place, columns in enumerate(slices):
                kept = {
                    key: state[:, columns] if state.shape == weight.shape else state[place]
                    for key, state in self.states[name].items()
                }
                gradient = gradients[name][:, columns] / self.world_size
                moved = rows[name] if rows else list(range(weight.shape[0]))
                self._move(weight[:, columns], gradient, kept, moved)

    def _move(self, weight: Tensor, gradient: Tensor, states: States, rows: list[int]) -> None:
        """One step of some rows, in place; a row's state is [D] or a number."""
        for row in rows:
            g, state = gradient[row], {name: kept[row] for name, kept in states.items()}
            if self.optimizer == "exact_sgd":
                weight[row] -= LEARNING_RATE * g
                continue
            squares = g.square() if state[last_of(states)].dim() else g.square().mean()
            if self.optimizer not in ADAMS:
                state["momentum1"] += squares
                weight[row] -= LEARNING_RATE * g / (state["momentum1"].sqrt() + EPS)
                continue
            state["momentum1"] += (1 - BETA1) * (g - state["momentum1"])
            state["exp_avg_sq"] += (1 - BETA2) * (squares - state["exp_avg_sq"])
            mean = state["momentum1"] / (1 - BETA1**self.steps)
            root = (state["exp_avg_sq"] / (1 - BETA2**self.steps)).sqrt() + EPS
            weight[row] -= LEARNING_RATE * (mean / root + DECAY * weight[row])

    def check_piece(self, name: str, shard: Piece, where: str) -> tuple[slice, slice]:
        """Compare rows and state that a rank holds with the table; which rows and
        columns they are.
        """
        (row, column), rows, states = shard
        part = slice(row, row + rows.shape[0]), slice(column, column + rows.shape[1])
        assert_close(
            rows,
            self.weights()[name].detach()[part],
            rtol=self.weights_rtol,
            atol=1e-6,
            msg=f"weights of {name} {where}",
        )
        whole = self.states[name]
        index = list(self.weights()).index(name)
        starts = [
            columns.start
            for columns in column_slices(self.kind, index, self.weights()[name].shape[1])
        ]
        wanted = {
            key: kept[part]
            if kept.shape == self.weights()[name].shape
            else kept[starts.index(column)][part[0]]
            for key, kept in whole.items()
        }
        if self.optimizer in ADAMS:
            wanted["step"] = torch.tensor(float(self.steps))
        assert states.keys() == wanted.keys(), f"state of {name} {where}"
        for key, state in states.items():
            assert_close(state, wanted[key], rtol=1e-5, atol=1e-6, msg=f"{key} of {name} {where}")
        return part

    def step(self, batches: list[KeyedJaggedTensor], step: int) -> list[Tensor]:
        """One step on the global batch; returns each rank's outputs."""
        outputs = self.outputs(batches)
        loss = sum(
            (
                (out * coefficients(out, seed_of(rank, step))).sum()
                for rank, out in enumerate(outputs)
            ),
            start=torch.zeros(()),
        )
        weights = self.weights()
        gradients = torch.autograd.grad(loss, list(weights.values()))
        self.update(dict(zip(weights, gradients, strict=True)), self.rows_of(batches))
        return [out.detach() for out in outputs]


def new_states(optimizer: str, weight: Tensor, slices: int) -> States:
    """Zeros: [R, D], or [slices, R] of what is kept for a whole row."""
    whole, rowwise = torch.zeros_like(weight), torch.zeros(slices, weight.shape[0])
    return {
        "exact_sgd": dict[str, Tensor],
        "exact_adagrad": lambda: {"momentum1": whole},
        "exact_row_wise_adagrad": lambda: {"momentum1": rowwise},
        "adam": lambda: {"momentum1": whole, "exp_avg_sq": whole.clone()},
        "partial_row_wise_adam": lambda: {"momentum1": whole, "exp_avg_sq": rowwise},
    }[optimizer]()


def last_of(states: States) -> str:
    """The state of squares."""
    return list(states)[-1]


def held(sharded: ShardedEmbeddingBagCollection) -> dict[str, list[Piece]]:
    """Table -> this rank's shards."""
    return pieces_held(sharded, "embedding_bags")


def tables_of(sharded: Any) -> list[Any]:
    """A sharded collection's tables with their shards, as the formulas of traffic take them."""
    return sharded._tables


def pieces_held(sharded: Any, path: str) -> dict[str, list[Piece]]:
    """Table -> this rank's shards, of a collection whose tables stand under a path."""
    rank, parameters = sharded._env.rank, dict(sharded.named_parameters())
    found: dict[str, list[Piece]] = {}
    for table in tables_of(sharded):
        for index, shard in enumerate(shard for shard in table.shards if shard.rank == rank):
            parameter = parameters[f"{path}.{table.name}.weight" + (f"_{index}" if index else "")]
            states: States = {}
            for optimizer in getattr(parameter, "_in_backward_optimizers", ()):
                kept = optimizer.state[parameter].items()
                states |= {
                    name.removeprefix(f"{table.name}."): state.clone() for name, state in kept
                }
            place = [shard.row_offset, shard.column_offset]
            found.setdefault(table.name, []).append((place, parameter.detach().clone(), states))
    return found


def local_weights(sharded: ShardedEmbeddingBagCollection) -> dict[str, Tensor]:
    """Table -> a copy of this rank's rows, on the CPU."""
    return {
        name.split(".")[1]: parameter.detach().cpu().clone()
        for name, parameter in sharded.named_parameters()
    }


def local_state(sharded: ShardedEmbeddingBagCollection) -> dict[str, Tensor]:
    """``table.momentum1`` -> a copy, on the CPU."""
    states = sharded.fused_optimizer.state.values()
    return {name: tensor.cpu().clone() for of_table in states for name, tensor in of_table.items()}
