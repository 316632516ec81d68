"""Models behind plain tensors: scripted, saved, loaded in a new process, they give the bits of the
model itself.
"""

import copy
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch
from inference.served_models import (
    KEYS,
    KINDS,
    ROWS,
    Weighted,
    batch,
    dlrm,
    inputs,
    of_kind,
    two_tower,
)
from torch import Tensor, nn

from tutorec._kernels.backend import backend, use_backend
from tutorec.fx.tracer import symbolic_trace
from tutorec.inference.export import export_model, load_exported, save_exported
from tutorec.inference.modules import quantize_embeddings, shard_quant_model
from tutorec.inference.scripting import load_scripted, save_scripted, script_model
from tutorec.inference.serving import (
    check_lists,
    request_of,
    tensors_from_text,
    tensors_to_text,
    with_tensor_inputs,
)
from tutorec.modules.embedding_collection import EmbeddingCollection
from tutorec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from tutorec.modules.embedding_modules import EmbeddingBagCollection
from tutorec.quant.whole_model import quantize
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor

BACKENDS = [
    "torch",
    pytest.param(
        "fbgemm", marks=pytest.mark.skipif(backend().name != "fbgemm", reason="no fbgemm")
    ),
]


def close(kind: str, got: Tensor, expected: Tensor) -> None:
    """The same bits where lookups are quantized; float tables are looked up one by one
    in a graph.
    """
    if kind == "float":
        torch.testing.assert_close(got, expected)
    else:
        assert torch.equal(got, expected)


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_served_model_gives_the_models_results(name: str, kind: str, tmp_path: Path):
    with use_backend(name):
        model = dlrm(kind)
        served = with_tensor_inputs(model, inputs(3))
        assert [node.name for node in served.graph.nodes if node.op == "placeholder"] == [
            *("dense_features", "values", "lengths")
        ]
        save_scripted(script_model(served), tmp_path / "model.pt")
        loaded = load_scripted(tmp_path / "model.pt")
        for samples in (1, 3, 17):
            expected = model(*inputs(samples))
            request = request_of(served, *inputs(samples))
            assert torch.equal(served(**request), expected)
            close(kind, loaded(**request), expected)


class Trained(nn.Module):
    """A model of dense layers and a table, whose parameters require gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = EmbeddingBagCollection(
            [EmbeddingBagConfig(ROWS, 8, "t", feature_names=["f"])]
        )
        self.top = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
        self.again = self.top[2]

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        return self.again(self.top(self.tables(features).values()))


LISTS = KeyedJaggedTensor(["f"], torch.tensor([1, 2, 3]), lengths=torch.tensor([1, 2]))
REQUEST = {"values": LISTS.values(), "lengths": LISTS.lengths()}
FROZEN: dict[str, Callable[[nn.Module], nn.Module]] = {
    "quantize": quantize,
    "quantize_embeddings": lambda model: quantize_embeddings(model, torch.int8, inplace=False),
    "shard_quant_model": lambda model: shard_quant_model(quantize(model), world_size=2)[0],
}


def trains(model: nn.Module) -> bool:
    """Whether all parameters of a model require gradients, and get them."""
    model.zero_grad()
    model(LISTS).sum().backward()
    return all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("frozen", [*FROZEN, "float"])
def test_what_is_served_is_frozen_and_the_model_can_be_trained_on(frozen: str, tmp_path: Path):
    model = Trained()
    made = FROZEN[frozen](model) if frozen in FROZEN else model
    served = with_tensor_inputs(made, [LISTS])
    scripted = script_model(served)
    program = export_model(made, [LISTS])
    save_scripted(scripted, tmp_path / "model.pt")
    save_exported(program, tmp_path / "model.pt2")
    torch.jit.save(torch.jit.script(symbolic_trace(served)), tmp_path / "torch.pt")
    with torch.inference_mode():
        there, loaded = load_scripted(tmp_path / "model.pt"), load_exported(tmp_path / "model.pt2")
    calls: list[Callable[[], Tensor]] = [
        *(partial(each, **REQUEST) for each in (served, copy.deepcopy(served), scripted, there)),
        partial(load_scripted(tmp_path / "torch.pt"), **REQUEST),
        *(partial(each.module(), LISTS) for each in (program, loaded)),
    ]
    if made is not model:
        calls.append(partial(made, LISTS))
        assert not any(each.requires_grad for each in made.parameters())
    for each in (scripted, there, program, loaded):
        assert not any(parameter.requires_grad for parameter in each.parameters())
    expected = served(**REQUEST)
    # TorchScript compiles a call at the first, and again at the second and the third.
    for inference in (False, False, True, True, True, True, False, False):
        for call in calls:
            with torch.inference_mode(inference):
                result = call()
            assert not result.requires_grad
            torch.testing.assert_close(result, expected)
    with ThreadPoolExecutor(4) as threads:
        results = threads.map(lambda i: call_in_mode(calls[i % len(calls)], i % 3 == 0), range(80))
    assert not any(result.requires_grad for result in results)
    assert trains(model)


def call_in_mode(call: Callable[[], Tensor], inference: bool) -> Tensor:
    with torch.inference_mode(inference):
        return call()


def test_quantizing_in_place_freezes_the_model():
    model = Trained()
    assert quantize(model, inplace=True) is model
    assert not any(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_of_two_answers_and_one_of_weighted_ids_are_served(kind: str):
    towers = two_tower(kind)
    queries, candidates = script_model(with_tensor_inputs(towers, [batch(4)]))(
        batch(4).values(), batch(4).lengths()
    )
    for got, expected in zip((queries, candidates), towers(batch(4)), strict=True):
        close(kind, got, expected)
    weighted, features = of_kind(Weighted(), kind), batch(5, weighted=True)
    served = with_tensor_inputs(weighted, [batch(2, weighted=True)])
    close(kind, script_model(served)(**request_of(served, features)), weighted(features).values())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ids_and_lengths_of_both_widths_are_served(kind: str, dtype: torch.dtype):
    model = dlrm(kind)
    dense, features = inputs(4)
    scripted = script_model(with_tensor_inputs(model, inputs(2)))
    close(
        kind,
        scripted(dense, features.values().to(dtype), features.lengths().to(dtype)),
        model(dense, features),
    )


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wrong", [ROWS, -1, -2, 2**40])
def test_an_id_that_is_no_row_is_refused_in_torchscript(name: str, kind: str, wrong: int):
    with use_backend(name):
        scripted = script_model(with_tensor_inputs(dlrm(kind), inputs(2)))
        dense, features = inputs(3)
        ids = features.values().clone()
        ids[-1] = wrong
        sample = int(features["shop"].lengths().nonzero()[-1])
        message = (
            r"table 'shop_table' has 30 rows \(ids 0 to 29\), and feature 'shop', sample "
            rf"{sample}, holds id {wrong}; 1 of the feature's "
        )
        with pytest.raises(torch.jit.Error, match=message):
            scripted(dense, ids, features.lengths())
        with pytest.raises(ValueError, match=message):
            dlrm(kind)(dense, KeyedJaggedTensor(KEYS, ids, lengths=features.lengths()))


class Rows(nn.Module):
    """An unpooled collection; answers with the rows of its features."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = EmbeddingCollection(
            [
                EmbeddingConfig(30, 8, "item_table", feature_names=["item", "clicked"]),
                EmbeddingConfig(40, 8, "user_table", feature_names=["user"]),
            ]
        )

    def forward(self, features: KeyedJaggedTensor) -> tuple[Tensor, Tensor]:
        rows = self.tables(features)
        return rows["clicked"].values(), rows["user"].values()


@pytest.mark.parametrize("kind", KINDS)
def test_a_collection_without_pooling_names_an_id_that_is_no_row(kind: str):
    features = KeyedJaggedTensor(
        ["item", "clicked", "user"],
        torch.tensor([29, 3, 39, 40, 39]),
        lengths=torch.tensor([1, 0, 0, 1, 1, 2]),
    )
    right = KeyedJaggedTensor(
        features.keys(), features.values().clamp(max=29), lengths=features.lengths()
    )
    model = of_kind(Rows(), kind)
    message = (
        r"table 'user_table' has 40 rows \(ids 0 to 39\), and feature 'user', sample 1, holds id "
        r"40; 1 of the feature's 3 ids are outside"
    )
    graph = symbolic_trace(with_tensor_inputs(model, [right]))
    scripted = script_model(graph)
    for call, kind_of_error in ((scripted, torch.jit.Error), (graph, ValueError)):
        with pytest.raises(kind_of_error, match=message):
            call(features.values(), features.lengths())
        call(features.values().clamp(max=39), features.lengths())


@pytest.mark.parametrize(
    ("values", "lengths", "message"),
    [
        ([1, 2], [1, 1, 1, 1], "lengths add up to 4, and there are 2 values"),
        ([1, 2, 3], [1, 1, 0, 0], "lengths add up to 2, and there are 3 values"),
        ([1, 2], [1, 1, 0], "there are 3 lengths, not a multiple of the 4 features"),
        (
            [1, 2],
            [3, 0, 0, 0, -1, 0, 0, 0],
            "lengths has a negative number, -1, for feature 'user', sample 0",
        ),
        ([], [2**62] * 4, f"lengths has the number {2**62}, and there are 0 values"),  # sum wraps
        ([[1, 2]], [1, 1, 0, 0], "values and lengths have one dimension each, got 2 and 1"),
    ],
)
def test_a_request_that_is_no_batch_is_refused_before_the_lookup(values, lengths, message):
    scripted = script_model(with_tensor_inputs(dlrm("quantized"), inputs(2)))
    with pytest.raises(torch.jit.Error, match=message):
        scripted(torch.ones(1, 3), torch.tensor(values), torch.tensor(lengths))
    with pytest.raises(ValueError, match=message):
        check_lists(KEYS, torch.tensor(values), torch.tensor(lengths), None)


def test_weights_that_are_no_batchs_are_refused():
    with pytest.raises(ValueError, match="there are 3 weights for 1 values"):
        check_lists(["a"], torch.ones(1), torch.ones(1), torch.ones(3))
    with pytest.raises(ValueError, match=r"1 weights.*weights.real"):
        check_lists(["a"], torch.ones(1), torch.ones(1), torch.ones(1) * 1j)


def test_requests_of_other_batches_are_refused():
    served = with_tensor_inputs(dlrm("float"), inputs(2))
    dense, features = inputs(2)
    swapped = features.permute([1, 0, 2, 3])
    with pytest.raises(
        ValueError,
        match=r"batch of \['item', 'clicked', 'user', 'shop'\]",
    ):
        request_of(served, dense, swapped)
    with pytest.raises(ValueError, match=r"3.*\['dense_features', 'values', 'lengths'\].*hold 4"):
        request_of(served, dense, batch(2, weighted=True))
    with pytest.raises(ValueError, match="hold 1"):
        request_of(served, dense)


class Two(nn.Module):
    def forward(self, query: KeyedJaggedTensor, history: KeyedJaggedTensor) -> Tensor:
        return query.values().sum() - history.values().sum()


def test_two_batches_have_names_of_their_own():
    features = batch(2)
    served = with_tensor_inputs(Two(), [features, features])
    assert list(request_of(served, features, features)) == [
        *("query_values", "query_lengths", "history_values", "history_lengths")
    ]
    assert int(script_model(served)(*request_of(served, features, features).values())) == 0


class Answers(nn.Module):
    def forward(self, features: KeyedJaggedTensor) -> dict[str, Tensor]:
        return {"ids": features.values()}


def test_what_cannot_be_served_is_refused():
    with pytest.raises(TypeError, match=r"not.*KeyedTensor"):
        with_tensor_inputs(Answers(), [batch(1)])
    with pytest.raises(ValueError, match=r"Answers.forward.*\['features'\].*2 inputs"):
        with_tensor_inputs(Answers(), [batch(1), batch(1)])
    with pytest.raises(ValueError, match="and the example has 1 inputs"):
        with_tensor_inputs(Two(), [batch(1)])
    variable = KeyedJaggedTensor(
        ["a", "b"],
        torch.ones(3),
        lengths=torch.tensor([1, 1, 1]),
        stride_per_key_per_rank=[[1], [2]],
    )
    with pytest.raises(ValueError, match="input 'features'"):
        with_tensor_inputs(Answers(), [variable])


def test_tensors_come_back_from_their_text_bit_for_bit():
    tensors = {
        "a": torch.randn(3, 5),
        "b": torch.tensor([2**62 + 1, -7]),
        "c": torch.randn(2, 1, 3, dtype=torch.float64),
        "d": torch.tensor([1e-45, -0.0, float("inf"), 3.4028235e38]),
        "e": torch.tensor([], dtype=torch.int32),
        "f": torch.tensor(0.1),
        "g": torch.zeros(0, 4),
    }
    back = tensors_from_text(tensors_to_text(tensors))
    assert list(back) == list(tensors)
    for name, tensor in tensors.items():
        assert back[name].dtype == tensor.dtype
        assert back[name].shape == tensor.shape
        assert torch.equal(back[name], tensor)
        assert torch.equal(torch.signbit(back[name]), torch.signbit(tensor))
    assert (
        tensors_from_text(tensors_to_text({"x": torch.tensor([float("nan")])}))["x"].isnan().all()
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("values int64 3\n1 2", "invalid for input of size 2"),
        ("values int64 2\n1 2.5", "with 2 numbers"),
        ("values int8 2\n1 2", "int8"),
        ("values\n1 2", "'values' with 2 numbers"),
        ("values int64 x\n1 2", "with 2 numbers"),
        ("values int64 -1\n1 2", "the size -1 is negative"),
        ("values int64 2 99999999999999999999\n1 2", "Overflow"),
        ("values int64 1\n1\nvalues int64 1\n2", "values is there twice"),
        ("dense float32 1\n1e300", "1e300 does not fit"),
        ("dense float64 1\n-1e999", "-1e999 does not fit"),
    ],
)
def test_text_that_is_no_tensor_is_refused(text: str, words: str):
    with pytest.raises(ValueError, match=r"not the text of a tensor.*" + words):
        tensors_from_text(text)


@pytest.mark.parametrize(
    "tensors", [{"a b": torch.ones(1)}, {"a": torch.ones(1, dtype=torch.bool)}]
)
def test_tensors_without_a_text_form_are_refused(tensors):
    with pytest.raises(
        ValueError, match=r"request holds \['int64', 'int32', 'float32', 'float64'\] and no"
    ):
        tensors_to_text(tensors)


IN_A_NEW_PROCESS = """
import sys, warnings
warnings.simplefilter("error")
import torch
from tutorec.fx.tracer import symbolic_trace
from tutorec.inference.export import export_model, load_exported, save_exported
from tutorec.inference.modules import quantize_embeddings, shard_quant_model
from tutorec.inference.scripting import load_scripted
torch.set_num_threads(1)
for folder in sys.argv[1:]:
    request, expected = torch.load(folder + "/expected.pt")
    with torch.no_grad():
        print(torch.equal(load_scripted(folder + "/model.pt")(**request), expected))
"""


def test_files_give_the_same_bits_in_a_new_process(tmp_path: Path):
    folders = [tmp_path / name for name in ("torch", "fbgemm") if name in ("torch", backend().name)]
    for folder in folders:
        folder.mkdir()
        with use_backend(folder.name):
            model = dlrm("sharded")
            served = with_tensor_inputs(model, inputs(2))
            save_scripted(script_model(served), folder / "model.pt")
            torch.save((request_of(served, *inputs(7)), model(*inputs(7))), folder / "expected.pt")
    command = [sys.executable, "-c", IN_A_NEW_PROCESS, *map(str, folders)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ran.stdout.split(), ran.stderr) == (["True"] * len(folders), "")


def test_files_that_hold_no_scripted_model_are_refused(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match=r"No such file.*none\.pt"):
        load_scripted(tmp_path / "none.pt")
    (tmp_path / "bad.pt").write_bytes(b"PK\x03\x04 no model")
    with pytest.raises(ValueError, match=r"bad\.pt' is damaged.*not"):
        load_scripted(tmp_path / "bad.pt")
