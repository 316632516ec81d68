# after: hurt
assert by_pairs * 100_000_000 / 8192 > 10
# after: train-run
assert naive < 0.75 * by_popular
assert losses[-20:].mean() < losses[:20].mean()
# after: correct
assert in_training > by_popular + 1 and found["best possible"] > in_training
assert in_search > by_popular + 1
# after: search-run
assert 4 * 1000 * 1_000_000 == 4e9
assert by_towers < by_pairs * 1_000_000 / 8192
