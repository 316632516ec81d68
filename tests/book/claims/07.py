# after: timeline
assert TABLES["products"][2] * 2 * 256 == 204_800
assert sum(ids for _, _, ids in TABLES.values()) * 2 * 256 - 204_800 == 1536
assert round(100 * 204_800 / (204_800 + 1536)) == 99
popular = (batches[0]["products"].values() < 100_000 / 8).float().mean()
assert abs(popular - 0.5) < 0.01
# after: plans
assert of_products["row-wise"].shards()[1].shard_offsets == [50_000, 0]
assert of_products["row-wise"].shards()[1].shard_sizes == [50_000, 256]
# after: worked
assert sums == ([150, 10], [50, 120])
assert partial == ([[20, 10], [0, 40]], [[130, 0], [50, 80]])


# after: bytes
def by_formula(plan, W, R, N, B=256, D=256):
    return (W - 1) * {
        "table-wise": 4 * (B + N) + 8 * B * D,
        "column-wise": 4 * W * (B + N) + 8 * B * D,
        "row-wise": 4 * (W * B + N) + 8 * W * B * D,
        "data-parallel": min(4 * W * (B + N) + 4 * W * B * D, 8 * R * D),
    }[plan]


def computed(plan, W=2):
    return sum(by_formula(plan, W, R, 256 * ids) for R, _, ids in TABLES.values())


def without_sizes(plan):
    by_stage = Traffic.merge(of_rank[plan] for of_rank in counted).by_stage()
    return sum(count for stage, count in by_stage.items() if "sizes" not in stage)


for plan in ("table-wise", "column-wise", "data-parallel"):
    assert without_sizes(plan) == computed(plan)
assert abs(without_sizes("row-wise") / computed("row-wise") - 1) < 1e-3
in_table = {
    "table-wise": (2.5, 17.6),
    "column-wise": (2.9, 38.0),
    "row-wise": (4.6, 120.6),
}
for plan, mb in in_table.items():
    assert tuple(round(computed(plan, W) / 1e6, 1) for W in (2, 8)) == mb
for W, by_samples, by_rows_mb in ((2, 2.9, 410), (8, 82.1, 2870)):
    parts_of = [
        (4 * W * 256 * (1 + ids) + 4 * W * 256 * 256, 8 * R * 256) for R, _, ids in TABLES.values()
    ]
    summed = [(W - 1) * sum(one) / 1e6 for one in zip(*parts_of, strict=True)]
    assert (round(summed[0], 1), round(summed[1])) == (by_samples, by_rows_mb)
    assert [rows < samples for samples, rows in parts_of] == [False, False, True, True]
for W, mb in ((2, 2.3), (8, 55.3)):
    assert round(computed("data-parallel", W) / 1e6, 1) == mb
in_all = {name: round(sum(parts.values()), 2) for name, parts in bars.items()}
assert in_all == {
    "table-wise": 2.51,
    "row-wise": 4.61,
    "column-wise": 2.93,
    "data-parallel": 2.28,
}
# after: reading
assert round(share["table-wise"][0]) == 99 and round(share["row-wise"][0]) == 79
assert share["column-wise"] == share["data-parallel"] == [50, 50]
assert abs(share["row-wise"][1] - 50) < 3
of_shuffled = world.run(count, models, shuffled)
moved = Traffic.merge(each["row-wise"] for each in of_shuffled).total() / 1e6
assert round(moved / in_all["column-wise"], 1) == 1.6
# after: same
if device().type == "cpu":  # a GPU may add up a bag in another order
    assert [name for name, equal in bits.items() if not equal] == ["row-wise"]
apart = {name: [float(one.split()[0]) for one in of_plan] for name, of_plan in same.items()}
assert apart["column-wise"][1] > 1
assert max(plain for plain, _ in apart.values()) < 0.1
assert max(rowwise for name, (_, rowwise) in apart.items() if name != "column-wise") < 0.1
for name in ("table-wise", "row-wise", "column-wise"):
    issues = Traffic.merge(each[name] for each in counted).issues
    assert [*issues] == ["input sizes", "input ids", "output rows", "output gradients"]
    assert set(issues.values()) == {1}
mixed = dict.fromkeys(TABLES, sharding_plan.data_parallel())
mixed["products"] = sharding_plan.column_wise([0, 1])
mixed["visitors"] = sharding_plan.table_wise(rank=1)
mixed_models = world.run(start, {"mixed": mixed}, TABLES)[0]
of_mixed = Traffic.merge(each["mixed"] for each in world.run(count, mixed_models, batches))
assert sum(of_mixed.issues.values()) == 11
assert round(100 * (1 - of_mixed.total() / 1e6 / in_all["column-wise"])) == 22
whole_sent = Traffic.merge(each["table-wise"] for each in counted).total()
assert round(204_800 * 256 * 4 / 1e6, 1) == 209.7 and round(whole_sent / 1e6, 3) == 2.514
assert round(204_800 * 256 * 4 / whole_sent) == 83
# after: one-bag
assert paths.facts["sent"] == {
    plan: by_formula(plan, W=2, R=9, N=3, B=1, D=2)
    for plan in ("table-wise", "row-wise", "column-wise", "data-parallel")
}
# after: race
if device().type == "cpu":
    assert busy[0]["table-wise"] > 1.5 * busy[1]["table-wise"]
# after: small
assert round(100 * 20 / 23) == 87
# 4 bytes for an id and a length; of each table one rank sends ids, and one sends rows.
small_bytes = sum(4 * 2048 * (1 + ids) + 8 * 2048 * 64 for _, _, ids in SMALL.values())
read_here = 20 * 2 * 2048 * 64 * 4
assert round(read_here / 1e6, 2) == 20.97 and round(small_bytes / 1e6, 3) == 4.415
assert round(read_here / small_bytes) == 5
# after: ex-3-solution
assert check.all_right("07")
