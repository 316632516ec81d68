# after: model
assert round(24 * 54 / 419) == 3 and 16_384 - 8 == 16_376
assert store.counts["train"] == 120_000 and store.table_rows == {"user": 500, "item": 200}
# after: names
dense = {name: shape for name, shape in shapes.items() if not name.startswith(PATH)}
assert len(dense) == 10 and all(on_rank_0[name] == shape for name, shape in dense.items())
cut_in_two = [name for name in shapes if on_rank_0[name] == on_rank_1[name] == "(500000, 16)"]
assert len(cut_in_two) == 2
# after: trap
assert rows["rank 0"] == [[1.0, 1.0]] * 3
assert rows["rank 1"] == [[2.0, 2.0], [1.0, 1.0], [2.0, 2.0]]
# after: memory
assert 68 < held < 68.1
if device().type == "cpu":
    assert held < on_meta < 1.5 * held and 2.6 * held < whole_first < 3.2 * held
# after: run
assert len(never_stopped) == 234 and last.name == "step-200"
info = checkpoint.read_info(last)
assert info.step == SAVED and any("momentum1" in name for name in info.tensors)
assert 0.4 < never_stopped[SAVED:].mean() < 0.5
# after: overlaps
assert [shard.shard_sizes[0] for shard in loaded["3 ranks, by rows"].shards()][:2] == [333_334] * 2
# after: against-library
assert not rectangle.isnan().any()
state = checkpoint.read_state_dict(last)["optimizer"]["state"][item]
assert {tuple(value.shape) for value in state.values()} == {(ROWS,)}
# after: kill
assert checkpoint.latest_checkpoint(folder / "run") == last
assert checkpoint.read_info(last).step == SAVED
saves = {name.split("_")[3] for name in seen if name.endswith(".distcp")}
assert len(saves) == 2, seen
assert {name.split("_")[3] for name in listed if name.endswith(".distcp")} < saves
# after: resume
two_ranks, by_rows, by_columns = gaps.values()
assert len(two_ranks) == 34
if device().type == "cpu":
    assert max(gap[0] for gap in gaps.values()) < 0.1
    assert max(two_ranks[1], by_rows[1]) < 1 < by_columns[1]
    assert 100 < by_columns.max() < 1000
# after: ex-3-solution
assert check.all_right("10")
