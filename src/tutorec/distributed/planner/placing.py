"""From the numbers of an answer to options with ranks, and to a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from tutorec.distributed.plan import EmbeddingModuleShardingPlan, ParameterSharding, ShardingPlan, ShardingType
from tutorec.distributed.planner.option_checks import check_one_each, placed_ranks
from tutorec.distributed.planner.options import ShardingOption
from tutorec.distributed.planner.problem import Placement, PlanningProblem, Spread
from tutorec.distributed.planner.topology import Topology
from tutorec.distributed.shard_geometry import ShardPiece, sharding_spec


def place_options(problem: PlanningProblem, placement: Placement) -> list[ShardingOption]:
    """The chosen option of each table, as a copy whose shards have their ranks; tables in the problem's order."""
    placed = []
    for choice, ranks in zip(placement.taken(problem), placement.ranks, strict=True):
        for option in choice.options:
            pieces = option.pieces().copy()
            pieces.ranks = np.asarray(ranks, dtype=np.int64)
            placed.append(option.with_pieces(pieces))
    return placed


def in_rank_order(problem: PlanningProblem, placement: Placement) -> Placement:
    """The same placement, with equal pieces of a table on ascending ranks: what costs the same reads the same.

    Args:
        problem: What the placement answers.
        placement: The answer.
    """
    tidy = []
    for choice, ranks in zip(placement.taken(problem), placement.ranks, strict=True):
        ranks = ranks.copy()
        # Pieces of a grid keep their place inside a host: whole blocks change places.
        block = problem.local_size if choice.spread is Spread.HOSTS_ROWS else 1
        if choice.spread in (Spread.ANY, Spread.HOST, Spread.HOSTS_ROWS):
            costs = np.column_stack([choice.time, choice.memory]).reshape(len(ranks) // block, -1)
            blocks = ranks.reshape(-1, block)
            for alike in np.unique(costs, axis=0):
                same = np.flatnonzero((costs == alike).all(axis=1))
                blocks[same] = blocks[same[np.argsort(blocks[same, 0], kind="stable")]]
        tidy.append(ranks)
    return Placement(placement.chosen, tidy)


def placement_of(problem: PlanningProblem, placed: Sequence[ShardingOption]) -> Placement:
    """The answer that placed options are; the inverse of `place_options`.

    Args:
        problem: What they answer.
        placed: An option for each table, its shards on ranks.

    Raises:
        KeyError: A table has no option, one that is none of the problem's, or one without places.
    """
    by_table = {option.fqn: option for option in placed}
    chosen, ranks = [], []
    for choices in problem.choices:
        name = choices[0].options[0].fqn
        if name not in by_table:
            raise KeyError(f"table {name.strip('.')!r} is not placed")
        first = by_table[name]
        ways = [(o.sharding_type, o.compute_kernel, o.pieces().sizes.tolist()) for o in (c.options[0] for c in choices)]
        way = (first.sharding_type, first.compute_kernel, first.pieces().sizes.tolist())
        if way not in ways:
            raise KeyError(f"table {first.name!r} is placed as {way[:2]}, which is none of its options")
        chosen.append(ways.index(way))
        found = first.pieces().ranks
        if found is None:
            raise KeyError(f"table {first.name!r} has not been placed")
        ranks.append(found)
    return Placement(np.array(chosen, dtype=np.int64), ranks)


def to_sharding_plan(sharding_options: Sequence[ShardingOption], topology: Topology) -> ShardingPlan:
    """Placed options as a plan.

    Args:
        sharding_options: One per table, in the order of the model's tables.
        topology: For devices and ranks per host.

    Raises:
        PlannerError: These are no options, a table has two, or a shard lies on no rank of the topology.

    Source:
        TorchRec's ``to_sharding_plan``.
    """
    check_one_each("sharding_options", sharding_options)
    plan: dict[str, EmbeddingModuleShardingPlan] = {}
    for option in sharding_options:
        plan.setdefault(option.path, EmbeddingModuleShardingPlan())[option.name] = _entry(option, topology)
    return ShardingPlan(plan)


def _entry(option: ShardingOption, topology: Topology) -> ParameterSharding:
    pieces, ranks = option.pieces(), placed_ranks(option, topology.world_size).tolist()
    replicated = option.sharding_type == ShardingType.DATA_PARALLEL.value
    spec = None
    if not replicated:
        lines = zip(ranks, pieces.offsets.tolist(), pieces.sizes.tolist(), strict=True)
        spec = sharding_spec(
            [ShardPiece(rank, *offset, *size) for rank, offset, size in lines],
            topology.compute_device,
            topology.local_world_size,
        )
    rows, columns = option.tensor.shape
    return ParameterSharding(
        sharding_type=option.sharding_type,
        compute_kernel=option.compute_kernel,
        ranks=ranks,
        sharding_spec=spec,
        cache_params=option.cache_params and replace(option.cache_params, stats=None),
        shape=(int(rows), int(columns)),
    )
