"""Placements of plans from elsewhere: of a partitioner, of a callback, and of a written plan."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tutorec.distributed.plan.plan import ParameterSharding, ShardingPlan, ShardingType
from tutorec.distributed.planner.options import ShardingOption
from tutorec.distributed.planner.problem import Placement, PlanningProblem, broken_rules
from tutorec.distributed.planner.report import PlanInputs
from tutorec.errors import PlannerError


def options_placement(
    problem: PlanningProblem, placed: Sequence[ShardingOption], source: str
) -> Placement:
    """The placement of options from a partitioner or a callback; the inverse of `place_options`.

    Args:
        problem: The planning problem.
        placed: An option for each table, with placed shards.
        source: Who placed them, for the message.

    Raises:
        PlannerError: A table has no option, one that is not in the problem, or one whose shards are
            on ranks that its sharding type does not allow.
    """
    by_table = {option.fqn: option for option in placed}
    chosen = []
    ranks = []
    for choices in problem.choices:
        fqn = choices[0].options[0].fqn
        option = by_table.get(fqn)
        if option is None or option.shard_arrays().ranks is None:
            raise PlannerError(f"{source} is not a plan: table {fqn.strip('.')!r} is not placed")

        shardings = [_sharding(choice.options[0]) for choice in choices]
        if _sharding(option) not in shardings:
            raise PlannerError(
                f"{source} is not a plan: table {option.name!r} is placed as "
                f"{_sharding(option)[:2]}, which is none of its options"
            )

        chosen.append(shardings.index(_sharding(option)))
        ranks.append(option.shard_arrays().ranks)

    placement = Placement(np.array(chosen, dtype=np.int64), ranks)
    if broken := broken_rules(problem, placement):
        pinned = (
            "; pin and colocate are kept by the planner's own search: leave proposer and "
            "partitioner out"
        )
        hint = pinned if any("allowed" in rule for rule in broken) else ""
        raise PlannerError(f"{source} is not a plan: {'; '.join(broken[:3])}{hint}")

    return placement


def _sharding(option: ShardingOption) -> tuple[Any, ...]:
    """In what the options of a table differ."""
    return (
        option.sharding_type,
        option.compute_kernel,
        option.cache_load_factor,
        option.shard_arrays().sizes.tolist(),
    )


def plan_placement(inputs: PlanInputs, plan: ShardingPlan) -> Placement:
    """The choices and ranks of a plan that was made before, or written by hand.

    Args:
        inputs: Options of the model's tables, for the machine and batch that are asked about.
        plan: An entry for each table.

    Raises:
        PlannerError: A table is not in the plan, is sharded as no option, or does not fit.
    """
    options: dict[tuple[str, str], list[ShardingOption]] = defaultdict(list)
    for option in inputs.options:
        options[option.path, option.name].append(option)

    world_size = inputs.problem.world_size
    placed = []
    for (path, name), table_options in options.items():
        entry = plan.plan.get(path, {}).get(name)
        if entry is None:
            raise PlannerError(f"the plan has no entry for table {name!r}: plan this model again")
        placed.append(_option_of_entry(table_options, entry, world_size))

    return options_placement(inputs.problem, placed, "the given plan")


def _option_of_entry(
    options: Sequence[ShardingOption], entry: ParameterSharding, world_size: int
) -> ShardingOption:
    """The option of a table that an entry describes, on the ranks that it names."""
    load_factor = getattr(entry.cache_params, "load_factor", None)
    ranks = np.arange(world_size)
    sizes = None  # a copy is the whole table
    if entry.sharding_type != ShardingType.DATA_PARALLEL.value:
        shards = entry.shards()
        ranks = np.array(entry.ranks, dtype=np.int64)
        sizes = [list(shard.shard_sizes) for shard in shards]

    for option in options:
        shards = option.shard_arrays()
        same_way = (option.sharding_type, option.compute_kernel, option.cache_load_factor) == (
            entry.sharding_type,
            entry.compute_kernel,
            load_factor,
        )
        if same_way and (sizes is None or shards.sizes.tolist() == sizes):
            return option.with_shards(replace(shards, ranks=ranks))

    name = options[0].name
    known = sorted({(option.sharding_type, option.compute_kernel) for option in options})
    cached = "" if load_factor is None else f" and {100 * load_factor:g} % of its rows in slots"
    raise PlannerError(
        f"table {name!r} is {entry.sharding_type} with kernel {entry.compute_kernel}{cached} and "
        f"shards {sizes or 'on every rank'} in the plan, which is none of the options of this "
        f"planner ({', '.join(' '.join(way) for way in known)}): give it the constraints and the "
        "number of ranks that the plan was made with"
    )
