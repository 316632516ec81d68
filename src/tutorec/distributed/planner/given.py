"""A plan that is there already, as a placement of a planning problem."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from tutorec.distributed.plan.plan import ParameterSharding, ShardingPlan, ShardingType
from tutorec.distributed.planner.options import ShardingOption
from tutorec.distributed.planner.problem import Placement
from tutorec.distributed.planner.proposers import placement_of
from tutorec.distributed.planner.report import PlanInputs
from tutorec.errors import PlannerError

__all__ = ["given_placement"]


def given_placement(inputs: PlanInputs, plan: ShardingPlan) -> Placement:
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
    for (path, name), of_table in options.items():
        entry = plan.plan.get(path, {}).get(name)
        if entry is None:
            raise PlannerError(f"the plan has no entry for table {name!r}: plan the model anew")
        placed.append(_placed(of_table, entry, world_size))
    return placement_of(inputs.problem, placed, "the given plan")


def _placed(
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
        pieces = option.pieces()
        same_way = (option.sharding_type, option.compute_kernel, option.cache_load_factor) == (
            entry.sharding_type,
            entry.compute_kernel,
            load_factor,
        )
        if same_way and (sizes is None or pieces.sizes.tolist() == sizes):
            return option.with_pieces(replace(pieces, ranks=ranks))

    name = options[0].name
    known = sorted({(option.sharding_type, option.compute_kernel) for option in options})
    cached = "" if load_factor is None else f" and {100 * load_factor:g} % of its rows in slots"
    raise PlannerError(
        f"table {name!r} is {entry.sharding_type} with kernel {entry.compute_kernel}{cached} and "
        f"shards {sizes or 'on every rank'} in the plan, which is none of the options of this "
        f"planner ({', '.join(' '.join(way) for way in known)}): give it the constraints and the "
        "number of ranks that the plan was made with"
    )
