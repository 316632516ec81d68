# after: data
assert list(rows.values()) == [[[200, 64], 51_200], [[1024, 4], 16_384], [[64, 4], 1_024]]
assert 4 * 1024 * 64 == 262_144 and 262_144 // 16 == 16_384
# after: hash
assert results["whole"][0] == 262_144 and results["hash"][0] == 16_384
assert round(open_shop(3).best_auc, 3) == 0.862
assert 0.08 < lost < 0.18
assert mean(results["hash"][1]) - 0.5 < 2 / 3 * (mean(results["whole"][1]) - 0.5)
# after: by-hand
assert compress(Hash(32, hashes=2, importance=True)).table_bytes()["item_table"].stored == 16_384
assert QR().parts(TABLES[1])[0].table.num_embeddings == 32
assert 1024 * 60 + 60 * 64 < 1024 * 64 <= 1024 * 61 + 61 * 64
# after: early
assert rows["PooledEarly"] < 1e-6 and rows["ByHand"] > 0.01
# after: contest
areas_of = {name: areas for name, (_, areas) in results.items()}
sizes = {name: nbytes for name, (nbytes, _) in results.items()}
assert sizes["block of 4"] == 17_408 and sizes["block of 16, int4"] == 16_384
assert sizes["QR"] == sizes["QR added"] == sizes["2 hashes, weights"] == 16_384
own = areas_of["block of 4"] + areas_of["block of 16, int4"]
assert min(own) > max(areas_of["QR"]) + 0.02
assert min(areas_of["QR"]) > max(areas_of["hash"])
assert max(abs(auc_of[f"whole, {kind}"] - auc_of["whole"]) for kind in ("int8", "int4")) < 1e-3
assert max(areas_of["whole"]) - min(areas_of["whole"]) > 1e-3
assert abs(auc_of["QR added"] - auc_of["hash"]) < 0.02
assert auc_of["QR added"] + 0.02 < auc_of["QR"]
assert auc_of["block of 16"] > auc_of["whole"]
# after: squares
assert rows == {"added": 2, "multiplied": 32}
# after: rank
assert 0.02 < lost < 0.06
assert max(abs(auc_24[f"whole, {kind}"] - auc_24["whole"]) for kind in ("int8", "int4")) < 1e-3
lead = auc_24["block of 4"] - auc_24["QR"]
assert lead < (auc_of["block of 4"] - auc_of["QR"]) / 3
assert auc_24["whole"] - auc_24["block of 16, int4"] < lost / 2
assert auc_24["whole"] - auc_24["block of 16"] < lost / 2
assert max(auc_24.values()) < min(auc_of["block of 4"], auc_of["whole"])
# after: two-ranks-run
assert sent["Whole"]["backward"] == sent["Hash"]["backward"] == 256
assert sent["Block"]["backward"] == 16
assert abs(sent["Whole"]["forward"] - 262) < 8
assert abs(sent["Block"]["forward"] - 22) < 8
totals = {name: sum(each.values()) for name, each in sent.items()}
assert max(totals, key=totals.get) == "QR"
# after: ex3-solution
assert check.all_right("16")
