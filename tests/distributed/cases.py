"""Tables, batches and the global-batch reference that the tests of sharded modules share.

The reference is *fused semantics*: the update is made once per step with the mean over ranks of the gradients of all
ranks' samples; ids that repeat are summed first; rows that no rank has touched, and their state, do not move.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from tutorec.distributed.embeddingbag import EmbeddingBagCollectionSharder, ShardedEmbeddingBagCollection
from tutorec.distributed.env import ShardingEnv
from tutorec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
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


def group() -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None, "tests of several ranks run inside a pool"
    return world


def shard(
    ebc: EmbeddingBagCollection, optimizer: str = "exact_sgd", kernel: str = "fused", **fused_params: float
) -> ShardedEmbeddingBagCollection:
    """The collection, table-wise over the ranks of the pool."""
    env = ShardingEnv.from_process_group(group())
    words = {
        config.name: table_wise(home(index, env.world_size), kernel)
        for index, config in enumerate(ebc.embedding_bag_configs())
    }
    params = {"optimizer": optimizer, "learning_rate": LEARNING_RATE, "eps": EPS, **fused_params}
    return EmbeddingBagCollectionSharder(params).shard(ebc, construct_module_sharding_plan(ebc, words), env)


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
    momentum: dict[str, Tensor] = field(default_factory=dict)

    def weights(self) -> dict[str, Tensor]:
        return {name: bag.get_parameter("weight") for name, bag in self.ebc.embedding_bags.items()}

    def outputs(self, batches: list[KeyedJaggedTensor]) -> list[Tensor]:
        return [self.ebc(each).values() for each in batches]

    def update(self, gradients: dict[str, Tensor]) -> None:
        """Apply dense gradients of the sum of all ranks' losses. (Untouched rows have none, and no decay.)"""
        with torch.no_grad():
            for name, weight in self.weights().items():
                gradient = gradients[name] / self.world_size
                if self.optimizer == "exact_sgd":
                    weight -= LEARNING_RATE * gradient
                    continue
                state = self.momentum.setdefault(name, torch.zeros(weight.shape[0]))
                state += gradient.square().mean(dim=1)
                weight -= LEARNING_RATE * gradient / (state.sqrt() + EPS).unsqueeze(1)

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


def local_weights(sharded: ShardedEmbeddingBagCollection) -> dict[str, Tensor]:
    return {name.split(".")[1]: parameter.detach().clone() for name, parameter in sharded.named_parameters()}


def local_state(sharded: ShardedEmbeddingBagCollection) -> dict[str, Tensor]:
    """``table.momentum1`` -> tensor."""
    state = sharded.fused_optimizer.state_dict()["state"]
    return {name: tensor.clone() for of_table in state.values() for name, tensor in of_table.items()}
