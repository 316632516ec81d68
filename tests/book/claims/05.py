# after: model
model = ClickModel()
assert sum(weight.numel() for weight in model.tables.parameters()) == 96_000 == 2 * 3000 * 16
assert sum(weight.numel() for weight in model.parameters()) - 96_000 == 103
ids = next(store.batches(256, 0, 2)).sparse_features
assert 4 <= ids.values().numel() / 256 <= 6  # a sample reads 5 rows or so
table_bytes = 100_000_000 * 64 * 4
assert table_bytes == 25_600_000_000
assert 3 * table_bytes == 76_800_000_000 < 80_000_000_000 < 6 * table_bytes == 153_600_000_000
# after: copies-run
assert dense == (384_000, 1_536_000)
assert sparse[0] == 55_368 == 769 * (16 * 4 + 8)
assert dense[1] == 4 * 384_000 and 8 * 25_600_000_000 == 204_800_000_000
assert 3 * 384_000 < sparse[1] < 1_536_000
# after: same
change, gap, _, _ = runs["SGD, 5 steps"]
assert gap < 1e-5 * change
assert runs["Adagrad, 5 steps"][1] > gap
assert runs["Adagrad, 5 steps"][1] < 0.01 * runs["Adagrad, 5 steps"][0]
assert 240_000 // 512 == 2 * 234
if store.counts["train"] == 240_000:
    change, gap, one, two = runs["Adagrad, 234 steps"]
    assert abs(one - two) < 0.0005
    assert 0.65 < one < 0.83 and round(store.best_auc, 3) == 0.864
# after: broken-run
adagrad = torch.optim.Adagrad([torch.nn.Parameter(torch.zeros(30, 16))])
assert [state["sum"].shape for state in adagrad.state.values()] == [(30, 16)]
assert apart["4: no filter"] < 0.01 * min(far for line, far in apart.items() if line[0] != "4")
# after: step
assert stages == {
    "input sizes": 24,
    "input ids": 4 * (966 + 512),
    "output rows": 256 * 16 * 4,
    "output gradients": 2 * 256 * 16 * 4,
}
assert stages["input ids"] == 5912 and stages["output rows"] == 16_384
assert stages["output gradients"] == 32_768 and shards == 55_088
# after: held
assert abs(shards / sparse[0] - 1) < 0.01 and 6.5 < dense[0] / shards < 7.5
assert held == 3 * 192_000 + 4 and 2 * held < sparse[1]
# after: more-ranks
assert round(rows[64][1] / rows[64][2]) == 33
assert 700 * 16 * 4 == 44_800 < shards
# after: ex-3-solution
assert check.all_right("05")
