# after: in-16
torch.testing.assert_close(
    result_dict["product"][0], ebc.embedding_bags["product_table"].weight[[1, 2, 3]].sum(0)
)

# after: in-34
# TorchRec would have initialized the tables again.
torch.testing.assert_close(kt.values().detach().cpu(), result.values().detach())
