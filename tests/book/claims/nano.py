# after: batch
assert batch["product"].values.tolist() == [7, 7, 2]
assert batch["product"].samples().tolist() == [0, 1, 1]
# after: lookup
assert pool(weight[bags.values], bags).tolist() == [[14, 15], [18, 20]]
# after: update
assert weight[[2, 7]].tolist() == [[3.5, 4.5], [13, 14]]
# after: bytes
assert run_ranks(2, send_ids) == [(40, [[2], [3]]), (24, [[7, 7, 2], [8, 8, 3]])]
# after: plan
assert make_plan(SHOP, size=2, memory=2e9, samples=1024) == {
    "product": RowWise(),
    "user": ColumnWise(),
    "shop": TableWise(0),
    "country": Replicated(),
}
assert 10_000_000 * 65 * 4 == 2.6e9
assert cost(SHOP[0], RowWise(), 2, 1024)[1].sum() < cost(SHOP[0], ColumnWise(), 2, 1024)[1].sum()
assert SHOP[0].bag_length > SHOP[0].columns
# after: run
assert all((rows.weight - 1).abs().max() < 0.1 for rows in saved.values())
assert all((rows.weight - 1).abs().max() > 1 for rows in START.values())
# after: checkpoint
for name, rows in resumed[0].items():
    assert (rows.weight - 1).abs().max() < (saved[name].weight - 1).abs().max()
# after: serve
assert Int8Table(torch.rand(2, 64)).codes[0].nbytes + 2 * 4 == 72
# after: compare
if installed:
    from tutorec.spmd import device

    threads = run_ranks(4, lambda g: train(g, PLAN, START, descent, 20))[0]
    for name, rows in threads.items():
        assert torch.equal(rows.weight, by_nano[name].weight)
        difference = (by_tutorec[f"embedding_bags.{name}.weight"] - rows.weight).abs().max()
        assert difference < 1e-6
        if device().type == "cpu":
            assert (difference == 0) == (name != "product")
