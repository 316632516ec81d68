# after: hurt
assert layer == 25.6e9
# after: log-head
assert 60 in store.rows(0, 4).item
# after: scratch-run
assert batch.sparse_features["clicked"].lengths().tolist() == [0, 1, 1, 2]
# after: library-run
torch.testing.assert_close(vectors["user"], model.user(*user))
torch.testing.assert_close(vectors["item"], model.item(*item))
# after: train-chart
assert closed > 90
assert counted < learned < store.best_auc + 0.005
# after: touched-measure
assert 0.002 < read / 200_000 < 0.01
# after: bytes-measure
assert abs(times["Adam, dense"] - 4) < 1e-6 and abs(times["SGD, dense"] - 2) < 1e-6
assert round(times["row-wise Adagrad, fused"], 2) == 1.02
# after: hashing-measure
assert round(100 * alone(10**6, 10**6)) == 37
assert max(abs(m - f) for m, f in zip(*by_ratio.values(), strict=True)) < 0.01
assert round(100 * math.exp(-1 / 100)) == 99
# after: hashing-auc
assert lost[f"hashed into {items}"][1] > 5
assert lost[f"hashed into {items // 4}"][1] > 50
assert abs(results[f"{items} rows, row-wise Adagrad"] - learned) < 0.01
# after: ex-3-solution
assert check.all_right("01")
