import copy
import io
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from strategies import DrawnBatch, jagged_batches

from tutorec.sparse.equality import jt_is_equal, kjt_is_equal, kt_is_equal
from tutorec.sparse.jagged import JaggedTensor
from tutorec.sparse.keyed import KeyedTensor
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor


def through_pickle(node: Any) -> Any:
    return pickle.loads(pickle.dumps(node))


def through_a_file(node: Any) -> Any:
    file = io.BytesIO()
    torch.save(node, file)
    file.seek(0)
    return torch.load(file)  # weights_only=True, the default


def through_a_trusted_file(node: Any) -> Any:
    file = io.BytesIO()
    torch.save(node, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


ROADS = [through_pickle, through_a_file, through_a_trusted_file, copy.deepcopy, copy.copy]
each_road = pytest.mark.parametrize("road", ROADS, ids=lambda road: road.__name__)


@each_road
@given(drawn=jagged_batches())
def test_a_batch_and_its_features_come_back(road: Callable[[Any], Any], drawn: DrawnBatch) -> None:
    batch = drawn.kjt()
    features = batch.to_dict()
    assert kjt_is_equal(road(batch), batch)
    again = road(features)
    assert list(again) == drawn.keys
    for key, jagged in features.items():
        assert jt_is_equal(again[key], jagged)
        assert jt_is_equal(road(jagged), jagged)


@each_road
def test_variable_batches_and_keyed_tensors_come_back(road: Callable[[Any], Any]) -> None:
    batch = KeyedJaggedTensor(
        ["a", "b"],
        torch.tensor([5, 7, 1]),
        torch.tensor([0.5, 1.0, 2.0]),
        lengths=torch.tensor([1, 0, 0, 2]),
        stride_per_key_per_rank=[[1], [3]],
        inverse_indices=(["a", "b"], torch.tensor([[0, 0, 0], [0, 2, 1]])),
    ).sync()
    again = road(batch)
    assert kjt_is_equal(again, batch)
    assert again.length_per_key_or_none() == [1, 2]
    for piece in batch.split([1, 1]):
        assert kjt_is_equal(road(piece), piece)
    keyed = KeyedTensor(["a", "b"], [1, 2], torch.arange(6.0).view(3, 2), key_dim=0)
    keyed.offset_per_key()
    assert kt_is_equal(road(keyed), keyed)
    assert road(keyed)["b"].tolist() == [[2.0, 3.0], [4.0, 5.0]]


def test_a_view_does_not_take_its_storage_along() -> None:
    batch = KeyedJaggedTensor(["a", "b"], torch.arange(100_000), lengths=torch.tensor([5, 99_995]))
    for written in (pickle.dumps(batch["a"]), pickle.dumps(batch.split([1, 1])[0])):
        assert len(written) < 5_000
    file = io.BytesIO()
    torch.save({"first": batch["a"]}, file)
    assert len(file.getvalue()) < 10_000
    assert copy.deepcopy(batch["a"]).values().untyped_storage().nbytes() == 5 * 8


def test_a_shallow_copy_shares_tensors_and_a_deep_one_does_not() -> None:
    jagged = JaggedTensor(torch.tensor([5, 7, 1]), lengths=torch.tensor([1, 2]))
    assert copy.copy(jagged).values() is jagged.values()
    assert copy.copy(jagged) is not jagged
    deep = copy.deepcopy({"one": jagged, "two": jagged, "ids": jagged.values()})
    deep["one"].values()[0] = 100
    assert jagged.values()[0] == 5
    # What was one object is one object in the copy, as copy.deepcopy promises.
    assert deep["one"] is deep["two"]
    assert deep["ids"] is deep["one"].values()


def test_a_deep_copy_asks_for_gradients_as_the_original_does() -> None:
    whole = KeyedTensor(["a", "b"], [1, 2], torch.ones(2, 3, requires_grad=True))
    again = copy.deepcopy(whole)
    assert again.values().requires_grad
    assert again.values().is_leaf
    with pytest.raises(RuntimeError, match="Only Tensors created explicitly by the user"):
        copy.deepcopy(KeyedTensor(["a"], [3], whole.values() * 2))


LOADS = """
import sys, torch
{before}
print(torch.load(sys.argv[1]), end="")
"""


@pytest.mark.parametrize(
    "before", ["import tutorec.sparse", "from tutorec.sparse.jagged_tensor import JaggedTensor"]
)
def test_another_process_loads_a_file_once_it_knows_the_types(before: str, tmp_path: Any) -> None:
    jagged = JaggedTensor(torch.tensor([5, 7, 1]), lengths=torch.tensor([1, 2]))
    torch.save(jagged, tmp_path / "jagged.pt")
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-c",
        LOADS.format(before=before),
        str(tmp_path / "jagged.pt"),
    ]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.stdout == str(jagged), ran.stderr


def test_a_process_that_knows_nothing_is_told_what_it_lacks(tmp_path: Any) -> None:
    torch.save(JaggedTensor(torch.tensor([5]), lengths=torch.tensor([1])), tmp_path / "jagged.pt")
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-c",
        LOADS.format(before=""),
        str(tmp_path / "jagged.pt"),
    ]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode != 0
    assert "tutorec.sparse.copying" in ran.stderr
