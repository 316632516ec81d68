# after: hurt
full_size = ROWS == 200_000
if full_size:
    assert round(megabytes["the table"], 1) == round(megabytes["gradient"], 1) == 51.2
    assert (
        round(megabytes["state"], 1) == 102.4 and 1.0 < megabytes["rows that the step reads"] < 1.1
    )
assert round(100 * 10**6 * 64 * 4 / 1e9, 1) == 25.6 and round(3 * 25.6, 1) == 76.8
# after: first-step
assert [round(moved, 3) for moved in rows["exact_sgd"]] == [1, 3, 30]
for name in ("exact_adagrad", "exact_row_wise_adagrad"):
    assert [round(moved, 3) for moved in rows[name]] == [1, 1, 1]
# after: mistakes
assert [state for _, state in rows.values()] == [9, 3, 1]
assert [round(moved, 2) for moved, _ in rows.values()] == [1, 2.28, 1]
# after: memory-figure
tables = {
    name: [panel[name]["state"] / megabytes["the table"] for panel in panels.values()]
    for name in pairs
}
for name, due in {
    "SGD": 0,
    "row-wise Adagrad": 1 / 64,
    "Adagrad": 1,
    "partial row-wise Adam": 1 + 1 / 64,
    "Adam": 2,
}.items():
    assert all(abs(kept - due) < 1e-3 for kept in tables[name]), (name, tables[name])
assert {bar["gradient"] for bar in panels["inside"].values()} == {0}
assert {bar["gradient"] for bar in panels["outside"].values()} == {megabytes["the table"]}
if full_size:
    assert round(panels["inside"]["row-wise Adagrad"]["state"], 1) == 0.8
# after: absent
lengths_of_101 = {name: round(path[100] - path[99], 2) for name, path in paths.items()}
assert lengths_of_101 == {"dense Adam": 0.71, "fused Adam": 1.32}
assert 5.9 < paths["dense Adam"][99] < 6.1
assert max(abs(moved - 1) for moved in paths["fused Adam"][:100]) < 1e-3
# after: halves
assert round(rows["inside"], 2) == 1.71 and round(rows["outside"], 3) == 1
# after: combined
assert [group["lr"] for group in combined.param_groups] == [0.5, 0.01]
# after: warm-up
assert all(abs(rate - 0.5) < 1e-4 for rate in rates["schedule on the layers"])
due = [0.5 * min(step / 8, 1) for step in range(1, 13)]
assert all(abs(a - b) < 1e-4 for a, b in zip(rates["schedule on combined"], due, strict=True))
# after: clipping
assert [round(moved, 3) for moved in rows["not clipped"]] == [1, 0.316, 1, 0.001]
assert all(moved > 0.28 for moved in rows["clipped to 1"])
# after: ex-3-solution
late = shard(small, optimizer="adam", learning_rate=RATE)
[of_table] = late.fused_optimizer.state.values()
next(value for key, value in of_table.items() if "step" in key).fill_(10**6)
assert abs(rates_moved(late, [batch_of([7])]) - rates_of_late_row) < 0.01
assert check.all_right("11")
