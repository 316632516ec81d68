import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from hypothesis import given
from strategies import DrawnBatch, jagged_batches
from torch import nn
from torch.export import Dim
from torch.fx._pytree import tree_flatten_spec

from tutorec.modules.embedding_configs import EmbeddingBagConfig
from tutorec.modules.embedding_modules import EmbeddingBagCollection
from tutorec.sparse.equality import jt_is_equal, kjt_is_equal, kt_is_equal
from tutorec.sparse.jagged import JaggedTensor
from tutorec.sparse.keyed import KeyedTensor
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor


def small(**parts: Any) -> KeyedJaggedTensor:
    given = {
        "keys": ["a", "b"],
        "values": torch.tensor([5, 7, 1]),
        "lengths": torch.tensor([1, 0, 0, 2]),
    }
    return KeyedJaggedTensor(**{**given, **parts})


def larger() -> KeyedJaggedTensor:
    """Three samples instead of two, from offsets instead of lengths."""
    return KeyedJaggedTensor(
        ["a", "b"], torch.tensor([5, 7, 1, 4]), offsets=torch.tensor([0, 1, 2, 4, 4, 4, 4])
    )


def variable() -> KeyedJaggedTensor:
    inverse = (["a", "b"], torch.tensor([[0, 0, 0], [0, 2, 1]]))
    return small(
        stride_per_key_per_rank=[[1], [3]],
        inverse_indices=inverse,
        weights=torch.tensor([0.5, 1.0, 2.0]),
    )


@given(jagged_batches())
def test_a_batch_survives_being_flattened(drawn: DrawnBatch) -> None:
    batch = drawn.kjt()
    leaves, spec = pytree.tree_flatten(batch)
    assert [type(leaf) for leaf in leaves] == [torch.Tensor] * (2 if drawn.weights is None else 3)
    assert kjt_is_equal(pytree.tree_unflatten(leaves, spec), batch)
    for key, jagged in batch.to_dict().items():
        again = pytree.tree_map(lambda leaf: leaf, jagged)
        assert jt_is_equal(again, jagged)
        assert [row.tolist() for row in again.to_dense()] == drawn.ids[key]


def test_batches_from_lengths_and_from_offsets_are_one_structure() -> None:
    batch = small()
    batch.offsets()
    specs = {
        pytree.treespec_dumps(pytree.tree_structure(each)) for each in (batch, small(), larger())
    }
    assert len(specs) == 1
    assert pytree.tree_structure(small()) == pytree.tree_structure(larger())
    assert pytree.tree_structure(small()) != pytree.tree_structure(small(weights=torch.ones(3)))


def test_a_variable_batch_keeps_its_samples_and_inverse_indices() -> None:
    batch = variable()
    doubled = pytree.tree_map(lambda leaf: leaf * 2, {"features": batch})["features"]
    assert doubled.stride_per_key() == [1, 3]
    assert doubled.values().tolist() == [10, 14, 2]
    assert doubled.inverse_indices()[1].tolist() == [[0, 0, 0], [0, 4, 2]]
    assert kjt_is_equal(pytree.tree_map(lambda leaf: leaf, batch), batch)


def test_a_batch_without_keys_keeps_its_samples() -> None:
    empty = KeyedJaggedTensor(
        [], torch.tensor([], dtype=torch.int64), lengths=torch.tensor([]).long(), stride=4
    )
    assert pytree.tree_map(lambda leaf: leaf, empty).stride() == 4


def test_a_keyed_tensor_survives_being_flattened() -> None:
    keyed = KeyedTensor(["a", "b"], [1, 2], torch.arange(6.0).view(3, 2), key_dim=0)
    leaves, spec = pytree.tree_flatten(keyed)
    assert leaves[0] is keyed.values()
    assert kt_is_equal(pytree.tree_unflatten(leaves, spec), keyed)


def test_leaves_may_become_anything() -> None:
    shapes = pytree.tree_map(lambda leaf: tuple(leaf.shape), small())
    assert (shapes.values(), shapes.lengths()) == ((3,), (4,))
    assert pytree.tree_leaves(shapes) == [3, 4]
    assert (
        pytree.tree_map(
            lambda _: None, JaggedTensor(torch.ones(1), lengths=torch.tensor([1]))
        ).values()
        is None
    )


def test_key_paths_name_the_parts() -> None:
    paths = [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path({"x": variable()})[0]]
    assert paths == ["['x']._values", "['x']._lengths", "['x']._weights", "['x']._inverse_indices"]
    keyed = KeyedTensor(["a"], [1], torch.ones(1, 1))
    assert [pytree.keystr(path) for path, _ in pytree.tree_flatten_with_path(keyed)[0]] == [
        "._values"
    ]


def test_a_keyed_tensor_is_put_into_the_order_that_a_program_knows() -> None:
    known = pytree.tree_structure(KeyedTensor(["a", "b"], [1, 2], torch.zeros(2, 3)))
    swapped = KeyedTensor(["b", "a"], [2, 1], torch.tensor([[2.0, 3.0, 1.0]]))
    again = pytree.tree_unflatten(tree_flatten_spec(swapped, known), known)
    assert again.keys() == ["a", "b"]
    assert again.values().tolist() == [[1.0, 2.0, 3.0]]
    with pytest.raises(ValueError, match=r"keys \['a', 'b'\].*\['a', 'c'\]"):
        tree_flatten_spec(KeyedTensor(["a", "c"], [1, 2], torch.zeros(2, 3)), known)
    with pytest.raises(ValueError, match=r"\[1, 2\].*\[2, 1\]"):
        tree_flatten_spec(KeyedTensor(["a", "b"], [2, 1], torch.zeros(2, 3)), known)


def test_a_batch_is_put_into_the_order_that_a_program_knows() -> None:
    known = pytree.tree_structure(small())
    again = pytree.tree_unflatten(tree_flatten_spec(small().permute([1, 0]), known), known)
    assert kjt_is_equal(again, small())
    with pytest.raises(ValueError, match=r"weighted False.* called with True"):
        tree_flatten_spec(small(weights=torch.ones(3)), known)
    jagged = pytree.tree_structure(small()["a"])
    assert len(tree_flatten_spec(small()["b"], jagged)) == 2
    with pytest.raises(ValueError, match=r"weighted False.* called with True"):
        tree_flatten_spec(small(weights=torch.ones(3))["a"], jagged)


class Doubles(nn.Module):
    """Takes a batch and returns one of each type."""

    def forward(
        self, batch: KeyedJaggedTensor
    ) -> tuple[KeyedJaggedTensor, JaggedTensor, KeyedTensor]:
        values, lengths = batch.values() * 2, batch.lengths()
        sums = KeyedTensor(
            ["ids", "lists"], [1, 1], torch.stack([values.sum(), lengths.sum()]).unsqueeze(0)
        )
        return (
            KeyedJaggedTensor(batch.keys(), values, lengths=lengths),
            JaggedTensor(values, lengths=lengths),
            sums,
        )


ANY_SIZE = [{0: Dim.DYNAMIC}, {0: Dim.DYNAMIC}]


def exported(module: nn.Module, batch: KeyedJaggedTensor) -> Callable[[KeyedJaggedTensor], Any]:
    return torch.export.export(module, (batch,), strict=False, dynamic_shapes=(ANY_SIZE,)).module()


def test_an_exported_program_takes_and_returns_the_types_at_other_batch_sizes() -> None:
    program = exported(Doubles(), small())
    for batch in (small(), larger()):
        doubled, jagged, sums = program(batch)
        values, lengths = batch.values() * 2, batch.lengths()
        assert kjt_is_equal(doubled, KeyedJaggedTensor(["a", "b"], values, lengths=lengths))
        assert jt_is_equal(jagged, JaggedTensor(values, lengths=lengths))
        assert sums["ids"].tolist() == [[int(values.sum())]]


class PadsAndSplits(nn.Module):
    """What a model does with a sequence inside an exported graph."""

    def forward(self, jagged: JaggedTensor) -> torch.Tensor:
        return jagged.to_padded_dense(3, -1.0)


def test_an_exported_program_pads_as_eager_code_does() -> None:
    one = JaggedTensor(torch.tensor([5, 7, 1]), lengths=torch.tensor([1, 2]))
    two = JaggedTensor(torch.tensor([5, 7, 1, 2, 9]), lengths=torch.tensor([0, 4, 1]))
    program = torch.export.export(
        PadsAndSplits(), (one,), strict=False, dynamic_shapes=(ANY_SIZE,)
    ).module()
    for jagged in (one, two):
        assert torch.equal(program(jagged), jagged.to_padded_dense(3, -1.0))
    assert program(two).tolist() == [[-1, -1, -1], [5, 7, 1], [9, -1, -1]]


class Pools(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = EmbeddingBagCollection(
            [EmbeddingBagConfig(10, 4, "t", feature_names=["a", "b"])]
        )

    def forward(self, batch: KeyedJaggedTensor) -> KeyedTensor:
        return self.tables(batch)


def test_an_exported_collection_keeps_a_check_of_ids_with_names() -> None:
    module = Pools()
    program = exported(module, small())
    for batch in (small(), larger()):
        assert torch.equal(program(batch).values(), module(batch).values())
    operators = {str(node.target) for node in program.graph.nodes}  # pyright: ignore[reportFunctionMemberAccess]
    assert any("embedding_bag" in name for name in operators)
    # An assertion of a graph has the same words for every batch.
    for number in (10, -1):
        with pytest.raises(RuntimeError, match=r"table 't'.*10 rows \(ids 0 to 9\).*feature 'b'"):
            program(small(values=torch.tensor([5, 7, number])))


def test_registered_types_are_copied_by_tree_map_without_their_caches() -> None:
    batch = small()
    batch.to_dict()
    again = copy.copy(pytree.tree_map(torch.clone, batch))
    assert again.values().data_ptr() != batch.values().data_ptr()
    assert kjt_is_equal(again, batch)
