"""Tables of the page "Many machines": a DLRM planned and simulated on 8 to 4,096 GPUs.

``{machines-table} one``       tables sharded over all ranks
``{machines-table} replicas``  sharded over groups of 64; replicas are averaged every 100 steps
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from sphinx.application import Sphinx
from tables import GeneratedTable

from tutorec.distributed.core.env import sharding_groups
from tutorec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from tutorec.distributed.planner.planners import EmbeddingShardingPlanner
from tutorec.distributed.planner.topology import Topology
from tutorec.distributed.simulate import Load, Simulation, SyncSimulation, simulate, simulate_sync
from tutorec.modules.embedding_configs import EmbeddingBagConfig
from tutorec.modules.embedding_modules import EmbeddingBagCollection

# Rows of the 26 tables of the Criteo Terabyte click logs, as TorchRec's DLRM example plans them.
CRITEO = [
    int(rows)
    for rows in """45833188 36746 17245 7413 20243 3 7114 1441 62 29275261 1572176 345138 10 2209 11267 128 4 974 14
    48937457 11316796 40094537 452104 12606 104 35""".split()  # noqa: E501
]
COLUMNS, SAMPLES, GROUP, EVERY = 128, 2048, 64, 100
RANKS = (8, 16, 64, 256, 1024, 4096)
FUSED = {"optimizer": "exact_row_wise_adagrad", "learning_rate": 0.01}


@dataclass(frozen=True)
class Planned:
    """A step of a plan, and of replicas the averaging."""

    step: Simulation
    sync: SyncSimulation | None = None

    @property
    def ms(self) -> float:
        """Of a step with its part of the averaging."""
        return self.step.step_ms + (0.0 if self.sync is None else self.sync.ms / EVERY)


def tables() -> EmbeddingBagCollection:
    """The tables, which take no memory."""
    configs = [
        EmbeddingBagConfig(rows, COLUMNS, f"table_{number}", feature_names=[f"feature_{number}"])
        for number, rows in enumerate(CRITEO)
    ]
    return EmbeddingBagCollection(configs, device=torch.device("meta"))


def machines(ranks: int) -> Topology:
    return Topology.preset(f"8xH100x{ranks // 8}")


@cache
def planned(ranks: int, group: int | None = None) -> Planned:
    """The default planner's plan for so many ranks, sharded over all of them or over groups."""
    everyone, model = machines(ranks), tables()
    own = everyone if group is None else everyone.part(sharding_groups(ranks, group, True)[0])
    plan = EmbeddingShardingPlanner(own, batch_size=SAMPLES).plan(
        model, [EmbeddingBagCollectionSharder(FUSED)]
    )
    step = simulate(plan, own, model, Load(SAMPLES))
    if group is None:
        return Planned(step)
    sync = simulate_sync(
        plan, everyone, model, group, fused_params=FUSED, use_inter_host_allreduce=True
    )
    return Planned(step, sync)


def mib(count: float) -> str:
    return f"{count / 2**20:,.0f}"


HEADERS = {
    "one": (
        "GPUs",
        "hosts",
        "sent inside, MiB",
        "to other hosts, MiB",
        "step, ms",
        "of it memory",
        "of it wires",
    ),
    "replicas": (
        "GPUs",
        "replicas",
        "step, ms",
        "mean, ms",
        "sent for it, GiB",
        "both, ms",
        "one replica, ms",
    ),
}


def rows(name: str) -> list[tuple[str, ...]]:
    """The rows of the table of that name."""
    return (
        [_one(ranks) for ranks in RANKS]
        if name == "one"
        else [_replicas(ranks) for ranks in RANKS if ranks > GROUP]
    )


def _one(ranks: int) -> tuple[str, ...]:
    step = planned(ranks).step
    wires = step.step_parts["inside hosts"] + step.step_parts["across hosts"]
    inside, across = (mib(step.sent(crossing=crossing).mean()) for crossing in (False, True))
    times = (f"{ms:.2f}" for ms in (step.step_ms, step.step_parts["memory"], wires))
    return f"{ranks:,}", f"{ranks // 8:,}", inside, across, *times


def _replicas(ranks: int) -> tuple[str, ...]:
    found, alone = planned(ranks, GROUP), planned(ranks)
    assert found.sync is not None, "of replicas"
    return (
        f"{ranks:,}",
        f"{ranks // GROUP}",
        f"{found.step.step_ms:.2f}",
        f"{found.sync.ms:.0f}",
        f"{found.sync.sent().mean() / 2**30:.1f}",
        f"{found.ms:.2f}",
        f"{alone.ms:.2f}",
    )


class MachinesTable(GeneratedTable):
    """One of the page's tables, by its name."""

    required_arguments = 1

    @property
    def header(self) -> tuple[str, ...]:  # type: ignore[override]
        return HEADERS[self.arguments[0]]

    def rows(self) -> list[tuple[str, ...]]:
        return rows(self.arguments[0])


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("machines-table", MachinesTable)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
