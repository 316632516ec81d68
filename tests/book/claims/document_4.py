# after: in-13-memory
assert sum(p.numel() * 4 for p in costly_embed.parameters()) == 2 * 2**30

# after: fair-corrected-cell
assert sum(embeddings_per_feat) == 21_014
rows = {
    compat: sum(rows_on_ranks(LoadBalanceManager(embeddings_per_feat, num_groups, compat=compat)))
    for compat in (True, False)
}
assert rows == {True: 21_012, False: 21_014}
first_ids = torch.zeros(1, len(embeddings_per_feat), dtype=torch.long)
assert fair.shard_tensor(first_ids, rank=3)[0, 0] == -1

# after: balanced-cell
assert sum(lbmgr.embeddings_per_feat) == 3_492_796
assert len(set(rows_on_ranks(balanced))) == 1
