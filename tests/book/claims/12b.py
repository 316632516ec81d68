# after: problem
assert 262.0e9 < 512 * ROWS * COLUMNS * 4 < 262.5e9
assert [list(bags.values()).count(length) for length in (20, 5, 1)] == [32, 32, 448]
# after: step
h100 = Topology.preset("8xH100x1")
assert (h100.hbm_mem_bw, h100.intra_host_bw, h100.inter_host_bw) == (3350e6, 450e6, 50e6)
assert h100.latency_ms == 0.02 and round(h100.latency_ms * h100.inter_host_bw) == 1_000_000
# after: ranks
told = {8: 7.75, 16: 12.8, 40: 8.02, 48: 7.12, 64: 5.48, 512: 1.17, 4096: 1.19}
for ranks, ms in told.items():
    assert abs(whole[ranks].step_ms / ms - 1) < 0.005, ranks
assert abs(whole[16].step_ms / whole[8].step_ms - 1.65) < 0.005
assert abs(whole[8].step_ms / whole[512].step_ms - 6.6) < 0.01
assert whole[48].step_ms < whole[8].step_ms < whole[40].step_ms
assert min(hosts for hosts in range(2, 64) if 72 * (hosts - 1) < 7 * hosts**2) == 10
assert (whole[4096].work.lookups == 0).sum() == 3584
for ranks in (16, 40, 48, 64, 512, 4096):
    assert whole[ranks].step_parts["across hosts"] > 0.65 * whole[ranks].step_ms
for ranks in (512, 4096):
    assert round(100 * whole[ranks].step_parts["across hosts"] / whole[ranks].step_ms) == 66
assert 16.7e6 < 4 * SAMPLES * COLUMNS < 16.8e6
rows_ms = [4 * SAMPLES * columns / 50e6 for columns in (64, 32)]
assert [round(ms, 2) for ms in rows_ms] == [0.34, 0.17]
assert [round(ms + 0.02, 2) for ms in rows_ms] == [0.36, 0.19]
assert 0.34 < whole[512].phases["rows"].max() < 0.36
# after: weak
assert [
    round(100 * ms / told) for ms, told in zip(weak, (7.75, 25.5, 43.3, 70.1), strict=True)
] == [100] * 4
assert [round(share) for share in efficiency] == [100, 30, 18, 11]
assert 7 <= 64 * efficiency[-1] / 100 < 7.2 and abs(8192 * 512 - 4.2e6) < 0.01e6
# after: types
columns = [[ms[place] for ms in times.values() if ms[place]] for place in range(4)]
assert min(columns[0]) == times["table_wise"][0]
assert min(columns[1]) > 0.99 * times["table_wise"][1]
assert min(columns[2]) == times["2 slices"][2]
assert min(columns[3]) == times["grid"][3]
assert round(100 * (1 - times["2 slices"][2] / times["table_wise"][2])) == 11
assert round(times["8 slices"][3], 3) == 0.437 and round(times["grid"][3], 3) == 0.331
assert round(100 * (times["table_row_wise"][3] / times["grid"][3] - 1), 1) == 3.6
assert times["table_row_wise"][3] < 1.05 * min(columns[3])
on_one_host = {round(times[name][0], 6) for name in list(times)[4:]}
assert len(on_one_host) == 1
assert round(times["row_wise"][1] / times["table_wise"][1]) == 57
# after: parts
grid, cut_in_two, cut_in_four = (on_4096[name] for name in ("grid", "2 slices", "4 slices"))
assert abs(times["table_wise"][3] / times["grid"][3] - 3.6) < 0.02
assert 0.3 < grid["latency"] / sum(grid.values()) < 0.4
assert abs(grid["latency"] - 0.12) < 1e-9 and abs(cut_in_two["latency"] - 0.08) < 1e-9
assert 0.97 < cut_in_four["memory"] / cut_in_two["memory"] <= 1
for sharding, ms in (("grid", 0.33), ("table_row_wise", 0.34)):
    assert round(times[sharding][3], 2) == ms
# after: latencies
for row in rows.values():
    assert [cell.partition(",")[0] for cell in row[:3]] == ["table_wise", "2 slices", "2 slices"]
fastest_on_4096 = [row[3].partition(",")[0] for row in rows.values()]
assert fastest_on_4096 == ["grid", "grid", "grid", "8 slices", "grid"]
assert rows["20 us + 0.1 us a peer"][2:] == ["2 slices, 1.25", "grid, 1.25"]
# after: peers
with_peers = [with_latency(steps["table_wise"][place], 0.02, 0.0001) for place in (2, 3)]
assert [round(ms, 2) for ms in with_peers] == [1.38, 2.82]
assert rows["table_wise"][2:] == with_peers
assert all(abs(with_latency(one, 0.02) - one.step_ms) < 1e-9 for of in steps.values() for one in of)
# after: hot-rank
assert round(100 * PowerLaw(1.05).over(ROWS).hottest(1)[0][1]) == 9
assert 40 < lookups.max() / lookups.mean() < 60
# after: hot
for sharding in ("table_wise", "2 slices"):
    assert max(rows[sharding]) - min(rows[sharding]) < 1e-9
even, spread, crowded = rows["table_row_wise"]
assert round(100 * (spread / even - 1)) == 3 and round(100 * (crowded / even - 1)) == 28
memory = steps["table_row_wise"][2].step_parts["memory"]
assert abs(memory / even - 1 / 9) < 0.005
# after: slow
assert abs(longer["GPU 0, 20 ids"] - 27.7) < 0.05
assert longer["GPU 40, 5 ids"] < 1e-9 and longer["GPU 300, 1 id"] < 1e-9
nobody_waits = step("row_wise", 64)
assert nobody_waits.rank_ms.mean() > 0.999 * nobody_waits.step_ms
# after: levers
saved = {
    name: [round(100 * (1 - ms / now)) for ms, now in zip(row, rows["as it is"], strict=True)]
    for name, row in rows.items()
}
assert saved["H200"][:2] == [13, 3] and saved["16-bit rows and gradients"][1] == 43
assert round(100 * (Topology.preset("8xH200x1").hbm_mem_bw / h100.hbm_mem_bw - 1)) == 43
assert 0.4 < whole[8].step_parts["memory"] / whole[8].step_ms < 0.5
assert round(times["2 slices"][2], 2) == 1.04
assert abs(times["table_wise"][0] / times["2 slices"][2] - 7.4) < 0.05
# after: ex-3-solution
assert 30 < 4 * SAMPLES * COLUMNS / answer[1] < 34
assert 1000e6 < 8 * ROWS * COLUMNS < 1030e6
assert check.all_right("12b")
