# after: hurt
old_ms = month["today"].report.cost
new_ms = month["a new plan"].report.cost
assert [round(of.report.cost, 2) for of in month.values()] == [1.38, 2.67, 1.92]
assert round(old_ms / new_ms - 1, 2) == 0.39
# after: explained
steps = str(saved.explain())
assert "1.22 ms on rank 2" in steps and "0.160 ms for the" in steps
of_weekdays = {
    choice.options[0].sharding_type: choice.time.sum()
    for choice in saved.report.problem.choices[-1]
}
assert min(of_weekdays, key=of_weekdays.get) == "data_parallel"
assert "+5.5 %" in str(saved.explain("weekdays"))
# after: plot
times = saved.report.rank_times
held = saved.report.rank_memory[:, 0]
assert times.max() / times.min() < 1.1 and held.max() / held.min() > 3
# after: facts
assert rows["half of the memory reserved"][0] is None
assert round(rows["half of the memory reserved"][1] / saved.report.cost, 2) == 1.06
lost = {change: old / new - 1 for change, (old, new, _) in rows.items() if old}
assert max(lost, key=lost.get) == "1,024 samples, not 32,768"
assert round(lost["1,024 samples, not 32,768"], 2) == 0.47
small_batch = bars["1,024 samples, not 32,768"]
assert small_batch["latency"] > 0.5 * sum(small_batch.values())
assert (
    rows["1 page in a bag, not 100"][2] == rows["1,024 samples, not 32,768"][2] == ["column_wise"]
)
assert "data_parallel" in rows["half of the latency"][2]
own_hosts = planner_for(machine="1xH100x4").plan(shop, SHARDERS)
whole = [t for t, of in own_hosts.plan[""].items() if of.sharding_type == "table_wise"]
assert len(whole) == 4
one_host = Topology.preset("4xH100").intra_host_bw
assert one_host / Topology.preset("1xH100x4").inter_host_bw == 9
# after: break
assert "'visitors' needs 7.26 GiB" in refused[0] and "6.80 GiB" in refused[0]
assert "ParameterConstraints(sharding_types=['row_wise'])" in refused[0].splitlines()[2]
assert by_rows[0] == by_rows[1] and by_rows[0].plan[""]["visitors"].ranks == [0, 1]
# after: measured
assert machines["calibrated"].source.startswith("measured on this machine on")
assert len(clock) == len(WAYS) and clock.min() > 0
for name in WAYS:
    assert min(rows[name].values()) > 0
# after: file
assert "sellers" in other_tables and "11000000" in other_tables
# after: large
biggest = large[512].report
if len(large[512].plan[""]) == 100:
    assert biggest.bound.ms > 0.95 * biggest.cost
    assert compared["512 ranks"].types["table_row_wise"] > 50
# after: ex2-solution
assert check.all_right("09b")
