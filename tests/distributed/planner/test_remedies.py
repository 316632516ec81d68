"""Nothing fits: the message has the numbers, and each remedy that it offers makes
everything fit.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
from distributed.planner.planned_cases import GIB, inputs_of

from tutorec.distributed.planner import remedies
from tutorec.distributed.planner.options import ParameterConstraints
from tutorec.distributed.planner.remedies import find_shortage, why_infeasible
from tutorec.distributed.planner.report import PlanInputs
from tutorec.distributed.planner.search import search
from tutorec.distributed.planner.topology import Topology
from tutorec.errors import PlannerErrorType

BIG = {"item": (100_000_000, 64)}
TWO = Topology(2, "cuda", hbm_cap=16 * GIB)


def message(inputs: PlanInputs) -> str:
    assert search(inputs.problem) is None
    return str(why_infeasible(inputs))


def fits(inputs: PlanInputs, **change: Any) -> bool:
    remade = inputs.remade(**change)
    return remade is not None and search(remade.problem) is not None


def constraint_of(text: str) -> tuple[str, list[str]]:
    """The type that the message offers, and for which tables."""
    found = re.search(
        r"ParameterConstraints\(sharding_types=\['(\w+)'\]\) for tables? (.*?):", text
    )
    assert found, text
    return found[1], re.findall(r"'(\w+)'", found[2])


def memory_of(text: str, name: str = "hbm_cap") -> int:
    found = re.search(rf"{name}=(\d+)", text)
    assert found, text
    return int(found[1])


def test_table_that_is_too_large_is_told_with_its_contents():
    inputs = inputs_of(
        BIG, TWO, constraints={"item": ParameterConstraints(sharding_types=["table_wise"])}
    )
    error = why_infeasible(inputs)
    text = str(error)
    assert text.startswith(
        "no sharding plan fits: table 'item' needs 23.8 GiB of HBM on one rank, and each rank has "
        "16.0 GiB for tables (world_size=2)"
    )
    assert "weights 100,000,000 x 64 x 4 B = 23.8 GiB" in text
    assert "allowed sharding: table_wise" in text
    assert error.error_type is PlannerErrorType.STRICT_CONSTRAINTS
    kind, tables = constraint_of(text)
    assert (kind, tables) == ("row_wise", ["item"])
    assert "11.9 GiB of 'item' on a rank" in text
    assert fits(inputs, constraints={"item": ParameterConstraints(sharding_types=[kind])})


def test_offered_memory_is_enough_and_not_much_too_much():
    inputs = inputs_of(
        BIG, TWO, constraints={"item": ParameterConstraints(sharding_types=["table_wise"])}
    )
    offered = memory_of(message(inputs))
    assert fits(inputs, topology=Topology(2, "cuda", hbm_cap=offered))
    assert not fits(inputs, topology=Topology(2, "cuda", hbm_cap=int(offered * 0.93)))


def test_smaller_reservation_is_offered_where_it_is_enough():
    whole = Topology(1, "cuda", hbm_cap=25 * GIB)
    inputs = inputs_of(BIG, whole, percentage=0.15)
    text = message(inputs)
    assert "3.75 GiB of a rank's 25.0 GiB HBM are kept" in text
    found = re.search(r"FixedAbsoluteStorageReservation\((\d+)\)", text)
    assert found, text
    keep = int(found[1])
    capacity = np.array([[25 * GIB - keep, inputs.problem.capacity[0, 1]]])
    assert search(replace(inputs.problem, capacity=capacity)) is not None
    assert 0 < keep < 2 * GIB


def test_more_ranks_are_offered_where_they_are_enough():
    tables = {f"t{number}": (10_000_000, 64) for number in range(14)}
    inputs = inputs_of(tables, TWO)
    text = message(inputs)
    assert text.startswith(
        "no sharding plan fits: 14 tables together need at least 33.4 GiB of HBM, and 2 ranks "
        "have 32.0"
    )
    assert why_infeasible(inputs).error_type is PlannerErrorType.INSUFFICIENT_STORAGE
    found = re.search(r"world_size=(\d+), local_world_size=(\d+)$", text)
    assert found, text
    world, local = int(found[1]), int(found[2])
    assert world == 4
    assert fits(inputs, topology=Topology(world, "cuda", hbm_cap=16 * GIB, local_world_size=local))


def test_ranks_without_room_are_not_offered_by_the_million():
    # Each rank has 4 KiB for tables: 6 million of them would have enough.
    inputs = inputs_of(BIG, Topology(2, "cuda", hbm_cap=4096), batch_size=4)
    text = message(inputs)
    assert "each rank has 4.00 KiB for tables" in text
    assert "15.0 GiB of HBM on each rank instead of 4.00 KiB" in text
    assert "ranks instead of" not in text


def test_smaller_batch_is_offered_where_buffers_are_too_large():
    inputs = inputs_of(
        {"item": (1000, 64)}, Topology(1, "cuda", hbm_cap=8 * 1024**2), batch_size=65536
    )
    text = message(inputs)
    found = re.search(r"batch_size=(\d+) instead of 65536", text)
    assert found, text
    assert fits(inputs, batch_size=int(found[1]))
    assert not fits(inputs, batch_size=int(found[1]) * 8)


def test_constraints_of_tables_that_do_not_fit_together_are_loosened():
    names = [f"t{number}" for number in range(6)]
    replicated = ParameterConstraints(sharding_types=["data_parallel"])
    inputs = inputs_of(
        {name: (1_000_000, 64) for name in names},
        Topology(2, "cuda", hbm_cap=int(1.4 * GIB)),
        constraints=dict.fromkeys(names, replicated),
    )
    text = message(inputs)
    kind, tables = constraint_of(text)
    assert tables == names[:3]
    assert "and 3 others" in text
    assert fits(
        inputs, constraints=dict.fromkeys(names, ParameterConstraints(sharding_types=[kind]))
    )


def test_at_most_three_remedies_take_one_search_each(monkeypatch):
    searched = []
    monkeypatch.setattr(
        remedies, "search", lambda problem: (searched.append(problem), search(problem))[1]
    )
    wanted = {"item": ParameterConstraints(sharding_types=["table_wise"])}
    lines = str(
        why_infeasible(inputs_of(BIG, TWO, constraints=wanted, percentage=0.05))
    ).splitlines()
    assert len(lines) <= 5
    assert len(searched) <= 5


def test_pins_that_overfill_a_rank_are_named():
    names = [f"t{number}" for number in range(5)]
    inputs = inputs_of(
        {name: (20_000_000, 64) for name in names},
        TWO,
        constraints=dict.fromkeys(names, ParameterConstraints(pin=[0])),
    )
    error = why_infeasible(inputs)
    assert (
        "5 tables pinned to rank 0 together need at least 23.8 GiB of HBM, and rank 0 has 16.0 GiB"
        in str(error)
    )
    assert "no pin for table" in str(error)
    assert error.error_type is PlannerErrorType.STRICT_CONSTRAINTS


def test_host_memory_is_what_counts_on_the_cpu():
    inputs = inputs_of(BIG, Topology(1, "cpu", ddr_cap=8 * GIB))
    text = message(inputs)
    assert "of DDR on one rank" in text
    assert fits(inputs, topology=Topology(1, "cpu", ddr_cap=memory_of(text, "ddr_cap")))


def test_offered_memory_of_small_machines_is_small():
    inputs = inputs_of({"item": (1000, 16)}, Topology(1, "cpu", ddr_cap=60_000), batch_size=4)
    offered = memory_of(message(inputs), "ddr_cap")
    assert 60_000 < offered < 90_000
    assert fits(inputs, topology=Topology(1, "cpu", ddr_cap=offered))


def test_proposals_that_all_failed_are_told_apart_from_no_room():
    error = why_infeasible(inputs_of({"item": (100, 64)}, TWO), proposed=True)
    assert error.error_type is PlannerErrorType.PARTITION
    assert "leave proposer, partitioner and performance_model out" in str(error)


def test_without_the_model_the_numbers_remain():
    inputs = inputs_of(BIG, Topology(1, "cuda", hbm_cap=16 * GIB))
    alone = replace(inputs, remake=None)
    text = message(alone)
    assert "needs 23.8 GiB" in text
    assert "no single change was found" in text


def test_shortage_is_that_of_the_least_demanding_option():
    inputs = inputs_of(BIG, Topology(1, "cuda", hbm_cap=16 * GIB))
    short = find_shortage(inputs.problem)
    needed = min(int(choice.memory[:, 0].max()) for choice in inputs.problem.choices[0])
    assert (short.memory, short.needed, short.room, short.tables, short.ranks) == (
        0,
        needed,
        16 * GIB,
        (0,),
        (),
    )
    assert needed > 100_000_000 * 64 * 4
