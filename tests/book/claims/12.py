# after: problem
assert 262.0e9 < 512 * ROWS * COLUMNS * 4 < 262.5e9
assert [list(bags.values()).count(length) for length in (20, 5, 1)] == [32, 32, 448]
# after: loads
assert ids == [672, 192, 64, 64, 64, 64, 64, 64] and sum(ids) / 8 == 156
assert tables == [64] * 8 and abs(672 / (sum(ids) / 8) - 4.3) < 0.01
assert [sum(parts.values()) for parts in by_rank.values()] == ids
assert by_rank["rank 0"]["in bags of 20"] == 640
# after: presets
assert (MEMORY, INSIDE, ACROSS, LATENCY) == (3350e6, 450e6, 50e6, 0.02)
looked_up = SAMPLES * (672 * (8 + 256) + 64 * 256)
assert abs(looked_up - 12.7e9) < 0.01e9 and round(looked_up / MEMORY, 2) == 3.79
pooled = SAMPLES * 64 * 256
assert abs(pooled - 1.07e9) < 0.005e9 and abs(pooled * 7 / 8 - 0.94e9) < 0.005e9
assert round(pooled * 7 / 8 / INSIDE, 2) == 2.09
assert abs(4 * SAMPLES * (64 + 672) * 7 / 8 - 0.17e9) < 0.005e9
# after: same
totals = {name: sum(phases.values()) for name, phases in steps.items()}
assert abs(totals["order of the log"] - 16.0) < 0.01
assert abs(totals["longest first"] - 7.75) < 0.005
by_order, even = steps.values()
assert [round(ms, 2) for ms in by_order.values()] == [0.42, 3.79, 2.11, 2.11, 7.58]
assert [round(ms, 2) for ms in even.values()] == [0.15, 1.13, 2.11, 2.11, 2.25]
assert all(even[phase] <= ms for phase, ms in by_order.items())
memory_ms = by_order["lookup"] + by_order["update"]
assert round(100 * memory_ms / totals["order of the log"]) == 71
assert loads_of(longest_first, 8) == ([64] * 8, [156] * 8)
assert round(totals["longest first"] + even["lookup"] + even["update"], 1) == 11.1
assert round(2 * (even["lookup"] + even["update"]), 1) == 6.8
assert even["rows"] + even["gradients"] > 0.5 * totals["longest first"]
on_two_hosts = by_hand(deal(sorted(bags, key=bags.get, reverse=True), 16), 16)
assert abs(sum(on_two_hosts.values()) - 12.8) < 0.01
assert [round(even[phase], 1) for phase in ("rows", "gradients")] == [2.1, 2.1]
assert [round(on_two_hosts[phase], 1) for phase in ("rows", "gradients")] == [5.4, 5.4]
# after: threshold
assert round(2 * 7 / 8 / 450 * 3350 / 3 - 1, 1) == 3.3
assert round(2 * 8 / 16 / 50 * 3350 / 3 - 1) == 21
assert [round(ns * 3350 / 2 / 3 - 1) for ns in (2 * 7 / 8 / 450, 1 / 50)] == [1, 10]
assert memory[2] < wires["wires, one host"] < memory[3]
assert memory[20] < wires["wires, two hosts"] < memory[21]
assert (round(memory[0], 1), round(memory[-1], 1)) == (0.5, 7.1)
assert [round(ns, 1) for ns in wires.values()] == [1.0, 5.1]
assert (672 / 64, round(156 / 64, 1)) == (10.5, 2.4)
# after: by-simulation
waits = by_simulation(in_log_order, 8)
assert 0.45 < 1 - waits.rank_ms.mean() / waits.step_ms < 0.55
assert len(waits.exchanges) == 4
log_order = bags
for ranks, below, above in ((8, 3, 4), (16, 20, 21)):
    for length in (below, above):
        bags = dict.fromkeys(log_order, length)
        phases = by_simulation(deal(bags, ranks), ranks).phases
        ms = {phase: of_ranks.max() for phase, of_ranks in phases.items()}
        in_memory, on_wires = ms["lookup"] + ms["update"], ms["rows"] + ms["gradients"]
        assert (in_memory > on_wires) == (length == above), (ranks, length)
bags = log_order
# after: compare
assert list(rows) == list(plans)
# after: roofline
assert 20 * COLUMNS == 1280 and 20 * 256 + 256 + 20 * 8 == 5536
assert abs(moved / samples - 5536) < 1e-6 and 67e12 / 3.35e12 == 20
assert 0.2 < operations / moved < 0.25 and abs(COLUMNS / (2 * 256 + 8) - 1 / 8) < 0.005
assert peak / bandwidth > 2 * operations / moved
one_row = work["1 row"]
assert abs(one_row[0] / one_row[1] - 0.5) < 0.001
# after: ex-2-solution
assert check.all_right("12") and rows_needed(4096, 4096, 4, 67e12, 3.35e12) == 41
