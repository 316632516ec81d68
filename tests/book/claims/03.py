# after: hurt-times
assert rows[4096] < rows[1]
# after: forward-by-hand
assert pooled.length_per_key() == [2, 2, 1]
assert pooled["clicked@price_table"].flatten().tolist() == [18, 0, 6]
# after: weighted
assert weighted(weighted_batch)["clicked"].flatten().tolist() == [10.5, 0, 10]
assert len(rows.values()) == 5
weighted_by_hand = forward_by_hand(weighted, weighted_batch)[1]
torch.testing.assert_close(weighted_by_hand, weighted(weighted_batch).values())
squared = tutorec.EmbeddingBagConfig(**price_table, pooling=tutorec.PoolingType.SQRTN)
four = kjt_from_lists({"clicked": [[1, 2, 3, 8]]})
assert tutorec.EmbeddingBagCollection([squared])(four).values().item() == 14 / 2
# after: one-call
torch.testing.assert_close(look_up_at_once(batch), look_up_in_loop(batch))
# after: large
assert gains["batch of 1"] > gains["batch of 4,096"]
# after: dense
assert round(written / 1e6) == 133 and round(read, -3) == 8000
# after: updates-figure
assert weight.grad.flatten().tolist() == change.tolist() == [0, 0, 1, 0, 0, 0, 0, 2, 0, 0]
assert updated.grad is None
# after: fused
assert all(weight.grad is None for weight in fused.parameters())
# after: absent
again = tutorec.EmbeddingBagCollection(tables=configs[1:])
inside_again = deepcopy(again)
apply_optimizer_in_backward(torch.optim.Adam, inside_again.parameters(), {})
assert rows_moved(inside_again) == 0
assert rows_moved(again, torch.optim.Adam(again.parameters()).step) == 3
# after: solution-3
assert check.all_right("03")
