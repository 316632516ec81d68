"""Tables in a YAML file: what it may hold, and that what is wrong is named with file, table and
key.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tutorec import table_files
from tutorec.distributed.planner.options import ParameterConstraints
from tutorec.errors import PlannerError, PlannerErrorType
from tutorec.modules.embedding_configs import PoolingType
from tutorec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from tutorec.table_files import load_tables, tables_of
from tutorec.types import DataType

ITEM = "  - {name: item, num_embeddings: 8, embedding_dim: 4}\n"


def of_bags(text: str) -> EmbeddingBagCollection:
    model = tables_of(text).model
    assert isinstance(model, EmbeddingBagCollection)
    return model


def test_example_of_the_documentation_says_what_it_says():
    doc = table_files.__doc__ or ""
    text = doc.split(".. code-block:: yaml\n")[1].split("\nKeys of a table")[0]
    file = tables_of(text)
    assert isinstance(file.model, EmbeddingBagCollection)
    item, user = file.model.embedding_bag_configs()
    assert (item.num_embeddings, item.embedding_dim, item.feature_names) == (
        100_000_000,
        64,
        ["item", "seen"],
    )
    assert user.feature_names == ["user"]
    assert file.batch_size == 512
    assert file.fused_params == {"optimizer": "exact_row_wise_adagrad", "learning_rate": 0.02}
    assert file.constraints == {
        "item": ParameterConstraints(pooling_factors=[1.0, 20.0]),
        "user": ParameterConstraints(
            sharding_types=["table_wise", "column_wise"], min_partition=32
        ),
    }


def test_tables_are_not_allocated():
    model = of_bags("tables:\n  - {name: item, num_embeddings: 1e12, embedding_dim: 1024}")
    assert model.embedding_bags["item"].get_parameter("weight").is_meta


def test_every_key_of_a_table_arrives():
    text = """
tables:
  - name: item
    module: sparse.bags
    num_embeddings: 1_000
    embedding_dim: 16
    feature_names: [a, b]
    data_type: fp16
    pooling: sum
    is_weighted: true
    sharding_types: [row_wise]
    compute_kernels: [fused]
    min_partition: 8
    pooling_factors: [1, 2.5]
    num_poolings: [1, 2]
    batch_sizes: [4, 8]
    pin: [0, 3]
    colocate: pair
"""
    file = tables_of(text)
    bags = file.model.get_submodule("sparse.bags")
    assert isinstance(bags, EmbeddingBagCollection)
    [config] = bags.embedding_bag_configs()
    assert (config.pooling, config.data_type, config.num_embeddings) == (
        PoolingType.SUM,
        DataType.FP16,
        1000,
    )
    assert file.constraints["item"] == ParameterConstraints(
        sharding_types=["row_wise"],
        compute_kernels=["fused"],
        min_partition=8,
        pooling_factors=[1.0, 2.5],
        num_poolings=[1.0, 2.0],
        batch_sizes=[4, 8],
        pin=[0, 3],
        colocate="pair",
        is_weighted=True,
    )
    assert (file.batch_size, file.fused_params) == (None, None)


def test_tables_without_pooling_are_sequences():
    model = tables_of(
        "tables:\n  - {name: item, num_embeddings: 8, embedding_dim: 4, pooling: NONE}"
    ).model
    assert isinstance(model, EmbeddingCollection)


def test_modules_may_differ_in_kind():
    text = "tables:\n  - {name: a, num_embeddings: 8, embedding_dim: 4, module: arch.bags}\n"
    text += "  - {name: b, num_embeddings: 8, embedding_dim: 4, module: arch.rows, pooling: none}\n"
    model = tables_of(text).model
    assert isinstance(model.get_submodule("arch.bags"), EmbeddingBagCollection)
    assert isinstance(model.get_submodule("arch.rows"), EmbeddingCollection)


def test_merge_keys_save_repetition():
    text = """
tables:
  - &wide {name: a, num_embeddings: 8, embedding_dim: 64, min_partition: 32}
  - {<<: *wide, name: b}
  - {<<: *wide, name: c, embedding_dim: 32, min_partition: 4}
"""
    file = tables_of(text)
    assert [config.embedding_dim for config in of_bags(text).embedding_bag_configs()] == [
        64,
        64,
        32,
    ]
    assert {name: each.min_partition for name, each in file.constraints.items()} == {
        "a": 32,
        "b": 32,
        "c": 4,
    }


@pytest.mark.parametrize("written", ["100000000", "100_000_000", "1e8", "1.0e+8", "+100000000"])
def test_whole_numbers_are_read_however_they_are_written(written: str):
    model = of_bags(f"tables:\n  - {{name: item, num_embeddings: {written}, embedding_dim: 4}}")
    assert model.embedding_bag_configs()[0].num_embeddings == 100_000_000


@given(rows=st.integers(1, 10**12), columns=st.integers(1, 2048), factor=st.floats(0, 1e6))
def test_numbers_come_back_as_they_were_written(rows: int, columns: int, factor: float):
    entry = (
        f"{{name: t, num_embeddings: {rows}, embedding_dim: {columns}, pooling_factors: "
        f"[{factor!r}]}}"
    )
    file = tables_of(f"tables: [{entry}]")
    assert isinstance(file.model, EmbeddingBagCollection)
    [config] = file.model.embedding_bag_configs()
    assert (config.num_embeddings, config.embedding_dim) == (rows, columns)
    assert file.constraints["t"].pooling_factors == [factor]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "f.yaml: the file is None, not a mapping"),
        ("tables: [", "f.yaml: this is not YAML: .* line 1"),
        ("batch_size: 4", "the file lists no tables"),
        ("tables: []", "the file lists no tables"),
        ("table: []", "the file has the key 'table'; did you mean 'tables'?"),
        ("tables:\n  - item", "entry 1 of tables is 'item', not a mapping"),
        ("tables:\n  - {num_embeddings: 8}", "entry 1 of tables lacks 'name'"),
        (
            "tables:\n  - name: item\n    embedding_dim: 4",
            "entry 1 of tables lacks 'num_embeddings'",
        ),
        (
            "tables:\n" + ITEM + "  - name: b\n    num_embedings: 4",
            "entry 2 of tables has the key 'num_embedings'; did you mean 'num_embeddings'?",
        ),
        ("tables:\n" + ITEM + ITEM, "2 tables have the name 'item'"),
        ("tables:\n  - name: a\n    name: b", "line 2: 'name' is given 2 times"),
        (
            "tables:\n" + ITEM.replace("item", "no"),
            "entry 1 of tables: False is not a name: write it in quotes",
        ),
        (
            "tables:\n" + ITEM.replace("8", "many"),
            "table 'item': num_embeddings must be a positive whole number",
        ),
        (
            "tables:\n" + ITEM.replace("8", "0"),
            "table 'item': num_embeddings must be a positive whole number",
        ),
        (
            "tables:\n" + ITEM.replace("8", "2.5"),
            "table 'item': num_embeddings must be a positive whole number",
        ),
        (
            "tables:\n" + ITEM.replace("8", "1e18"),
            "'item': num_embeddings is 1,000,000,000,000,000,000: give at most",
        ),
        (
            "tables:\n" + ITEM.replace("4}", "1e10}"),
            "'item': embedding_dim is 10,000,000,000: give at most 1,000,000",
        ),
        (
            "tables:\n" + ITEM.replace("4}", "4, pooling: MAX}"),
            "table 'item': 'MAX' is not one of SUM, MEAN",
        ),
        (
            "tables:\n" + ITEM.replace("4}", "4, data_type: INT8}"),
            "table 'item': data_type INT8 cannot be trained",
        ),
        (
            "tables:\n" + ITEM.replace("4}", "4, is_weighted: 2}"),
            "table 'item': is_weighted=2 must be one of True, False",
        ),
        ("tables:\n" + ITEM.replace("4}", "4, feature_names: [a, a]}"), "name a feature twice"),
        ("tables:\n" + ITEM.replace("4}", "4, feature_names: [[a]]}"), "is not a name"),
        ("tables:\n" + ITEM.replace("4}", "4, module: a..b}"), "module name can't be empty"),
        (
            "tables:\n" + ITEM.replace("4}", "4, module: a.forward.b}"),
            "attribute 'forward' already exists",
        ),
        ("tables:\n" + ITEM + "fused_params: 3", "fused_params is 3, not a mapping"),
        (
            "tables:\n" + ITEM + ITEM.replace("item", "b").replace("4}", "4, pooling: NONE}"),
            "tables 'item', 'b' differ in whether they pool",
        ),
        (
            "tables:\n" + ITEM + ITEM.replace("item", "b").replace("4}", "4, module: bags}"),
            "table 'item': module '' and another one are inside one another",
        ),
        (
            "tables:\n"
            + ITEM.replace("4}", "4, module: a.b}")
            + ITEM.replace("item", "b").replace("4}", "4, module: a}"),
            "table 'item': module 'a.b' and another one are inside one another",
        ),
        ("tables: " + "[" * 50_000, "maximum recursion depth"),
        ("tables: " + "{a: " * 50_000, "maximum recursion depth"),
        ("tables:\n " + "- " * 50_000, "maximum recursion depth"),
    ],
)
def test_what_is_wrong_is_named(text: str, message: str):
    with pytest.raises(PlannerError, match=message) as caught:
        tables_of(text, "f.yaml")
    assert str(caught.value).startswith("f.yaml: ")
    assert caught.value.error_type is PlannerErrorType.INPUT_VALIDATION


def test_file_is_read_and_named(tmp_path: Path):
    path = tmp_path / "tables.yaml"
    path.write_text("tables:\n" + ITEM, encoding="utf-8")
    assert isinstance(load_tables(path).model, EmbeddingBagCollection)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PlannerError, match=r"tables.yaml.*not YAML"):
        load_tables(path)
    with pytest.raises(FileNotFoundError):
        load_tables(tmp_path / "absent.yaml")
