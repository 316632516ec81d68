# after: stages
from tutorec._kernels.backend import backend

assert sum(buffer.nbytes for buffer in tables_of(model).buffers()) == 68 * 700 == 47_600
assert sum(weight.numel() for weight in model.parameters()) < 10_000
assert counts["all, with the dense layers"].functions > 100
assert counts["all, with the dense layers"].operators > 20
assert counts["one torch.add of 64 numbers"] == (1, 1)
in_steps = [counts[name] for name in list(calls)[1:]]
if backend().name == "fbgemm":
    assert in_steps[2].operators - in_steps[1].operators > in_steps[1].operators
    assert (
        in_steps[2].functions - in_steps[1].functions
        > in_steps[1].functions - in_steps[0].functions
    )
# after: bits
from tutorec.quant.packing import unpack_rows  # noqa: E402
from tutorec.types import DataType  # noqa: E402

assert same == list(LAYOUTS)
assert [row[0] for row in rows.values()] == [47_600, 72 * 700, 47_600]
assert rows["table-wise"][3] == rows["column-wise"][3] == 0
assert 1 < rows["row-wise"][3] < 10
assert min(row[1] for row in rows.values()) > count_calls(lambda: score(**her)).functions
assert crowd["lengths"].max() == 8
crowd_ids = batch_of(crowd["values"], crowd["lengths"])
in_int8 = tables_of(model)(crowd_ids).to_dict()
for config in TABLES:
    packed = tables_of(model).embedding_bags[config.name].weight
    weights = unpack_rows(packed, 64, DataType.INT8).double()
    for feature in config.feature_names:
        bags = crowd_ids[feature]
        exact = torch.nn.functional.embedding_bag(
            bags.values().long(),
            weights,
            bags.offsets().long(),
            mode="sum",
            include_last_offset=True,
        )
        assert torch.equal(in_int8[feature].double(), exact)
# after: watch
assert torch.equal(pooled.values(), tables_of(model)(two_visitors).values())
assert "if " not in forward and "for " not in forward
assert list(noted)[:3] == ["features", "flatten_feature_lengths", "split"]
assert {"to", "_unwrap_kjt"} <= set(noted)
if backend().name == "fbgemm":
    assert "sub" in noted and sum("lookup" in name for name in noted) == 1


class Choosing(torch.nn.Module):
    def forward(self, batch):
        return batch.values() if batch.keys()[0] == "user" else batch.lengths()


try:
    tutorec.fx.symbolic_trace(Choosing())
    raise AssertionError("an if on the batch was traced")
except torch.fx.proxy.TraceError:
    pass
# after: script
assert torch.equal(served(**crowd), score(**crowd))
for count in (1, 3):
    assert torch.equal(loaded(**visitors(count)), score(**visitors(count)))
    few = visitors(count)
    assert torch.equal(
        exported(few["dense_features"], batch_of(few["values"], few["lengths"])), score(**few)
    )
assert set(files) == {"clicks.pt", "clicks.pt2"}
# after: speed
assert counts["TorchScript"].functions == 4
assert counts["TorchScript"].operators > counts["in Python"].operators
assert counts["exported, run by Python"].functions > 2 * counts["in Python"].functions
# after: cpp
assert missing or len(from_cpp) == 4096
# after: break
complaints = {name: complaint(call) for name, call in attempts.items()}
assert "nothing" not in complaints.values()
named = ["Python", "TorchScript"] if missing else ["Python", "TorchScript", "C++"]
for name in named:
    assert "'item_table' has 200 rows" in complaints[name]
    assert "'item', sample 0, holds id 200" in complaints[name]
assert "item_table" in complaints["exported"] and "id 200" not in complaints["exported"]
assert "lengths add up to 11, and there are 8" in complaints["lengths, TorchScript"]
# after: ex-3-solution
assert check.all_right("14")
