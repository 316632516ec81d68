# after: collection
assert all(weight.is_meta for weight in ebc.parameters())
