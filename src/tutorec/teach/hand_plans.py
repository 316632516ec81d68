"""Eight tables of the shop on four GPUs, and what a plan that a person wrote for them comes to.

Chapters 09 and 09b plan them. Chapter 09 also asks its reader to find a plan. Many are good, so
that the answer is not compared with a plan: it is planned with constraints that leave nothing open,
and judged by its cost.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from tutorec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from tutorec.distributed.planner.options import ParameterConstraints
from tutorec.distributed.planner.planners import EmbeddingShardingPlanner
from tutorec.distributed.planner.problem import fixed_time
from tutorec.distributed.planner.report import PlannedSharding
from tutorec.distributed.planner.topology import Topology
from tutorec.errors import PlannerError
from tutorec.modules.embedding_configs import EmbeddingBagConfig
from tutorec.modules.embedding_modules import EmbeddingBagCollection

#: Table -> rows, columns, ids in a bag on average.
TABLES: dict[str, tuple[int, int, int]] = {
    "visitors": (300_000_000, 64, 1),
    "products": (100_000_000, 64, 20),
    "queries": (40_000_000, 128, 10),
    "sellers": (10_000_000, 64, 1),
    "brands": (5_000_000, 64, 5),
    "pages": (2_000_000, 32, 100),
    "cities": (100_000, 64, 1),
    "weekdays": (7, 64, 1),
}
#: Lengths of bags that exercise 09.3 changes, so that the chapter's own plan is no answer.
BUSY_VISITORS: dict[str, int] = {"visitors": 20, "products": 1}
TYPES = ("table_wise", "row_wise", "column_wise", "data_parallel")
GPUS = 4
SAMPLES = 32_768  # in the batch of one GPU
META = torch.device("meta")
_FEWEST_ROWS = 7  # of a table of which a part is taken
_NARROWEST = 32  # columns that a slice has at least; by default the planner has 128

DOES_NOT_FIT = "a plan for which no rank has the room"
UNEVEN = "a plan in which one rank is busy for much longer than the others"
TOO_MUCH = "a plan in which all ranks are busy alike, and for too long"
TOO_MANY_TYPES = "a plan that would be good if it took part in fewer exchanges"
GOOD = "a plan as good as the best"

# What a plan may take beyond the best to be as good, and the busiest rank beyond the mean to be no
# exception.
_SLACK = 1.05
_UNEVEN = 1.25

Words = Mapping[str, Any]


def collection(
    tables: Mapping[str, tuple[int, ...]] = TABLES,
    *,
    scale: float = 1.0,
    device: str | torch.device = META,
) -> EmbeddingBagCollection:
    """A collection of tables, each with a feature of its own name.

    Args:
        tables: Name -> rows, columns, and whatever else.
        scale: Each table has this part of its rows, but seven of them at least.
        device: Where the weights are; on ``meta`` they take no memory.

    Example:
        >>> of_cities = {"cities": (100_000, 64)}
        >>> collection(of_cities).embedding_bag_configs()[0].num_embeddings
        100000
        >>> [rows] = collection(of_cities, scale=0.01, device="cpu").parameters()
        >>> rows.shape
        torch.Size([1000, 64])
    """
    configs = [
        EmbeddingBagConfig(
            num_embeddings=max(min(rows, _FEWEST_ROWS), round(rows * scale)),
            embedding_dim=columns,
            name=name,
            feature_names=[name],
        )
        for name, (rows, columns, *_) in tables.items()
    ]

    return EmbeddingBagCollection(configs, device=torch.device(device))


def sharder() -> EmbeddingBagCollectionSharder:
    """What shards them, with row-wise Adagrad."""
    return EmbeddingBagCollectionSharder(
        fused_params={"optimizer": "rowwise_adagrad", "learning_rate": 0.1}
    )


def shop_plan(
    words: Words | None = None,
    *,
    bags: Mapping[str, int] | None = None,
    planner: type[EmbeddingShardingPlanner] = EmbeddingShardingPlanner,
    **more: Any,
) -> PlannedSharding:
    """A plan for the eight tables.

    Args:
        words: For some tables their type, or their type and ranks, as for `hand_plan`; the others
            are free.
        bags: Lengths of bags that differ from those in `TABLES`.
        planner: The class that plans.
        more: Arguments of the planner.

    Raises:
        PlannerError: No plan fits.

    Example:
        >>> shop_plan({"pages": "row_wise"}).plan[""]["pages"].ranks
        [0, 1, 2, 3]
    """
    constraints = {}
    for table, (_, columns, bag) in TABLES.items():
        sharding_type, ranks = _parts((words or {}).get(table, "free"))
        cut = columns > _NARROWEST and sharding_type in ("free", "column_wise")
        constraints[table] = ParameterConstraints(
            sharding_types=list(TYPES) if sharding_type == "free" else [sharding_type],
            pin=ranks or None,
            min_partition=_NARROWEST if cut else None,
            pooling_factors=[float((bags or {}).get(table, bag))],
        )

    topology = Topology.preset(f"{GPUS}xH100")
    shop_planner = planner(topology, batch_size=SAMPLES, constraints=constraints, stats=[], **more)
    return shop_planner.plan(collection(), [sharder()])


def hand_plan(words: Words) -> PlannedSharding:
    """The plan that says this, with the bags of `BUSY_VISITORS`.

    Args:
        words: For each table its type, or its type and the ranks that hold it: ``"row_wise"``,
            ``("table_wise", 2)``, ``("column_wise", 0, 1)``.

    Raises:
        ValueError: A table is missing or unknown, or a word is neither a type nor a rank.
        PlannerError: It does not fit.

    Example:
        >>> plan = hand_plan({table: "row_wise" for table in TABLES})
        >>> plan.plan[""]["cities"].ranks
        [0, 1, 2, 3]
    """
    return shop_plan(_checked(words), bags=BUSY_VISITORS)


def judge(words: Words) -> str:
    """What a plan comes to with the bags of `BUSY_VISITORS`: `GOOD`, or what is wrong with it.

    Args:
        words: As for `hand_plan`.

    Raises:
        ValueError: A table is missing or unknown, or a word is neither a type nor a rank.

    Example:
        >>> judge({table: ("table_wise", 0) for table in TABLES}) == DOES_NOT_FIT
        True
    """
    try:
        report = hand_plan(words).report
    except PlannerError:
        return DOES_NOT_FIT
    assert report is not None, "a plan that was just made has its report"

    best, fewest = _best()
    limit = _SLACK * best
    if report.cost <= limit:
        return GOOD
    if report.cost - fixed_time(report.problem, report.choices) + fewest <= limit:
        return TOO_MANY_TYPES
    times = report.rank_parts.sum(axis=1)
    return UNEVEN if times.max() > _UNEVEN * times.mean() else TOO_MUCH


@functools.cache
def _best() -> tuple[float, float]:
    """Milliseconds of a step under the planner's own plan, and those of its exchanges."""
    report = shop_plan(bags=BUSY_VISITORS).report
    assert report is not None, "a plan that was just made has its report"
    return report.cost, fixed_time(report.problem, report.choices)


def _checked(words: Words) -> Words:
    """The words, if there is a sensible one for each table."""
    if not isinstance(words, Mapping) or set(words) != set(TABLES):
        raise ValueError(f"A plan here is a dict with the tables {', '.join(TABLES)}.")

    for table, word in words.items():
        sharding_type, ranks = _parts(word)
        counts = {"table_wise": [1], "column_wise": range(1, GPUS + 1)}.get(sharding_type, [0])
        known = sharding_type in TYPES and set(ranks) <= set(range(GPUS))
        if not known or len(ranks) not in counts:
            raise ValueError(
                f"{table!r} is {word!r}: an entry is 'row_wise', 'data_parallel', or a type with "
                f"ranks from 0 to {GPUS - 1}, as ('table_wise', 2) and ('column_wise', 0, 1)."
            )
    return words


def _parts(word: Any) -> tuple[Any, list[int]]:
    """Type and ranks."""
    if isinstance(word, str) or not isinstance(word, Sequence) or not word:
        return word, []
    return word[0], list(word[1:])
