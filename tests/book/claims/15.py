# after: click-model
assert 25e6 * 8 / 10e9 == 0.020
assert [len(batches) for batches in visits] == [10, 10]
assert ClickModel(dense_layers).tables.embedding_bag_configs()[0].num_embeddings == 2000
# after: plain
sent = [message.stage for message in plain.messages]
assert all(sent.count(stage) == 10 for stage in set(sent)) and len(set(sent)) == 4
assert [message.due > message.sent for message in plain.messages] == [
    stage == "input ids" for stage in sent
]
drawn = [each for each in plain.intervals() if each.stage == "wait"]
assert abs(sum(each.end - each.start for each in drawn) - plain.waiting_ms() / 500) < 1e-9
# after: loops
assert list(one_ahead(None, iter([]))) == []
# after: by-hand-run
assert in_turn.ahead("input ids") == 0 and early.ahead("input ids") == 1
# after: sparse-dist
assert piped.ahead("input ids") == 1 and piped.ahead("input sizes") == 1
assert piped.ahead("output rows") == piped.ahead("output gradients") == 0
# after: streams
placed = draw.streams(operations, claim="").facts["placed"]
works = sorted(placed[one.name] for one in operations if one.stream == WORKS)
assert all(works[n][1] == works[n + 1][0] for n in range(len(works) - 1))
assert placed["ids 1"][1] <= placed["forward 1"][0]
assert placed["read 1"][1] < placed["forward 0"][1]
# after: steps
assert all(steps.losses == plain.losses for steps in base + sparse)
assert window >= 30
# after: six
assert [row[:2] for row in lines.values()] == [[0, 0], [0, 0], [1, 0], [1, 0], [2, 1], [2, 0]]
assert [name for name in NAMES if not lines[name][4]] == ["TrainPipelineSemiSync"]
for name in NAMES:
    assert (late_rows[name].losses == plain.losses) == (name != "TrainPipelineSemiSync")
# after: days
calm, apart = (row[3:] for row in lines.values())
assert lines["ordinary"][1] == q and lines["sale"][1] == 1
assert max(calm[1:]) < calm[0] - 0.002 and abs(calm[1] - calm[2]) < 0.001
swings = curves["TrainPipelineSemiSync"]
assert apart[1] < 0.65 and apart[2] > swings[0] + 0.3
assert f"{min(swings[:40]):.1f} {max(swings[:40]):.1f}" == "0.6 1.9"
# after: limits
assert f"{steepness:.2f} {2 / steepness:.2f} {1 / steepness:.2f}" == "3.61 0.55 0.28"
assert f"{1 / steepness / q:.1f}" == "4.3"
assert 1 / steepness < 0.45 < 2 / steepness and 1 / steepness / q > 2
for _, below, above, far in lines.values():
    assert abs(below - always) < 0.01 and below < above - 0.02 and far > swings[0] + 0.1
# after: ex-2-solution
assert check.all_right("15")
