# after: popularity
lengths = [len(ids) for ids in per_batch]
assert sum(lengths) // 48 == 3792
repeats = 1 - sum(len(ids.unique()) for ids in per_batch) / sum(lengths)
assert round(100 * repeats) == 51
assert round(5 * (1 - repeats)) == 2  # points that slots for random rows would add
assert round(100 * len(seen.unique()) / len(seen)) == 22  # first lookups
assert abs(100 * len(seen.unique()) / len(seen) - 21.7) < 0.1  # so at most 78 % hit
assert len(losses) == 48
# after: limited
assert abs(100 * counts.hit_rate - 74.2) < 0.1
assert round((13_108 * 1052 + 8 * 262_144) / 1e6, 1) == 15.9
assert int(100 * (limit - 8 * 262_144) / 1052 / 262_144) == 23  # % of the rows that fit
# after: lru
assert by_hand == 1269
# after: picture
assert small.counts.hits == 4 and small.counts.read == 5
assert small.counts.written == 1
# after: equations
for percent in (2, 5, 10, 20):
    for q in (1, 1 / 32):
        slots = ROWS * percent // 100
        library_rate = caches.hit_rate(law, slots, "lru", ids=IDS, admitted=q)
        assert abs(by_the_equations(slots, q) - library_rate) < 1e-3
assert round(100 * caches.hit_rate(law, 0, ids=IDS)) == 42
# after: measured
for name in WAYS:
    for one, other in zip(rates[f"{name}, predicted"], rates[f"{name}, measured"], strict=True):
        assert abs(one - other) < 1
errors = {
    name: max(
        abs(one - other)
        for one, other in zip(rates[f"{name}, predicted"], rates[f"{name}, measured"], strict=True)
    )
    for name in WAYS
}
assert max(errors, key=errors.get) == "q-LRU"
assert round(rates["q-LRU, measured"][0] - 42) == 16
assert round(rates["q-LRU, measured"][3] - rates["q-LRU, measured"][2]) == 7
# after: size
assert [round(row[0]) for row in sizes.values()] == [2, 6, 31]
reached = [row[2] for row in sizes.values()]
assert reached == sorted(reached) and abs(reached[-1] - 89) < 0.3
by_law = 100 * caches.hit_rate(law, ROWS * 33 // 100, "lru", ids=IDS)
assert sizes["1,000 batches"][1] == 33 and 0.4 < (90 - by_law) / (90 - reached[-1]) < 0.6
# after: drift
[still, slow, fast] = zip(*drift.values(), strict=True)
assert slow[1] == max(slow)  # q-LRU is best when 8 products move
assert still[0] < still[1] < still[2] and fast[0] > fast[1] > fast[2]
assert [round(rate) for rate in fast[1:]] == [61, 54]
# after: noon
lru = day["LRU"]
q_lru = day["q-LRU"]
lfu = day["LFU"]
assert min(lru[6:]) > 70  # from 40 batches after noon on
assert q_lru[14] < lru[14] + 1 and min(q_lru[20:]) > max(lfu[20:])
assert q_lru[-1] > lru[-1] > lfu[-1]
# after: settled
assert round(100 * settled) == 81 > round(100 * counts.hit_rate)
# after: ex-2-solution
assert check.all_right("17")
