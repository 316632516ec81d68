"""Quantized bags over several devices of one process: the results of the unsharded module, whatever
the plan.
"""

from __future__ import annotations

import copy
import io
import re
from dataclasses import replace

import pytest
import torch
from distributed.quant_plans import sharded, sharder_of, words_of
from hypothesis import given, settings
from hypothesis import strategies as st
from quant.equals import DTYPES, bags, dequantized
from strategies import jagged_batches, rows_of, table_sets, variable_batches

import tutorec
from tutorec._kernels.backend import backend, use_backend
from tutorec.distributed.core.env import ShardingEnv
from tutorec.distributed.plan.geometry import table_wise_sharding
from tutorec.distributed.quant_embeddingbag import (
    QuantEmbeddingBagCollectionSharder,
    flatten_feature_lengths,
)
from tutorec.distributed.quant_state import serving_devices
from tutorec.distributed.shard import shard
from tutorec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    row_wise,
    table_wise,
)
from tutorec.fx.tracer import Tracer
from tutorec.inference.export import export_model
from tutorec.inference.scripting import script_model
from tutorec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from tutorec.modules.embedding_modules import EmbeddingBagCollection as FloatBags
from tutorec.quant.preparing import quant_prep_enable_quant_state_dict_split_scale_bias
from tutorec.quant.whole_model import quantize
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor

BACKENDS = [
    "torch",
    pytest.param(
        "fbgemm", marks=pytest.mark.skipif(backend().name != "fbgemm", reason="no fbgemm")
    ),
]
both = pytest.mark.parametrize("name", BACKENDS)
CPU = torch.device("cpu")
# A plan, a collection and an operator for each device make an example dear.
FEW_EXAMPLES = settings(max_examples=20)


def table(
    name: str, rows: int, columns: int, *features: str, pooling: PoolingType = PoolingType.SUM
):
    return EmbeddingBagConfig(rows, columns, name, feature_names=list(features), pooling=pooling)


TABLES = [
    table("things", 50, 16, "item", "seen"),
    table("users", 3, 8, "user"),
    table("shops", 40, 24, "seen"),
]


def batch(*keys: str, ids: list[int] | None = None) -> KeyedJaggedTensor:
    keys = keys or ("item", "seen", "user")
    return KeyedJaggedTensor(
        list(keys),
        torch.tensor(ids or [2, 1, 0] * len(keys)),
        lengths=torch.tensor([2, 0, 1] * len(keys)),
    )


def graph_of(module):
    return torch.fx.GraphModule(module, Tracer().trace(module))


def same(found, expected):
    assert found.keys() == expected.keys()
    assert found.length_per_key() == expected.length_per_key()
    assert found.values().dtype == expected.values().dtype
    assert torch.equal(found.values(), expected.values())


def drawn_bags(data):
    """Tables of any formats and poolings, their quantized collection, and a batch in any order of
    keys.
    """
    tables = data.draw(table_sets())
    weighted = data.draw(st.booleans())
    if weighted:
        sums = [PoolingType.SUM, PoolingType.SQRTN]
        tables = [replace(one, pooling=data.draw(st.sampled_from(sums))) for one in tables]
    dtypes = {one.name: data.draw(st.sampled_from(DTYPES)) for one in tables}
    drawn = data.draw(jagged_batches(rows_of(tables), weighted=weighted))
    features = drawn.kjt()
    return (
        tables,
        dtypes,
        weighted,
        features.permute(list(data.draw(st.permutations(range(len(drawn.keys)))))),
    )


@both
@FEW_EXAMPLES
@given(data=st.data())
def test_whole_rows_give_the_bits_of_the_unsharded_module(name, data):
    tables, dtypes, weighted, features = drawn_bags(data)
    devices = data.draw(st.integers(1, 4))
    with use_backend(name):
        _, quantized = bags(tables, dtypes, weighted)
        module = sharded(quantized, data.draw(words_of(quantized, devices, rows=False)), devices)
        same(module(features), quantized(features))


@both
@FEW_EXAMPLES
@given(data=st.data())
def test_split_rows_stay_within_the_bound_of_a_reordered_sum(name, data):
    tables, dtypes, weighted, features = drawn_bags(data)
    devices = data.draw(st.integers(1, 4))
    with use_backend(name):
        _, quantized = bags(tables, dtypes, weighted)
        module = sharded(quantized, data.draw(words_of(quantized, devices)), devices)
        found, expected = module(features), quantized(features)
        assert found.keys() == expected.keys()
        bound = reordering_bound(quantized, features, weighted)
        assert bool(((found.values() - expected.values()).abs() <= bound).all())


def reordering_bound(quantized, features, weighted):
    """``(L + 1) * 2**-24 * sum|x|`` of each bag and column; of means and root-means divided as they
    are.
    """
    numbers = dequantized(quantized)
    lists, columns = features.to_dict(), []
    for config in quantized.embedding_bag_configs():
        rows = numbers.embedding_bags[config.name].weight.detach().double().abs()
        for feature in config.feature_names:
            ids, lengths = lists[feature].values().long(), lists[feature].lengths().long()
            sample = torch.arange(len(lengths)).repeat_interleave(lengths)
            weights = (
                lists[feature].weights().double().abs()
                if weighted
                else torch.ones(len(ids), dtype=torch.double)
            )
            sums = torch.zeros(len(lengths), rows.shape[1], dtype=torch.double)
            sums = sums.index_add(0, sample, rows[ids] * weights.unsqueeze(1))
            count = lengths.double().unsqueeze(1)
            part = sums * (count + 1) * 2.0**-24
            if config.pooling is PoolingType.MEAN:
                part = part / count.clamp(min=1)
            elif config.pooling is PoolingType.SQRTN:
                squares = torch.zeros(len(lengths), dtype=torch.double).index_add(
                    0, sample, weights**2
                )
                part = (
                    part / squares.sqrt().clamp(min=1e-30).unsqueeze(1)
                    if weighted
                    else part / count.clamp(min=1).sqrt()
                )
            columns.append(part)
    return torch.cat(columns, dim=1)


@pytest.mark.slow
@both
@FEW_EXAMPLES
@given(data=st.data())
def test_graphs_and_scripts_give_the_bits_of_eager_code_for_any_plan(name, data):
    tables, dtypes, weighted, features = drawn_bags(data)
    devices = data.draw(st.integers(1, 3))
    with use_backend(name):
        _, quantized = bags(tables, dtypes, weighted)
        module = sharded(quantized, data.draw(words_of(quantized, devices)), devices)
        graph = graph_of(module)  # before any batch was seen
        same(graph(features), module(features))


@both
@pytest.mark.parametrize("weighted", [False, True])
def test_scripted_and_loaded_modules_give_the_bits_of_eager_ones(name, weighted):
    mean = PoolingType.SUM if weighted else PoolingType.MEAN
    tables = [
        table("things", 50, 16, "item", "seen", pooling=mean),
        table("users", 3, 6, "user", pooling=PoolingType.SQRTN),
        table("shops", 40, 24, "seen"),
    ]
    kinds = {"things": torch.int8, "users": torch.quint4x2, "shops": torch.quint2x4}
    with use_backend(name):
        _, quantized = bags(tables, kinds, weighted)
        features = batch("user", "other", "item", "seen")
        if weighted:
            features = KeyedJaggedTensor(
                features.keys(),
                features.values(),
                torch.linspace(-1, 2, 12),
                lengths=features.lengths(),
            )
        for words in (
            {"things": table_wise(1), "users": table_wise(0), "shops": table_wise(1)},
            {"things": row_wise(), "users": row_wise(), "shops": row_wise()},
            {"things": column_wise([0, 1]), "users": row_wise(), "shops": table_wise(0)},
        ):
            module = sharded(quantized, words, 2)
            scripted, buffer = script_model(module), io.BytesIO()
            same(scripted(features), module(features))
            torch.jit.save(scripted, buffer)
            buffer.seek(0)
            same(torch.jit.load(buffer)(features), module(features))


@both
def test_exported_modules_take_other_numbers_of_ids_and_samples(name):
    words = {"things": row_wise(), "users": column_wise(ranks=[0, 1]), "shops": table_wise(rank=1)}
    with use_backend(name):
        _, quantized = bags(
            TABLES, {"things": torch.int8, "users": torch.quint4x2, "shops": torch.int8}
        )
        module = sharded(quantized, words, 2)
        exported = export_model(module, [batch()]).module()
        for ids, lengths in (
            ([2, 1, 0, 2, 1], [1, 0, 2, 1, 0, 1]),
            ([1, 0, 2], [1, 1, 1]),
            ([], [0] * 6),
        ):
            values = torch.tensor(ids, dtype=torch.long)
            features = KeyedJaggedTensor(
                ["item", "seen", "user"], values, lengths=torch.tensor(lengths)
            )
            assert torch.allclose(
                exported(features).values(), module(features).values(), rtol=0, atol=1e-6
            )


@both
@FEW_EXAMPLES
@given(data=st.data())
def test_variable_batches_are_what_the_unsharded_module_makes_of_them(name, data):
    drawn = data.draw(variable_batches(max_features=3, weighted=False))
    tables = [table(f"t{place}", 12, 4 + place, key) for place, key in enumerate(drawn.keys)]
    features = drawn.kjt()
    with use_backend(name):
        _, quantized = bags(tables, torch.int8)
        module = sharded(quantized, data.draw(words_of(quantized, 2, rows=False)), 2)
        try:
            expected = quantized(features)
        except ValueError as error:
            with pytest.raises(ValueError, match=re.escape(str(error)[:40])):
                module(features)
        else:
            same(module(features), expected)


@both
@pytest.mark.parametrize("word", [table_wise(rank=2), row_wise(), column_wise(ranks=[0, 1, 2, 3])])
def test_more_devices_than_tables_and_rows(name, word):
    tables = [table("few", 3, 8, "item"), table("one", 1, 4, "user")]
    with use_backend(name):
        _, quantized = bags(tables, torch.int8)
        module = sharded(
            quantized,
            {"few": word, "one": word},
            7 if word.call != "column_wise(ranks=[0, 1, 2, 3])" else 4,
        )
        features = batch("item", "user", ids=[2, 1, 0, 0, 0, 0])
        assert torch.allclose(
            module(features).values(), quantized(features).values(), rtol=0, atol=1e-6
        )
        same(graph_of(module)(features), module(features))


@both
@pytest.mark.parametrize("word", [table_wise(rank=1), row_wise()])
def test_batches_without_ids_and_without_samples(name, word):
    with use_backend(name):
        _, quantized = bags(TABLES, torch.int8)
        module = sharded(quantized, {one.name: word for one in TABLES}, 2)
        for samples in (0, 3):
            lengths = torch.zeros(3 * samples, dtype=torch.long)
            features = KeyedJaggedTensor(
                ["item", "seen", "user"], torch.tensor([], dtype=torch.long), lengths=lengths
            )
            same(module(features), quantized(features))
            assert module(features).values().shape == (samples, 64)


@both
@pytest.mark.parametrize("word", [table_wise(rank=1), row_wise(), column_wise(ranks=[0, 1])])
def test_ids_of_32_bits_and_other_orders_and_keys(name, word):
    with use_backend(name):
        _, quantized = bags(TABLES, torch.int8)
        module = sharded(quantized, {one.name: word for one in TABLES}, 2)
        for keys in (["item", "seen", "user"], ["user", "other", "seen", "item"]):
            features = batch(*keys)
            narrow = KeyedJaggedTensor(
                keys, features.values().int(), lengths=features.lengths().int()
            )
            assert torch.equal(module(narrow).values(), module(features).values())
            assert torch.equal(graph_of(module)(narrow).values(), module(features).values())
            assert torch.allclose(
                module(features).values(), quantized(features).values(), rtol=0, atol=1e-5
            )


@both
@pytest.mark.parametrize("word", [table_wise(rank=0), row_wise(), column_wise(ranks=[0, 1])])
def test_bad_ids_are_named_and_fail_in_a_graph(name, word):
    with use_backend(name):
        _, quantized = bags(TABLES, torch.int8)
        module = sharded(quantized, {one.name: word for one in TABLES}, 2)
        graph = graph_of(module)
        for bad in (3, 1000, -1, -1000):
            features = batch(ids=[2, 1, 0, 2, 1, 0, 2, bad, 0])
            with pytest.raises(
                ValueError,
                match=rf"table 'users' has 3 rows .* feature 'user', sample 0, holds id {bad}",
            ):
                module(features)
            with pytest.raises((ValueError, RuntimeError)):
                graph(features)
        same(graph(batch()), module(batch()))


def test_missing_features_and_weights_are_named():
    _, quantized = bags(TABLES, torch.int8)
    module = sharded(quantized, {one.name: table_wise(rank=0) for one in TABLES}, 2)
    with pytest.raises(
        KeyError,
        match=r"no feature 'user'.*table 'users'.*\['item', 'seen'\]",
    ):
        module(batch("item", "seen"))
    with pytest.raises(KeyError, match="feature 'user'"):
        graph_of(module)(batch("item", "seen"))
    with pytest.raises(TypeError, match="takes a KeyedJaggedTensor, got int"):
        module(3)
    _, weighted = bags([table("things", 5, 4, "item")], torch.int8, weighted=True)
    module = sharded(weighted, {"things": row_wise()}, 2)
    with pytest.raises(ValueError, match="needs one weight per id"):
        module(batch("item"))
    with pytest.raises(ValueError, match="needs one weight per id"):
        graph_of(module)(batch("item"))


def test_weights_that_nobody_asked_for_have_no_effect():
    _, quantized = bags(TABLES, torch.int8)
    features = batch()
    heavy = KeyedJaggedTensor(
        features.keys(), features.values(), torch.full((9,), 7.0), lengths=features.lengths()
    )
    for word in (table_wise(rank=1), row_wise()):
        module = sharded(quantized, {one.name: word for one in TABLES}, 2)
        with pytest.warns(UserWarning, match=r"weights.* collection is not weighted"):
            same(module(heavy), module(features))
        same(module(heavy), module(features))  # said once
        same(graph_of(module)(heavy), module(features))


def test_output_dtype_is_kept():
    for dtype in (torch.float16, torch.bfloat16):
        _, quantized = bags(TABLES, torch.int8)
        narrow = type(quantized)(quantized.embedding_bag_configs(), False, CPU, output_dtype=dtype)
        narrow.load_state_dict(quantized.state_dict())
        for word in (table_wise(rank=1), column_wise(ranks=[1, 0])):
            same(sharded(narrow, {one.name: word for one in TABLES}, 2)(batch()), narrow(batch()))
        split = sharded(narrow, {one.name: row_wise() for one in TABLES}, 2)
        assert split(batch()).values().dtype == dtype
        assert torch.allclose(
            split(batch()).values().float(), quantized(batch()).values(), rtol=2e-2, atol=1e-2
        )


def test_tables_that_stay_on_their_device_are_not_copied():
    _, quantized = bags(TABLES, torch.int8)
    for word in (table_wise(rank=1), row_wise()):
        module = sharded(quantized, {one.name: word for one in TABLES}, 2)
        rows = quantized.packed_rows("things")
        shown = module.embedding_bags["things"].weight
        assert shown.data_ptr() == rows.data_ptr()
        operators = [
            operator
            for lookup in module._lookups
            for each in lookup.devices
            for operator in each._operators
        ]
        assert {operator.weights.untyped_storage().data_ptr() for operator in operators} == {
            operator.weights.untyped_storage().data_ptr() for operator, _ in quantized._operators
        }
        assert module.state_dict()["embedding_bags.things.weight"].data_ptr() == rows.data_ptr()


@both
@FEW_EXAMPLES
@given(data=st.data())
def test_state_has_the_names_and_rows_of_the_unsharded_module_and_comes_back(name, data):
    tables, dtypes, weighted, features = drawn_bags(data)
    devices = data.draw(st.integers(1, 3))
    with use_backend(name):
        _, quantized = bags(tables, dtypes, weighted)
        module = sharded(quantized, data.draw(words_of(quantized, devices)), devices)
        state, expected = module.state_dict(), quantized.state_dict()
        assert list(state) == list(expected)
        assert all(torch.equal(state[key], expected[key]) for key in expected)
        _, other = bags(tables, dtypes, weighted)
        before = module(features).values()
        elsewhere = sharded(other, data.draw(words_of(other, devices)), devices)
        elsewhere.load_state_dict(
            {key: value.clone() for key, value in state.items()}, assign=data.draw(st.booleans())
        )
        assert all(torch.equal(elsewhere.state_dict()[key], expected[key]) for key in expected)
        assert torch.allclose(elsewhere(features).values(), before, rtol=1e-4, atol=1e-4)


def test_state_that_does_not_fit_is_refused():
    ebc, quantized = bags(TABLES, torch.int8)
    for word in (table_wise(rank=1), column_wise(ranks=[0, 1])):
        module = sharded(quantized, {one.name: word for one in TABLES}, 2)
        with pytest.raises(
            ValueError,
            match=r"table 'things'.*uint8 \[50, 32\].*torch\.float32",
        ):
            module.load_state_dict(ebc.state_dict())
        with pytest.raises(RuntimeError, match=r"embedding_bags\.shops\.weight"):
            module.load_state_dict(
                {key: rows for key, rows in quantized.state_dict().items() if "shops" not in key}
            )


SPLIT_WORDS = [table_wise(rank=1), row_wise(), column_wise(ranks=[0, 1])]


def split_bags(dtype):
    """A quantized collection that shows scale and bias as buffers of their own."""
    ebc = FloatBags(TABLES)
    quant_prep_enable_quant_state_dict_split_scale_bias(ebc)
    return quantize(ebc, dtype)


@pytest.mark.parametrize("dtype", [torch.int8, torch.quint4x2, torch.float16])
@pytest.mark.parametrize("word", SPLIT_WORDS)
def test_state_with_scale_and_bias_of_their_own_comes_and_goes(word, dtype):
    quantized, other = split_bags(dtype), split_bags(dtype)
    words = {one.name: word for one in TABLES}
    expected = quantized.state_dict()
    assert ("embedding_bags.things.weight_qscale" in expected) == (dtype is not torch.float16)
    found = sharded(quantized, words, 2).state_dict()
    assert list(found) == list(expected)
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    module = sharded(other, words, 2)
    module.load_state_dict(expected)
    assert all(torch.equal(module.state_dict()[key], expected[key]) for key in expected)
    assert torch.allclose(module(batch()).values(), quantized(batch()).values(), atol=1e-6)


@pytest.mark.parametrize("word", SPLIT_WORDS)
def test_part_of_a_split_state_leaves_the_rest_as_it_was(word):
    quantized, other = split_bags(torch.int8), split_bags(torch.int8)
    module = sharded(other, {one.name: word for one in TABLES}, 2)
    before = {key: rows.clone() for key, rows in module.state_dict().items()}
    some = {
        "embedding_bags.things.weight_qbias": quantized.state_dict()[
            "embedding_bags.things.weight_qbias"
        ]
    }
    with pytest.raises(RuntimeError, match=r"embedding_bags\.things\.weight_qscale"):
        module.load_state_dict(some)
    result = module.load_state_dict(some, strict=False)
    assert (
        sorted(result.missing_keys) == sorted(set(before) - set(some))
        and not result.unexpected_keys
    )
    after = module.state_dict()
    assert all(torch.equal(after[key], some.get(key, before[key])) for key in before)


@pytest.mark.parametrize("word", SPLIT_WORDS)
def test_missing_tables_are_named_as_the_unsharded_module_names_them(word):
    _, quantized = bags(TABLES, torch.int8)
    module = sharded(quantized, {one.name: word for one in TABLES}, 2)
    before = {key: rows.clone() for key, rows in module.state_dict().items()}
    missing = module.load_state_dict({}, strict=False).missing_keys
    assert sorted(missing) == sorted(before)
    assert all(torch.equal(module.state_dict()[key], before[key]) for key in before)


@pytest.mark.parametrize("word", SPLIT_WORDS)
def test_state_of_the_other_form_says_what_sets_them_apart(word):
    _, joined = bags(TABLES, torch.int8)
    split = split_bags(torch.int8)
    words = {one.name: word for one in TABLES}
    for module, other, how in ((joined, split, "with"), (split, joined, "without")):
        with pytest.raises(
            ValueError, match=f"stored {how} separate buffers for scale.*quantize both models alike"
        ):
            sharded(module, words, 2).load_state_dict(other.state_dict())


def test_copies_and_pickles_stand_alone():
    _, quantized = bags(TABLES, torch.int8)
    words = {"things": column_wise(ranks=[0, 1]), "users": table_wise(rank=1), "shops": row_wise()}
    module = sharded(quantized, words, 2)
    before, buffer = module(batch()).values(), io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(module), torch.load(buffer, weights_only=False)):
        assert torch.equal(other(batch()).values(), before)
        other.load_state_dict(
            {key: torch.zeros_like(rows) for key, rows in other.state_dict().items()}
        )
        assert not other(batch()).values().any()
        assert torch.equal(module(batch()).values(), before)


def test_moving_the_model_leaves_the_rows_where_the_plan_put_them():
    _, quantized = bags(TABLES, torch.int8)
    module = sharded(quantized, {one.name: row_wise() for one in TABLES}, 2)
    expected = module(batch())
    same(module.to(CPU).half().eval()(batch()), expected)
    assert module.device == CPU
    assert module.devices == [CPU, CPU]


def test_printed_form_is_the_document_s():
    _, quantized = bags(
        [table("product_table", 8, 4, "product"), table("user_table", 8, 4, "user")], torch.int8
    )
    module = sharded(quantized, {"product_table": table_wise(0), "user_table": table_wise(0)}, 1)
    assert [line.rstrip() for line in repr(module).splitlines()] == [
        "ShardedQuantEmbeddingBagCollection(",
        "  (lookups):",
        "   InferGroupedPooledEmbeddingsLookup()",
        "  (_output_dists): ModuleList()",
        "  (embedding_bags): ModuleDict(",
        "    (product_table): Module()",
        "    (user_table): Module()",
        "  )",
        "  (_input_dist_module): ShardedQuantEbcInputDist()",
        ")",
    ]


def test_graph_is_the_sequence_of_calls_of_the_document():
    _, quantized = bags(
        [table("product_table", 8, 4, "product"), table("user_table", 8, 4, "user")], torch.int8
    )
    module = sharded(quantized, {"product_table": table_wise(0), "user_table": table_wise(0)}, 1)
    names = re.compile(
        "flatten_feature_lengths|_fx_marker|split|_unwrap_kjt|bounds_check_indices|check_rows|packed_lookup|int_nbit_split_embedding_codegen_lookup_function|embeddings_cat_empty_rank_handle_inference|KeyedTensor"
    )
    graph = Tracer(leaf_modules=["IntNBitTableBatchedEmbeddingBagsCodegen"]).trace(module)
    called = [
        getattr(node.target, "__name__", str(node.target))
        for node in graph.nodes
        if node.op.startswith("call")
    ]
    on_fbgemm = backend().name == "fbgemm"
    assert [found.group() for call in called if (found := names.search(call))] == [
        "flatten_feature_lengths",
        "_fx_marker",
        "split",
        "_fx_marker",
        "_unwrap_kjt",
        *(["bounds_check_indices"] if on_fbgemm else ["check_rows"]),
        *(["int_nbit_split_embedding_codegen_lookup_function"] if on_fbgemm else ["packed_lookup"]),
        "embeddings_cat_empty_rank_handle_inference",
        "KeyedTensor",
    ]
    code = torch.fx.GraphModule(module, graph).code
    assert "_fx_marker('KJT_ONE_TO_ALL_FORWARD_BEGIN', flatten_feature_lengths)" in code
    assert "split([2])" in code
    assert re.search(
        (
            r"KeyedTensor\(keys = \['product', 'user'\], length_per_key = \[4, 4\], values = \w+, "
            r"key_dim = 1\)"
        ),
        code,
    )


def test_flatten_feature_lengths_keeps_a_batch_that_is_in_order():
    features = batch()
    assert flatten_feature_lengths(features, ["item", "seen", "user"]) is features
    assert flatten_feature_lengths(features, ["user", "user"]).keys() == ["user", "user"]


@both
def test_collections_and_tables_that_nobody_reads(name):
    with use_backend(name):
        _, quantized = bags([], torch.int8)
        module = sharded(quantized, {}, 2)
        features = batch()
        assert module(features).values().shape == (3, 0)
        assert graph_of(module)(features).values().shape == (3, 0)


def test_validation_off_skips_the_check_of_ids():
    _, quantized = bags([table("things", 5, 4, "item")], torch.int8)
    module = sharded(quantized, {"things": table_wise(0)}, 1)
    with tutorec.validation(False):
        same(module(batch("item")), quantized(batch("item")))


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ({"compute_kernel": "fused"}, r"compute kernel 'fused'; supported now: quant"),
        (
            {"sharding_type": "data_parallel"},
            r"sharding type 'data_parallel'; supported now: table_wise, row_wise, col",
        ),
        ({"shape": (9, 4)}, r"made for a table 'things' of 9 x 4 rows .* this one has 5 x 4"),
    ],
)
def test_plans_that_cannot_be_carried_out_say_why(word, message):
    _, quantized = bags([table("things", 5, 4, "item")], torch.int8)
    entry = table_wise_sharding((5, 4), rank=0, device_type="cpu")
    entry.compute_kernel = "quant"
    with pytest.raises(ValueError, match=message):
        shard(quantized, {"things": replace(entry, **word)}, ShardingEnv.from_local(1, 0))
    with pytest.raises(ValueError, match="nothing about table 'things'"):
        shard(quantized, {}, ShardingEnv.from_local(1, 0))


def test_environments_and_devices_that_cannot_serve_say_why():
    _, quantized = bags([table("things", 5, 4, "item")], torch.int8)
    plan = construct_module_sharding_plan(
        quantized, {"things": table_wise(0)}, sharder_of(quantized), world_size=1
    )
    assert plan["things"].compute_kernel == "quant"
    sharder = QuantEmbeddingBagCollectionSharder()
    with pytest.raises(ValueError, match=r"'cpu'.*'cuda', not.*'meta'"):
        sharder.shard(quantized, plan, ShardingEnv.from_local(1, 0), torch.device("meta"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_gpus_that_are_not_there_are_named():
    with pytest.raises(
        ValueError,
        match=r"2 devices.*cuda:0 to cuda:1.*0 GPUs",
    ):
        serving_devices("cuda", 2)
