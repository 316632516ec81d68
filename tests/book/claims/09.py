# after: plan
assert str(plan).split("\n\n")[1].count("| fused ") == 8
assert plan.plan[""]["queries"].ranks == [2, 2, 3, 3]
# after: hurt
assert "table 'visitors' needs 72.7 GiB of HBM" in refused
assert "62.7 GiB for tables" in refused
assert refused.count("\n") > 2  # what is needed for what, and changes that would help
assert abs(by_person.report.cost - 2.846) < 0.005
assert abs(plan.report.cost - 1.378) < 0.005
assert 2 * plan.report.cost < by_person.report.cost
assert plan == shop_plan()
# after: count
assert round(days) == 206


def places(choice):
    """Ways to place the shards of an option on the ranks."""
    one_slice = choice.options[0].sharding_type == "column_wise" and len(choice.time) == 1
    if one_slice:  # the pages: this is the whole table
        return 0
    return GPUS ** len(choice.time) if choice.rule.value == "any" else 1


options = plan.report.problem.choices
counted = [sum(map(places, of_table)) for of_table in options]
assert plans == math.prod(counted) == 178_233_209_088
assert sum(map(len, options)) == 32
# after: shard
of_visitors = options[0]
assert needed == of_visitors[0].memory[0, 0]
assert round(needed / 2**30, 1) == 72.7 and round(80e9 / 2**30, 1) == 74.5
assert round(plan.report.problem.capacity[0, 0] / 2**30, 1) == 62.7
# after: shard-drawn
whole, by_rows, by_columns = (sum(bar.values()) for bar in panels["products"].values())
assert round(by_rows / whole, 2) == 0.57
assert round(by_columns / whole, 2) == 0.52
assert min(sum(panels["queries"][cut].values()) for cut in ("rows", "columns")) > 0.5 * sum(
    panels["queries"]["whole"].values()
)
# after: pairs
assert len(steps) == 10
assert list(steps)[:2] == [("columns", "columns"), one_each]
cut_plans = {pair: round(steps[pair], 3) for pair in pairs if {*pair} <= {"rows", "columns"}}
assert cut_plans == {
    ("rows", "rows"): 0.549,
    ("columns", "rows"): 0.611,
    ("rows", "columns"): 0.581,
    ("columns", "columns"): 0.482,
}
assert (latency(one_each), latency(("rows", "columns"))) == (0.08, 0.16)
assert sum(busy(one_each, 0).values()) < sum(busy(one_each, 1).values())
# after: agrees
for choices in planner.plan(two, [sharder]).report.problem.choices:
    for choice in choices:
        option = choice.options[0]
        for index, (rows_of_it, columns_of_it) in enumerate(option.shard_arrays().sizes.tolist()):
            its_parts, its_bytes = shard(option.name, rows_of_it, columns_of_it)
            assert math.isclose(sum(its_parts.values()), choice.time[index])
            assert math.isclose(its_bytes, choice.memory[index, 0], rel_tol=1e-6)
from tutorec.distributed.plan.plan import ShardingPlan  # noqa: E402
from tutorec.distributed.sharding_plan import (  # noqa: E402
    column_wise,
    construct_module_sharding_plan,
    row_wise,
    table_wise,
)

by_word = {
    "whole on 0": table_wise(rank=0),
    "whole on 1": table_wise(rank=1),
    "rows": row_wise(),
    "columns": column_wise(ranks=[0, 1]),
}
for pair, ms_by_hand in steps.items():
    entries = {name: by_word[cut] for name, cut in zip(panels, pair, strict=True)}
    of_pair = construct_module_sharding_plan(two, entries, world_size=2)
    estimated = planner.estimate(ShardingPlan({"": of_pair}), two, [sharder])
    assert math.isclose(estimated.report.cost, ms_by_hand), pair
# after: allocated
shards = small.plan[""]["visitors"].shards()
assert [one.shard_sizes for one in shards] == [[15_000, 64]] * 2
# after: lpt
assert max(loads(longest_first[-1])) == 15 and sum(MS.values()) == 26
moved = sorted(
    (max(loads(longest_first[-1] | {name: 1 - at})), name) for name, at in longest_first[-1].items()
)
assert moved[:2] == [(15, "d"), (15, "e")] and moved[2][0] > 15
# after: ruin
assert max(loads(best)) == 13 < max(loads(before)) and rounds > 1
# after: bound
problem = plan.report.problem


def at_least(types):
    """Milliseconds below which no better plan with all these types can be."""
    total = 0
    for of_table in problem.choices:
        cheapest = [
            one.time.sum()
            for one in of_table
            if one.options[0].sharding_type in types
            if one.memory[0, 0] <= problem.capacity[0, 0] and one.longest <= plan.report.cost
        ]
        total += min(cheapest, default=math.inf)
    return total / GPUS + sum(3 if one == "data_parallel" else 4 for one in types) * LATENCY


sets = [()]
for each in TYPES:
    sets += [(*types, each) for types in sets]
cheapest = min(sets, key=at_least)
assert cheapest == ("row_wise", "column_wise")
assert math.isclose(at_least(cheapest), work / GPUS + 8 * LATENCY)
assert abs(at_least(cheapest) / plan.report.bound.ms - 1) < 1e-5
assert round(GPUS * (at_least(cheapest) - 8 * LATENCY), 2) == 4.77
assert round(at_least(cheapest), 2) == 1.35
of_pages = {one.options[0].sharding_type: one for one in problem.choices[5]}
whole_pages = of_pages["table_wise"]
assert round(whole_pages.longest, 2) == 1.76 > plan.report.cost
# after: found
optimum = made["integer program"].report
assert optimum.gap < 0.001 and not found[found.best].copied
assert abs(optimum.cost - 1.373) < 0.005
assert found["local search"].ms < 1.005 * optimum.cost
assert abs(found["greedy"].ms / optimum.cost - 1.10) < 0.01
assert found["greedy"].copied == ("weekdays",)
assert plan.report.bound.ms > 0.98 * plan.report.cost
assert made["integer program"].plan[""]["weekdays"].sharding_type == "column_wise"
of_weekdays = {
    choice.options[0].sharding_type: choice.time for choice in optimum.problem.choices[-1]
}
assert round(of_weekdays["data_parallel"].max(), 3) == 0.015
assert round(of_weekdays["column_wise"].sum() / GPUS, 3) == 0.044
assert made["greedy"].plan[""]["products"].sharding_type == "row_wise"
of_products = {
    choice.options[0].sharding_type: choice.time.sum() / GPUS
    for choice in optimum.problem.choices[1]
}
by_rows_longer = of_products["row_wise"] - of_products["column_wise"]
assert by_rows_longer > 0.6 * (found["greedy"].ms - optimum.cost)
saved = (of_weekdays["column_wise"].sum() - of_weekdays["data_parallel"].sum()) / GPUS
assert round(saved, 2) == 0.03
# after: dlrm-table
assert len(ROWS) == len(BAGS) == 26
assert round(sum(ROWS) * 128 * 4 / 1e9) == 105 and 8 * 8192 == 65_536
assert BAGS[20] == 100 and ROWS[20] == 40_000_000

ms = {name: one.report.cost for name, one in plans_of_dlrm.items()}
assert abs(ms["in turn"] - 3.79) < 0.01
assert abs(ms["with bags, slices of 32"] - 1.40) < 0.01
assert 0.9 * ms["in turn"] < ms["without bags"] < ms["in turn"]
assert ms["with bags, slices of 32"] < ms["with bags"] < 0.5 * ms["in turn"]
times = plans_of_dlrm["without bags"].report.rank_times
assert round(times.max(), 2) == 3.55 and times.argmax() == 3
assert plans_of_dlrm["without bags"].plan[""]["t20"].ranks == [3]
assert abs(times.max() / times.mean() - 3) < 0.05
assert plans_of_dlrm["with bags"].plan[""]["t20"].sharding_type == "row_wise"
narrow_20 = plans_of_dlrm["with bags, slices of 32"].plan[""]["t20"]
assert narrow_20.sharding_type == "column_wise" and len(set(narrow_20.ranks)) == 4

with_bags, sliced = (plans_of_dlrm[name].report for name in list(plans_of_dlrm)[2:])
assert round(with_bags.cost / with_bags.bound.ms - 1, 2) == 0.15
assert sliced.cost < 1.001 * sliced.bound.ms
in_turn = plans_of_dlrm["in turn"].report
whole_20 = max(one.longest for one in in_turn.problem.choices[20])
assert math.isclose(whole_20 + 4 * LATENCY, in_turn.bound.ms, rel_tol=1e-6)
longest = {
    (one.options[0].name, one.options[0].sharding_type): one.longest
    for of_table in with_bags.problem.choices
    for one in of_table
}
on_one = [longest["t21", "table_wise"], longest["t20", "row_wise"]]
assert [round(each, 2) for each in on_one] == [1.00, 0.55]
assert abs(sum(on_one) + 11 * LATENCY - with_bags.cost) < 0.02
work_of_21 = {one.options[0].sharding_type: one.time.sum() for one in with_bags.problem.choices[21]}
assert 2 < work_of_21["row_wise"] / work_of_21["table_wise"] < 2.3
kinds = [entry.sharding_type for entry in plans_of_dlrm["with bags"].plan[""].values()]
assert {*kinds} == {"table_wise", "row_wise", "data_parallel"}
kinds = [each.sharding_type for each in plans_of_dlrm["with bags, slices of 32"].plan[""].values()]
assert kinds.count("data_parallel") == 11 and {*kinds} == {"data_parallel", "column_wise"}
not_copied = planner_for(min_partition=32, sharding_types=[*TYPES[:3]])
assert not_copied.plan(dlrm, [sharder]).report.cost > sliced.cost + 0.05
# after: ex3-solution
from tutorec.teach.hand_plans import BUSY_VISITORS  # noqa: E402

assert bags == BUSY_VISITORS
assert check.all_right("09")
