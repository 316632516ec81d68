"""The collection that is to be sharded: its tables, placed as the plan says.

Each rank reads its own plan, so the ranks compare what they have read before anything is built.
Rank 0 then says which tables train otherwise than their caller may believe.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tutorec._check import warn_caller
from tutorec.distributed import comm
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
from tutorec.distributed.fused_params import names_optimizer, optimizer_spec
from tutorec.distributed.plan.plan import EmbeddingComputeKernel, ParameterSharding, ShardingType
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
    _say_who_trains(tables, source, fused_params, env)
    return tables


def is_first_rank(env: ShardingEnv) -> bool:
    """Whether this rank is the one that warns for all."""
    everyone = comm.default_group()
    return (env.rank if everyone is None else everyone.rank()) == 0


def _say_who_trains(
    tables: Sequence[PlacedTable],
    source: CollectionSpec,
    fused_params: Mapping[str, Any] | None,
    env: ShardingEnv,
) -> None:
    """Warn of tables for which no optimizer was named, and of those that do not use the named one.

    Once for all ranks.
    """
    if not is_first_rank(env):
        return

    in_backward = {
        name for name, rows in source.weights.items() if getattr(rows, "_optimizer_classes", ())
    }
    trained = [table for table in tables if source.weights[table.name].requires_grad]
    fused = [table.name for table in trained if table.kernel is not EmbeddingComputeKernel.DENSE]
    dense = [table.name for table in trained if table.kernel is EmbeddingComputeKernel.DENSE]

    unnamed = [name for name in fused if name not in in_backward]
    if unnamed and not names_optimizer(fused_params):
        default = optimizer_spec(fused_params)
        them = "it" if len(unnamed) == 1 else "them"
        warn_caller(
            f"no optimizer is named for {_tables(unnamed)}: {default.kind.upper()} with a learning "
            f"rate of {default.learning_rate} updates {them} during backward, whatever optimizer "
            "the other parameters have. Name one: apply_optimizer_in_backward(torch.optim.Adam, "
            "collection.parameters(), {'lr': 0.01}) before sharding, or sharders=["
            f"{source.kind}Sharder({{'optimizer': 'adam', 'learning_rate': 0.01}})]",
        )

    marked = [name for name in dense if name in in_backward]
    if marked:
        warn_caller(
            f"the optimizer in backward of {_tables(marked)} is not used: {_left_to_caller(marked)}"
        )
    others = [name for name in dense if name not in in_backward]
    if others and names_optimizer(fused_params):
        warn_caller(
            f"fused_params={dict(fused_params or {})} are not used for {_tables(others)}: "
            f"{_left_to_caller(others)}"
        )


def _left_to_caller(names: Sequence[str]) -> str:
    it = "it" if len(names) == 1 else "them"
    return (
        f"with the compute kernel 'dense' your own optimizer has to update {it}, and "
        f"in_backward_optimizer_filter(model.named_parameters()) yields {it}; or give {it} "
        "compute_kernel='fused'"
    )


def _tables(names: Sequence[str]) -> str:
    return ("table " if len(names) == 1 else "tables ") + ", ".join(map(repr, names))
