# after: hurt
assert "table 'visitors' needs 72.7 GiB of HBM" in refused
assert "62.7 GiB for tables" in refused
assert abs(by_person.report.cost - 2.846) < 0.005
assert abs(plan.report.cost - 1.378) < 0.005
assert 2 * plan.report.cost < by_person.report.cost
assert plan == shop_plan()
# after: count
assert round(days) == 344


def places(choice):
    """Ways to place the shards of an option on the ranks."""
    return GPUS ** len(choice.time) if choice.spread.value == "any" else 1


options = plan.report.problem.choices
counted = [sum(map(places, of_table)) for of_table in options]
assert plans == math.prod(counted) == 297_055_348_480
offered = [len(choice.time) for of_table in options for choice in of_table]
assert (len(offered), sum(offered)) == (32, 89)
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
assert round(steps["columns", "columns"] - 0.08, 2) == 0.40
assert round(steps["rows", "columns"] - 0.16, 2) == 0.42
assert (latency(one_each), latency(("rows", "columns"))) == (0.08, 0.16)
assert sum(busy(one_each, 0).values()) < sum(busy(one_each, 1).values())
# after: agrees
for choices in planner.plan(two, [sharder]).report.problem.choices:
    for choice in choices:
        option = choice.options[0]
        for index, (rows_of_it, columns_of_it) in enumerate(option.pieces().sizes.tolist()):
            its_parts, its_bytes = shard(option.name, rows_of_it, columns_of_it)
            assert math.isclose(sum(its_parts.values()), choice.time[index])
            assert math.isclose(its_bytes, choice.memory[index, 0], rel_tol=1e-6)
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
assert max(loads(best)) == 13
# after: soft
assert even[0] > uneven[0] and even[-1] < uneven[-1]
# after: found
optimum = made["integer program"].report
assert optimum.gap < 0.0015 and not found[found.best].copied
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
assert round(of_weekdays["column_wise"].max(), 3) == 0.089
# after: dlrm
assert len(ROWS) == len(BAGS) == 26
assert round(sum(ROWS) * 128 * 4 / 1e9) == 105 and 8 * 8192 == 65_536
assert BAGS[20] == 100 and ROWS[20] == 40_000_000

ms = {name: one.report.cost for name, one in plans_of_dlrm.items()}
assert abs(ms["in turn"] - 3.79) < 0.01
assert abs(ms["with bags, slices of 32"] - 1.40) < 0.01
assert 0.9 * ms["in turn"] < ms["without bags"] < ms["in turn"]
assert ms["with bags, slices of 32"] < ms["with bags"] < 0.5 * ms["in turn"]
busiest = plans_of_dlrm["without bags"].explain()
assert "t20" in str(busiest)
assert plans_of_dlrm["with bags"].plan[""]["t20"].sharding_type == "row_wise"
narrow_20 = plans_of_dlrm["with bags, slices of 32"].plan[""]["t20"]
assert narrow_20.sharding_type == "column_wise" and len(set(narrow_20.ranks)) == 4
# after: ex3-solution
assert check.all_right("09")
