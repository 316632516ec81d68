# after: build
assert 4096 // (4 * COLUMNS) == 16 and round(4 * ROWS * COLUMNS / 1e6, 1) == 16.8
# after: cold
if skewed["cache of 5 %"].pages:  # else the folder is in memory
    for percent in (5, 20):
        own = skewed[f"cache of {percent} %"].pages
        assert own < skewed[f"file, memory of {percent} %"].pages
assert abs(skewed["cache of 5 %"].hit_rate - 0.77) < 0.015
# after: even
if even["cache of 5 %"].pages:
    for percent in (5, 20):
        own = even[f"cache of {percent} %"].pages
        assert 0.99 < own / even[f"file, memory of {percent} %"].pages < 1.15
# after: shares
assert round(3350 / 64) == 52
blind = shares["150 MiB, popularity not known"]
known = shares["150 MiB, popularity known"]
assert [round(share) for share in blind[:2]] == [50, 20]
assert [round(share) for share in known[:2]] == [20, 50]
assert round(blind[2], 1) == 20.4 and round(known[2], 1) == 14.3
# after: ex-2-solution
assert check.all_right("17b")
