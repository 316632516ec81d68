"""How much a reader meets on the way: `python tests/policy/walk.py` prints it.

Rank 0 of two is traced while it shards a collection of two tables, runs its first and its second
batch, and goes backward; and one planning call. *Files*: those whose functions ran. *Jumps*: how
often the next call is in another file. *Tokens run*: those of the functions that ran, without
comments and docstrings.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from policy.tree import PACKAGE, SRC, SourceFile, Tree

from tutorec.spmd import Ranks

FOLDER = f"{SRC / PACKAGE}/"

# A call: the path of its file below FOLDER, and the first line of its function.
Call = tuple[str, int]


class Walk(NamedTuple):
    """What a reader of one phase meets."""

    files: int
    jumps: int
    tokens_run: int


# The most that there may be. Lower a number when a change allows it.
CEILINGS = {
    "construction": Walk(33, 157, 13_650),
    "first forward": Walk(26, 135, 10_650),
    "second forward": Walk(22, 109, 8_950),
    "backward": Walk(6, 14, 1_200),
    "planning call": Walk(15, 780, 17_500),
}


def traced(call: Callable[[], Any]) -> tuple[Any, list[Call]]:
    """The value of a call, and the calls of library functions that it made."""
    calls: list[Call] = []

    def note(frame: Any, event: str, argument: Any) -> None:
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(FOLDER):
            calls.append((path.removeprefix(FOLDER), frame.f_code.co_firstlineno))

    sys.setprofile(note)
    try:
        value = call()
    finally:
        sys.setprofile(None)
    return value, calls


def calls_of_a_step() -> dict[str, list[Call]]:
    """Phase -> its calls on this rank, as the README's quick start makes them."""
    import torch
    import torch.distributed as dist

    from tutorec.distributed.core.env import ShardingEnv
    from tutorec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from tutorec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
    from tutorec.modules.embedding_configs import EmbeddingBagConfig
    from tutorec.modules.embedding_modules import EmbeddingBagCollection
    from tutorec.sparse.keyed_jagged import KeyedJaggedTensor

    tables = [EmbeddingBagConfig(4096, 64, name, feature_names=[name]) for name in ("item", "user")]
    ebc = EmbeddingBagCollection(tables)
    group = dist.group.WORLD
    assert group is not None, "a pool's ranks have a group"

    def shard() -> Any:
        plan = construct_module_sharding_plan(
            ebc, {"item": table_wise(rank=0), "user": table_wise(rank=1)}
        )
        env = ShardingEnv.from_process_group(group)
        return EmbeddingBagCollectionSharder({"learning_rate": 0.1}).shard(ebc, plan, env)

    phases: dict[str, list[Call]] = {}
    sharded, phases["construction"] = traced(shard)

    ids = torch.tensor([1, 2, 1, 5, 2, 3, 4, 1])
    batch = KeyedJaggedTensor(["item", "user"], ids, lengths=torch.tensor([3, 1, 2, 2]))
    _, phases["first forward"] = traced(lambda: sharded(batch).values())
    rows, phases["second forward"] = traced(lambda: sharded(batch).values())
    _, phases["backward"] = traced(lambda: rows.sum().backward())
    return phases


def calls_of_a_plan() -> list[Call]:
    """The calls of the second planning call; by then all modules are imported."""
    import torch

    from tutorec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from tutorec.distributed.planner import EmbeddingShardingPlanner, Topology
    from tutorec.modules.embedding_configs import EmbeddingBagConfig
    from tutorec.modules.embedding_modules import EmbeddingBagCollection

    tables = [EmbeddingBagConfig(4096, 64, name, feature_names=[name]) for name in ("item", "user")]
    ebc = EmbeddingBagCollection(tables, device=torch.device("meta"))

    def plan() -> Any:
        planner = EmbeddingShardingPlanner(Topology(world_size=2, compute_device="cuda"))
        return planner.plan(ebc, [EmbeddingBagCollectionSharder()])

    plan()
    return traced(plan)[1]


def all_calls(ranks: Ranks) -> dict[str, list[Call]]:
    """Phase -> its calls, on rank 0 of two."""
    phases = ranks.run(calls_of_a_step)[0]
    if not phases["construction"]:
        raise SystemExit(f"another tutorec than {FOLDER} is imported: set PYTHONPATH to {SRC}")
    return {**phases, "planning call": calls_of_a_plan()}


def measured(calls: Iterable[Call], tree: Tree) -> Walk:
    """Files, jumps and tokens of the functions that were called."""
    calls = list(calls)
    jumps = sum(this[0] != following[0] for this, following in pairwise(calls))
    tokens = 0
    for path in {path for path, _ in calls}:
        module = f"{PACKAGE}." + path.removesuffix(".py").replace("/", ".")
        lines = {line for called, line in calls if called == path}
        tokens += tokens_run(tree.modules[module.removesuffix(".__init__")], lines)
    return Walk(len({path for path, _ in calls}), jumps, tokens)


def tokens_run(file: SourceFile, lines: set[int]) -> int:
    """Tokens of the outermost functions of a file that begin at, or around, the given lines."""
    spans = []
    for _, node in file.functions():
        first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        spans.append((first, node.end_lineno or first, node))

    ran = {}
    for line in lines:
        around = [span for span in spans if span[0] <= line <= span[1]]
        if around:
            first, end, node = max(around, key=lambda span: span[0])
            ran[first, end] = node

    inner = [
        span
        for span in ran
        if any(other != span and other[0] <= span[0] and span[1] <= other[1] for other in ran)
    ]
    return sum(file.tokens(node) for span, node in ran.items() if span not in inner)


def too_long(walks: dict[str, Walk]) -> list[str]:
    """A violation for each number that is above its ceiling."""
    found = []
    for phase, walk in walks.items():
        for what, number, most in zip(Walk._fields, walk, CEILINGS[phase], strict=True):
            if number > most:
                found.append(f"{phase}: {number:,} {what}, at most {most:,}")
    return found


def main() -> None:
    with Ranks(2) as ranks:
        phases = all_calls(ranks)
    tree = Tree.of_repository()
    print(f"{'':16}{'files':>12}{'jumps':>14}{'tokens run':>18}")
    for phase, calls in phases.items():
        cells = [
            f"{number:,} of {most:,}"
            for number, most in zip(measured(calls, tree), CEILINGS[phase], strict=True)
        ]
        print(f"{phase:16}{cells[0]:>12}{cells[1]:>14}{cells[2]:>18}")


if __name__ == "__main__":
    main()
