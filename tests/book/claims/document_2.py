# after: keyed
assert kjt.offsets().tolist() == [0, 3, 4, 6, 8]

# after: sharded-output
torch.testing.assert_close(kt.values().detach().cpu(), result.values().detach())

# after: first-loss
first_loss = float(loss)

# after: second-loss
# The document prints 255.66006469726562 and 245.43795776367188.
assert abs(first_loss - float(loss) - 10.222107) < 5e-4

# after: shard-quantized
torch.testing.assert_close(sharded_qebc(kjt).values(), qebc(kjt).values(), rtol=0, atol=0)

# after: script
torch.testing.assert_close(scripted_gm(kjt).values(), qebc(kjt).values(), rtol=0, atol=0)
