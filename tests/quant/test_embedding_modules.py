"""The quantized EmbeddingBagCollection: it looks up what its packed rows stand for, as the float
one would.
"""

from __future__ import annotations

import copy
import io
import pickle
import re
import warnings
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from quant.equals import DTYPES, bags, dequantized
from strategies import jagged_batches, rows_of, table_sets, variable_batches
from torch import nn
from torch.testing import assert_close

import tutorec
from tutorec._kernels.backend import backend, use_backend
from tutorec.modules.embedding_configs import EmbeddingBagConfig, PoolingType, QuantConfig
from tutorec.modules.embedding_modules import EmbeddingBagCollection
from tutorec.quant.embedding_modules import EmbeddingBagCollection as QuantEmbeddingBagCollection
from tutorec.quant.embedding_modules import quant_prep_customize_row_alignment
from tutorec.quant.packing import unpack_rows
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor
from tutorec.types import DataType

BACKENDS = [
    "torch",
    pytest.param(
        "fbgemm", marks=pytest.mark.skipif(backend().name != "fbgemm", reason="no fbgemm")
    ),
]
both = pytest.mark.parametrize("name", BACKENDS)


def table(name: str = "t", rows: int = 10, columns: int = 8, **parts: object) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(rows, columns, name, **{"feature_names": [f"{name}_id"], **parts})  # type: ignore[arg-type]


def batch(
    *keys: str, ids: list[int] | None = None, lengths: list[int] | None = None
) -> KeyedJaggedTensor:
    """Ids 3 and 1, none, and 3 of each key."""
    values = torch.tensor(ids if ids is not None else [3, 1, 3] * len(keys))
    return KeyedJaggedTensor(
        list(keys), values, lengths=torch.tensor(lengths or [2, 0, 1] * len(keys))
    )


def close(found, expected):
    assert found.keys() == expected.keys()
    assert found.length_per_key() == expected.length_per_key()
    assert_close(found.values(), expected.values(), rtol=1e-5, atol=1e-5)


@both
@given(data=st.data())
def test_lookups_equal_the_float_collection_of_the_dequantized_tables(name, data):
    tables = data.draw(table_sets())
    weighted = data.draw(st.booleans())
    if weighted:
        sums = [PoolingType.SUM, PoolingType.SQRTN]
        tables = [replace(one, pooling=data.draw(st.sampled_from(sums))) for one in tables]
    dtypes = {one.name: data.draw(st.sampled_from(DTYPES)) for one in tables}
    drawn = data.draw(jagged_batches(rows_of(tables), weighted=weighted))
    features = drawn.kjt()
    keys = data.draw(st.permutations(range(len(drawn.keys))))
    features = features.permute(list(keys))
    with use_backend(name):
        _, quantized = bags(tables, dtypes, weighted)
        close(quantized(features), dequantized(quantized)(features))


@both
@given(data=st.data())
def test_variable_batches_are_what_the_float_collection_makes_of_them(name, data):
    drawn = data.draw(variable_batches(max_features=3, weighted=False))
    tables = [
        table(f"t{place}", rows=12, columns=4 + place, feature_names=[key], pooling=pooling)
        for place, (key, pooling) in enumerate(
            zip(drawn.keys, [PoolingType.SUM, PoolingType.MEAN, PoolingType.SUM], strict=False)
        )
    ]
    features = drawn.kjt()
    counts = [len(lists) for lists in drawn.ids.values()]
    samples = data.draw(st.integers(0, 4)) if min(counts) else 0
    if data.draw(st.booleans()):
        inverse = torch.tensor(
            [[data.draw(st.integers(0, count - 1)) for _ in range(samples)] for count in counts],
            dtype=torch.int64,
        ).view(len(counts), samples)
        features = drawn.kjt(inverse_indices=(drawn.keys, inverse))
    with use_backend(name):
        _, quantized = bags(tables, torch.int8)
        if (features.inverse_indices_or_none() is None or not samples) and len(set(counts)) > 1:
            with pytest.raises(ValueError, match="different numbers of samples") as expected:
                dequantized(quantized)(features)
            with pytest.raises(ValueError, match=re.escape(str(expected.value))):
                quantized(features)
        else:
            close(quantized(features), dequantized(quantized)(features))


@both
@pytest.mark.parametrize("output_dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_output_dtype_is_that_of_the_pooled_rows(name, output_dtype):
    with use_backend(name):
        ebc = EmbeddingBagCollection([table()])
        ebc.qconfig = QuantConfig(output_dtype, torch.int8)
        quantized = QuantEmbeddingBagCollection.from_float(ebc)
        pooled = quantized(batch("t_id")).values()
        assert quantized.output_dtype() is pooled.dtype is output_dtype
        assert_close(
            pooled.float(), dequantized(quantized)(batch("t_id")).values(), rtol=1e-2, atol=1e-2
        )


@both
@pytest.mark.parametrize("dtype", [torch.int8, torch.float16])
@pytest.mark.parametrize("pooling", [PoolingType.SUM, PoolingType.MEAN])
def test_rows_are_summed_in_float32_under_a_default_of_float64(name, dtype, pooling):
    ebc = EmbeddingBagCollection([table(pooling=pooling)])
    with use_backend(name):
        expected = tutorec.quantize(ebc, dtype)(batch("t_id")).values()
        torch.set_default_dtype(torch.float64)
        try:
            found = tutorec.quantize(ebc, dtype)(batch("t_id")).values()
        finally:
            torch.set_default_dtype(torch.float32)
    assert found.dtype == torch.float32
    assert torch.equal(found, expected)


@pytest.mark.parametrize("data_type", [DataType.FP16, DataType.BF16])
def test_tables_of_16_bits_are_packed_from_their_numbers(data_type):
    torch.manual_seed(3)
    ebc = EmbeddingBagCollection([table(data_type=data_type, rows=40)])
    ebc.qconfig = QuantConfig(torch.float, torch.float32)
    quantized = QuantEmbeddingBagCollection.from_float(ebc)
    numbers = unpack_rows(quantized.packed_rows("t"), 8, DataType.FP32)
    assert torch.equal(numbers, ebc.embedding_bags["t"].weight.detach().float())


def test_the_documents_cell_runs_and_prints_as_printed():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch import quantization as quant
    names = ("product", "user")
    ebc = EmbeddingBagCollection(
        [table(f"{name}_table", 4096, 64, feature_names=[name]) for name in names]
    )

    class InferenceModule(nn.Module):
        def __init__(self, ebc):
            super().__init__()
            self.ebc_ = ebc

        def forward(self, kjt):
            return self.ebc_(kjt)

    module = InferenceModule(ebc)
    qconfig = QuantConfig(
        activation=quant.PlaceholderObserver.with_args(dtype=torch.float),
        weight=quant.PlaceholderObserver.with_args(dtype=torch.int8),
    )
    qebc = quant.quantize_dynamic(
        module,
        qconfig_spec={tutorec.EmbeddingBagCollection: qconfig},
        mapping={tutorec.EmbeddingBagCollection: QuantEmbeddingBagCollection},
        inplace=False,
    )
    assert str(qebc) == (
        "InferenceModule(\n"
        "  (ebc_): QuantizedEmbeddingBagCollection(\n"
        "    (_kjt_to_jt_dict): ComputeKJTToJTDict()\n"
        "    (embedding_bags): ModuleDict(\n"
        "      (product_table): Module()\n"
        "      (user_table): Module()\n"
        "    )\n"
        "  )\n"
        ")"
    )
    assert [(name, list(each.shape), each.dtype) for name, each in qebc.named_buffers()] == [
        ("ebc_.embedding_bags.product_table.weight", [4096, 80], torch.uint8),
        ("ebc_.embedding_bags.user_table.weight", [4096, 80], torch.uint8),
    ]
    assert list(qebc.parameters()) == []
    features = batch("product", "user")
    assert_close(qebc(features).values(), module(features).values(), rtol=0, atol=1e-3)
    assert list(dict(module.named_parameters())) == [
        f"ebc_.embedding_bags.{name}_table.weight" for name in names
    ]
    twice = quant.quantize_dynamic(
        qebc,
        qconfig_spec={tutorec.EmbeddingBagCollection: qconfig},
        mapping={tutorec.EmbeddingBagCollection: QuantEmbeddingBagCollection},
        inplace=False,
    )
    assert torch.equal(twice(features).values(), qebc(features).values())


def changed(quantized: QuantEmbeddingBagCollection) -> QuantEmbeddingBagCollection:
    """Rows written through the shown buffers are what is looked up."""
    for part in quantized.state_dict().values():
        part.zero_()
    assert quantized(batch("t_id", "u_id")).values().count_nonzero() == 0
    return quantized


TWO = [table(), table("u", 7, 6, pooling=PoolingType.MEAN)]


@both
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("tbes", [False, True])
def test_shown_buffers_stay_views_of_the_operators(name, split, tbes):
    with use_backend(name):
        ebc, _ = bags(TWO, torch.int8)
        ebc.__dict__["__quant_state_dict_split_scale_bias"] = split
        ebc.__dict__["__register_tbes_in_named_modules"] = tbes
        quantized = QuantEmbeddingBagCollection.from_float(ebc)
        features = batch("t_id", "u_id")
        expected = quantized(features).values()
        state = {key: part.clone() for key, part in quantized.state_dict().items()}
        assert sorted(state) == sorted(
            f"embedding_bags.{one}.{part}"
            for one in "tu"
            for part in (["weight", "weight_qscale", "weight_qbias"] if split else ["weight"])
        )
        again = copy.deepcopy(quantized)
        changed(quantized)
        assert torch.equal(again(features).values(), expected)
        quantized.load_state_dict(state)
        assert torch.equal(quantized(features).values(), expected)
        changed(quantized)
        quantized.load_state_dict({key: part.clone() for key, part in state.items()}, assign=True)
        assert torch.equal(quantized(features).values(), expected)
        changed(quantized)
        there = again.to("meta").to_empty(device=features.device())
        there.load_state_dict(state)
        assert torch.equal(there(features).values(), expected)
        changed(there)
        empty = QuantEmbeddingBagCollection(
            again.embedding_bag_configs(),
            False,
            torch.device("meta"),
            quant_state_dict_split_scale_bias=split,
        )
        empty.load_state_dict(state, assign=True)
        assert torch.equal(empty(features).values(), expected)
        assert empty.device == features.device()
        changed(empty)
        file = io.BytesIO()
        torch.save(there.cpu().half().float(), file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        loaded.load_state_dict(state)
        assert torch.equal(loaded(features).values(), expected)
        changed(loaded)


def test_rows_are_moved_once():
    """As the operators' buffers; moved as the buffers that are shown, too, they would for a while
    be there twice.
    """
    _, quantized = bags(TWO, torch.int8)
    moved: list[list[int]] = []
    quantized._apply(lambda part: moved.append(list(part.shape)) or part)
    assert not [shape for shape in moved if len(shape) > 1]
    assert (
        sum(
            shape == list(operator.weights.shape)
            for operator, _ in quantized._operators
            for shape in moved
        )
        >= 2
    )


def test_a_float_state_of_the_same_shape_is_refused():
    ebc, quantized = bags([table(columns=16)], torch.quint4x2)
    before = quantized.packed_rows("t").clone()
    assert ebc.state_dict()["embedding_bags.t.weight"].shape == before.shape
    with pytest.raises(
        ValueError,
        match=r"table 't'.*weight \[10, 16\].*torch.float32",
    ):
        quantized.load_state_dict(ebc.state_dict())
    assert torch.equal(quantized.packed_rows("t"), before)


def test_packed_rows_of_the_caller_are_taken():
    _, quantized = bags(TWO, {"t": torch.int8, "u": torch.float16})
    weights = {
        "t": (
            quantized.packed_rows("t")[:, 4:12].clone(),
            quantized.packed_rows("t")[:, :4].clone(),
        ),
        "u": (quantized.packed_rows("u")[:, :12].clone(), None),
    }
    configs = quantized.embedding_bag_configs()
    features = batch("t_id", "u_id")
    assert torch.equal(
        made(*configs, table_name_to_quantized_weights=weights)(features).values(),
        quantized(features).values(),
    )
    with pytest.raises(KeyError, match=r"no.*table 'u'.*\['t'\]"):
        made(*configs, table_name_to_quantized_weights={"t": weights["t"]})
    weights["t"] = (weights["t"][0][:, :6], weights["t"][1])
    with pytest.raises(ValueError, match=r"'t'.*INT8.*uint8 \[10, 8\].*\[10, 6\]"):
        made(*configs, table_name_to_quantized_weights=weights)


def test_rows_are_zero_until_they_are_given():
    assert (
        made(replace(table(), data_type=DataType.INT8))(batch("t_id")).values().count_nonzero() == 0
    )


@both
@pytest.mark.parametrize("alignment", [4, 64])
def test_rows_may_be_padded_to_other_lengths(name, alignment):
    with use_backend(name):
        ebc, _ = bags(TWO, torch.quint4x2)
        quant_prep_customize_row_alignment(ebc, [EmbeddingBagCollection], alignment)
        quantized = QuantEmbeddingBagCollection.from_float(ebc)
        assert quantized.packed_rows("t").shape[1] == {4: 8, 64: 64}[alignment]
        close(quantized(batch("t_id", "u_id")), dequantized(quantized)(batch("t_id", "u_id")))


def test_only_rows_left_after_pruning_are_kept():
    ebc, _ = bags([table(num_embeddings_post_pruning=4)], torch.int8)
    quantized = QuantEmbeddingBagCollection.from_float(ebc)
    assert list(quantized.packed_rows("t").shape) == [4, 16]
    close(quantized(batch("t_id")), dequantized_rows(ebc, quantized))
    with pytest.raises(
        ValueError, match=r"'t'.*4 rows \(ids 0 to 3\).*feature 't_id', sample 0.*id 9"
    ):
        quantized(batch("t_id", ids=[9, 1, 3]))
    ebc.embedding_bag_configs()[0].num_embeddings_post_pruning = 11
    with pytest.raises(ValueError, match=r"table 't'.*10 rows: num_embeddings_post_pruning=11"):
        QuantEmbeddingBagCollection.from_float(ebc)


def dequantized_rows(ebc, quantized):
    whole = copy.deepcopy(ebc)
    with torch.no_grad():
        whole.embedding_bags["t"].weight[:4] = unpack_rows(
            quantized.packed_rows("t"), 8, DataType.INT8
        )
    return whole(batch("t_id"))


@both
@pytest.mark.parametrize("tables", [[], [table()], TWO])
def test_an_empty_batch_gives_no_rows(name, tables):
    with use_backend(name):
        _, quantized = bags(tables, torch.int8)
        keys = [f"{one.name}_id" for one in tables]
        none = KeyedJaggedTensor(
            keys, torch.empty(0, dtype=torch.int64), lengths=torch.empty(0, dtype=torch.int64)
        )
        assert list(quantized(none).values().shape) == [0, sum(one.embedding_dim for one in tables)]
        bare = KeyedJaggedTensor(
            keys,
            torch.empty(0, dtype=torch.int32),
            lengths=torch.zeros(2 * len(keys), dtype=torch.int32),
            stride=2,
        )
        if tables:
            assert quantized(bare).values().count_nonzero() == 0
            assert list(quantized(bare).values().shape) == [2, quantized(none).values().shape[1]]


def test_keys_in_any_order_and_more_than_are_needed_will_do():
    _, quantized = bags(TWO, torch.int8)
    features = batch("x", "u_id", "y", "t_id", ids=[90, 91, 92, 1, 2, 3, 93, 94, 95, 4, 5, 6])
    again = batch("t_id", "u_id", ids=[4, 5, 6, 1, 2, 3])
    for _ in range(2):
        assert torch.equal(quantized(features).values(), quantized(again).values())


def test_sets_of_keys_leave_nothing_behind():
    _, quantized = bags([table()], torch.int8)
    before = len(pickle.dumps(quantized))
    for number in range(200):
        quantized(batch(f"x{number}", "t_id"))
    assert len(pickle.dumps(quantized)) == before


@pytest.mark.parametrize(
    ("features", "kind", "words"),
    [
        (
            lambda: batch("t_id"),
            KeyError,
            "the batch has no feature 'u_id', which table 'u' reads; its keys are",
        ),
        (
            lambda: batch("t_id", "u_id", ids=[3, 1, 3, 3, 7, 3]),
            ValueError,
            "'u' has 7 .* 'u_id', sample 0, holds id 7",
        ),
        (
            lambda: batch("t_id", "u_id", ids=[3, 1, -2, 3, 1, 3]),
            ValueError,
            "feature 't_id', sample 2, holds id -2",
        ),
        (lambda: torch.zeros(3), TypeError, "takes a KeyedJaggedTensor, got Tensor"),
        (lambda: None, TypeError, "takes a KeyedJaggedTensor, got NoneType"),
    ],
)
@both
def test_bad_batches_are_refused_by_name(name, features, kind, words):
    with use_backend(name):
        _, quantized = bags(TWO, torch.int8)
        with pytest.raises(kind, match=words):
            quantized(features())


def test_a_missing_feature_is_named_without_validation_too():
    _, quantized = bags(TWO, torch.int8)
    with tutorec.validation(False), pytest.raises(KeyError, match=r"u_id"):
        quantized(batch("t_id"))


def test_weights_are_asked_for_and_otherwise_left_alone():
    _, weighted = bags([table()], torch.int8, weighted=True)
    with pytest.raises(ValueError, match="needs one weight per id"):
        weighted(batch("t_id"))
    _, plain = bags([table()], torch.int8)
    features = batch("t_id")
    with_weights = KeyedJaggedTensor(
        ["t_id"], features.values(), torch.tensor([2.0, 3.0, 4.0]), lengths=features.lengths()
    )
    with pytest.warns(
        UserWarning,
        match=r"keys \['t_id'\]\) has weights.* not weighted",
    ):
        found = plain(with_weights).values()
    assert torch.equal(found, plain(features).values())
    assert torch.equal(found, plain(with_weights).values())  # said once
    for dtype in (torch.float64, torch.float16):
        odd = KeyedJaggedTensor(
            ["t_id"],
            features.values(),
            torch.tensor([2.0, 3.0, 4.0], dtype=dtype),
            lengths=features.lengths(),
        )
        assert_close(weighted(odd).values(), weighted(with_weights).values())


@pytest.mark.parametrize(
    ("dtype", "words"),
    [
        (
            torch.uint8,
            r"table 't' cannot be quantized to torch.uint8: torch.int8 is what has 8 bits",
        ),
        (
            torch.int64,
            (
                r"'t' cannot be quantized to torch.int64: it has more bits .*; use torch.int8, "
                r"torch.quint4x2"
            ),
        ),
        (torch.int32, r"table 't' cannot be quantized to torch.int32"),
        (
            torch.bfloat16,
            r"table 't' cannot be quantized to torch.bfloat16: torch.float16 has as many bits",
        ),
        (torch.float64, r"table 't' cannot be quantized to torch.float64: no operator reads it"),
        (torch.bool, r"table 't' cannot be quantized to torch.bool"),
        (DataType.UINT8, r"table 't' cannot be quantized to torch.uint8"),
    ],
)
def test_formats_without_packed_rows_are_refused_by_table(dtype, words):
    with pytest.raises(ValueError, match=words):
        bags([table()], dtype)


def made(
    *tables: EmbeddingBagConfig, weighted: bool = False, **parts: object
) -> QuantEmbeddingBagCollection:
    return QuantEmbeddingBagCollection(list(tables), weighted, torch.get_default_device(), **parts)  # type: ignore[arg-type]


from_float = QuantEmbeddingBagCollection.from_float


@pytest.mark.parametrize(
    ("make", "kind", "words"),
    [
        (
            lambda: from_float(bags([table()], torch.int8)[1]),
            ValueError,
            r"already quantized .*\['t'\]",
        ),
        (lambda: bags([table()], "int8"), TypeError, "table 't': 'int8' is not a number format"),
        (lambda: made(table()).packed_rows("x"), KeyError, r"no table 'x'; the tables are \['t'\]"),
        (lambda: made(table(), table()), ValueError, "named more than once"),
        (lambda: made(table(pooling=PoolingType.NONE)), ValueError, "a bag is pooled by"),
        (
            lambda: made(table(pooling=PoolingType.MEAN), weighted=True),
            ValueError,
            "weights go with SUM",
        ),
        (
            lambda: made(table(), output_dtype=torch.int8),
            ValueError,
            "looked-up rows cannot be torch.int8",
        ),
        (
            lambda: made(table(), row_alignment=6),
            ValueError,
            "row alignment 6 is not a multiple of 4",
        ),
    ],
)
def test_what_cannot_be_made_is_refused(make, kind, words):
    with pytest.raises(kind, match=words):
        make()


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_numbers_that_are_not_finite_are_refused_with_their_place(number):
    ebc = EmbeddingBagCollection([table("first"), table("second", columns=6)])
    ebc.qconfig = QuantConfig(torch.float, torch.quint4x2)
    with torch.no_grad():
        ebc.embedding_bags["second"].weight[7, 3] = number
    with pytest.raises(ValueError, match=r"table 'second'.* row 7.* column 3"):
        QuantEmbeddingBagCollection.from_float(ebc)


def test_torchs_own_qconfig_and_observer_classes_name_formats():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.ao import quantization as quant
    ebc = EmbeddingBagCollection([table()])
    ebc.qconfig = quant.QConfig(
        activation=quant.PlaceholderObserver,
        weight=quant.PlaceholderObserver.with_args(dtype=torch.qint8),
    )
    assert QuantConfig._fields[:2] == quant.QConfig._fields
    quantized = QuantEmbeddingBagCollection.from_float(ebc)
    assert quantized.embedding_bag_configs()[0].data_type is DataType.INT8
    assert quantized.output_dtype() is torch.float32
    assert ebc.embedding_bag_configs()[0].data_type is DataType.FP32


def test_nothing_requires_grad():
    ebc, quantized = bags([table()], torch.int8)
    assert not quantized(batch("t_id")).values().requires_grad
    assert ebc(batch("t_id")).values().requires_grad
