"""The model of the checkpoint tests: tables of every sharding type under every optimizer, pooled
ones and not.

``shift`` moves every table on to the next sharding type, so that saving under shift a and loading
under shift b, for all a and b, covers every ordered pair of types. What is held is described by
rectangles of the whole tables, so that two plans are compared without the code that is tested.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from distributed.cases import KINDS, coefficients, group, on_rank, word
from torch import Tensor, nn

from tutorec.distributed.core.env import ShardingEnv
from tutorec.distributed.embedding import EmbeddingCollectionSharder
from tutorec.distributed.embedding_base import ShardedEmbeddingModule
from tutorec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from tutorec.distributed.model_parallel import DistributedModelParallel
from tutorec.distributed.plan.plan import ShardingPlan
from tutorec.distributed.sharding_plan import construct_module_sharding_plan
from tutorec.modules.embedding_collection import EmbeddingCollection
from tutorec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from tutorec.modules.embedding_modules import EmbeddingBagCollection
from tutorec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from tutorec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from tutorec.optim.optimizers import in_backward_optimizer_filter
from tutorec.optim.rowwise_adagrad import RowWiseAdagrad
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor

RATE = 0.05
# The one that has no torch optimizer comes from fused_params.
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, float]] | None] = {
    "sgd": (torch.optim.SGD, {"lr": RATE}),
    "adagrad": (torch.optim.Adagrad, {"lr": RATE, "eps": 1e-3}),
    "rowwise": (RowWiseAdagrad, {"lr": RATE, "eps": 1e-3}),
    "adam": (torch.optim.Adam, {"lr": RATE, "eps": 1e-3}),
    "partial": None,
}
FUSED_PARAMS = {"optimizer": "partial_row_wise_adam", "learning_rate": RATE, "eps": 1e-3}
BY_ROW = ("rowwise", "partial")
ROWS = 11
Held = dict[str, list[tuple[list[int], dict[str, Tensor]]]]


class Pooled(nn.Module):
    """The pooled tables one level down, with a buffer beside them."""

    def __init__(self, kinds: Sequence[str]) -> None:
        super().__init__()
        self.ebc = EmbeddingBagCollection(
            [
                # 6 columns are padded by fbgemm; cut in two they are 3.
                EmbeddingBagConfig(
                    num_embeddings=ROWS,
                    embedding_dim=(8, 6)[index % 2],
                    name=f"{name}{index}",
                    feature_names=["f0", "f1"],
                )
                for name, index in itertools.product(kinds, range(len(KINDS)))
            ]
        )
        self.register_buffer("seen", torch.zeros(2))


class Model(nn.Module):
    """Pooled tables, rows one by one, and a dense layer that stands in two places."""

    def __init__(self, kinds: Sequence[str] = tuple(OPTIMIZERS)) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.sparse = Pooled(kinds)
        self.ec = EmbeddingCollection(
            [
                EmbeddingConfig(
                    num_embeddings=ROWS, embedding_dim=4, name=f"ec{index}", feature_names=["f1"]
                )
                for index in range(len(KINDS))
            ]
        )
        self.over = nn.Linear(4, 4)
        self.again = self.over
        for path, table in self.named_parameters():
            chosen = next((OPTIMIZERS[kind] for kind in kinds if f".{kind}" in path), None)
            if ".ec" in path:
                chosen = OPTIMIZERS["adagrad"]
            if chosen is not None:
                apply_optimizer_in_backward(chosen[0], [table], dict(chosen[1]))

    def forward(self, batch: KeyedJaggedTensor, seed: int) -> Tensor:
        """A loss whose gradient differs everywhere."""
        pooled = self.sparse.ebc(batch).values()
        rows = [one.values() for _, one in sorted(self.ec(batch).items())]
        dense = self.again(self.over(torch.cat(rows)))
        self.sparse.seen += 1
        return (pooled * coefficients(pooled, seed)).sum() + (
            dense * coefficients(dense, seed + 1)
        ).sum()


def batch(seed: int, samples: int = 4) -> KeyedJaggedTensor:
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (2 * samples,), generator=draw)
    values = torch.randint(0, ROWS - 2, (int(lengths.sum()),), generator=draw)
    return on_rank(KeyedJaggedTensor(["f0", "f1"], values, lengths=lengths, stride=samples))


def kind_under(shift: int, index: int) -> str:
    return KINDS[(index + shift) % len(KINDS)]


def plan_of(model: Model, shift: int, env: ShardingEnv, kernel: str = "fused") -> ShardingPlan:
    """Table i of each optimizer is of sharding type i + shift; copies are always fused."""

    def entry(name: str, index: int) -> Any:
        kind = kind_under(shift, int(name[-1]))
        own = "fused" if kind == "data_parallel" else kernel
        return word(kind, index, env.world_size, env.local_size, own)

    ebc = model.sparse.ebc
    pooled = {
        config.name: entry(config.name, index)
        for index, config in enumerate(ebc.embedding_bag_configs())
    }
    rows = {
        config.name: entry(config.name, index)
        for index, config in enumerate(model.ec.embedding_configs())
    }
    return ShardingPlan(
        {
            "sparse.ebc": construct_module_sharding_plan(ebc, pooled, local_size=env.local_size),
            "ec": construct_module_sharding_plan(model.ec, rows, local_size=env.local_size),
        }
    )


def sharded(
    shift: int, kinds: Sequence[str] = tuple(OPTIMIZERS), kernel: str = "fused"
) -> tuple[DistributedModelParallel, CombinedOptimizer]:
    model = Model(kinds)
    plan = plan_of(model, shift, ShardingEnv.from_process_group(group()), kernel)
    cache = {"cache_load_factor": 0.3}
    sharders = [
        EmbeddingBagCollectionSharder({**FUSED_PARAMS, **cache}),
        EmbeddingCollectionSharder(cache),
    ]
    return with_optimizer(DistributedModelParallel(model, plan=plan, sharders=sharders))


def with_optimizer(model: Any) -> tuple[Any, CombinedOptimizer]:
    """A momentum for the dense layer, so that there is something to lose."""
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(model.named_parameters())),
        lambda params: torch.optim.AdamW(params, lr=RATE),
    )
    fused = [model.fused_optimizer] if isinstance(model, DistributedModelParallel) else []
    return model, CombinedOptimizer([*fused, dense])


def train(model: nn.Module, optimizer: CombinedOptimizer, rank: int, steps: Sequence[int]) -> float:
    loss = torch.zeros(())
    for step in steps:
        optimizer.zero_grad()
        loss = model(batch(100 * step + rank), 100 * step + rank)
        loss.backward()
        optimizer.step()
    return loss.item()


def held(model: DistributedModelParallel) -> Held:
    """Parameter -> this rank's pieces: ([row, column, R, D], weights and states under
    short names).
    """
    optimizer = model.fused_optimizer
    live = {id(parameter): state for parameter, state in optimizer.state.items()}
    found: Held = {}
    for path, part in model.module.named_modules():
        if not isinstance(part, ShardedEmbeddingModule):
            continue
        for table in part.local_shards():
            for piece, rows in zip(table.shards, table.rows, strict=True):
                states = {
                    key.rpartition(".")[2]: value.clone()
                    for key, value in live.get(id(rows), {}).items()
                }
                place = [piece.row_offset, piece.column_offset, piece.rows, piece.columns]
                found.setdefault(f"{path}.{table.name}", []).append(
                    (place, {"weight": rows.detach().clone(), **states})
                )
    return found


def dense_of(model: DistributedModelParallel, optimizer: CombinedOptimizer) -> dict[str, Tensor]:
    """Weights, buffers and state of the dense parts."""
    bare = model.module
    assert isinstance(bare, Model), "the model of these tests"
    found = {
        "seen": bare.sparse.seen.clone(),
        **{n: p.detach().clone() for n, p in bare.over.named_parameters()},
    }
    states = optimizer.state
    for name, parameter in bare.over.named_parameters():
        found |= {
            f"{name}.{key}": value.clone() for key, value in states.get(parameter, {}).items()
        }
    return found


def by_column(of_ranks: Sequence[Held]) -> dict[str, dict[str, Tensor]]:
    """Parameter -> what -> the whole table [R, D]; a number for each row stands in every column of
    its slice.
    """
    pieces: dict[str, list[tuple[list[int], dict[str, Tensor]]]] = {}
    for of_rank in of_ranks:
        for name, own in of_rank.items():
            pieces.setdefault(name, []).extend(own)
    found: dict[str, dict[str, Tensor]] = {}
    for name, own in pieces.items():
        rows = max(place[0] + place[2] for place, _ in own)
        columns = max(place[1] + place[3] for place, _ in own)
        for (row, column, height, width), values in own:
            for what, value in values.items() if height else ():  # a rank may hold no row
                whole = found.setdefault(name, {}).setdefault(
                    what, torch.full((rows, columns), torch.nan)
                )
                wide = value.view(1, 1) if value.dim() == 0 else value.view(height, -1)
                whole[row : row + height, column : column + width] = wide.expand(height, width)
    return found


def expected_pieces(whole: dict[str, dict[str, Tensor]], mine: Held) -> Held:
    """What a rank with these pieces should hold of whole tables: means over columns where it has a
    number a row.
    """
    found: Held = {}
    for name, own in mine.items():
        for place, values in own:
            row, column, height, width = place
            expected = {}
            for what, value in values.items():
                part = whole[name][what][row : row + height, column : column + width]
                if value.dim() == 0:
                    part = part.reshape(-1)[0] if part.numel() else value
                elif value.dim() == 1:
                    part = part.double().mean(dim=1).float()
                expected[what] = part
            found.setdefault(name, []).append((place, expected))
    return found
