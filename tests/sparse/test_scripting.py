"""The jagged types in graphs: traced by torch.fx, compiled by TorchScript, saved and loaded.

What makes it work, and what these tests hold the classes to:

- plain classes with ``__slots__``, no base class, every attribute typed where ``__init__`` sets it;
- what TorchScript cannot compile is ``@torch.jit.unused`` (its signature is compiled all the same,
  so foreign types in it are ``Any``) or sits behind ``if not is_scripting():`` alone, without
  ``and``;
- a class is constructed with every argument given, in its own methods or in a free function that
  only static methods call: TorchScript compiles those apart, where any other function that returned
  it would be compiled without end;
- a list of integers comes from an int64 tensor, and numbers are never added in place, which a
  tracer's share;
- ``__fx_create_arg__`` writes an object that leaves a traced graph as a call of its constructor,
  and functions that read numbers (``tolist``) stay whole in the graph (``torch.fx.wrap``). No
  metaclass, so nothing is paid elsewhere.
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
        warnings.filterwarnings(
            "ignore", message=r".torch\.jit\.\w+. is deprecated", category=DeprecationWarning
        )
        # torch.jit.script of torch's own GraphModule, about annotations in its __init__.
        warnings.filterwarnings(
            "ignore",
            message="The TorchScript type system doesn't support instance-level annotations",
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
            keys,
            values,
            weights,
            lengths,
            None,
            None,
            None,
            None,
            None,
            None,
            None,
            None,
            None,
            None,
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
        sums = [
            first.values().sum(),
            (item.values() * item.weights()).sum(),
            item.offsets()[1],
            rest.lengths().sum(),
        ]
        return KeyedTensor(["sums"], [4], torch.stack(sums).unsqueeze(0))


def test_permute_split_and_indexing_run_in_torchscript() -> None:
    module, weights = Operations(), torch.tensor([0.5, 2.0, 1.0, 1.0, 1.0, 1.0])
    scripted = through_a_file(torch.jit.script(Calls(module)))
    expected = module(KeyedJaggedTensor(KEYS, VALUES, weights, lengths=LENGTHS))
    assert expected.values().tolist() == [[5.0, 18.5, 2.0, 4.0]]
    assert torch.equal(scripted(LENGTHS, VALUES, weights).values(), expected.values())


class SplitsTooFew(nn.Module):
    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        first = features.split([1, 1])[0]
        return KeyedTensor(["ids"], [1], first.values().sum().view(1, 1))


def test_torchscript_refuses_segments_that_do_not_hold_all_keys() -> None:
    scripted = through_a_file(torch.jit.script(Calls(SplitsTooFew())))
    with pytest.raises(
        torch.jit.Error, match=r"KeyedJaggedTensor.split: segments \[1, 1\] hold 2 keys"
    ):
        scripted(LENGTHS, VALUES, None)


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


class Moves(nn.Module):
    """What stands before a lookup on a device of its own."""

    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        return features.to(torch.device("meta"), non_blocking=True).to(
            torch.device("meta"), False, torch.float64
        )


class MovesToCpu(nn.Module):
    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        moved = features.to(torch.device("cpu"), non_blocking=True, dtype=torch.float64)
        return KeyedTensor(["w"], [6], (moved.weights() * moved.values()).unsqueeze(0))


def test_a_batch_is_moved_in_torchscript() -> None:
    weights = torch.tensor([0.5, 2.0, 1.0, 1.0, 1.0, 1.0])
    for module in (MovesToCpu(), torch.fx.symbolic_trace(MovesToCpu())):
        got = through_a_file(torch.jit.script(Calls(module)))(LENGTHS, VALUES, weights).values()
        assert got.dtype == torch.float64
        assert got.tolist() == [[0.5, 18.0, 3.0, 3.0, 0.0, 5.0]]


class MovesVariable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.moves = Moves()

    def forward(
        self, lengths: Tensor, values: Tensor
    ) -> tuple[KeyedJaggedTensor, KeyedJaggedTensor]:
        inverse = (["a", "b"], torch.zeros(2, 4, dtype=torch.int64))
        features = KeyedJaggedTensor.from_lengths_sync(
            ["a", "b"], values, lengths, None, None, [[2], [4]], inverse_indices=inverse
        )
        return features, self.moves(features)


@pytest.mark.parametrize("eager", [True, False])
def test_a_moved_batch_knows_what_the_first_one_knew(eager: bool) -> None:
    module = MovesVariable()
    stayed, moved = (
        module(LENGTHS, VALUES)
        if eager
        else through_a_file(torch.jit.script(module))(LENGTHS, VALUES)
    )
    for batch, device in ((stayed, "cpu"), (moved, "meta")):
        assert {
            str(part.device) for part in (batch.values(), batch.lengths(), batch.offsets())
        } == {device}
        assert str(batch.inverse_indices()[1].device) == device
        assert (batch.length_per_key(), batch.offset_per_key(), batch.stride_per_key()) == (
            [2, 4],
            [0, 2, 6],
            [2, 4],
        )
        assert batch.stride_per_key_per_rank() == [[2], [4]]


class ReturnsBatch(nn.Module):
    def forward(self, lengths: Tensor, values: Tensor) -> tuple[KeyedJaggedTensor, JaggedTensor]:
        return KeyedJaggedTensor(["a", "b"], values, lengths=lengths, stride=3), JaggedTensor(
            values, lengths=lengths
        )


def test_a_traced_graph_returns_jagged_tensors() -> None:
    traced = torch.fx.symbolic_trace(ReturnsBatch())
    batch, jagged = traced(LENGTHS, VALUES)
    assert isinstance(batch, KeyedJaggedTensor)
    assert batch.length_per_key() == [3, 3]
    assert jagged.offsets().tolist() == [0, 2, 2, 3, 4, 4, 6]
    scripted_batch, scripted_jagged = compiled(ReturnsBatch())(LENGTHS, VALUES)
    assert scripted_batch.values().tolist() == VALUES.tolist()
    assert scripted_jagged.offsets().tolist() == [0, 2, 2, 3, 4, 4, 6]


class VariableOperations(nn.Module):
    """The same operations on features with numbers of samples of their own."""

    def forward(self, features: KeyedJaggedTensor) -> tuple[Tensor, list[int], list[list[int]]]:
        swapped = features.permute([1, 0])
        first, rest = swapped.split([1, 1])
        offsets = [first.offsets(), rest["a"].offsets(), features.to_dict()["b"].offsets()]
        return (
            torch.cat(offsets),
            swapped.stride_per_key() + rest.length_per_key(),
            first.stride_per_key_per_rank(),
        )


class BuildsVariable(nn.Module):
    """A batch of variable batch size that is built in TorchScript, by a function with default
    arguments.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations = VariableOperations()

    def forward(self, lengths: Tensor, values: Tensor) -> tuple[Tensor, list[int], list[list[int]]]:
        features = KeyedJaggedTensor.from_lengths_sync(
            ["a", "b"], values, lengths, stride_per_key_per_rank=[[1, 1], [3, 1]]
        )
        return self.operations(features)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_variable_batches_run_in_torchscript(dtype: torch.dtype) -> None:
    module = BuildsVariable()
    offsets, numbers, ranks = module(LENGTHS.to(dtype), VALUES)
    assert offsets.tolist() == [0, 1, 2, 2, 4, 0, 2, 2, 0, 1, 2, 2, 4]
    assert (numbers, ranks) == ([4, 2, 2], [[3, 1]])
    got = through_a_file(torch.jit.script(module))(LENGTHS.to(dtype), VALUES)
    assert (got[0].tolist(), got[1], got[2]) == (offsets.tolist(), numbers, ranks)


def empty_batches(features: KeyedJaggedTensor) -> tuple[KeyedJaggedTensor, KeyedJaggedTensor]:
    return KeyedJaggedTensor.empty(is_weighted=True), KeyedJaggedTensor.empty_like(features)


def test_empty_batches_are_made_in_torchscript() -> None:
    made = torch.jit.script(KeyedJaggedTensor.empty)()
    assert (made.keys(), made.to_dict(), made.offsets().tolist()) == ([], {}, [0])
    none, like = torch.jit.script(empty_batches)(made)
    assert (none.weights().numel(), like.keys(), like.stride()) == (0, [], 0)


class Joins(nn.Module):
    def forward(
        self, parts: list[KeyedJaggedTensor]
    ) -> tuple[KeyedJaggedTensor, KeyedJaggedTensor]:
        joined = KeyedJaggedTensor.concat(parts)
        return joined, KeyedJaggedTensor.empty_like(joined)


def test_joining_and_emptying_stay_calls_in_a_traced_graph() -> None:
    parts = KeyedJaggedTensor(KEYS, VALUES, torch.ones(6), lengths=LENGTHS).split([1, 2])
    joined, none = torch.fx.symbolic_trace(Joins())(parts)
    assert torch.equal(joined.values(), VALUES)
    assert (joined.keys(), none.keys(), none.weights().numel(), none.stride()) == (KEYS, [], 0, 2)


class KeysAsInput(nn.Module):
    def forward(
        self, keys: list[str], values: Tensor, lengths: Tensor
    ) -> tuple[KeyedJaggedTensor, int]:
        batch = KeyedJaggedTensor(keys, values, lengths=lengths)
        return batch, batch.stride()


def test_keys_may_be_an_input_of_a_traced_graph() -> None:
    batch, stride = torch.fx.symbolic_trace(KeysAsInput())(KEYS, VALUES, LENGTHS)
    assert (stride, batch.keys(), batch.offsets().tolist()) == (2, KEYS, [0, 2, 2, 3, 4, 4, 6])


class FirstOffsets(nn.Module):
    def forward(self, offsets: Tensor, values: Tensor) -> Tensor:
        return KeyedJaggedTensor.from_offsets_sync(["a", "b"], values, offsets)["a"].offsets()


def test_a_graph_recorded_by_jit_trace_takes_other_batch_sizes() -> None:
    two, six = (
        (torch.tensor([0, 2, 2]), torch.arange(2)),
        (torch.tensor([0, 2, 2, 3, 4, 6, 8]), torch.arange(8)),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", torch.jit.TracerWarning)
        traced = torch.jit.trace(FirstOffsets(), two, strict=False)
    assert traced(*two).tolist() == [0, 2]
    assert traced(*six).tolist() == [0, 2, 2, 3]


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


class JoinsOnly(nn.Module):
    def forward(self, parts: list[KeyedJaggedTensor]) -> KeyedJaggedTensor:
        return KeyedJaggedTensor.concat(parts)


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("weights", [None, torch.arange(6.0)])
def test_batches_are_joined_in_torchscript(weights: Tensor | None, traced: bool) -> None:
    batch = KeyedJaggedTensor(KEYS, VALUES, weights, lengths=LENGTHS)
    parts = batch.split([1, 2])
    module = torch.fx.symbolic_trace(JoinsOnly()) if traced else JoinsOnly()
    joined = through_a_file(torch.jit.script(module))(parts)
    assert (joined.keys(), joined.stride(), joined.length_per_key()) == (KEYS, 2, [2, 2, 2])
    assert torch.equal(joined.values(), VALUES) and torch.equal(joined.lengths(), LENGTHS)
    assert (
        (joined.weights_or_none() is None)
        if weights is None
        else torch.equal(joined.weights(), weights)
    )


def test_batches_that_do_not_fit_are_not_joined_in_torchscript() -> None:
    joins = torch.jit.script(JoinsOnly())
    batch = KeyedJaggedTensor(["a"], VALUES[:3], lengths=torch.tensor([2, 1]))
    longer = KeyedJaggedTensor(["b"], VALUES[:3], lengths=torch.tensor([2, 1, 0]))
    weighted = KeyedJaggedTensor(["b"], VALUES[:3], torch.ones(3), lengths=torch.tensor([2, 1]))
    variable = KeyedJaggedTensor(
        ["b"], VALUES[:3], lengths=torch.tensor([2, 1]), stride_per_key_per_rank=[[2]]
    )
    for other, message in (
        (longer, r"KeyedJaggedTensor.concat: samples differ: \[2, 3\]"),
        (weighted, "KeyedJaggedTensor.concat: weights differ: 1 of 2 batches have weights"),
        (variable, "KeyedJaggedTensor.concat: variable batch differ: 1 of 2"),
        (batch, "KeyedJaggedTensor.concat: keys occur twice"),
    ):
        with pytest.raises(torch.jit.Error, match=message):
            joins([batch, other])
