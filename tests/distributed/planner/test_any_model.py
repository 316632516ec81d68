"""Whatever the tables, the machines and the constraints: a plan fits, covers every table once, and
obeys.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from distributed.planner.models import bags
from hypothesis import given
from hypothesis import strategies as st
from strategies import examples

from tutorec.distributed.core.env import ShardingEnv
from tutorec.distributed.plan.geometry import checked_shards
from tutorec.distributed.plan.plan import ShardingType
from tutorec.distributed.planner import EmbeddingShardingPlanner, Topology
from tutorec.distributed.planner.options import ParameterConstraints
from tutorec.distributed.planner.problem import broken_rules, rank_memory
from tutorec.distributed.planner.report import PlannedSharding
from tutorec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from tutorec.errors import PlannerError

WORDS = [kind.value for kind in ShardingType]


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    """Tables, machines and constraints; memory is tight in half of the cases."""
    hosts, per_host = draw(
        st.sampled_from([(1, 1), (1, 2), (2, 1), (2, 2), (1, 3), (2, 4), (3, 2)])
    )
    shapes = draw(
        st.lists(
            st.tuples(st.integers(1, 3000), st.sampled_from([1, 4, 12, 64, 256])),
            min_size=1,
            max_size=7,
        )
    )
    constraints = {}
    for index in range(len(shapes)):
        if draw(st.booleans()):
            kinds = draw(
                st.one_of(
                    st.none(), st.lists(st.sampled_from(WORDS), min_size=1, max_size=3, unique=True)
                )
            )
            constraints[f"t{index}"] = ParameterConstraints(
                sharding_types=kinds,
                min_partition=draw(st.sampled_from([None, 4, 32])),
                pooling_factors=[draw(st.sampled_from([0.5, 1.0, 20.0]))],
                pin=draw(
                    st.one_of(
                        st.none(),
                        st.lists(st.integers(0, hosts * per_host - 1), min_size=1, unique=True),
                    )
                ),
                colocate=draw(st.sampled_from([None, None, "pair"])),
            )
    weights = sum(rows * columns * 4 for rows, columns in shapes)
    cap = draw(
        st.sampled_from([None, None, 2 * weights // (hosts * per_host) + 100_000, weights // 2 + 1])
    )
    return {"hosts": (hosts, per_host), "shapes": shapes, "constraints": constraints, "cap": cap}


def plan_of(case: dict[str, Any], device: str = "cpu") -> PlannedSharding | None:
    topology = Topology.hosts(*case["hosts"], device=device, ddr_cap=case["cap"])
    try:
        return EmbeddingShardingPlanner(
            topology,
            batch_size=4,
            constraints=case["constraints"],
            storage_reservation=FixedPercentageStorageReservation(0.0),
        ).plan(bags(*case["shapes"]))
    except PlannerError:
        return None


@given(case=cases())
def test_plan_fits_covers_and_obeys(case):
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # constraints without effect are drawn, too
        plan = plan_of(case)
    if plan is None:
        return
    report = plan.report
    assert report is not None
    problem = report.inputs.problem
    assert broken_rules(problem, report.placement) == []
    assert (rank_memory(problem, report.placement) <= problem.capacity).all()
    assert report.bound.ms <= report.cost * (1 + 1e-9)
    hosts, per_host = case["hosts"]
    env = ShardingEnv(hosts * per_host, 0, None, local_size=per_host)
    held = np.zeros(env.world_size)
    ranks_of: dict[str, list[set[int]]] = {}
    for index, shape in enumerate(case["shapes"]):
        name = f"t{index}"
        entry = plan.plan[""][name]
        pieces = checked_shards(name, shape, entry, env.world_size, env.local_size)
        for piece in pieces:
            held[piece.rank] += piece.rows * piece.columns * 4
        constraint = case["constraints"].get(name)
        if constraint is None:
            continue
        assert constraint.sharding_types is None or entry.sharding_type in constraint.sharding_types
        assert constraint.pin is None or {piece.rank for piece in pieces} <= set(constraint.pin)
        if constraint.colocate is not None:
            ranks_of.setdefault(constraint.colocate, []).append({piece.rank for piece in pieces})
    assert all(ranks == members[0] for members in ranks_of.values() for ranks in members)
    assert case["cap"] is None or held.max() <= case["cap"]


@examples(20)
@given(case=cases(), order=st.randoms(use_true_random=False))
def test_order_of_tables_does_not_change_the_cost(case, order):
    case["constraints"] = {}
    first = plan_of(case)
    shuffled = list(case["shapes"])
    order.shuffle(shuffled)
    second = plan_of({**case, "shapes": shuffled})
    assert (first is None) == (second is None)
    if (
        first is not None
        and second is not None
        and first.report is not None
        and second.report is not None
    ):
        assert abs(first.report.cost - second.report.cost) <= 1e-9 * first.report.cost
