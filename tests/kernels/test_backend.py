"""The choice of kernels: from faked metadata, from the environment, and with libraries that do not
load.
"""

import os
import subprocess
import sys

import pytest
import torch

from tutorec._kernels import backend as module
from tutorec._kernels import wheels as wheels_module
from tutorec._kernels.backend import backend, use_backend
from tutorec._kernels.wheels import BackendChoice, choose
from tutorec.errors import BackendError


def wheels(
    torch_version: str = "2.13.0", cpu: str | None = None, cuda: str | None = None
) -> dict[str, str | None]:
    return {"torch": torch_version, "fbgemm-gpu-cpu": cpu, "fbgemm-gpu": cuda}


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A process that has not chosen yet, whatever this one has loaded."""
    monkeypatch.setattr(module.chosen, "current", None)
    monkeypatch.setattr(module.chosen, "loaded", False)
    monkeypatch.delenv("TUTOREC_BACKEND", raising=False)
    return monkeypatch


@pytest.fixture
def linux(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(wheels_module.platform, "machine", lambda: "x86_64")


@pytest.mark.parametrize(
    ("torch_version", "fbgemm"),
    [
        ("2.13.0+cpu", "1.8.0"),
        ("2.13.1", "1.8.2"),
        ("2.5.0", "1.0.0"),
        ("2.14.0", "1.9.0"),
        ("2.20.0", "1.15.0"),
    ],
)
def test_fitting_pair_chooses_fbgemm(torch_version: str, fbgemm: str):
    choice = choose(wheels(torch_version, cpu=fbgemm), torch_cuda=None)
    assert (choice.name, choice.remedy, choice.broken) == ("fbgemm", None, False)
    assert choice.pair == f"fbgemm-gpu-cpu {fbgemm} belongs to torch {torch_version}"


@pytest.mark.parametrize(
    ("torch_version", "fbgemm", "belongs", "line"),
    [
        ("2.13.0", "1.7.0", "torch 2.12", 'pip install "fbgemm-gpu-cpu==1.8.*"'),
        ("2.13.0", "1.9.0", "torch 2.14", 'pip install "fbgemm-gpu-cpu==1.8.*"'),
        ("2.12.1", "1.8.0", "torch 2.13", 'pip install "fbgemm-gpu-cpu==1.7.*"'),
        ("2.13.0", "0.8.0", "an older torch", 'pip install "fbgemm-gpu-cpu==1.8.*"'),
    ],
)
def test_wrong_pair_falls_back_and_names_the_right_one(
    torch_version: str, fbgemm: str, belongs: str, line: str
):
    choice = choose(wheels(torch_version, cpu=fbgemm), torch_cuda=None)
    assert (choice.name, choice.broken, choice.remedy) == ("torch", True, line)
    assert (
        choice.reason
        == f"fbgemm-gpu-cpu {fbgemm} belongs to {belongs}, not to torch {torch_version}"
    )


NEWEST_PAIR = 'pip install "torch==2.14.*" "fbgemm-gpu-cpu==1.9.*"'


@pytest.mark.parametrize(
    ("cpu", "cuda", "torch_cuda", "remedy"),
    [
        (None, None, None, NEWEST_PAIR),
        (None, None, "13.0", NEWEST_PAIR.replace("gpu-cpu", "gpu")),
        (None, None, "12.8", NEWEST_PAIR),
        ("1.9.0", None, None, NEWEST_PAIR),
        (None, "1.9.0", "13.0", NEWEST_PAIR.replace("gpu-cpu", "gpu")),
        (None, "1.9.0", None, f"pip uninstall -y fbgemm-gpu && {NEWEST_PAIR}"),
        ("1.9.0", "1.9.0", None, f"pip uninstall -y fbgemm-gpu-cpu fbgemm-gpu && {NEWEST_PAIR}"),
    ],
)
def test_a_torch_without_a_wheel_is_offered_the_newest_pair_that_exists(
    linux, cpu, cuda, torch_cuda, remedy
):
    for torch_version in ("2.6.0", "2.15.0", "2.16.1+cu132"):
        choice = choose(wheels(torch_version, cpu, cuda), torch_cuda=torch_cuda)
        assert (choice.name, choice.remedy) == ("torch", remedy)
        if cpu is cuda is None:
            reason = (
                f"no fbgemm wheel serves torch {torch_version}: those that do belong to torch "
                "2.8 to torch 2.14"
            )
            assert choice.reason == reason


def test_a_newer_wheel_that_does_not_load_is_offered_the_newest_pair_that_is_known(
    fresh: pytest.MonkeyPatch,
):
    def fail() -> None:
        raise OSError("undefined symbol")

    fresh.setattr(module, "_load_libraries", fail)
    fresh.setattr(wheels_module, "installed", lambda: wheels("2.15.0", cpu="1.10.0"))
    assert backend().remedy == NEWEST_PAIR


def test_both_wheels_are_refused_with_the_line_that_keeps_one(linux: None):
    choice = choose(wheels(cpu="1.8.0", cuda="1.8.0"), torch_cuda=None)
    assert (choice.name, choice.broken) == ("torch", True)
    assert "fbgemm-gpu-cpu 1.8.0 and fbgemm-gpu 1.8.0 are both installed" in choice.reason
    uninstall = (
        "pip uninstall -y fbgemm-gpu-cpu fbgemm-gpu && pip install --force-reinstall --no-deps "
    )
    assert choice.remedy == f'{uninstall}"fbgemm-gpu-cpu==1.8.*"'
    with_cuda = choose(wheels(cpu="1.8.0", cuda="1.8.0"), torch_cuda="13.0")
    assert with_cuda.remedy == f'{uninstall}"fbgemm-gpu==1.8.*"'


def test_no_wheel_is_sound_and_offers_one(linux: None):
    choice = choose(wheels(), torch_cuda=None)
    assert (choice.name, choice.broken, choice.pair) == ("torch", False, "no fbgemm wheel")
    assert choice.remedy == 'pip install "fbgemm-gpu-cpu==1.8.*"'


def test_no_wheel_where_none_is_published_offers_nothing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    choice = choose(wheels(), torch_cuda=None)
    assert (choice.name, choice.broken, choice.remedy) == ("torch", False, None)
    assert "no wheel for this platform" in choice.reason


def test_torch_before_the_rule_offers_nothing(linux: None):
    assert choose(wheels("2.4.1"), torch_cuda=None).remedy is None


@pytest.mark.parametrize(
    ("cuda_wheel", "torch_cuda", "says", "right"),
    [
        ("1.8.0", None, "this torch is a CPU build", "fbgemm-gpu-cpu"),
        ("1.8.0", "12.8", "is built for CUDA 13, and this torch for CUDA 12.8", "fbgemm-gpu-cpu"),
        ("1.8.0+cu126", "13.0", "is built for CUDA 12, and this torch for CUDA 13.0", "fbgemm-gpu"),
    ],
)
def test_cuda_wheel_beside_the_wrong_torch_is_refused(
    linux: None, cuda_wheel: str, torch_cuda: str | None, says: str, right: str
):
    choice = choose(wheels(cuda=cuda_wheel), torch_cuda=torch_cuda)
    assert (choice.name, choice.broken) == ("torch", True)
    assert says in choice.reason
    assert choice.remedy == f'pip uninstall -y fbgemm-gpu && pip install "{right}==1.8.*"'


@pytest.mark.parametrize(
    ("cuda_wheel", "torch_cuda"), [("1.8.0", "13.0"), ("1.8.0+cu126", "12.6"), ("1.5.0", "12.8")]
)
def test_cuda_wheel_beside_its_torch_is_chosen(cuda_wheel: str, torch_cuda: str):
    minor = int(cuda_wheel.split(".")[1])
    assert (
        choose(wheels(f"2.{minor + 5}.0", cuda=cuda_wheel), torch_cuda=torch_cuda).name == "fbgemm"
    )


def test_cpu_wheel_beside_a_cuda_torch_is_chosen_and_the_cuda_wheel_offered(linux: None):
    choice = choose(wheels("2.13.0+cu130", cpu="1.8.0"), torch_cuda="13.0")
    assert (choice.name, choice.broken) == ("fbgemm", False)
    assert choice.remedy == 'pip uninstall -y fbgemm-gpu-cpu && pip install "fbgemm-gpu==1.8.*"'
    assert choose(wheels("2.13.0+cu128", cpu="1.8.0"), torch_cuda="12.8").remedy is None


@pytest.mark.parametrize(
    ("torch_version", "torch_cuda", "right"),
    [
        ("2.13.0", "13.0", "fbgemm-gpu==1.8.*"),
        ("2.13.0+cu126", "12.6", "fbgemm-gpu-cpu==1.8.*"),  # published for CUDA 13 alone
        ("2.10.0+cu128", "12.8", "fbgemm-gpu==1.5.*"),
        ("2.10.0+cu130", "13.0", "fbgemm-gpu-cpu==1.5.*"),
    ],
)
def test_a_gpu_is_offered_the_wheel_that_is_published_for_its_cuda(
    linux, torch_version, torch_cuda, right
):
    assert choose(wheels(torch_version), torch_cuda=torch_cuda).remedy == f'pip install "{right}"'


@pytest.mark.parametrize("versions", [wheels(), wheels(cpu="1.8.0")])
def test_a_cuda_torch_without_a_gpu_is_not_offered_the_cuda_wheel(linux, monkeypatch, versions):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "fbgemm-gpu=" not in str(choose(versions).remedy)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert "fbgemm-gpu==1.8.*" in str(choose(versions).remedy)


def test_no_cuda_wheel_is_offered_where_none_is_published(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(wheels_module.platform, "machine", lambda: "aarch64")
    assert choose(wheels(), torch_cuda="13.0").remedy == 'pip install "fbgemm-gpu-cpu==1.8.*"'


def test_tables_on_cuda_take_the_cuda_wheel():
    cpu, cuda = (choose(wheels(**{one: "1.8.0"}), torch_cuda="13.0") for one in ("cpu", "cuda"))
    assert [cpu.serves(device) for device in ("cpu", "cuda", "meta")] == [True, False, False]
    assert [cuda.serves(device) for device in ("cpu", "cuda", "meta")] == [True, True, False]
    assert not choose(wheels(cuda="1.8.0"), "torch", torch_cuda="13.0").serves("cuda")


@pytest.mark.parametrize(
    ("torch_version", "fbgemm"), [("2.14.0.dev20260601", "1.8.0"), ("2.13.0", "1.9.0.dev3")]
)
def test_development_versions_are_not_judged_and_not_broken(torch_version: str, fbgemm: str):
    choice = choose(wheels(torch_version, cpu=fbgemm), torch_cuda=None)
    assert (choice.name, choice.broken) == ("torch", False)
    assert "cannot be judged" in choice.pair


def test_torch_can_be_demanded_beside_anything():
    for versions in (
        wheels(),
        wheels(cpu="1.8.0"),
        wheels(cpu="1.7.0"),
        wheels(cpu="1.8.0", cuda="1.8.0"),
    ):
        choice = choose(versions, override="torch", torch_cuda=None)
        assert (choice.name, choice.broken, choice.reason) == (
            "torch",
            False,
            "TUTOREC_BACKEND=torch asks for it",
        )


def test_fbgemm_demanded_and_not_to_be_had_raises_with_the_line(linux: None):
    assert choose(wheels(cpu="1.8.0"), override="FBGEMM", torch_cuda=None).name == "fbgemm"
    with pytest.raises(
        BackendError,
        match=r"fbgemm is not installed; this would help: pip install \"fbgemm-gpu-cpu==1.8",
    ):
        choose(wheels(), override="fbgemm", torch_cuda=None)
    with pytest.raises(BackendError, match=r"1\.7\.0.*2\.12, not.*2\.13\.0"):
        choose(wheels(cpu="1.7.0"), override="fbgemm", torch_cuda=None)


def test_unknown_backend_is_refused_with_the_three_words():
    with pytest.raises(
        ValueError, match=r"TUTOREC_BACKEND='tpu'.*no.*use 'auto'.*'torch'.*'fbgemm'"
    ):
        choose(wheels(), override="tpu", torch_cuda=None)


def test_backend_is_chosen_once_and_follows_the_environment(fresh: pytest.MonkeyPatch):
    fresh.setenv("TUTOREC_BACKEND", "torch")
    first = backend()
    fresh.setenv("TUTOREC_BACKEND", "tpu")
    assert backend() is first and first.name == "torch"


@pytest.mark.parametrize(
    "error", [OSError("undefined symbol: _ZN3c10"), ImportError("no folder"), RuntimeError("")]
)
def test_libraries_that_do_not_load_fall_back_and_say_why(
    fresh: pytest.MonkeyPatch, error: Exception
):
    def fail() -> None:
        raise error

    fresh.setattr(module, "_load_libraries", fail)
    fresh.setattr(wheels_module, "installed", lambda: wheels(cpu="1.8.0"))
    choice = backend()
    assert (choice.name, choice.broken) == ("torch", True)
    assert f"its libraries do not load: {str(error) or 'RuntimeError'}" in choice.reason
    assert choice.remedy == 'pip install --force-reinstall --no-deps "fbgemm-gpu-cpu==1.8.*"'
    with pytest.raises(BackendError, match="do not load"), use_backend("fbgemm"):
        pass


def test_cuda_wheel_that_does_not_load_offers_the_cpu_wheel(fresh: pytest.MonkeyPatch):
    def fail() -> None:
        raise OSError("libnvidia-ml.so.1: cannot open shared object file")

    fresh.setattr(module, "_load_libraries", fail)
    fresh.setattr(wheels_module, "installed", lambda: wheels(cuda="1.8.0"))
    fresh.setattr(torch.version, "cuda", "13.0")
    assert backend().remedy == 'pip uninstall -y fbgemm-gpu && pip install "fbgemm-gpu-cpu==1.8.*"'


def test_package_folder_that_is_missing_falls_back(fresh: pytest.MonkeyPatch):
    fresh.setattr(wheels_module, "installed", lambda: wheels(cpu="1.8.0"))
    fresh.setattr(torch.version, "cuda", None)
    fresh.setattr("importlib.util.find_spec", lambda name: None)
    assert "'fbgemm_gpu' is missing" in backend().reason


def test_use_backend_restores_what_was_there(fresh: pytest.MonkeyPatch):
    fresh.setenv("TUTOREC_BACKEND", "torch")
    before = backend()
    with use_backend("torch") as choice:
        assert isinstance(choice, BackendChoice) and backend() is choice
    assert backend() is before
    with pytest.raises(KeyError, match="inside"), use_backend("torch"):
        raise KeyError("inside")
    assert backend() is before


FBGEMM_AFTER_US = """
import sys
from tutorec._kernels.backend import backend
choice = backend()
assert choice.name == "fbgemm", choice
assert not any(name.split(".")[0] == "fbgemm_gpu" for name in sys.modules), "loading by path imported fbgemm's Python"
import torch
import warnings
warnings.simplefilter("ignore")  # fbgemm's own, for optimizers that its CPU wheel lacks
import fbgemm_gpu
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice, EmbeddingLocation, SplitTableBatchedEmbeddingBagsCodegen,
)
theirs = SplitTableBatchedEmbeddingBagsCodegen([(5, 4, EmbeddingLocation.HOST, ComputeDevice.CPU)])
theirs(torch.tensor([1]), torch.tensor([0, 1])).sum().backward()

from tutorec._kernels.specs import OptimizerSpec
from tutorec._kernels.specs import GroupSpec, TableSpec
from tutorec._kernels.tbe_build import build_table_batch
ours = build_table_batch(GroupSpec((TableSpec("item", 5, 4),), (0,)), optimizer=OptimizerSpec("sgd"),
                         device=torch.device("cpu"))
ours(torch.tensor([1]), torch.tensor([0, 1])).sum().backward()
print("both ran")
"""  # noqa: E501


def test_fbgemm_python_still_imports_after_its_libraries_were_loaded_by_path():
    if choose().name != "fbgemm":
        pytest.skip("no fbgemm wheel that fits this torch")
    environment = {name: value for name, value in os.environ.items() if name != "TUTOREC_BACKEND"}
    command = [sys.executable, "-c", FBGEMM_AFTER_US]
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert ran.stdout.strip() == "both ran", ran.stderr
