"""Compressed tables against a few lines of plain torch: rows, gradients, poolings, weights, and
what is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import tutorec
from tutorec.modules.compressed import BlockEmbeddingBag, QREmbeddingBag, compute_mem
from tutorec.modules.compressed_collection import CompressedEmbeddingBagCollection, TableBytes
from tutorec.modules.compressions import QR, Block, Compression, Hash, Whole, mixed_dimensions
from tutorec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from tutorec.sparse.hashing import mixing_hash
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor
from tutorec.types import DataType

META = torch.device("meta")

# --- the bags of the CachedEmbedding playground


def test_the_memory_of_the_three_bags_is_what_the_playground_printed() -> None:
    rows, columns = 1024 * 1024, 512
    bags = [
        BlockEmbeddingBag(rows, 128, columns, mode="max", device=META),
        nn.EmbeddingBag(rows, columns, mode="max", device=META),
        QREmbeddingBag(columns, num_buckets=math.ceil(math.sqrt(rows)), verbose=False).to("cpu"),
    ]
    assert [compute_mem(bag) for bag in bags] == [512, 2048, 4]
    assert [parameter.element_size() for parameter in nn.Linear(10, 10).parameters()] == [4, 4]


def whole_block(bag: BlockEmbeddingBag) -> Tensor:
    table = bag.embedding.weight
    return (
        table
        if isinstance(bag.linear, nn.Identity)
        else table @ bag.linear.get_parameter("weight").T
    )


def whole_qr(bag: QREmbeddingBag) -> Tensor:
    ids = torch.arange(bag.num_embeddings)
    quotient, remainder = bag.quotient[ids // bag.num_buckets], bag.remainder[ids % bag.num_buckets]
    combine: dict[str, Callable[[], Tensor]] = {
        "multiply": lambda: quotient * remainder,
        "add": lambda: quotient + remainder,
        "concatenate": lambda: torch.cat([quotient, remainder], 1),
    }
    return combine[bag.compression.operation]()


IDS, OFFSETS = torch.tensor([3, 9, 0, 9, 5, 1]), torch.tensor([0, 2, 2, 6])


def same_as_a_whole_table(bag: nn.Module, whole: Tensor, mode: str) -> None:
    """Every way to call ``nn.EmbeddingBag``, values and gradients."""
    weights = torch.rand(6) if mode == "sum" else None
    calls = [
        ((IDS.view(2, 3), None, None if weights is None else weights.view(2, 3)), False),
        ((IDS, OFFSETS[:-1], weights), False),
        ((IDS.int(), OFFSETS[:-1].int(), None), False),
        ((IDS, OFFSETS, weights), True),
    ]
    for (ids, offsets, weight), last in calls:
        for each in bag.modules():
            if hasattr(each, "include_last_offset"):
                each.include_last_offset = last
        found = bag(ids, offsets, weight)
        wanted = nn.functional.embedding_bag(
            ids, whole, offsets, mode=mode, per_sample_weights=weight, include_last_offset=last
        )
        assert_close(found, wanted)
        coefficients, own = torch.randn(found.shape), list(bag.parameters())
        got = torch.autograd.grad((found * coefficients).sum(), own)
        assert_close(
            got, torch.autograd.grad((wanted * coefficients).sum(), own, retain_graph=True)
        )


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("operation", ["multiply", "add", "concatenate"])
def test_a_qr_bag_is_a_bag_of_the_rows_that_it_stands_for(operation, mode: str) -> None:
    bag = QREmbeddingBag(6, 4, 10, operation, mode)
    same_as_a_whole_table(bag, whole_qr(bag), mode)
    assert bag.quotient.shape[0] == 3


@pytest.mark.parametrize("columns", [2, 6])
@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_a_block_bag_is_a_bag_of_a_table_of_low_rank(mode: str, columns: int) -> None:
    bag = BlockEmbeddingBag(10, columns, 6, mode)
    same_as_a_whole_table(bag, whole_block(bag), mode)
    assert isinstance(bag.linear, nn.Identity) == (columns == 6)


def test_a_block_bag_takes_the_largest_of_the_narrow_columns() -> None:
    bag = BlockEmbeddingBag(10, 2, 6, "max")
    found = bag(IDS.view(2, 3))
    assert_close(
        found, bag.embedding.weight[IDS.view(2, 3)].amax(1) @ bag.linear.get_parameter("weight").T
    )
    found.sum().backward()


@pytest.mark.parametrize(
    "make",
    [lambda: QREmbeddingBag(4, 3, device=META), lambda: BlockEmbeddingBag(9, 2, 4, device=META)],
)
def test_a_bag_on_the_meta_device_is_filled_later(make) -> None:
    bag = make()
    assert all(weight.is_meta for weight in bag.parameters())
    bag.to_empty(device="cpu").reset_parameters()
    assert bag(torch.tensor([[8]])).abs().sum() > 0


def test_bags_name_what_is_wrong(capsys) -> None:
    with pytest.raises(ValueError, match=r"ids 0 to 8.*1 to 9"):
        QREmbeddingBag(4, 3)(torch.tensor([[1, 9]]))
    with pytest.raises(ValueError, match=r"ids 0 to 6.*-1 to 2"):
        QREmbeddingBag(4, 3, 7)(torch.tensor([[-1, 2]]))
    with pytest.raises(ValueError, match=r"block_embedding_dim=8.*embedding_dim=4.*1 to 4"):
        BlockEmbeddingBag(10, 8, 4)
    QREmbeddingBag(4, 3, verbose=True)
    assert capsys.readouterr().out == "QREmbeddingBag: 24 parameters instead of 36\n"


# --- tables of a collection

HOW: dict[str, Compression] = {
    "multiply": QR(4),
    "add": QR(operation="add"),
    "concatenate": QR(4, "concatenate"),
    "hash": Hash(5),
    "hashes": Hash(5, 2),
    "importance": Hash(5, 2, importance=True),
    "block": Block(2),
    "full": Block(6),
}
R = 11


def tables(pooling: PoolingType = PoolingType.SUM) -> list[EmbeddingBagConfig]:
    """One table for each compression and a plain one, in no order of theirs; features
    are shared.
    """
    names = ["plain", *HOW]
    return [
        EmbeddingBagConfig(
            R, 6, name, feature_names=[f"f{index % 3}", f"f{(index + 1) % 3}"], pooling=pooling
        )
        for index, name in enumerate(names)
    ]


def batch(weighted: bool = False) -> KeyedJaggedTensor:
    """Three samples of f2, f0, f1; bags are empty, ids repeat."""
    lengths = torch.tensor([2, 0, 1, 0, 3, 1, 1, 1, 2])
    values = torch.tensor([10, 3, 7, 0, 0, 5, 9, 2, 10, 4, 4])
    return KeyedJaggedTensor(
        ["f2", "f0", "f1"], values, torch.arange(1, 12) / 4 if weighted else None, lengths
    )


def whole_table(module: CompressedEmbeddingBagCollection, name: str) -> Tensor:
    """The table that the parts stand for, written out [R, D]."""
    stored = {
        path.split(".")[-2]: weight
        for path, weight in module.named_parameters()
        if "projections" not in path
    }
    ids, how = torch.arange(R), HOW.get(name, Whole())
    if isinstance(how, QR):
        buckets = how.num_buckets or 4
        parts = [
            stored[f"{name}_quotient"][ids // buckets],
            stored[f"{name}_remainder"][ids % buckets],
        ]
        return {"multiply": parts[0].mul, "add": parts[0].add}.get(
            name, lambda x: torch.cat([parts[0], x], 1)
        )(parts[1])
    if isinstance(how, Hash):
        rows = [stored[f"{name}_hashed"][mixing_hash(ids, 5, seed)] for seed in range(how.hashes)]
        own = stored[f"{name}_importance"] if how.importance else torch.ones(R, 2)
        return sum((own[:, [seed]] * one for seed, one in enumerate(rows)), start=torch.zeros(R, 6))
    if name == "block":
        return stored["block_block"] @ module.projections["block"].get_parameter("weight").T
    return stored["full_block" if name == "full" else name]


def expected(module: CompressedEmbeddingBagCollection, features: KeyedJaggedTensor) -> Tensor:
    """Bag by bag, out of whole tables."""
    columns = []
    for config in module.embedding_bag_configs():
        table = whole_table(module, config.name)
        for feature in config.feature_names:
            bags = features[feature].to_dense()
            weights = features[feature].to_dense_weights() or [torch.ones(len(bag)) for bag in bags]
            rows = []
            for bag, weight in zip(bags, weights, strict=True):
                by = {"MEAN": max(len(bag), 1), "SQRTN": max(float(weight.norm()), 1e-9)}.get(
                    config.pooling.value, 1
                )
                rows.append((table[bag] * weight[:, None]).sum(0) / by)
            columns.append(torch.stack(rows))
    return torch.cat(columns, 1)


CASES = [(PoolingType.SUM, False), (PoolingType.MEAN, False), (PoolingType.SQRTN, False)]
CASES += [(PoolingType.SUM, True), (PoolingType.SQRTN, True)]


@pytest.mark.parametrize(("pooling", "weighted"), CASES)
def test_a_collection_pools_the_rows_that_its_tables_stand_for(
    pooling: PoolingType, weighted: bool
) -> None:
    module = CompressedEmbeddingBagCollection(tables(pooling), HOW, weighted)
    with torch.no_grad():
        for weight in module.parameters():
            weight.copy_(torch.randn_like(weight))
    found, wanted = module(batch(weighted)), expected(module, batch(weighted))
    assert found.keys() == [
        f"{feature}@{table.name}" for table in tables() for feature in table.feature_names
    ]
    assert found.length_per_key() == [6] * 18
    assert_close(found.values(), wanted)
    coefficients, own = torch.randn(wanted.shape), list(module.parameters())
    got = torch.autograd.grad((found.values() * coefficients).sum(), own)
    assert_close(got, torch.autograd.grad((wanted * coefficients).sum(), own))


def test_each_sample_of_a_variable_batch_gets_its_list() -> None:
    module = CompressedEmbeddingBagCollection(tables(), HOW)
    lengths, values = torch.tensor([2, 0, 1, 3, 1]), torch.tensor([10, 3, 7, 0, 0, 5, 9])
    keys = ["f2", "f0", "f1"]
    means = torch.tensor([[0, 1, 0], [0, 0, 1], [0, 0, 0]])
    lists = KeyedJaggedTensor(
        keys,
        values,
        lengths=lengths,
        stride_per_key_per_rank=[[2], [2], [1]],
        inverse_indices=(keys, means),
    )
    bags = [[10, 3], [], [10, 3], [7], [7], [0, 0, 5], [9], [9], [9]]
    flat = torch.tensor([one for bag in bags for one in bag])
    spelt_out = KeyedJaggedTensor(keys, flat, lengths=torch.tensor([len(bag) for bag in bags]))
    assert_close(module(lists).values(), module(spelt_out).values())
    no_inverse = KeyedJaggedTensor(
        keys, values, lengths=lengths, stride_per_key_per_rank=[[2], [2], [1]]
    )
    with pytest.raises(ValueError, match="different numbers of samples"):
        module(no_inverse)


def test_two_tables_that_make_the_same_features_share_them() -> None:
    two = [EmbeddingBagConfig(R, 4, name, feature_names=["f"]) for name in ("t0", "t1")]
    module = CompressedEmbeddingBagCollection(two, {"t0": QR(4), "t1": QR(4)})
    assert module.pooled is None
    assert module.rows is not None
    assert sorted(module._row_features) == ["f%4", "f//4"]
    keys = module(KeyedJaggedTensor(["f"], torch.tensor([10, 4]), lengths=torch.tensor([1, 1])))
    assert keys.keys() == ["f@t0", "f@t1"]
    assert not torch.equal(keys["f@t0"], keys["f@t1"])


def test_no_ids_give_zeros_and_no_samples_an_empty_result() -> None:
    module = CompressedEmbeddingBagCollection(tables(), HOW)
    none = torch.tensor([], dtype=torch.int64)
    found = module(
        KeyedJaggedTensor(["f2", "f0", "f1"], none, lengths=torch.zeros(6, dtype=torch.int64))
    )
    assert_close(found.values(), torch.zeros(2, 108))
    found.values().sum().backward()
    assert module(KeyedJaggedTensor(["f2", "f0", "f1"], none, lengths=none)).values().shape == (
        0,
        108,
    )


def test_hashed_ids_may_be_any_and_others_are_refused() -> None:
    def ask(how: Compression, number: int) -> None:
        module = CompressedEmbeddingBagCollection(
            [EmbeddingBagConfig(R, 4, "t", feature_names=["f"])], {"t": how}
        )
        module(KeyedJaggedTensor(["f"], torch.tensor([number]), lengths=torch.tensor([1])))

    ask(Hash(5, 2), -(1 << 62))
    for how in (QR(4), QR(4, "add"), Block(2), Hash(5, 2, importance=True), Whole()):
        for number in (R, -1):
            with pytest.raises(
                ValueError, match=rf"has 11 rows .*'f', sample 0, holds id {number}"
            ):
                ask(how, number)


def test_a_collection_names_what_is_wrong() -> None:
    one = [EmbeddingBagConfig(R, 4, "t", feature_names=["f"])]
    with pytest.raises(KeyError, match=r"no tables \['u'\].*\['t'\]"):
        CompressedEmbeddingBagCollection(one, {"u": QR()})
    with pytest.raises(ValueError, match=r"table 't'.*4 columns.*Block.*5"):
        CompressedEmbeddingBagCollection(one, {"t": Block(5)})
    narrow = [EmbeddingBagConfig(R, 1, "t")]
    with pytest.raises(ValueError, match=r"table 't_quotient': embedding_dim.*0"):
        CompressedEmbeddingBagCollection(narrow, {"t": QR(operation="concatenate")})
    with pytest.raises(ValueError, match=r"num_buckets=0 .* at least 1"):
        QR(0)
    with pytest.raises(ValueError, match=r"operation='times'.*multiply, add, concatenate"):
        QR(4, "times")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="rows=5 and hashes=0"):
        Hash(5, 0)
    for how in (QR(4), Hash(5)):
        module = CompressedEmbeddingBagCollection(one, {"t": how}, is_weighted=True)
        with pytest.raises(ValueError, match="needs one weight per id"):
            module(KeyedJaggedTensor(["f"], torch.tensor([1]), lengths=torch.tensor([1])))
        with pytest.raises(KeyError, match="'f'"):
            module(
                KeyedJaggedTensor(
                    ["g"], torch.tensor([1]), torch.tensor([1.0]), lengths=torch.tensor([1])
                )
            )


def test_bytes_are_counted_with_the_matrix_and_in_the_tables_format() -> None:
    def size(how: Compression, data_type: DataType = DataType.FP32) -> tuple[int, int]:
        one = [EmbeddingBagConfig(10_000, 8, "t", data_type)]
        found = CompressedEmbeddingBagCollection(one, {"t": how}, device=META).table_bytes()["t"]
        assert isinstance(found, TableBytes)
        return found

    assert size(QR()) == (320_000, 2 * 100 * 8 * 4)
    assert size(QR(), DataType.FP16) == (160_000, 2 * 100 * 8 * 2)
    assert size(QR(operation="concatenate")) == (320_000, 2 * 100 * 4 * 4)
    assert size(Block(4)) == (320_000, (10_000 * 4 + 4 * 8) * 4)
    assert size(Hash(500, 2)) == (320_000, 500 * 8 * 4)
    assert size(Hash(500, 2, importance=True)) == (320_000, (500 * 8 + 10_000 * 2) * 4)
    assert size(Whole()) == (320_000, 320_000)


def test_a_made_row_is_drawn_as_large_as_a_row_of_the_table() -> None:
    wide = EmbeddingBagConfig(10_000, 64, "t", weight_init_min=-0.5, weight_init_max=0.5)
    for how in (
        QR(),
        QR(50),
        QR(operation="concatenate"),
        QR(operation="add"),
        Hash(500),
        Hash(500, 2),
    ):
        module = CompressedEmbeddingBagCollection([wide], {"t": how})
        rows = module(
            KeyedJaggedTensor(
                ["t"], torch.arange(2000), lengths=torch.ones(2000, dtype=torch.int64)
            )
        )
        assert 0.4 < float(rows.values().detach().abs().max()) <= 0.5
    module = CompressedEmbeddingBagCollection([wide], {"t": Hash(500, 2, importance=True)})
    assert module.rows is not None
    assert module.rows.embeddings["t_importance"].get_parameter("weight").eq(1).all()


def test_a_collection_on_the_meta_device_is_filled_later() -> None:
    module = CompressedEmbeddingBagCollection(tables(), HOW, device=META)
    assert all(weight.is_meta for weight in module.parameters())
    module.to_empty(device="cpu").reset_parameters()
    assert bool((module(batch()).values()[0].view(18, 6).abs().sum(1) > 0).any())
    torch.manual_seed(3)
    made = CompressedEmbeddingBagCollection(tables(), HOW)
    torch.manual_seed(3)
    made.reset_parameters()
    assert all(bool(weight.isfinite().all()) for weight in made.parameters())


@pytest.mark.parametrize("weighted", [False, True])
def test_quantized_tables_answer_almost_the_same(weighted: bool) -> None:
    module = CompressedEmbeddingBagCollection(tables(), HOW, weighted)
    quantized = tutorec.quantize(module, torch.int8)
    assert type(quantized.get_submodule("pooled")).__module__ == "tutorec.quant.embedding_modules"
    assert type(quantized.get_submodule("rows")).__module__ == "tutorec.quant.embedding_collection"
    exact, close = (
        module(batch(weighted)).values().detach(),
        quantized(batch(weighted)).values().detach(),
    )
    assert 0 < float((exact - close).abs().max()) < 0.02 * float(exact.abs().max())


def test_columns_follow_popularity() -> None:
    popularity = {"country": 1.0, "city": 1 / 16, "item": 1 / 1e6}
    assert mixed_dimensions(popularity, 64, 0.0) == {"country": 64, "city": 64, "item": 64}
    assert mixed_dimensions(popularity, 64, 0.5) == {"country": 64, "city": 16, "item": 4}
    assert mixed_dimensions(popularity, 48, 0.25) == {"country": 48, "city": 32, "item": 4}
    assert mixed_dimensions({}, 64, 0.5) == {}
    with pytest.raises(ValueError, match=r"positive, got \{'item': 0\}"):
        mixed_dimensions({"item": 0}, 64, 0.5)
