"""The doctor: what it says of faked wheels, of demands that cannot be met, and of this machine."""

import json
import os

import pytest
import torch

import tutorec
from tutorec import _doctor, cli
from tutorec._doctor import Report, doctor
from tutorec._kernels import backend as backend_module
from tutorec._kernels import wheels as wheels_module


@pytest.fixture
def wheels(monkeypatch: pytest.MonkeyPatch):
    """Pretend that these versions are installed, in a process that has not chosen its
    kernels yet.
    """

    def pretend(torch_version: str, cpu: str | None, cuda: str | None) -> None:
        found = {"torch": torch_version, "fbgemm-gpu-cpu": cpu, "fbgemm-gpu": cuda}
        monkeypatch.setattr(wheels_module, "installed", lambda: found)
        monkeypatch.setattr(backend_module.chosen, "current", None)
        monkeypatch.setattr(backend_module.chosen, "loaded", False)
        monkeypatch.setattr(wheels_module.sys, "platform", "linux")
        monkeypatch.setattr(wheels_module.platform, "machine", lambda: "x86_64")
        monkeypatch.setattr(torch.version, "cuda", None)
        monkeypatch.delenv("TUTOREC_BACKEND", raising=False)

    return pretend


def test_wrong_pair_is_broken_and_runs_on_torch(wheels, capsys: pytest.CaptureFixture[str]):
    wheels("2.13.0", "1.7.0", None)
    report = doctor()
    assert (report.broken, report.backend) == (True, "torch")
    assert report.kernels["cpu"] == {
        "dense": "torch.dense",
        "sgd": "torch.sgd",
        "adagrad": "torch.adagrad",
        "rowwise_adagrad": "torch.rowwise_adagrad",
        "adam": "torch.adam",
        "partial_rowwise_adam": "torch.partial_rowwise_adam",
    }
    lines = capsys.readouterr().out.splitlines()
    assert "fbgemm-gpu-cpu 1.7.0 belongs to torch 2.12, not to torch 2.13.0" in lines[0]
    assert lines[-1] == '  to improve this: pip install "fbgemm-gpu-cpu==1.8.*"'


def test_both_wheels_are_broken(wheels):
    wheels("2.13.0", "1.8.0", "1.8.0")
    report = doctor()
    assert report.broken and "both installed" in report.pair
    assert report.remedy is not None and report.remedy.startswith(
        "pip uninstall -y fbgemm-gpu-cpu fbgemm-gpu && pip"
    )


def test_no_wheel_is_sound_and_could_be_faster(wheels, capsys: pytest.CaptureFixture[str]):
    wheels("2.13.0", None, None)
    report = doctor()
    assert (report.broken, report.backend, report.pair) == (False, "torch", "no fbgemm wheel")
    assert (
        "is ready, and could be faster: plain-torch kernels (fbgemm is not installed)"
        in report.verdict
    )
    assert 'pip install "fbgemm-gpu-cpu==1.8.*"' in capsys.readouterr().out


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch):
    """A machine with one GPU, whose torch is built for a version of CUDA."""

    def pretend(torch_cuda: str) -> None:
        monkeypatch.setattr(torch.version, "cuda", torch_cuda)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "some GPU")
        monkeypatch.setattr(_doctor, "_kernels", lambda device_types: {})
        monkeypatch.setattr(backend_module, "_load", lambda choice, override: choice)

    return pretend


@pytest.mark.parametrize(
    ("cpu", "torch_cuda", "line"),
    [
        (None, "13.0", 'pip install "fbgemm-gpu==1.8.*"'),
        ("1.8.0", "13.0", 'pip uninstall -y fbgemm-gpu-cpu && pip install "fbgemm-gpu==1.8.*"'),
        # the published CUDA wheel is for CUDA 13
        (None, "12.8", 'pip install "fbgemm-gpu-cpu==1.8.*"'),
        ("1.8.0", "12.8", None),
    ],
)
def test_gpu_without_the_cuda_wheel_costs_and_has_a_remedy(
    wheels, gpu, cpu: str | None, torch_cuda: str, line
):
    wheels("2.13.0", cpu, None)
    gpu(torch_cuda)
    report = doctor()
    assert report.remedy == line
    assert "tables on cuda are looked up by plain torch: one call for each width" in str(report)
    assert ("could be faster" in report.verdict) == (line is not None)


def test_gpu_with_the_cuda_wheel_runs_its_kernels(wheels, gpu):
    wheels("2.13.0", None, "1.8.0")
    gpu("13.0")
    report = doctor()
    assert (report.backend, report.remedy) == ("fbgemm", None)
    assert "tables on cuda are looked up by fbgemm's CUDA kernels" in str(report)


def test_gpu_whose_reader_asked_for_torch_is_told_no_remedy(
    wheels, gpu, monkeypatch: pytest.MonkeyPatch
):
    wheels("2.13.0", "1.8.0", None)
    gpu("13.0")
    monkeypatch.setenv("TUTOREC_BACKEND", "torch")
    assert doctor().remedy is None


@pytest.mark.parametrize(("cpu", "status"), [("1.7.0", 1), (None, 0)])
def test_command_exits_1_only_when_something_is_broken(wheels, cpu: str | None, status: int):
    wheels("2.13.0", cpu, None)
    assert cli.main(["doctor"]) == status


def test_demand_that_cannot_be_met_is_reported_not_raised(wheels, monkeypatch: pytest.MonkeyPatch):
    wheels("2.13.0", None, None)
    monkeypatch.setenv("TUTOREC_BACKEND", "fbgemm")
    report = doctor()
    assert (report.broken, report.backend, report.kernels) == (True, "none", {})
    assert "fbgemm was demanded (TUTOREC_BACKEND=fbgemm) and cannot be had" in report.verdict
    monkeypatch.setenv("TUTOREC_BACKEND", "tpu")
    assert "TUTOREC_BACKEND='tpu' names no backend" in doctor().reason


def test_json_holds_every_field(capsys: pytest.CaptureFixture[str]):
    report = doctor(json=True)
    told = json.loads(capsys.readouterr().out)
    assert set(told) == set(Report.__dataclass_fields__)
    # metadata may leave out +cu132
    assert torch.__version__.startswith(told["versions"]["torch"].split("+")[0])
    assert told["versions"]["tutorec"] == tutorec.__version__
    assert told["verdict"] == report.verdict


def test_report_is_short_and_its_first_line_is_the_verdict(capsys: pytest.CaptureFixture[str]):
    report = tutorec.doctor()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == report.verdict
    assert len(lines) <= 6 + 2 * bool(torch.cuda.is_available())  # and what serves the GPUs
    assert repr(report) == f"Report({report.verdict!r})"
    assert (
        report.cores == len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else report.cores >= 1
    )
    assert "gloo" in report.collectives
    assert f"input checks {'on' if tutorec.validation_enabled() else 'off'}" in str(report)


def test_report_says_when_checks_are_off():
    with tutorec.validation(False):
        assert "input checks off" in str(doctor())


def test_notebook_shows_the_report_once_a_cell(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(_doctor, "_notebook_cell", lambda: 1)
    report = doctor()
    capsys.readouterr()
    report._ipython_display_()  # what a notebook does with the value of a cell's last line
    assert capsys.readouterr().out == ""
    monkeypatch.setattr(_doctor, "_notebook_cell", lambda: 2)
    report._ipython_display_()
    assert capsys.readouterr().out == f"{report}\n"
