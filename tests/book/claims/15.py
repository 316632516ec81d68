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
# after: by-hand-run
assert one.ahead("input ids") == 0 and other.ahead("input ids") == 1
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
assert [row[:2] for row in rows.values()] == [[0, 0], [0, 0], [1, 0], [1, 0], [2, 1], [2, 0]]
assert [name for name in NAMES if not rows[name][4]] == ["TrainPipelineSemiSync"]
for name in NAMES:
    assert (late_rows[name].losses == plain.losses) == (name != "TrainPipelineSemiSync")
# after: stale-table
items = torch.cat([b.sparse_features["item"].values() for b in ordinary[0] + ordinary[1]])
assert round((items.bincount().max() / len(items)).item(), 2) == 0.07
clicks = torch.cat([b.labels for b in ordinary[0] + ordinary[1]]).float().mean().item()
assert f"{clicks:.3f}" == "0.348"
slope = 16 * clicks * (1 - clicks)
assert f"{slope:.2f} {2 / slope:.2f} {1 / slope:.2f}" == "3.63 0.55 0.28"
(_, _, *calm), (_, _, *slow), (_, _, *fast) = rows
assert all(abs(late - now) < 0.005 for now, late in (calm, slow))
assert fast[0] < 0.693 < 0.8 < fast[1], "far above the loss of an untrained model"
# after: ex-2-solution
assert check.all_right("15")
