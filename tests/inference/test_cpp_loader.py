"""The loader in C++: built once, it gives the bits of the model in Python, or ends with
a message.
"""

import hashlib
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from inference.served_models import KINDS, batch, dlrm, inputs, two_tower
from torch import Tensor, nn

from tutorec._kernels.backend import backend, operator_libraries, use_backend
from tutorec.errors import BackendError
from tutorec.inference import cpp_loader
from tutorec.inference.cpp_loader import build_loader, missing_tools, score_with_loader
from tutorec.inference.scripting import save_scripted, script_model
from tutorec.inference.serving import request_of, tensors_to_text, with_tensor_inputs

BACKENDS = [
    "torch",
    pytest.param(
        "fbgemm", marks=pytest.mark.skipif(backend().name != "fbgemm", reason="no fbgemm")
    ),
]
compiled = pytest.mark.skipif(missing_tools() is not None, reason=str(missing_tools()))


@pytest.fixture(scope="module")
def loader() -> Path:
    """The user's loader: compiled at the first run only."""
    return build_loader()


@compiled
@pytest.mark.slow
@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_loader_gives_the_bits_of_python(name: str, kind: str, loader: Path, tmp_path: Path):
    with use_backend(name):
        model = dlrm(kind)
        served = with_tensor_inputs(model, inputs(2))
        scripted = script_model(served)
        save_scripted(scripted, tmp_path / "model.pt")
        request = request_of(served, *inputs(9))
        got = score_with_loader(tmp_path / "model.pt", request, loader)
        assert got.dtype == torch.float32
        assert torch.equal(got, scripted(**request))
        if kind != "float":
            assert torch.equal(got, model(*inputs(9)))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A quantized model and a request to it, as files."""
    folder = tmp_path_factory.mktemp("served")
    served = with_tensor_inputs(dlrm("quantized"), inputs(2))
    save_scripted(script_model(served), folder / "model.pt")
    (folder / "request.txt").write_text(
        "\n" + tensors_to_text(request_of(served, *inputs(2))) + "\n\n"
    )
    return folder / "model.pt", folder / "request.txt"


@compiled
@pytest.mark.slow
def test_two_answers_come_back_as_two(loader: Path, tmp_path: Path):
    model = two_tower("quantized")
    served = with_tensor_inputs(model, [batch(2)])
    save_scripted(script_model(served), tmp_path / "model.pt")
    answers = score_with_loader(tmp_path / "model.pt", request_of(served, batch(3)), loader)
    assert all(
        torch.equal(got, expected) for got, expected in zip(answers, model(batch(3)), strict=True)
    )


class Numbers(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return x + 1, y > 0, x.double() / 3, y.half().unsqueeze(0)


@compiled
@pytest.mark.slow
def test_answers_of_every_dtype_are_printed_whole(loader: Path, tmp_path: Path):
    request = {"x": torch.tensor([2**60, -5]), "y": torch.tensor([0.1, -2.0, float("inf"), 1e-45])}
    scripted = script_model(with_tensor_inputs(Numbers(), list(request.values())))
    save_scripted(scripted, tmp_path / "model.pt")
    got = score_with_loader(tmp_path / "model.pt", request, loader)
    assert [one.dtype for one in got] == [torch.int64, torch.int64, torch.float64, torch.float32]
    assert all(
        torch.equal(one, expected.to(one.dtype))
        for one, expected in zip(got, scripted(**request), strict=True)
    )


def _add_digest(path: Path, data: bytes) -> None:
    path.write_bytes(data + b"tutorec sha256 " + hashlib.sha256(data).hexdigest().encode())


def run(loader: Path, *arguments: object) -> tuple[int, str]:
    ran = subprocess.run(
        [str(loader), *map(str, arguments)],
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        check=False,
    )
    assert not (ran.returncode and ran.stdout)
    return ran.returncode, ran.stderr


@compiled
@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (
            "lengths int64 8",
            "lengths int64 7",
            "reading the tensor 'lengths int64 7': there are 8 numbers",
        ),
        (
            "lengths int64 8",
            "lengths int8 8",
            "reading the tensor 'lengths int8 8': that is no name, dtype and sizes",
        ),
        (
            "lengths int64 8",
            "values int64 8",
            "reading the tensor 'values int64 8': it is there twice",
        ),
        ("lengths int64 8", "lenths int64 8", "calling the model: it needs a tensor lengths"),
        ("lengths int64 8\n3 ", "lengths int64 8\n3x ", "3x is no such number"),
        (
            "lengths int64 8\n3 ",
            "lengths int64 8\n99999999999999999999 ",
            "99999999999999999999 does not fit",
        ),
        ("lengths int64 8\n3 ", "lengths int32 8\n4294967299 ", "4294967299 does not fit"),
        ("lengths int64 8\n3 ", "lengths int64 8\n3\0x ", "3 is followed by a byte of zero"),
        ("lengths int64 8\n", "lengths\n", "'lengths': that is no name, dtype and sizes"),
        ("lengths int64 8", "lengths int64 -8", "the size -8 is negative"),
        (
            "lengths int64 8",
            "lengths int64 8 99999999999999999999",
            "99999999999999999999 does not fit",
        ),
        ("lengths int64 8", "lengths int64 8 +", "+ is no such number"),
        ("\n\n", "\nextra int64 8", "reading the tensor 'extra int64 8': there are 0 numbers"),
        (
            "dense_features float32 2 3",
            "dense_features float32 4294967296 4294967296",
            "its sizes do not fit",
        ),
        (
            "dense_features float32 2 3",
            "dense_features float32 0 4294967296 4294967296",
            "its sizes do not fit",
        ),
        ("float32 2 3\n", "float32 2 3\n1e300 ", "1e300 does not fit"),
        ("float32 2 3\n", "float64 2 3\n-1e999 ", "-1e999 does not fit"),
        ("float32 2 3\n", "float32 2 3\n0x1p3 ", "0x1p3 is no such number"),
        (
            "lengths int64 8\n3 ",
            "lengths int64 8\n4 ",
            "calling the model: builtins.ValueError: lengths add up to",
        ),
        (
            "lengths int64 8\n3 ",
            "lengths int64 8\n-3 ",
            "builtins.ValueError: lengths has a negative",
        ),
        (
            "dense_features float32 2 3",
            "dense_features float32 3 2",
            "mat1 and mat2 shapes cannot be multiplied",
        ),
        (
            "dense_features float32",
            "extra int64 0\n\ndense_features float32",
            "it takes no tensor extra",
        ),
    ],
)
def test_a_wrong_request_ends_with_a_message(
    loader: Path, served, tmp_path: Path, old: str, new: str, words: str
):
    model, request = served
    text = request.read_text()
    assert old in text
    (tmp_path / "request.txt").write_text(text.replace(old, new))
    code, message = run(loader, model, tmp_path / "request.txt", *operator_libraries())
    assert code == 1
    assert words in message


class ComplexNumbers(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.complex(x, x)


@compiled
@pytest.mark.slow
def test_an_answer_without_a_text_form_ends_with_its_dtype(loader: Path, tmp_path: Path):
    request = {"x": torch.ones(2)}
    scripted = script_model(with_tensor_inputs(ComplexNumbers(), [request["x"]]))
    save_scripted(scripted, tmp_path / "model.pt")
    with pytest.raises(ValueError, match=r"ComplexFloat.*int64"):
        score_with_loader(tmp_path / "model.pt", request, loader)


@compiled
@pytest.mark.slow
def test_an_id_that_is_no_row_ends_with_a_message(loader: Path, served, tmp_path: Path):
    name, header, numbers = served[1].read_text().partition("values int64")
    ids, _, rest = numbers.partition("\n")[2].partition(" ")
    (tmp_path / "request.txt").write_text(
        f"{name}{header}{numbers.partition(chr(10))[0]}\n{int(ids) + 10**6} {rest}"
    )
    with pytest.raises(ValueError, match=r"Error: table 'item_table'.*30.*id 1000"):
        score_with_loader(served[0], tmp_path / "request.txt", loader)


@compiled
@pytest.mark.slow
@pytest.mark.skipif(not operator_libraries(), reason="no operators outside of torch")
def test_a_model_without_its_operators_ends_with_their_name(loader: Path, served):
    code, message = run(loader, *served)
    assert code == 1
    assert "loading the model " in message
    assert "fbgemm::" in message.splitlines()[0]
    assert len(message.splitlines()) == 1


@compiled
@pytest.mark.slow
def test_missing_and_damaged_files_end_with_a_message(loader: Path, served, tmp_path: Path):
    model, request = served
    (tmp_path / "damaged.pt").write_bytes(model.read_bytes()[:2000])
    libraries = operator_libraries()
    for arguments, words in [
        ([], "usage: tutorec_loader MODEL REQUEST"),
        ([tmp_path / "none.pt", request], "none.pt: open file failed"),
        ([tmp_path / "damaged.pt", request], "loading the model "),
        ([request, request], "loading the model "),
        ([model, tmp_path / "none.txt", *libraries], "none.txt: there is no such file"),
        ([model, model, *libraries], "that is no name, dtype and sizes"),
        ([model, request, tmp_path / "none.so"], "loading an operator library: "),
    ]:
        code, message = run(loader, *arguments)
        assert code == 1
        assert words in message
    with pytest.raises(ValueError, match=r"loading the model .*damaged\.pt"):
        score_with_loader(tmp_path / "damaged.pt", request, loader)


@compiled
@pytest.mark.slow
def test_the_loader_is_built_once_for_a_user(loader: Path):
    before = loader.stat().st_mtime_ns
    assert build_loader() == loader
    assert loader.stat().st_mtime_ns == before


@compiled
@pytest.mark.slow
def test_flipped_and_cut_models_are_refused(loader: Path, served, tmp_path: Path):
    model, request = served
    data = model.read_bytes()
    damaged = tmp_path / "damaged.pt"
    for size in (
        60,
        64,
        65,
        119,
        120,
        127,
        128,
    ):  # SHA-256 pads a last block of up to 55 bytes, or up to 63, its own way
        _add_digest(damaged, data[:size])
        code, message = run(loader, damaged, request, *operator_libraries())
        assert code == 1
        assert "SHA-256" not in message
    for place in (0, len(data) // 2, len(data) - 80, len(data) - 79, len(data) - 1):
        flipped = bytearray(data)
        flipped[place] ^= 16
        damaged.write_bytes(flipped)
        code, message = run(loader, damaged, request, *operator_libraries())
        assert code == 1
        assert message.startswith(
            f"loading the model {damaged}: the file is damaged, cut or not a model: it does "
            "not end in the SHA-256"
        )
    torch.jit.save(torch.jit.load(model), damaged)
    assert run(loader, damaged, request, *operator_libraries()) == (0, "")


@pytest.mark.skipif(not hasattr(os, "getuid"), reason="no owners of files")
def test_a_loader_that_somebody_else_can_write_is_not_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    folder = tmp_path / "loader"
    folder.mkdir(mode=0o700)
    program = folder / "tutorec_loader"
    program.write_text("")
    program.chmod(0o700)
    assert build_loader(folder) == program
    for path, mode in ((folder, 0o777), (folder, 0o770), (program, 0o702)):
        path.chmod(mode)
        with pytest.raises(
            BackendError, match=rf"{path}, which belongs to user \d+ with mode {mode:o}: only you"
        ):
            build_loader(folder)
        path.chmod(0o700)
    mine = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: mine + 1)
    with pytest.raises(
        BackendError, match=rf"belongs to user {mine} .*only you, user {mine + 1}, may"
    ):
        build_loader(folder)
    program.unlink()
    with pytest.raises(BackendError, match=rf"belongs to user {mine} "):
        build_loader(folder)


@compiled
def test_a_loader_is_built_where_only_its_user_writes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    source = tmp_path / "source"
    source.mkdir()
    (source / "main.cpp").write_text("int main() {}")
    (source / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.18)\nproject(small LANGUAGES "
        "CXX)\nadd_executable(tutorec_loader main.cpp)\n"
    )
    monkeypatch.setattr(cpp_loader, "SOURCE", source)
    before = os.umask(0)
    try:
        program = build_loader(tmp_path / "cache" / "loader")
    finally:
        os.umask(before)
    assert [oct(path.stat().st_mode & 0o777) for path in (program, program.parent)] == [
        "0o700",
        "0o700",
    ]
    assert build_loader(tmp_path / "cache" / "loader") == program


def test_a_folder_that_cannot_be_made_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(cpp_loader, "missing_tools", lambda: None)
    with pytest.raises(BackendError, match=r"cannot be created:.*TUTOREC_CACHE"):
        build_loader(tmp_path / "file" / "below" / "loader")


def test_a_missing_tool_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    found = shutil.which
    monkeypatch.setattr(
        cpp_loader.shutil, "which", lambda name: None if name == "cmake" else found(name) or "c++"
    )
    with pytest.raises(
        BackendError, match=r"the C\+\+ loader cannot be built here: no cmake; apt install cmake"
    ):
        build_loader(tmp_path / "loader")
    monkeypatch.setattr(cpp_loader.shutil, "which", lambda name: None)
    assert "no cmake and no C++ compiler" in str(missing_tools())
    monkeypatch.setattr(cpp_loader.sys, "platform", "win32")
    assert "not built on Windows" in str(missing_tools())


@compiled
def test_a_build_that_fails_says_what_the_tools_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    source = tmp_path / "source"
    source.mkdir()
    (source / "CMakeLists.txt").write_text('message(FATAL_ERROR "no torch of that kind")')
    monkeypatch.setattr(cpp_loader, "SOURCE", source)
    with pytest.raises(BackendError, match=r"(?s)cmake -S .* failed:.*no torch of that kind"):
        build_loader(tmp_path / "built" / "loader")
    assert list((tmp_path / "built").iterdir()) == []


@pytest.mark.parametrize(
    ("variable", "below"), [("TUTOREC_CACHE", ""), ("XDG_CACHE_HOME", "tutorec")]
)
def test_the_cache_is_where_the_user_says(
    variable: str, below: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    for name in ("TUTOREC_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, str(tmp_path))
    folder = cpp_loader._default_folder()
    assert folder.parent == tmp_path / below
    monkeypatch.setattr(cpp_loader.torch, "__version__", "0.0")
    assert cpp_loader._default_folder() != folder


def test_the_program_that_chapter_14_shows_is_the_loader():
    root = Path(__file__).parents[2]
    cells = json.loads((root / "notebooks/14_serving.ipynb").read_text(encoding="utf-8"))["cells"]
    texts = ["".join(cell["source"]) for cell in cells]
    [shown] = [text for text in texts if "```cpp\n" in text]
    lines = shown.split("```cpp\n")[1].split("\n```")[0].splitlines()
    source = (cpp_loader.SOURCE / "loader.cpp").read_text(encoding="utf-8")
    # in the order of the file
    places = [source.find(line.strip().rstrip(";}")) for line in lines]
    assert len(lines) == 12 and -1 not in places
    assert [place for place in places if place] == sorted(place for place in places if place)
