# after: data
assert store.catalogue.unique().numel() == 1000 + 19 * 50 == 1950
assert 1600 * 4 * (32 + 1) == 211_200
assert int(store.catalogue.max()) < 2**62
# after: predict-hash
assert f"{100 - 100 * (1 - 1 / 1600) ** 999:.0f}" == "46"
hashes = mixing_hash(store.catalogue[-1], 1600)
assert f"{100 * float((hashes.bincount()[hashes] > 1).float().mean()):.0f}" == "46"
best = mean([store.best_auc(day) for day in range(10, 20)])
assert f"{best:.3f}" == "0.822"
# after: hash
assert 0.028 < high - low < 0.033 and 0.021 < best - high < 0.025
assert every_id.report().occupied == 1950 and every_id.report().evictions == 0
# after: picture
assert [step.rows for step in steps.values()] == [[0, 1, 0, 2], [0, 1, 2], [0, 1, 3, 2]]
assert [dict(step.evicted) for step in steps.values()] == [{}, {1: 52}, {1: 74}]
# after: contest-table
of_mapping = {name: mapping.row_bytes() for name, mapping in mappings.items()}
assert of_mapping == {"LRU": 60, "LFU": 60, "DistanceLFU": 68}
for mapping in mappings.values():
    assert mapping.output_size() * (132 + mapping.row_bytes()) == 211_200
assert 97 <= lines["LRU"][1] <= 101 and 70 < lines["DistanceLFU"][1] < 93
assert lines["LFU"][0] < low - 0.004
assert reports["LRU"].evictions == 1949 - 1099 and reports["LRU"].collisions == 0
assert reports["LFU"].evictions == 43 and f"{lines['LFU'][4]:.0f}" == "18"
every_day = zip(results["LRU"][0], results["a row for every id"][0], strict=True)
assert max(abs(one - other) for one, other in every_day) < 0.01
# after: evictions
pairs = list(zip(*evictions.values(), strict=True))
assert all(0.999 < one / other < 1.07 for one, other in pairs[:5] + pairs[6:])
assert (round(pairs[5][0]), round(pairs[5][1])) == (167, 144)
assert all(49 <= count <= 51 for _, count in pairs[6:])
assert round(pairs[4][1] / 50) == 13
# after: break
first_day = {name: mean(of_new) for name, (_, of_new) in results.items()}
late = {name: mean(of_all[10:]) for name, (of_all, _) in results.items()}
assert 0.055 < first_day["LRU"] - first_day[broken] < 0.072
assert first_day[broken] < first_day["hash, 1,600 rows"] - 0.005
assert 0.4 < (late["LRU"] - late[broken]) / (late["LRU"] - low) < 0.65
assert 0.013 < late["LRU"] - late[broken] < 0.019
assert f"{0.1 / 101**0.5:.5f}" == "0.00995"
# after: ranks
assert int((mixing_hash(store.catalogue[-1], 2**63 - 1) >= 2**62).sum()) == 483
assert mean(on_ranks["raw ids"]) < low - 0.02
assert abs(mean(on_ranks["mixed ids"]) - late["LRU"]) < 0.003
# after: ex3-solution
assert check.all_right("18")
