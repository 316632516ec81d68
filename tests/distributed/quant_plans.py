"""Plans of quantized collections for tests: a word for each table, drawn or counted through."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from hypothesis import strategies as st
from torch import nn

from tutorec.distributed.core.env import ShardingEnv
from tutorec.distributed.sharding_plan import (
    ParameterShardingGenerator,
    column_wise,
    construct_module_sharding_plan,
    get_module_to_default_sharders,
    row_wise,
    table_wise,
)
from tutorec.quant.packed_tables import PackedTables

Words = dict[str, ParameterShardingGenerator]


def sharder_of(module: nn.Module) -> Any:
    return get_module_to_default_sharders()[type(module)]


def sharded(
    module: PackedTables, words: Mapping[str, ParameterShardingGenerator], devices: int
) -> Any:
    """The module over so many virtual devices."""
    sharder = sharder_of(module)
    plan = construct_module_sharding_plan(
        module, words, sharder, world_size=devices, device_type="cpu"
    )
    return sharder.shard(module, plan, ShardingEnv.from_local(devices, 0), torch.device("cpu"))


@st.composite
def words_of(draw: Any, module: PackedTables, devices: int, rows: bool = True) -> Words:
    """A word for each table; without ``rows`` none that adds up what devices give."""
    found: Words = {}
    for name in module.table_names():
        columns = module.packed_table(name).columns
        kind = draw(st.sampled_from(["table", "column", "row"] if rows else ["table", "column"]))
        if kind == "row":
            found[name] = row_wise()
        elif kind == "table":
            found[name] = table_wise(rank=draw(st.integers(0, devices - 1)))
        else:
            # Any widths: also such as do not end at a byte, and several on one device.
            cuts = (
                sorted(draw(st.sets(st.integers(1, columns - 1), max_size=3)))
                if columns > 1
                else []
            )
            sizes = [stop - start for start, stop in zip([0, *cuts], [*cuts, columns], strict=True)]
            ranks = [draw(st.integers(0, devices - 1)) for _ in sizes]
            found[name] = column_wise(ranks, size_per_rank=sizes)
    return found
