"""Tables, batches and the global-batch reference that the tests of sharded modules share.

The reference is *fused semantics*: the update is made once per step with the mean over ranks of the gradients of all
ranks' samples; ids that repeat are summed first; rows that no rank has touched, and their state, do not move. Row-wise
Adagrad keeps one number for each row of each slice of columns.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from tutorec.distributed.embeddingbag import EmbeddingBagCollectionSharder, ShardedEmbeddingBagCollection
from tutorec.distributed.env import ShardingEnv
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

LEARNING_RATE = 0.05
EPS = 1e-3


def tables(pooling: PoolingType = PoolingType.SUM) -> list[EmbeddingBagConfig]:
    """Three tables: one read by two features, two that share a feature, one whose width is no multiple of 4."""
    return [
        EmbeddingBagConfig(num_embeddings=11, embedding_dim=8, name="t0", feature_names=["f0", "f1"], pooling=pooling),
        EmbeddingBagConfig(num_embeddings=7, embedding_dim=4, name="t1", feature_names=["f1", "f2"], pooling=pooling),
        EmbeddingBagConfig(num_embeddings=9, embedding_dim=6, name="t2", feature_names=["f3"], pooling=pooling),
    ]


FEATURES = ("f3", "f1", "f0", "f2")  # no table's order
ROWS = 7  # ids below that are rows of every table


def collection(pooling: PoolingType = PoolingType.SUM, weighted: bool = False) -> EmbeddingBagCollection:
    torch.manual_seed(7)
    return EmbeddingBagCollection(tables(pooling), is_weighted=weighted)


def home(table: int, world_size: int) -> int:
    """Where a table goes: from the last rank down, so that rank order is not table order; rank 0 of 4 gets none."""
    return (world_size - 1 - table) % world_size


def word(kind: str, table: int, world_size: int, local_size: int, kernel: str = "fused") -> ParameterShardingGenerator:
    """How a table is cut by each type: never in rank order, so that no order can be right by chance."""
    hosts = world_size // local_size
    host = (hosts - 1 - table) % hosts
    first, last = host * local_size, (host + 1) * local_size - 1
    kind = kind_of(kind, table)
    return {
        "table_wise": lambda: table_wise(home(table, world_size), kernel),
        "column_wise": lambda: column_wise(ranks=[(table + 1) % world_size, table % world_size], compute_kernel=kernel),
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
    return [slice(0, columns // 2), slice(columns // 2, columns)] if kind in CUT_IN_TWO else [slice(0, columns)]


def group() -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None, "tests of several ranks run inside a pool"
    return world


def shard(
    ebc: EmbeddingBagCollection,
    optimizer: str = "exact_sgd",
    kernel: str = "fused",
    kind: str = "table_wise",
    **fused_params: float,
) -> ShardedEmbeddingBagCollection:
    """The collection over the ranks of the pool, each table cut by one type of sharding, or by one after the other."""
    env = ShardingEnv.from_process_group(group())
    words = {
        config.name: word(kind, index, env.world_size, env.local_size, kernel)
        for index, config in enumerate(ebc.embedding_bag_configs())
    }
    params = {"optimizer": optimizer, "learning_rate": LEARNING_RATE, "eps": EPS, **fused_params}
    plan = construct_module_sharding_plan(ebc, words, local_size=env.local_size)
    return EmbeddingBagCollectionSharder(params).shard(ebc, plan, env)


def batch(seed: int, samples: int, weighted: bool = False, dtype: torch.dtype = torch.int64) -> KeyedJaggedTensor:
    """Bags of 0 to 3 ids out of few, so that ids repeat and bags are empty."""
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (len(FEATURES) * samples,), generator=draw)
    count = int(lengths.sum())
    values = torch.randint(0, ROWS, (count,), generator=draw).to(dtype)
    weights = torch.randint(1, 5, (count,), generator=draw) / 2 if weighted else None
    return KeyedJaggedTensor(list(FEATURES), values, weights, lengths=lengths, stride=samples)


def samples_of(rank: int, step: int) -> int:
    """Ranks bring different numbers of samples; now and then one brings none."""
    return 0 if (rank + step) % 5 == 4 else 3 + rank


def coefficients(like: Tensor, seed: int) -> Tensor:
    """What the outputs are multiplied by to make a loss whose gradient differs everywhere."""
    return torch.rand(like.shape, generator=torch.Generator().manual_seed(1000 + seed))


def seed_of(rank: int, step: int) -> int:
    return 100 * step + rank


@dataclass
class Reference:
    """The unsharded tables, trained on the batches of all ranks."""

    ebc: EmbeddingBagCollection
    optimizer: str
    world_size: int
    kind: str = "table_wise"
    momentum: dict[str, Tensor] = field(default_factory=dict)  # [slices, R]

    def weights(self) -> dict[str, Tensor]:
        return {name: bag.get_parameter("weight") for name, bag in self.ebc.embedding_bags.items()}

    def outputs(self, batches: list[KeyedJaggedTensor]) -> list[Tensor]:
        return [self.ebc(each).values() for each in batches]

    def update(self, gradients: dict[str, Tensor]) -> None:
        """Apply dense gradients of the sum of all ranks' losses. (Untouched rows have none, and no decay.)"""
        with torch.no_grad():
            for index, (name, weight) in enumerate(self.weights().items()):
                gradient = gradients[name] / self.world_size
                if self.optimizer == "exact_sgd":
                    weight -= LEARNING_RATE * gradient
                    continue
                slices = column_slices(self.kind, index, weight.shape[1])
                states = self.momentum.setdefault(name, torch.zeros(len(slices), weight.shape[0]))
                for state, columns in zip(states, slices, strict=True):
                    state += gradient[:, columns].square().mean(dim=1)
                    weight[:, columns] -= LEARNING_RATE * gradient[:, columns] / (state.sqrt() + EPS).unsqueeze(1)

    def step(self, batches: list[KeyedJaggedTensor], step: int) -> list[Tensor]:
        """One step on the global batch; returns each rank's outputs."""
        outputs = self.outputs(batches)
        loss = sum(
            ((out * coefficients(out, seed_of(rank, step))).sum() for rank, out in enumerate(outputs)),
            start=torch.zeros(()),
        )
        weights = self.weights()
        gradients = torch.autograd.grad(loss, list(weights.values()))
        self.update(dict(zip(weights, gradients, strict=True)))
        return [out.detach() for out in outputs]


def held(sharded: ShardedEmbeddingBagCollection) -> dict[str, list[tuple[list[int], Tensor, Tensor | None]]]:
    """Table -> this rank's pieces: ([row, column], rows, state of row-wise Adagrad)."""
    rank, parameters = sharded._env.rank, dict(sharded.named_parameters())
    state = sharded.fused_optimizer.state_dict()["state"]
    found: dict[str, list[tuple[list[int], Tensor, Tensor | None]]] = {}
    for table in sharded._tables:
        mine = [piece for piece in table.pieces if piece.rank == rank]
        for index, piece in enumerate(mine):
            name = f"embedding_bags.{table.name}.weight" + (f"_{index}" if index else "")
            momentum = state.get(name, {}).get(f"{table.name}.momentum1")
            place = [piece.row_offset, piece.column_offset]
            own = (place, parameters[name].detach().clone(), None if momentum is None else momentum.clone())
            found.setdefault(table.name, []).append(own)
    return found


def local_weights(sharded: ShardedEmbeddingBagCollection) -> dict[str, Tensor]:
    return {name.split(".")[1]: parameter.detach().clone() for name, parameter in sharded.named_parameters()}


def local_state(sharded: ShardedEmbeddingBagCollection) -> dict[str, Tensor]:
    """``table.momentum1`` -> tensor."""
    state = sharded.fused_optimizer.state_dict()["state"]
    return {name: tensor.clone() for of_table in state.values() for name, tensor in of_table.items()}
