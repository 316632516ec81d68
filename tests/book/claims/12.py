# after: problem
assert 262.0e9 < 512 * ROWS * COLUMNS * 4 < 262.5e9
assert [list(bags.values()).count(length) for length in (20, 5, 1)] == [32, 32, 448]
# after: loads
assert ids == [672, 192, 64, 64, 64, 64, 64, 64] and sum(ids) == 1248
assert tables == [64] * 8 and abs(672 / (1248 / 8) - 4.3) < 0.01
assert abs(SAMPLES * 672 * 256 - 11.3e9) < 0.05e9
assert abs(SAMPLES * 64 * 256 * 7 / 8 - 0.94e9) < 0.005e9
assert abs(SAMPLES * 64 * 256 - 1.1e9) < 0.05e9
# after: compare
assert list(rows) == list(plans)
# after: presets
assert (MEMORY, INSIDE, ACROSS, LATENCY) == (3350e6, 450e6, 50e6, 0.02)
# after: knee
assert round(LATENCY * ACROSS) == 1_000_000 and round(LATENCY * INSIDE) == 9_000_000
assert exchanges["1 MB"]["latency"] == exchanges["1 MB"]["bytes"]
# after: same
totals = {name: sum(phases.values()) for name, phases in steps.items()}
assert abs(totals["order of the log"] - 16.0) < 0.01
assert abs(totals["longest first"] - 7.75) < 0.005
waits = by_simulation(in_log_order, 8)
assert abs(1 - waits.rank_ms.mean() / waits.step_ms - 0.51) < 0.005
by_order = steps["order of the log"]
memory_ms = by_order["lookup"] + by_order["update"]
assert round(100 * memory_ms / totals["order of the log"]) == 71
assert loads_of(longest_first, 8)[1] == [156] * 8
even = steps["longest first"]
assert round(totals["longest first"] + even["lookup"] + even["update"], 1) == 11.1
assert even["rows"] + even["gradients"] > 0.5 * totals["longest first"]
on_two_hosts = by_hand(deal(sorted(bags, key=bags.get, reverse=True), 16), 16)
assert abs(sum(on_two_hosts.values()) - 12.8) < 0.01
assert [round(even[phase], 1) for phase in ("rows", "gradients")] == [2.1, 2.1]
assert [round(on_two_hosts[phase], 1) for phase in ("rows", "gradients")] == [5.4, 5.4]
assert [round(phases["ids"], 2) for phases in (even, on_two_hosts)] == [0.15, 0.33]
assert abs(2 * on_two_hosts["lookup"] / even["lookup"] - 1) < 1e-9
# after: summary
assert list(rows) == [*waits.phases, "sum"]
assert abs(rows["sum"][0] - 7.79) < 0.005 and abs(rows["sum"][1] - 16.0) < 0.01
assert abs(1 - rows["sum"][0] / rows["sum"][1] - 0.51) < 0.005
of_memory = rows["lookup"][1] + rows["update"][1]
assert round(100 * of_memory / rows["sum"][1]) == 71
# after: roofline
assert 20 * COLUMNS == 1280 and 5500 < moved / samples < 5600
assert 0.2 < operations / moved < 0.25 and 67e12 / 3.35e12 == 20
assert peak / bandwidth > 2 * operations / moved
one, sixteen = work["1 row"], work["16 rows"]
assert abs(one[0] / one[1] - 0.5) < 0.001 and abs(sixteen[0] / sixteen[1] - 8) < 0.1
# after: ex-2-solution
assert check.all_right("12")
