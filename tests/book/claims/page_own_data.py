# after: read-file
assert not YOURS and 25_000 < len(user) < 35_000 and len(np.unique(user)) == 800
assert len(np.unique(np.stack([user, item]), axis=1).T) == len(user)
# after: sort
assert abs(past.mean() - 0.8) < 1e-4
for c in np.random.default_rng(2).integers(len(click), size=50):
    own = np.flatnonzero((user == user[c]) & (when < when[c]))
    assert item[own][-LONGEST:].tolist() == item[begin[c] : c].tolist()
assert when[past].max() < when[~past].min()
# after: hash
assert 0.05 < unknown < 0.15
assert (item_map(item[past]) > 0).all()
# after: from-columns
assert bag_size[a_click] == 3
assert one.sparse_features.lengths().tolist() == [1, 1, 3]
# after: train
assert 18 < by_time < 22
assert by_time > 2.2 * by_popular
# after: random-split
assert 26 < by_chance < 31
assert 18 < found["trained on the past"] < 22.5
assert by_chance > 1.2 * found["trained on the past"]
assert 6 < by_chance - found["trained on the past"] < 10
assert found["trained on the past"] > 2 * found["popular films"]
assert (rows[same] == 0).any()
# after: stream
assert abs(by_stream - by_time) < 3
assert len(list(FOLDER.glob("clicks_*.parquet"))) == 4
# after: two-ranks
assert abs(on_two - by_time) < 3
# after: saved
assert len(set(shelf[0].tolist())) == 10 and shelf.min() > 0
before = by_towers(towers, len(counts))(visit)
assert torch.equal(best(visit), before)
assert not set(shelf[0].tolist()) & set(visit.sparse_features["history"].values().tolist())
