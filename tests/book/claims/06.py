# after: send-ids
assert len(visits[0]["user"]) == 2
# after: by-hand
assert ids_0.tolist() == [2, 2, 3, 4, 1]
assert ids_1.tolist() == [7, 7, 2, 1, 2, 1, 5]
# after: stages
assert ids.tolist() == ids_1.tolist() and tuple(pooled_shape) == (4, 64)
# after: count
for each in forward:
    assert each.issues == {"input sizes": 1, "input ids": 1, "output rows": 1}
assert forward[0].by_stage() == {"input sizes": 24, "input ids": 20, "output rows": 512}
assert path.facts == {"ids": 44, "rows": 1024, "sizes": 48}
# after: bytes
assert traffic.by_stage() == {"input sizes": 24, "input ids": 5120, "output rows": 65_536}
assert round(65_536 / 24) == 2731
# after: exchange
assert seconds[65_536] < 100 * seconds[24]
# after: growing
assert rows["4,096"][0] < rows["256"][0] < rows["16"][0]
# after: backward
assert backward.by_stage() == {"output gradients": 512}
assert not torch.equal(by_hand[1], ebc.embedding_bags["product_table"].weight)
# after: swapped
torch.testing.assert_close(by_name, rows_0[:, :64])
assert not torch.allclose(swapped_rows[:, 64:], rows_0[:, :64])
product_2 = ebc.embedding_bags["product_table"].weight[2]
torch.testing.assert_close(swapped_rows[0, 64:], product_2)


def try_batch(rank, batches):
    try:
        shard(ebc, plan)(batches[rank].to(device())).wait()
    except (KeyError, tutorec.errors.AgreementError) as error:
        return error.args[0]


users_only = kjt_from_lists({"user": [[2, 3], [4, 1]]}, dtype=torch.int32)
messages = world.run(try_batch, [batches[0], users_only])
assert "rank 1" in messages[0] and "product_table" in messages[0]
assert "'product'" in messages[1]
# after: answer
assert whole.facts["gradients"] == whole.facts["rows"] == 1024
# after: ex-3-solution
assert check.all_right("06")
