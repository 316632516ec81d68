"""The jagged types in graphs: traced by torch.fx, compiled by TorchScript, saved and loaded.

What makes it work, and what these tests hold the classes to:

- plain classes with ``__slots__``, no base class, every attribute typed where ``__init__`` sets it;
- what TorchScript cannot compile is ``@torch.jit.unused`` (its signature is compiled all the same, so foreign types
  in it are ``Any``) or sits behind ``if not is_scripting():`` alone, without ``and``;
- a class is constructed only in its own methods, with every argument given: a free function that returned it would be
  compiled while the class is, without end;
- ``__fx_create_arg__`` writes an object that leaves a traced graph as a call of its constructor, and functions that
  read numbers (``tolist``) stay whole in the graph (``torch.fx.wrap``). No metaclass, so nothing is paid elsewhere.
"""

import io
import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from tutorec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from tutorec.modules.embedding_modules import EmbeddingBagCollection
from tutorec.sparse.jagged import JaggedTensor
from tutorec.sparse.keyed import KeyedTensor
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor

TABLES = [
    EmbeddingBagConfig(10, 4, "item_table", feature_names=["item", "clicked"]),
    EmbeddingBagConfig(10, 3, "user_table", feature_names=["user"], pooling=PoolingType.MEAN),
]
KEYS = ["item", "clicked", "user"]
LENGTHS = torch.tensor([2, 0, 1, 1, 0, 2])
VALUES = torch.tensor([1, 9, 3, 3, 0, 5])


@pytest.fixture(autouse=True)
def _torchscript_is_deprecated() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r".torch\.jit\.\w+. is deprecated", category=DeprecationWarning)
        # torch.jit.script of torch's own GraphModule, about annotations in its __init__.
        warnings.filterwarnings(
            "ignore", message="The TorchScript type system doesn't support instance-level annotations"
        )
        yield


def through_a_file(scripted: torch.jit.ScriptModule) -> torch.jit.ScriptModule:
    file = io.BytesIO()
    torch.jit.save(scripted, file)
    file.seek(0)
    return torch.jit.load(file)


def compiled(module: nn.Module) -> torch.jit.ScriptModule:
    return through_a_file(torch.jit.script(torch.fx.symbolic_trace(module)))


class FromTensors(nn.Module):
    """Lengths and values in, pooled columns out: what a server calls."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = EmbeddingBagCollection(TABLES)

    def forward(self, lengths: Tensor, values: Tensor) -> KeyedTensor:
        return self.tables(KeyedJaggedTensor(KEYS, values, lengths=lengths, stride=2))


def test_a_graph_from_tensors_to_a_keyed_tensor_is_bit_equal() -> None:
    module = FromTensors()
    expected, got = module(LENGTHS, VALUES), compiled(module)(LENGTHS, VALUES)
    assert torch.equal(got.values(), expected.values())
    assert (got.keys(), got.length_per_key(), got.key_dim()) == (KEYS, [4, 4, 3], 1)
    assert torch.equal(got.to_dict()["user"], expected["user"])
    assert torch.equal(got["clicked"], expected["clicked"])


class FromBatch(nn.Module):
    """A batch in: its type is compiled with its methods."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = EmbeddingBagCollection(TABLES)

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        return self.tables(features)


class Calls(nn.Module):
    """Builds a batch in TorchScript and hands it to a traced graph that takes one."""

    def __init__(self, traced: nn.Module) -> None:
        super().__init__()
        self.traced = traced

    def forward(self, lengths: Tensor, values: Tensor, weights: Tensor | None) -> KeyedTensor:
        keys = ["item", "clicked", "user"]
        # TorchScript's classes know no default arguments from outside their file: all are given.
        batch = KeyedJaggedTensor(
            keys, values, weights, lengths, None, None, None, None, None, None, None, None, None, None
        )
        return self.traced(batch)


def test_a_graph_that_takes_a_batch_is_bit_equal() -> None:
    module = FromBatch()
    scripted = through_a_file(torch.jit.script(Calls(torch.fx.symbolic_trace(module))))
    expected = module(KeyedJaggedTensor(KEYS, VALUES, lengths=LENGTHS))
    assert torch.equal(scripted(LENGTHS, VALUES, None).values(), expected.values())


class Operations(nn.Module):
    """The operations that a sharded lookup does to a batch."""

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        swapped = features.permute([2, 0, 1])
        first, rest = swapped.split([1, 2])
        item = rest["item"]
        sums = [first.values().sum(), (item.values() * item.weights()).sum(), item.offsets()[1], rest.lengths().sum()]
        return KeyedTensor(["sums"], [4], torch.stack(sums).unsqueeze(0))


def test_permute_split_and_indexing_run_in_torchscript() -> None:
    module, weights = Operations(), torch.tensor([0.5, 2.0, 1.0, 1.0, 1.0, 1.0])
    scripted = through_a_file(torch.jit.script(Calls(module)))
    expected = module(KeyedJaggedTensor(KEYS, VALUES, weights, lengths=LENGTHS))
    assert expected.values().tolist() == [[5.0, 18.5, 2.0, 4.0]]
    assert torch.equal(scripted(LENGTHS, VALUES, weights).values(), expected.values())


class BuildsAndOperates(nn.Module):
    """The same operations on a batch that is built inside the traced graph."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = Operations()

    def forward(self, lengths: Tensor, values: Tensor, weights: Tensor) -> KeyedTensor:
        return self.operations(KeyedJaggedTensor(KEYS, values, weights, lengths))


def test_operations_on_a_batch_built_in_the_graph_are_traced() -> None:
    weights = torch.tensor([0.5, 2.0, 1.0, 1.0, 1.0, 1.0])
    got = compiled(BuildsAndOperates())(LENGTHS, VALUES, weights)
    assert got.values().tolist() == [[5.0, 18.5, 2.0, 4.0]]


class ReturnsBatch(nn.Module):
    def forward(self, lengths: Tensor, values: Tensor) -> tuple[KeyedJaggedTensor, JaggedTensor]:
        return KeyedJaggedTensor(["a", "b"], values, lengths=lengths, stride=3), JaggedTensor(values, lengths=lengths)


def test_a_traced_graph_returns_jagged_tensors() -> None:
    traced = torch.fx.symbolic_trace(ReturnsBatch())
    batch, jagged = traced(LENGTHS, VALUES)
    assert isinstance(batch, KeyedJaggedTensor)
    assert batch.length_per_key() == [3, 3]
    assert jagged.offsets().tolist() == [0, 2, 2, 3, 4, 4, 6]
    scripted_batch, scripted_jagged = compiled(ReturnsBatch())(LENGTHS, VALUES)
    assert scripted_batch.values().tolist() == VALUES.tolist()
    assert scripted_jagged.offsets().tolist() == [0, 2, 2, 3, 4, 4, 6]


class OffsetsOnly(nn.Module):
    def forward(self, lengths: Tensor, values: Tensor) -> Tensor:
        return JaggedTensor(values, lengths=lengths).offsets() + 0


def test_nothing_is_checked_while_a_graph_is_captured() -> None:
    too_many = torch.tensor([2, 2, 9])
    traced = torch.fx.symbolic_trace(OffsetsOnly())
    scripted = torch.jit.script(traced)
    assert scripted(too_many, VALUES).tolist() == [0, 2, 4, 13]
    exported = torch.export.export(OffsetsOnly(), (LENGTHS, VALUES), strict=False)
    assert exported.module()(LENGTHS, VALUES).tolist() == [0, 2, 2, 3, 4, 4, 6]


def test_a_class_is_compiled_without_inheritance() -> None:
    for kind in (JaggedTensor, KeyedJaggedTensor, KeyedTensor):
        assert kind.__mro__ == (kind, object)
        assert not hasattr(kind, "__dict__") or "__dict__" not in kind.__dict__
