"""The collection that is to be sharded: its tables, placed as the plan says.

Each rank reads its own plan, so the ranks compare what they have read before anything is built.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tutorec.distributed.collectives.autograd import division_fact
from tutorec.distributed.core.agreement import check_agreement
from tutorec.distributed.core.env import ShardingEnv
from tutorec.distributed.core.qcomm import QuantizedCommCodecs
from tutorec.distributed.core.tables import (
    SUPPORTED_KERNELS,
    PlacedTable,
    PlacementRules,
    check_plan_covers,
    place_table,
)
from tutorec.distributed.plan.plan import ParameterSharding, ShardingType
from tutorec.modules.embedding_configs import BaseEmbeddingConfig
from tutorec.modules.embedding_tables import get_embedding_names_by_table


@dataclass(frozen=True)
class CollectionSpec:
    """An unsharded collection and what is needed to shard it.

    Args:
        kind: Its class name, for messages.
        path: Path of its tables in the module: parameters are named ``<path>.<table>.weight``.
        configs: Configuration of each table.
        weights: Table name -> weights ``[R, D]``; they may be on the meta device.
        weighted: Whether each id must carry a weight.
        codecs: Name of an exchange -> data type in which rows are sent in it.
    """

    kind: str
    path: str
    configs: Sequence[BaseEmbeddingConfig]
    weights: Mapping[str, torch.Tensor]
    weighted: bool
    codecs: Mapping[str, QuantizedCommCodecs]


def agreed_tables(
    source: CollectionSpec,
    plan: Mapping[str, ParameterSharding],
    env: ShardingEnv,
    fused_params: Mapping[str, Any] | None,
    sharding_types: Sequence[ShardingType],
) -> list[PlacedTable]:
    """Read the plan, check it, and compare it with the other ranks' plans. Every rank calls it.

    Args:
        source: The unsharded collection.
        plan: Table name -> how it is sharded.
        env: The ranks.
        fused_params: Options of the fused optimizer.
        sharding_types: Those that the sharded collection supports.

    Returns:
        The tables, in the order of the collection.

    Raises:
        AgreementError: Ranks disagree about tables or plan, or another rank failed.
    """
    tables: list[PlacedTable] = []
    problem: Exception | None = None
    rules = PlacementRules(
        env.world_size,
        source.weighted,
        sharding_types,
        SUPPORTED_KERNELS,
        fused_params,
        env.local_size,
    )
    names = [config.name for config in source.configs]
    try:
        check_plan_covers(names, plan)
        for config, keys in zip(
            source.configs, get_embedding_names_by_table(source.configs), strict=True
        ):
            tables.append(
                place_table(config, keys, source.weights[config.name], plan[config.name], rules)
            )
    except (ValueError, KeyError, TypeError) as error:
        problem = error
    facts = {
        "tables": ", ".join(names),
        "qcomm_codecs_registry": str(sorted(source.codecs.items())),
    }
    facts |= {"ranks per host": str(env.local_size), **division_fact()}
    facts |= {
        f"table {t.name!r}: {fact}": value for t in tables for fact, value in t.describe().items()
    }
    facts |= {
        f"table {name!r}: requires_grad": str(rows.requires_grad)
        for name, rows in source.weights.items()
    }
    article = "an" if source.kind[0] in "AEIOU" else "a"
    check_agreement(f"sharding {article} {source.kind}", facts, env, problem)
    return tables
