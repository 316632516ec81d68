"""Quantized models that are made without rows, and get some later."""

from __future__ import annotations

import io
from itertools import product

import pytest
import torch
from quant.equals import bags
from torch import nn

from tutorec._kernels.packed_layout import row_alignment, row_layout
from tutorec.distributed.core.env import ShardingEnv
from tutorec.distributed.model_parallel import DistributedModelParallel
from tutorec.inference.modules import shard_quant_model
from tutorec.modules.embedding_collection import EmbeddingCollection
from tutorec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from tutorec.modules.embedding_modules import EmbeddingBagCollection
from tutorec.quant.embedding_modules import (
    quant_prep_customize_row_alignment,
    quant_prep_enable_quant_state_dict_split_scale_bias_for_types,
)
from tutorec.quant.utils import meta_to_cpu_placement
from tutorec.quant.whole_model import quantize
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor
from tutorec.types import DataType

META = torch.device("meta")
TABLE = EmbeddingBagConfig(10, 8, "t", feature_names=["t_id"])
BATCH = KeyedJaggedTensor(["t_id"], torch.tensor([3, 9]), lengths=torch.tensor([2, 0]))


@pytest.mark.parametrize("wrap", [nn.Sequential, lambda one: one])
def test_tables_on_meta_get_rows_of_zeros_and_then_those_that_are_loaded(wrap):
    _, loaded = bags([TABLE], torch.int8)
    model = quantize(wrap(EmbeddingBagCollection([TABLE], device=META)), torch.int8)
    meta_to_cpu_placement(model)
    found = next(one for one in model.modules() if hasattr(one, "packed_rows"))
    assert found.device.type == "cpu" and torch.equal(found(BATCH).values(), torch.zeros(2, 8))
    found.load_state_dict(loaded.state_dict())
    assert torch.equal(found(BATCH).values(), loaded(BATCH).values())


def test_tables_that_have_rows_keep_them_and_other_parts_stay():
    _, loaded = bags([TABLE], torch.int8)
    model = nn.ModuleDict({"a": loaded, "b": nn.Linear(2, 1, device="meta")})
    before = loaded.packed_rows("t").clone()
    meta_to_cpu_placement(model)
    assert torch.equal(loaded.packed_rows("t"), before) and model["b"].weight.is_meta


def test_a_wrapped_model_gets_its_rows_afterwards():
    _, loaded = bags([TABLE], torch.int8)
    model = DistributedModelParallel(
        nn.Sequential(quantize(EmbeddingBagCollection([TABLE], device=META))),
        ShardingEnv.from_local(1, 0),
        sharders=[],
    )
    with pytest.raises(ValueError, match=r"tables \['t'\].*meta_to_cpu_placement"):
        model(BATCH)
    meta_to_cpu_placement(model)
    model.module[0].load_state_dict(loaded.state_dict())
    assert torch.equal(model(BATCH).values(), loaded(BATCH).values())


def test_scale_and_bias_of_their_own_for_all_collections_of_a_kind():
    rows = EmbeddingCollection([EmbeddingConfig(10, 8, "r", feature_names=["r_id"])])
    model = nn.ModuleDict({"bags": nn.Sequential(EmbeddingBagCollection([TABLE])), "rows": rows})
    quant_prep_enable_quant_state_dict_split_scale_bias_for_types(model, [EmbeddingBagCollection])
    state = quantize(model).state_dict()
    assert (
        "bags.0.embedding_bags.t.weight_qscale" in state
        and "rows.embeddings.r.weight_qscale" not in state
    )


def test_rows_that_were_never_allocated_are_not_looked_up():
    model = quantize(nn.ModuleDict({"b": EmbeddingBagCollection([TABLE], device=META)}))["b"]
    with pytest.raises(
        ValueError,
        match=r"tables \['t'\].*no rows.*meta_to_cpu_placem",
    ):
        model(BATCH)
    _, loaded = bags([TABLE], torch.int8)
    with pytest.raises(ValueError, match=r"tables \['t'\] are on the meta device"):
        loaded.to("meta")(BATCH)
    rows = quantize(
        EmbeddingCollection([EmbeddingConfig(10, 8, "t", feature_names=["t_id"])], device=META)
    )
    with pytest.raises(ValueError, match=r"tables \['t'\] are on the meta device"):
        rows(BATCH)


@pytest.mark.parametrize("pair", [(torch.int8, torch.quint4x2), (torch.float16, torch.int8)])
def test_a_state_of_another_format_and_the_same_bytes_is_refused(pair):
    (_, one), (_, other) = (bags([TABLE], dtype) for dtype in pair)
    state, before = other.state_dict(), one.packed_rows("t").clone()
    assert state["embedding_bags.t.weight"].shape == before.shape
    stored = io.BytesIO()
    torch.save(state, stored)
    stored.seek(0)
    for each in (state, torch.load(stored)):
        for model, found in ((one, each), (nn.Sequential(one), nn.Sequential(other).state_dict())):
            with pytest.raises(
                ValueError,
                match=r"table 't'.*8 numbers.*\w+.*8",
            ):
                model.load_state_dict(found)
    assert torch.equal(one.packed_rows("t"), before)
    one.load_state_dict(one.state_dict())


def test_a_state_of_another_format_is_refused_by_sharded_tables_too():
    (_, one), (_, other) = bags([TABLE], torch.int8), bags([TABLE], torch.quint4x2)
    sharded, _ = shard_quant_model(nn.Sequential(one), 2)
    from_other, _ = shard_quant_model(nn.Sequential(other), 2)
    for state in (from_other.state_dict(), nn.Sequential(other).state_dict()):
        with pytest.raises(
            ValueError,
            match=r"table 't'.*8 numbers.*INT8.*8.*INT4",
        ):
            sharded.load_state_dict(state)


def test_invalid_alignments_are_named():
    ebc = EmbeddingBagCollection([TABLE])
    for wrong in (0, 6):
        with pytest.raises(ValueError, match=f"row alignment {wrong!r} is not a multiple of 4;"):
            quantize(ebc, row_alignment=wrong)
    with pytest.raises(ValueError, match="row_alignment='16': use 'fast', 'small'"):
        quantize(ebc, row_alignment="16")


def test_an_alignment_that_a_collection_asks_for_is_checked_before_anything_is_changed():
    model = nn.ModuleDict(
        {"a": EmbeddingBagCollection([TABLE]), "b": EmbeddingBagCollection([TABLE])}
    )
    quant_prep_customize_row_alignment(model["b"], [EmbeddingBagCollection], 6)
    with pytest.raises(ValueError, match="row alignment 6"):
        quantize(model, inplace=True)
    assert not model["a"].embedding_bags["t"].weight.is_meta


@pytest.mark.parametrize("wanted", ["fast", "small", 4, 16, 64])
def test_bytes_and_results_of_every_row_alignment(wanted):
    """Tables of all formats and widths return the same numbers, whatever the padding of
    their rows.
    """
    kinds = {
        torch.int8: DataType.INT8,
        torch.quint4x2: DataType.INT4,
        torch.quint2x4: DataType.INT2,
    }
    sizes = list(product(kinds, (4, 20, 60, 64, 96, 128)))
    tables = [
        EmbeddingBagConfig(30, D, f"t{i}", feature_names=["f"]) for i, (_, D) in enumerate(sizes)
    ]
    formats = {f"t{i}": dtype for i, (dtype, _) in enumerate(sizes)}
    ebc = EmbeddingBagCollection(tables)
    batch = KeyedJaggedTensor(["f"], torch.tensor([0, 29, 7]), lengths=torch.tensor([2, 0, 1]))
    padded = quantize(ebc, per_table=formats, row_alignment=16)
    module = quantize(ebc, per_table=formats, row_alignment=wanted)
    assert torch.equal(module(batch).values(), padded(batch).values())
    for index, (dtype, columns) in enumerate(sizes):
        shown = module.embedding_bags[f"t{index}"].weight
        assert shown.data_ptr() % 64 == 0, "a table begins a cache line"
        held = row_layout(columns, kinds[dtype], 4).row_bytes
        assert shown.shape[1] >= held
        assert wanted != "small" or shown.shape[1] == held


def test_every_line_of_a_fast_row_is_prefetched():
    """The rule in the docstring of ``packed_layout``, byte by byte, for every format and width."""
    for kind, columns in product((DataType.INT8, DataType.INT4, DataType.INT2), range(1, 300)):
        row = row_layout(columns, kind, row_alignment(columns, kind, "fast"))
        tail = row.row_bytes % 64
        extra = [row.row_bytes - tail] if 0 < tail <= (8 if kind is DataType.INT8 else 4) else []
        for start in range(0, 64 * row.row_bytes, row.row_bytes):
            prefetched = {
                (start + place) // 64 for place in [*range(0, row.payload_bytes, 64), *extra]
            }
            touched = {
                place // 64 for place in range(start, start + row.scale_bytes + row.payload_bytes)
            }
            assert touched <= prefetched, (kind, columns)
