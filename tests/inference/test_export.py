"""Exported programs: any number of samples and ids, the model's results, ids checked by the program
itself.
"""

import subprocess
import sys
import zipfile
from functools import cache
from pathlib import Path

import pytest
import torch
from inference.served_models import KINDS, ROWS, Weighted, batch, dlrm, inputs, of_kind, two_tower

from tutorec._kernels.backend import backend, use_backend
from tutorec.inference.export import export_model, load_exported, save_exported
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor

# To export a program takes seconds: `make quick` exports one.
BACKENDS = [
    pytest.param("torch", marks=pytest.mark.slow),
    pytest.param(
        "fbgemm", marks=pytest.mark.skipif(backend().name != "fbgemm", reason="no fbgemm")
    ),
]
both = pytest.mark.parametrize("name", BACKENDS)
kinds = pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=() if kind == "quantized" else pytest.mark.slow) for kind in KINDS],
)


@cache
def exported(name: str, kind: str) -> tuple[torch.nn.Module, torch.nn.Module]:
    """A model and its program, which takes seconds to make."""
    with use_backend(name):
        model = dlrm(kind)
        return model, export_model(model, inputs(4)).module()


@both
@kinds
def test_a_program_takes_any_number_of_samples_and_ids(name: str, kind: str):
    model, program = exported(name, kind)
    with use_backend(name):
        for samples in (4, 1, 2, 33):
            torch.testing.assert_close(program(*inputs(samples)), model(*inputs(samples)))
        dense, features = inputs(1)
        one = KeyedJaggedTensor(
            features.keys(), torch.tensor([7]), lengths=torch.tensor([0, 1, 0, 0])
        )
        torch.testing.assert_close(program(dense, one), model(dense, one))
        none = KeyedJaggedTensor(
            features.keys(), torch.tensor([], dtype=torch.int64), lengths=torch.zeros(4).long()
        )
        torch.testing.assert_close(program(dense, none), model(dense, none))


@both
@kinds
@pytest.mark.parametrize("wrong", [ROWS, -1, -2])
def test_a_program_refuses_ids_that_are_no_rows(name: str, kind: str, wrong: int):
    _, program = exported(name, kind)
    dense, features = inputs(3)
    ids = features.values().clone()
    ids[-1] = wrong
    message = r"table 'shop_table' has 30 rows \(ids 0 to 29\), and feature 'shop' holds an id"
    with pytest.raises(RuntimeError, match=message):
        program(
            dense,
            KeyedJaggedTensor._from_parts(
                features.keys(), ids, None, features.lengths(), None, None
            ),
        )


@pytest.mark.slow
@kinds
def test_a_program_takes_weights_and_keys_in_the_examples_order(kind: str):
    model = of_kind(Weighted(), kind)
    program = export_model(model, [batch(3, weighted=True)]).module()
    features = batch(5, weighted=True)
    torch.testing.assert_close(program(features).values(), model(features).values())
    with pytest.raises(ValueError, match="inputs with tree spec of"):
        program(features.permute([3, 1, 0, 2]))
    assert program(features).keys() == model(features).keys()


@pytest.mark.slow
@kinds
def test_a_model_of_two_answers_is_exported(kind: str):
    model = two_tower(kind)
    for got, expected in zip(
        export_model(model, [batch(3)]).module()(batch(6)), model(batch(6)), strict=True
    ):
        torch.testing.assert_close(got, expected)


IN_A_NEW_PROCESS = """
import sys, warnings
warnings.simplefilter("error")
import torch
from tutorec.inference.export import load_exported
for folder in sys.argv[1:]:
    program = load_exported(folder + "/model.pt2").module()
    inputs, expected = torch.load(folder + "/expected.pt", weights_only=False)
    torch.testing.assert_close(program(*inputs), expected)
    print("equal")
"""


@pytest.mark.slow
def test_programs_run_in_a_new_process(tmp_path: Path):
    folders = [tmp_path / name for name in ("torch", "fbgemm") if name in ("torch", backend().name)]
    for folder in folders:
        folder.mkdir()
        with use_backend(folder.name):
            model = dlrm("quantized")
            save_exported(export_model(model, inputs(4)), folder / "model.pt2")
            torch.save((inputs(5), model(*inputs(5))), folder / "expected.pt")
    command = [sys.executable, "-c", IN_A_NEW_PROCESS, *map(str, folders)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ran.stdout.split(), ran.stderr) == (["equal"] * len(folders), "")


def test_a_program_holds_its_packed_rows_once(tmp_path: Path):
    model = dlrm("quantized")
    program = export_model(model, inputs(4))
    assert not [name for name in program.state_dict if "embedding_bags" in name]
    save_exported(program, tmp_path / "model.pt2")
    packed = max(
        (operator.weights for operator, _ in model.sparse_arch.embedding_bag_collection._operators),
        key=len,
    )
    assert (tmp_path / "model.pt2").read_bytes().count(bytes(packed.tolist())) == 1


def test_examples_that_would_fix_a_size_are_refused():
    model = dlrm("float")
    with pytest.raises(
        ValueError, match=r"at least 2 samples and 2 ids; \(samples, ids\) are \[\(1, "
    ):
        export_model(model, inputs(1))
    few = KeyedJaggedTensor(
        batch(2).keys(), torch.tensor([1]), lengths=torch.tensor([1, 0, 0, 0, 0, 0, 0, 0])
    )
    with pytest.raises(ValueError, match=r"are \[\(2, 1\)\]"):
        export_model(model, (torch.ones(2, 3), few))
    with pytest.raises(ValueError, match="at least 2 samples"):
        export_model(model.dense_arch, [torch.ones(2, 3)])
    variable = KeyedJaggedTensor(
        ["a", "b"],
        torch.ones(3),
        lengths=torch.tensor([1, 1, 1]),
        stride_per_key_per_rank=[[1], [2]],
    )
    with pytest.raises(ValueError, match=r"differ.* number of samples"):
        export_model(model, [variable])


def test_files_that_hold_no_program_are_refused(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match=r"No such file.*none\.pt2"):
        load_exported(tmp_path / "none.pt2")
    (tmp_path / "bad.pt2").write_bytes(b"PK\x03\x04 no model")
    with pytest.raises(ValueError, match=r"bad\.pt2' is damaged.*not"):
        load_exported(tmp_path / "bad.pt2")
    with zipfile.ZipFile(tmp_path / "other.pt2", "w") as other:
        other.writestr("other/note", "no model")
    with pytest.raises(ValueError, match=r"other\.pt2' holds no"):
        load_exported(tmp_path / "other.pt2")
