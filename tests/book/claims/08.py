# after: share
assert round(share, 1) == 66.7
assert round(100 * (64 - 8) / (64 - 1)) == 89
assert 450 / 50 == 9
for stage in ("output rows", "output gradients"):  # most of the bytes, in equal parts
    assert 0.48 < traffic.total(stage) / traffic.total() < 0.5
# after: one-table
placed = {
    name: [(one.placement.rank(), one.shard_offsets, one.shard_sizes) for one in entry.shards()]
    for name, entry in of_products.items()
}
# torchrec 1.8.0's planner, Topology(world_size=4, local_world_size=2), and its grid sharding
assert placed["table-row-wise"] == [(0, [0, 0], [2048, 64]), (1, [2048, 0], [2048, 64])]
assert placed["table-column-wise"] == [(0, [0, 0], [4096, 32]), (1, [0, 32], [4096, 32])]
assert placed["grid"] == [
    (0, [0, 0], [2048, 32]),
    (1, [2048, 0], [2048, 32]),
    (2, [0, 32], [2048, 32]),
    (3, [2048, 32], [2048, 32]),
]
assert len(placed["row-wise"]) == 4
# after: factor
assert 3.8 < factor < 4
most = max(counted[2], key=lambda name: counted[2][name].total(crossing=True))
assert most == "row-wise"
# after: matrices
to = matrices["table-row-wise"]
for sender, receiver in ((0, 3), (1, 2), (2, 1), (3, 0)):
    assert to[sender][receiver] < to[sender][(sender + 2) % 4] / 10
for stage in ("output rows", "output gradients"):
    by_rows = counted[2]["row-wise"].total(stage, crossing=False)
    assert counted[2]["table-row-wise"].total(stage, crossing=False) == by_rows
# after: one-host-answer
assert layouts["table-row-wise"][0] == layouts["row-wise"][0]
assert layouts["table-row-wise"][3] == layouts["table-wise"][3]
assert layouts["table-column-wise"][0] == layouts["column-wise"][0]
assert layouts["table-column-wise"][3] == layouts["table-wise"][3]
assert layouts["grid"][0] == layouts["row-wise"][0]
assert layouts["grid"][3] == layouts["column-wise"][3]
assert round(layouts["row-wise"][0] / 1e6, 1) == 12.8
assert round(layouts["table-row-wise"][2] / 1e6, 1) == 2.2
# after: estimates
fastest = {(tables, ids): TYPES[times.index(min(times))] for tables, ids, *times in estimated}
assert fastest == {
    (64, 20): "table_wise",
    (8, 1): "table_column_wise",
    (8, 20): "table_row_wise",
    (8, 500): "table_row_wise",
    (1, 20): "grid_shard",
    (1, 500): "row_wise",
}
for ids, rows_win in ((8, False), (9, True)):
    by_columns, by_rows = (estimate(kind, 8, ids) for kind in TYPES[1:3])
    assert (by_rows < by_columns) == rows_win


def on_links(plan, ids):
    """Time by the bytes alone, in any unit: the network is nine times as slow."""
    across, inside = formula(plan, 64, 8, 4096, 4096 * ids, 64)
    return 9 * across + inside


for ids, rows_win in ((15, False), (16, True)):
    assert (on_links("table-row-wise", ids) < on_links("table-column-wise", ids)) == rows_win
assert (machine.world_size, machine.local_world_size) == (64, 8)
# after: break-it
assert "the plan has ranks [0, 1, 2, 3] where [0, 1] are a host" in message, message
# after: ex-3-solution
assert check.all_right("08")
