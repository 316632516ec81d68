# after: histories
assert (users, store.table_rows["item"]) == (500, 200)
assert int(lengths.sum()) == 41_674 and int(lengths.max()) == 3385
assert int(lengths.median()) == 36 and 500 * 3385 == 1_692_500
assert sorted_lengths[99] < 100
assert round(1_692_500 / 41_674, 1) == 40.6 and round(41_674 / 500, 1) == 83.3
# after: padding-times
assert rows["one rectangle"][0] == 1_692_500
assert round(rows["ten batches, sorted by length"][0] / 41_674, 1) == 4.6
assert rows["one rectangle"][2] > 3
jagged_by_length = JaggedTensor.from_dense(by_length)
in_that_order = pool_by_hand(jagged_by_length.values(), jagged_by_length.offsets(), weight)
torch.testing.assert_close(pool_padded(ten), in_that_order, rtol=1e-4, atol=1e-3)
# after: batch
assert batch.offsets().tolist() == [0, 3, 3, 5, 6, 7, 7]
# after: views
assert picture.facts["copies"] == ["permute([1, 0])", "concat of both halves"]
# after: counted
assert rows["built from lengths"] == [True, False, False]
assert rows["after offsets()"] == [True, True, False]
assert rows["one half of split()"] == [True, False, True]
# after: offsets
assert (len(large.offsets()), len(ends) - 1) == (26_625, 26)
# after: mistakes
unchecked = features_of(keys, batch.values(), torch.tensor([3, 0, 1, 1, 1, 0]))
ids_of_users, ends_of_users = unchecked["user"]
assert ids_of_users.tolist() == [1, 3] and ends_of_users.tolist() == [0, 1, 2, 2]
# after: wrong-order
assert wrong["user"].to_dense()[0].tolist() == [1]
ebc(wrong)  # no error
# after: ex-3-solution
assert check.all_right("02")
