"""Sharded collections on two processes: `python tests/parity/rank_cases.py tutorec` prints what
both ranks found.

Every case makes three steps with the same plan, weights and batches in either library; rank 1
brings fewer samples where torchrec allows it, bags are empty and ids repeat.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from registry import filled, of, print_and_end
from sharded_cases import exact_optimizer

WORLD = 2
STEPS = 3
RATE = 0.1
TABLES = (("t_item", 10, 8, ("item",)), ("t_user", 7, 8, ("user", "friend")))
# Features in an order that is no table's; lengths of rank 0 and of rank 1.
LENGTHS = {"friend": ((1, 0, 2), (0, 2)), "item": ((2, 1, 0), (3, 1)), "user": ((0, 1, 1), (1, 0))}
# Over gloo torchrec brings row-wise outputs home only where ranks have equally many samples.
EQUAL_LENGTHS = {
    "friend": ((1, 0, 2), (0, 2, 1)),
    "item": ((2, 1, 0), (3, 1, 0)),
    "user": ((0, 1, 1), (1, 0, 0)),
}


@dataclass(frozen=True)
class RankCase:
    """A plan for both tables and how they are trained."""

    sharding: str
    optimizer: str = "EXACT_SGD"
    pooling: str = "SUM"  # NONE: an EmbeddingCollection
    weighted: bool = False

    @property
    def name(self) -> str:
        words = [self.sharding, self.optimizer.removeprefix("EXACT_").lower(), self.pooling.lower()]
        return " ".join([*words, *["weighted"] * self.weighted])

    @property
    def lengths(self) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
        return (
            EQUAL_LENGTHS
            if self.sharding in ("row_wise", "table_row_wise", "grid_shard")
            else LENGTHS
        )


def _cases() -> list[RankCase]:
    # The exact optimizers that fbgemm has on a CPU.
    exact = ("EXACT_SGD", "EXACT_ROWWISE_ADAGRAD", "EXACT_ADAGRAD")
    cases = []
    for sharding in ("table_wise", "column_wise", "row_wise"):
        for pooling in ("SUM", "NONE"):
            cases += [RankCase(sharding, optimizer, pooling) for optimizer in exact]
        cases += [RankCase(sharding, pooling="MEAN"), RankCase(sharding, weighted=True)]
    for sharding in ("table_row_wise", "grid_shard", "table_column_wise"):
        cases += [RankCase(sharding, optimizer) for optimizer in exact]
    # torchrec steps data-parallel tables with a dense optimizer: only SGD leaves other rows where
    # they are. Those of an EmbeddingCollection it pools on a CPU, and raises.
    return [*cases, RankCase("data_parallel")]


RANK_CASES = {case.name: case for case in _cases()}


def word(root: str, case: RankCase, index: int) -> Any:
    plans = of(root, "distributed.sharding_plan")
    words = {
        "table_wise": lambda: plans.table_wise(rank=1 - index),
        "column_wise": lambda: plans.column_wise(ranks=[1, 0] if index else [0, 1]),
        "table_column_wise": lambda: plans.column_wise(ranks=[0, 1]),
        "row_wise": plans.row_wise,
        "table_row_wise": lambda: plans.table_row_wise(host_index=0),
        "grid_shard": lambda: plans.grid_shard(host_indexes=[0]),
        "data_parallel": plans.data_parallel,
    }
    return words[case.sharding]()


def collection(root: str, case: RankCase) -> Any:
    import torch

    configs = of(root, "modules.embedding_configs")
    cpu = torch.device("cpu")
    if case.pooling == "NONE":
        tables = [
            configs.EmbeddingConfig(
                num_embeddings=rows, embedding_dim=columns, name=name, feature_names=list(features)
            )
            for name, rows, columns, features in TABLES
        ]
        return of(root, "modules.embedding_modules").EmbeddingCollection(tables=tables, device=cpu)
    tables = [
        configs.EmbeddingBagConfig(
            num_embeddings=rows,
            embedding_dim=columns,
            name=name,
            feature_names=list(features),
            pooling=getattr(configs.PoolingType, case.pooling),
        )
        for name, rows, columns, features in TABLES
    ]
    made = of(root, "modules.embedding_modules").EmbeddingBagCollection
    return made(tables=tables, is_weighted=case.weighted, device=cpu)


def sharded(root: str, case: RankCase) -> tuple[Any, Any]:
    """The sharded collection with known rows, and the optimizer that its caller steps, if there is
    one.
    """
    import torch

    module = collection(root, case)
    fused = {"optimizer": exact_optimizer(root, case.optimizer), "learning_rate": RATE, "eps": 1e-8}
    kind = (
        "embedding.EmbeddingCollection"
        if case.pooling == "NONE"
        else "embeddingbag.EmbeddingBagCollection"
    ).split(".")
    sharder = getattr(of(root, f"distributed.{kind[0]}"), f"{kind[1]}Sharder")(fused_params=fused)
    words = {name: word(root, case, index) for index, (name, *_) in enumerate(TABLES)}
    plan = of(root, "distributed.sharding_plan").construct_module_sharding_plan(
        module, words, sharder, local_size=WORLD, world_size=WORLD, device_type="cpu"
    )
    for entry in plan.values():
        # table-column-wise is column-wise on the ranks of one host
        entry.sharding_type = case.sharding
        if case.sharding != "data_parallel":
            entry.compute_kernel = "fused"  # torchrec's hand-written plans say dense
    environment = of(root, "distributed.types").ShardingEnv.from_process_group(
        torch.distributed.group.WORLD
    )
    made = sharder.shard(module, plan, environment, torch.device("cpu"))
    rows_of = {
        name: filled(rows, columns, index) / 10
        for index, (name, rows, columns, _) in enumerate(TABLES)
    }
    with torch.no_grad():
        for table, row, column, piece in pieces(made):
            piece.copy_(
                rows_of[table][row : row + piece.shape[0], column : column + piece.shape[1]]
            )
    by_caller = case.sharding == "data_parallel" and root == "torchrec"
    return made, torch.optim.SGD(made.parameters(), lr=RATE) if by_caller else None


def pieces(module: Any) -> list[tuple[str, int, int, Any]]:
    """(table, first row, first column, rows) of what this rank holds."""
    found = []
    for name, value in sorted(module.state_dict().items()):
        shards = value.local_shards() if hasattr(value, "local_shards") else [None]
        for shard in shards:
            row, column = shard.metadata.shard_offsets if shard is not None else (0, 0)
            found.append(
                (
                    name.split(".")[-2],
                    row,
                    column,
                    (shard.tensor if shard is not None else value).detach(),
                )
            )
    return found


def batch(root: str, case: RankCase, rank: int, step: int) -> Any:
    import torch

    lengths = [length for of_ranks in case.lengths.values() for length in of_ranks[rank]]
    count = sum(lengths)
    ids = [(3 * position * position + 5 * step + 2 * rank) % 7 for position in range(count)]
    weights = [0.5 * (1 + (position + step) % 4) for position in range(count)]
    return of(root, "sparse.jagged_tensor").KeyedJaggedTensor.from_lengths_sync(
        keys=list(case.lengths),
        values=torch.tensor(ids),
        lengths=torch.tensor(lengths),
        weights=torch.tensor(weights) if case.weighted else None,
    )


def short(tensor: Any) -> Any:
    """Nine digits, which are as many as tell one float32 from the next."""
    if tensor.ndim > 1:
        return [short(row) for row in tensor]
    return [float(f"{number:.9g}") for number in tensor.double().tolist()]


def found(root: str, case: RankCase, rank: int) -> dict[str, Any]:
    """Outputs of the last step, which show the steps before it, weights after it, and the
    optimizer's state.
    """
    import torch

    module, optimizer = sharded(root, case)
    out: dict[str, Any] = {}
    for step in range(STEPS):
        result = module(batch(root, case, rank, step)).wait()
        out = {
            key: result[key].values() if case.pooling == "NONE" else result[key]
            for key in sorted(case.lengths)
        }
        loss = sum(
            (part * (1 + index + torch.arange(part.shape[1]) / 10)).sum()
            for index, part in enumerate(out.values())
        )
        if optimizer is not None:
            optimizer.zero_grad()
        loss.backward()
        if optimizer is not None:
            optimizer.step()
    return {
        "outputs": {key: short(part.detach()) for key, part in out.items()},
        "weights": {
            f"{table} {row} {column}": short(piece) for table, row, column, piece in pieces(module)
        },
        "state": state(module) if optimizer is None and case.sharding != "data_parallel" else {},
    }


def state(module: Any) -> dict[str, Any]:
    """What the optimizer remembers of the rows that this rank holds, piece after piece."""
    kept: dict[str, Any] = {}
    for of_table in module.fused_optimizer.state_dict()["state"].values():
        for name, value in of_table.items():
            shards = (
                [s.tensor for s in value.local_shards()]
                if hasattr(value, "local_shards")
                else [value]
            )
            kept.setdefault(name, []).extend(
                number for shard in shards for number in short(shard.detach().flatten())
            )
    return kept


def one_rank(root: str, rank: int, folder: str) -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=WORLD
    )
    results: dict[str, Any] = {}
    for name, case in RANK_CASES.items():
        try:
            results[name] = found(root, case, rank)
        except Exception as error:
            results[name] = {"error": f"{type(error).__name__}: {error}"}
    dist.destroy_process_group()
    return results


def main(root: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        started = []
        for rank in range(WORLD):
            local = {"RANK": str(rank), "WORLD_SIZE": str(WORLD), "LOCAL_WORLD_SIZE": str(WORLD)}
            words = [sys.executable, str(Path(__file__)), root, str(rank), folder]
            started.append(
                subprocess.Popen(words, env=os.environ | local, stdout=subprocess.PIPE, text=True)
            )
        written = [process.communicate()[0] for process in started]
    if any(process.returncode for process in started):
        raise SystemExit(f"ranks ended with {[process.returncode for process in started]}")
    of_ranks = [json.loads(text.splitlines()[-1]) for text in written]
    print(json.dumps({name: [results[name] for results in of_ranks] for name in of_ranks[0]}))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    if len(sys.argv) == 2:
        main(sys.argv[1])
    else:
        print_and_end(one_rank(sys.argv[1], int(sys.argv[2]), sys.argv[3]))
