# after: tables
assert round(MEAN) == MEAN == 873_199
assert round(4 * COLUMNS * sum(ROWS) / 1e9, 2) == 1.79
assert round(4 * COLUMNS * MEAN / 1e9, 2) == 0.45
# after: symptom
assert list(pairs.get_group(0)) == [3, 0] and max(held.values()) == 3_434_402
assert round(4 * COLUMNS * max(held.values()) / 1e9, 2) == 1.76
assert by_size.get_num_embeddings_on_rank(0) == ROWS[3]
assert round(ROWS[3] / MEAN, 2) == round(max(held.values()) / MEAN, 2) == 3.93
assert round(100 * ROWS[3] / sum(ROWS)) == 98
# after: line
assert small.cuts == {1: [1, 5]}
# after: wrong-sums
assert round(ratio, 2) == 1.44 and right == 0
assert sum(SMALL) == 21_014 and len(as_it_was.cuts) == 3
# after: property
assert violations(as_it_was) == {2}
assert sum(ROWS) % RANKS == 0
# after: search
assert set(smallest) == {2, 3, 4} and failing[3] == min(failing.values()) == 12
assert round(3 * failing["any"] / 2000) == 2
# after: defects
assert cases["condition 2"].embeddings_per_feat == [3, 2]
assert cases["condition 4"].embeddings_per_feat == [3, 3]
assert cases["condition 3"].embeddings_per_feat == [10, 15, 1]
# after: exact
for features, ranks in small_cases():
    division = LoadBalanceManager(features, ranks)
    counted = [division.get_num_embeddings_on_rank(rank) for rank in range(ranks)]
    assert max(counted) - min(counted) <= 1
# after: work
assert [round(of_loads[name][0], 2) for name in divisions] == [3.93, 3.93, 1.0]
assert [round(of_loads[name][-1], 2) for name in divisions] == [1.0, 2.0, 2.12]
assert of_loads["ranges of rows"][0] == 1
# after: planner
whole = plans["plan for 80 GiB"]
cut = plans["plan for 1 GiB"]
assert {entry.sharding_type for entry in whole.plan[""].values()} == {"table_wise"}
by_rows = [name for name, entry in cut.plan[""].items() if entry.sharding_type == "row_wise"]
assert by_rows == ["feature 3"]
assert [round(of_loads["plan for 1 GiB"][i], 3) for i in (0, -1)] == [1.035, 1.125]
assert round(cut.report.cost / whole.report.cost, 2) == 1.5
# after: clock
in_pairs = megabytes["pairs"]
assert round(megabytes["one cut"] / in_pairs, 2) == 1.41
assert 3.9 < megabytes["all cut"] / in_pairs < 4.1
assert 0.48 < megabytes["one bag"] / in_pairs < 0.52
assert [round(sent, 2) for sent in megabytes.values()] == [6.34, 8.97, 25.29, 3.19]
assert round(2 * RANKS * 1024 * 4 * COLUMNS / 1e6, 1) == 4.2
of_tenth = LoadBalanceManager(tenth, RANKS)
lookups = [
    sum(part.rows / tenth[part.feature] for part in of_tenth.get_owned_rows(rank))
    for rank in range(RANKS)
]
assert round(max(lookups) / min(lookups)) == 17
# after: ex2-solution
assert check.all_right("19")
