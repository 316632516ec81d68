"""Tracing models with collections of tables: leaves, values that are on their way,
wrappers, marks.
"""

import pytest
import torch
from torch import Tensor, nn

from tutorec.awaitable import LazyNoWait, NoWait
from tutorec.fx.tracer import Tracer, is_fx_tracing, symbolic_trace
from tutorec.fx.utils import assert_fx_safe, fx_marker
from tutorec.inference.scripting import script_model
from tutorec.models.dlrm import DLRM
from tutorec.modules.embedding_configs import EmbeddingBagConfig
from tutorec.modules.embedding_modules import EmbeddingBagCollection
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor

TABLES = [EmbeddingBagConfig(10, 4, f"t{index}", feature_names=[f"f{index}"]) for index in range(5)]
KEYS = [f"f{index}" for index in range(5)]


def dlrm() -> DLRM:
    return DLRM(EmbeddingBagCollection(TABLES), 3, [8, 4], [4, 1]).eval().requires_grad_(False)


def inputs(samples: int) -> tuple[Tensor, KeyedJaggedTensor]:
    ids = torch.arange(5 * samples) % 10
    return torch.ones(samples, 3), KeyedJaggedTensor(
        KEYS, ids, lengths=torch.ones(5 * samples, dtype=torch.int64)
    )


def targets(graph: torch.fx.Graph, op: str) -> list[str]:
    return [str(node.target) for node in graph.nodes if node.op == op]


def test_a_model_is_traced_through_its_collection():
    model = dlrm()
    traced = symbolic_trace(model)
    for samples in (2, 1, 5, 0):
        torch.testing.assert_close(traced(*inputs(samples)), model(*inputs(samples)))


@pytest.mark.parametrize("name", ["EmbeddingBagCollection", "SparseArch"])
def test_a_leaf_module_by_name_is_one_call(name):
    model = dlrm()
    traced = symbolic_trace(model, leaf_modules=[name])
    path = {
        "EmbeddingBagCollection": "sparse_arch.embedding_bag_collection",
        "SparseArch": "sparse_arch",
    }[name]
    calls = targets(traced.graph, "call_module")
    assert path in calls
    assert not [call for call in calls if "embedding_bags." in call]
    assert torch.equal(traced(*inputs(3)), model(*inputs(3)))


def test_the_traced_graph_holds_the_modules_own_parameters():
    model = dlrm()
    traced = symbolic_trace(model)
    model.sparse_arch.embedding_bag_collection.embedding_bags["t0"].weight.zero_()
    torch.testing.assert_close(traced(*inputs(2)), model(*inputs(2)))


@pytest.mark.parametrize("names", ["EmbeddingBagCollection", [EmbeddingBagCollection], [3]])
def test_leaf_modules_that_are_no_names_are_refused(names):
    with pytest.raises(TypeError, match="list of class names"):
        Tracer(leaf_modules=names)


class Tracing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(is_fx_tracing())
        return x + 1


def test_is_fx_tracing_is_true_inside_of_a_trace_alone():
    module = Tracing()
    module(torch.ones(1))
    Tracer().trace(module)
    torch.fx.symbolic_trace(module)
    module(torch.ones(1))
    assert module.seen == [False, True, False, False]


class Fails(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


def test_a_trace_that_fails_is_over():
    with pytest.raises(torch.fx.proxy.TraceError):
        symbolic_trace(Fails())
    assert not is_fx_tracing()


class Lazily(nn.Module):
    """The inner result is still on its way, and the answer too."""

    def forward(self, x: Tensor) -> NoWait[Tensor]:
        return NoWait(torch.relu(LazyNoWait(x + 1)))


def test_lazy_values_are_waited_for_and_ready_ones_stay_awaitable():
    answer = symbolic_trace(Lazily())(torch.tensor([1.0, -3.0]))
    assert isinstance(answer, NoWait)
    assert answer.wait().tolist() == [2.0, 0.0]


class ReturnsLazy(nn.Module):
    def forward(self, x: Tensor) -> LazyNoWait[Tensor]:
        return LazyNoWait(x + 1)


def test_a_lazy_answer_is_its_value():
    assert symbolic_trace(ReturnsLazy())(torch.ones(1)).tolist() == [2.0]


class Inner(nn.Module):
    def forward(self, x: Tensor, scale: float = 2.0) -> Tensor:
        return x * scale


class Hidden(nn.Module):
    """Calls a module that is no submodule, as a lookup that keeps its operators apart does."""

    def __init__(self) -> None:
        super().__init__()
        self._parts = [Inner()]

    def forward(self, x: Tensor) -> Tensor:
        return self._parts[0](x)


def test_a_module_that_is_no_submodule_is_traced_through():
    assert symbolic_trace(Hidden())(torch.ones(1)).tolist() == [2.0]


def test_a_leaf_that_is_no_submodule_is_refused_by_name():
    with pytest.raises(
        ValueError,
        match=r"Inner.*not.*Hidden.*leaf_modules",
    ):
        symbolic_trace(Hidden(), leaf_modules=["Inner"])


class Wrapper(nn.Module):
    """What DistributedModelParallel looks like to a tracer."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._dmp_wrapped_module = module

    def forward(self, *args, **kwargs):
        return self._dmp_wrapped_module(*args, **kwargs)


def test_of_a_wrapped_model_the_model_is_traced_under_the_wrappers_names():
    model = dlrm()
    traced = symbolic_trace(Wrapper(Wrapper(model)))
    assert [node.name for node in traced.graph.nodes if node.op == "placeholder"] == [
        "dense_features",
        "sparse_features",
    ]
    assert "_dmp_wrapped_module._dmp_wrapped_module.over_arch.model.1" in targets(
        traced.graph, "call_module"
    )
    torch.testing.assert_close(traced(*inputs(2)), model(*inputs(2)))


def test_concrete_arguments_are_taken_in():
    traced = symbolic_trace(Inner(), concrete_args={"scale": 3.0})
    assert traced(torch.ones(1), 3.0).tolist() == [3.0]


def test_annotations_that_are_not_evaluated_become_types():
    traced = symbolic_trace(dlrm())  # its file says `from __future__ import annotations`
    types = {
        node.name: node.type for node in traced.graph.nodes if node.op in ("placeholder", "output")
    }
    assert types == {
        "dense_features": Tensor,
        "sparse_features": KeyedJaggedTensor,
        "output": Tensor,
    }
    assert script_model(dlrm())(*inputs(2)).shape == (2, 1)


class NamesWhatIsNotThere(nn.Module):
    def forward(self, x: "Missing") -> "Missing":  # noqa: F821
        return x + 1


def test_annotations_without_a_type_are_left_out():
    assert script_model(NamesWhatIsNotThere())(torch.ones(1)).tolist() == [2.0]


class Marked(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        doubled = x + x
        fx_marker("BEGIN", doubled)
        unused = doubled.neg()
        fx_marker("END", unused)
        return doubled


def marks(graph: torch.fx.Graph, name: str) -> list[torch.fx.Node]:
    return [node for node in graph.nodes if node.op == "call_function" and node.args[:1] == (name,)]


def test_markers_stand_in_the_graph_and_survive_its_cleaning():
    traced = symbolic_trace(Marked())
    traced.graph.eliminate_dead_code()
    traced.recompile()
    assert [len(marks(traced.graph, name)) for name in ("BEGIN", "END", "OTHER")] == [1, 1, 0]
    assert marks(traced.graph, "END")[0].args[1].target == "neg"
    assert traced(torch.ones(1)).tolist() == Marked()(torch.ones(1)).tolist() == [2.0]
    assert script_model(traced)(torch.ones(1)).tolist() == [2.0]


def test_markers_are_left_by_torchs_own_tracer_too():
    assert len(marks(torch.fx.symbolic_trace(Marked()).graph, "BEGIN")) == 1


class Asserts(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        assert_fx_safe(x.dim() == 2, "x has two dimensions")
        return x + 1


def test_an_assertion_is_left_out_of_a_traced_graph_and_kept_in_torchscript():
    with pytest.raises(AssertionError, match="x has two dimensions"):
        Asserts()(torch.ones(1))
    assert symbolic_trace(Asserts())(torch.ones(1)).tolist() == [2.0]
    with pytest.raises(torch.jit.Error, match="x has two dimensions"):
        torch.jit.script(Asserts())(torch.ones(1))


def shards(rank: int) -> tuple[list[str], bool]:
    from tutorec.distributed.model_parallel import DistributedModelParallel

    tables = [
        EmbeddingBagConfig(10, 4, f"t{index}", feature_names=[f"f{index}"]) for index in range(5)
    ]
    model = DistributedModelParallel(DLRM(EmbeddingBagCollection(tables), 3, [8, 4], [4, 1]))
    ids = torch.arange(10)
    batch = KeyedJaggedTensor(
        [f"f{index}" for index in range(5)], ids, lengths=torch.ones(10, dtype=torch.int64)
    )
    traced = symbolic_trace(model)
    with torch.no_grad():
        same = torch.equal(traced(torch.ones(2, 3), batch), model(torch.ones(2, 3), batch))
    return [str(node.target) for node in traced.graph.nodes if node.op == "call_module"], same


def test_a_model_on_many_ranks_keeps_its_sharded_collection_as_one_call(ranks):
    for calls, same in ranks(2).run(shards):
        assert len([call for call in calls if call.endswith("embedding_bag_collection")]) == 1
        assert same


@pytest.mark.parametrize(
    "make", [KeyedJaggedTensor.from_lengths_sync, KeyedJaggedTensor.from_offsets_sync]
)
def test_a_batch_is_made_of_the_keys_of_another_one(make):
    """As preprocessing in a forward does; ``len`` of traced keys stopped the trace."""

    class Again(nn.Module):
        def forward(self, batch: KeyedJaggedTensor) -> torch.Tensor:
            bounds = (
                batch.lengths() if make is KeyedJaggedTensor.from_lengths_sync else batch.offsets()
            )
            return make(batch.keys(), batch.values(), bounds).values()

    batch = KeyedJaggedTensor(["item"], torch.tensor([3, 1]), lengths=torch.tensor([2, 0]))
    model = Again()
    traced = torch.fx.GraphModule(model, Tracer().trace(model))
    assert torch.equal(traced(batch), batch.values())
