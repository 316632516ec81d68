# after: hurt
assert sizes == {"trained": ["torch.float32", 256, 25.6], "int8": ["torch.uint8", 68, 6.8]}
assert sum(rows.numel() for rows in before.values()) == 44_800 == 700 * 64
# after: by-hand
spread = before["item_table"].amax(1) - before["item_table"].amin(1)
assert 3 < spread.max() / spread.min() < 6
constant = torch.full((5, 4), 0.3)
packed = quant.pack_rows(constant, DataType.INT8, alignment=4)
assert torch.equal(torch.stack([pack(row) for row in constant]), packed)
# after: by-hand-row
assert len(packed) == 68
assert (read - row).abs().max() <= scale / 2 * 1.001
bags = tutorec.kjt_from_lists({"user": [[7]], "item": [[7]], "clicked": [[7, 7]]})
quantized = tutorec.quantize(trained, torch.int8).model.sparse_arch.embedding_bag_collection
torch.testing.assert_close(quantized(bags)["item"][0], read)
torch.testing.assert_close(quantized(bags)["clicked"][0], 2 * read)
# after: levels
assert 16.9 < scale_4 / scale < 17.1
for columns in (48, 64, 96):
    for name, bits in (("int8", 8), ("int4", 4), ("int2", 2)):
        ones = torch.ones(1, columns)
        shortest = quant.pack_rows(ones, DataType[name.upper()], alignment=4)
        assert shortest.shape[1] == 4 + columns * bits // 8
# after: row-bytes
assert padded == 32
for name, whole in (("64 columns", 80), ("16 columns", 32)):
    parts = panels[name]["int8"]
    assert sum(parts.values()) == whole and whole - parts["weights"] == 16
row_bytes = [[sum(parts.values()) for parts in panel.values()] for panel in panels.values()]
assert row_bytes == [[256, 128, 80, 48, 32], [64, 32, 32, 16, 16]]
# after: error
assert all(largest <= bound for bound, largest, _ in found.values())
assert all(found[name][1] > 0.9 * found[name][0] for name in ("int8", "int4", "int2"))
assert 15 < ratio < 19 and 16 < found["int4"][0] / found["int8"][0] < 18
ranges = all_rows.amax(1) - all_rows.amin(1)
for name, parts in (("int8", 510), ("int4", 30), ("int2", 6)):
    off = errors(all_rows, DataType[name.upper()]).amax(1)
    assert (off <= ranges / parts * 1.005).all()
tiny = torch.linspace(-1e-4, 1e-4, 64)[None]
off = errors(tiny, DataType.INT8).max()
assert 2e-4 / 510 < off <= quant.round_trip_bound(tiny, DataType.INT8)
# after: answers
assert pairs == 90_290_544
assert list(flipped) == sorted(flipped, key=flipped.get)
assert 1 / 2_500 < flipped["int8"] / 100 < 1 / 1_600
assert 1 / 18 < flipped["another seed"] / 100 < 1 / 14
assert 0.75 < flipped["int4"] < 0.95
changed = {name: float(row[2]) - metrics.auc(labels, old) for name, row in rows.items()}
assert max(abs(changed[name]) for name in ("fp16", "int8")) < 1e-4
assert abs(changed["int4"]) < 1e-3
assert changed["int2"] < -3 * abs(changed["another seed"])
wrong, right, _ = rows["int2"]
assert wrong > 1.2 * right
for name in ("int8", "another seed"):
    wrong, right, _ = rows[name]
    assert abs(wrong / (wrong + right) - 0.5) < 0.05
for name, (wrong, right, _) in rows.items():  # ties count one half
    assert abs(changed[name] - (right - wrong) / 100) < 1e-5
# after: choice
assert chosen == {"user_table": torch.quint4x2, "item_table": torch.int8}
assert 700 * 68 == 47_600 > 40_000
visits = next(store.batches(4096)).sparse_features
ids = dict(zip(visits.keys(), visits.length_per_key(), strict=True))
assert ids["user"] == 4096 and round((ids["item"] + ids["clicked"]) / 4096, 1) == 3.7
share = rows["as chosen"][1]
assert rows["as chosen"][0] == 31_600 and max(nbytes for nbytes, _ in rows.values()) <= 40_000
assert share == min(other for _, other in rows.values()) and 0.45 < share < 0.65
# after: speed
assert [f"{layout.row_bytes} B" for layout in layouts.values()] == [
    n.split(" at ")[1] for n in ways
]
assert round(256 / 68, 1) == 3.8
assert tutorec.quantize(ebc).packed_table("cat_0_table").layout.row_bytes == 68
# after: lines
missed = draw.lines(layouts).facts["missed"]
assert list(missed.values()) == [0, 1, 0.5, 0]
# after: break-run
changed = errors(spoiled, DataType.INT8)[8]
assert torch.equal(changed, errors(items, DataType.INT8)[8])
packed = quant.pack_rows(spoiled, DataType.INT8, alignment=4)[7]
assert 0.19 < packed[:2].view(torch.float16) < 0.21
assert 5 <= len(packed[5:].unique()) <= 15
assert 0.2 < rows["1,000 is added"][2] < 0.26
halves = errors(far, DataType.FP16)
assert halves.amax(1).min() > 0.2 and halves.max() <= 0.25
assert rows["row means subtracted"][2] < 0.02
# after: ex-2-solution
assert check.all_right("13")
