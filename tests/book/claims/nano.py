# after: batch
assert bags.values.tolist() == [7, 7, 2]
assert bags.samples().tolist() == [0, 1, 1]
# after: lookup
assert pool(weight[bags.values], bags).tolist() == [[14, 15], [18, 20]]
# after: update
assert (weight - trained)[[2, 7]].tolist() == [[0.5, 0.5], [1, 1]]
# after: bytes
assert run_ranks(2, send_ids) == [(20, [[2], [2, 3, 4, 1]]), (24, [[7, 7, 2], [1, 2, 1, 5]])]
# after: run
assert shapes == [(6, 8), (12, 8), (12, 4), (12, 8)]
assert float(losses[-1]) < 0.01 < 1 < float(losses[0])
assert (saved["product"].weight[7] - 1).abs().max() < 0.1
# after: checkpoint
assert float(losses[-1]) < float(losses[0]) < 0.01
# after: plan
assert Planner(2, 2.5e9, 1024).plan(SHOP) == {
    "product": ColumnWise(),
    "user": TableWise(0),
    "shop": TableWise(1),
    "country": Replicated(),
}
assert 10_000_000 * 65 * 4 == 2.6e9
# after: serve
assert Int8Table(torch.rand(2, 64)).codes[0].nbytes + 2 * 4 == 72
# after: compare
if installed:
    from tutorec.spmd import device

    assert max(max(found.values()) for found in errors.values()) < 1e-6
    if device().type == "cpu":
        assert all(
            found[name] == 0 for found in errors.values() for name in ("user", "shop", "country")
        )
        assert all(found["product"] > 0 for found in errors.values())
