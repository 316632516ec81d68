"""Diagnosis of this machine: which backend and kernels run, why, and one pip line to improve it."""

from __future__ import annotations

import json as json_format
import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib import import_module
from typing import get_args

from tutorec._calibration import kept
from tutorec._kernels.backend import backend
from tutorec._kernels.wheels import BackendChoice, choose
from tutorec._validation import validation_enabled
from tutorec.errors import BackendError

__all__ = ["Report", "doctor"]


@dataclass
class Report:
    """The result of :func:`doctor`.

    Attributes:
        verdict: One line for a person.
        broken: True when what is installed or demanded contradicts itself.
        backend: Kernels that run here: ``"fbgemm"``, ``"torch"``, or ``"none"`` when a demand
            cannot be met.
        reason: Why these.
        pair: Verdict on the torch and fbgemm wheels.
        remedy: The one pip line that would improve things; None when nothing would.
        versions: Package -> version, None where absent.
        kernels: Operation -> the kernel that computes it, for each device type.
        cuda: What looks up tables on CUDA, and what it costs; None where torch sees no CUDA device.
        devices: Devices that torch sees.
        collectives: What ranks can talk through: ``gloo``, ``nccl``.
        cores: Cores that this process may use.
        threads: Threads that torch uses in this process.
        validation: Whether ids and lengths are checked.
        machine: Operating system and processor.
        calibration: Whether the planner has measured speeds of this machine that still fit.

    Example:
        >>> from tutorec._doctor import Report
        >>> Report("all is well", False, "fbgemm", "the pair fits", "the pair fits", None)
        Report('all is well')
    """

    verdict: str
    broken: bool
    backend: str
    reason: str
    pair: str
    remedy: str | None
    versions: Mapping[str, str | None] = field(default_factory=dict)
    kernels: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    cuda: str | None = None
    devices: tuple[str, ...] = ()
    collectives: tuple[str, ...] = ()
    cores: int = 1
    threads: int = 1
    validation: bool = True
    machine: str = ""
    calibration: str = ""

    def __post_init__(self) -> None:
        self._printed_in: object = None

    def __repr__(self) -> str:
        return f"Report({self.verdict!r})"

    def __str__(self) -> str:
        present = [f"{name} {version}" for name, version in self.versions.items() if version]
        lines = [self.verdict, f"  {', '.join(present)}; {self.machine}"]
        for device, kernels in self.kernels.items():
            by_library: dict[str, list[str]] = {}
            for requested, kernel in kernels.items():
                by_library.setdefault(kernel.split(".")[0], []).append(requested)
            for library, requests in by_library.items():
                lines.append(f"  on {device} by {library}: {', '.join(requests)}")

        if self.cuda:
            lines.append(f"  {self.cuda}")

        through = " and ".join(self.collectives) or "nothing: this torch has no gloo"
        checks = "on" if self.validation else "off"
        cores = f"{self.cores} core{'s' if self.cores > 1 else ''}, {self.threads} in use by torch"
        lines.append(
            f"  {', '.join(self.devices)}; {cores}; ranks talk through {through}; input checks "
            f"{checks}"
        )

        if self.calibration:
            lines.append(f"  the planner's speeds: {self.calibration}")
        if self.remedy:
            lines.append(f"  to improve this: {self.remedy}")
        return "\n".join(lines)

    def to_json(self) -> str:
        """The whole report as JSON text."""
        return json_format.dumps(asdict(self), indent=2, default=dict)

    def _ipython_display_(self) -> None:
        """In a notebook, show the report, unless ``doctor()`` printed it in this cell."""
        if self._printed_in != _notebook_cell():
            print(self)


def doctor(json: bool = False) -> Report:
    """Print what runs on this machine and why, and return it.

    Args:
        json: Print the report as JSON instead of text.

    Returns:
        The report; ``report.broken`` says whether something contradicts itself.

    Example:
        >>> import contextlib, io
        >>> from tutorec._doctor import doctor
        >>> with contextlib.redirect_stdout(io.StringIO()):
        ...     report = doctor()
        >>> report.backend in ("fbgemm", "torch")
        True
    """
    report = _examine()
    print(report.to_json() if json else report)
    report._printed_in = _notebook_cell()
    return report


def _examine() -> Report:
    """Look at wheels, kernels, devices and settings; never raises."""
    import torch

    runs = True
    try:
        choice = backend()
    except (BackendError, ValueError) as error:
        # The requested backend is not available: report the wheels as if none were requested.
        runs = False
        judged = choose(override="auto")
        choice = BackendChoice(
            "torch", str(error), judged.remedy, judged.pair, judged.versions, broken=True
        )

    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    device_types = ["cpu", "cuda"] if gpus else ["cpu"]

    report = Report(
        verdict="",
        broken=choice.broken,
        backend=choice.name if runs else "none",
        reason=choice.reason,
        pair=choice.pair,
        remedy=choice.remedy,
        versions={
            "tutorec": import_module("tutorec").__version__,
            "python": platform.python_version(),
            **choice.versions,
        },
        kernels=_kernels(device_types) if runs else {},
        devices=("cpu", *gpus),
        collectives=_collectives(),
        cuda=_cuda(choice) if gpus else None,
        cores=_cores(),
        threads=torch.get_num_threads(),
        validation=validation_enabled(),
        machine=f"{platform.system()} {platform.machine()}",
        calibration=kept().state if runs else "",
    )
    report.verdict = _verdict(report)
    return report


def _verdict(report: Report) -> str:
    """The first line of the report."""
    kernels = {"fbgemm": "fbgemm kernels", "torch": "plain-torch kernels", "none": "no kernels"}[
        report.backend
    ]
    if report.broken:
        return (
            f"tutorec {report.versions['tutorec']} finds something broken, {kernels} run: "
            f"{report.reason}"
        )

    state = "ready, and could be faster" if report.remedy else "ready"
    return f"tutorec {report.versions['tutorec']} is {state}: {kernels} ({report.reason})"


def _cuda(choice: BackendChoice) -> str:
    if choice.serves("cuda"):
        return "tables on cuda are looked up by fbgemm's CUDA kernels"
    return (
        "tables on cuda are looked up by plain torch: one call for each width of tables instead "
        "of one for all, and every backward waits for the device; fbgemm's CUDA kernels do neither"
    )


def _kernels(device_types: list[str]) -> dict[str, dict[str, str]]:
    """The kernels behind each request, read from operators that are built on a small table."""
    import torch

    from tutorec._kernels.specs import GroupSpec, OptimizerKind, OptimizerSpec, TableSpec
    from tutorec._kernels.tbe_build import build_table_batch

    group = GroupSpec((TableSpec("probe", rows=1, columns=4),), feature_tables=(0,))
    optimizers: dict[str, OptimizerSpec | None] = {"dense": None}
    for optimizer in get_args(OptimizerKind):
        optimizers[optimizer] = OptimizerSpec(optimizer)

    kernels: dict[str, dict[str, str]] = {}
    for device_type in device_types:
        device = torch.device(device_type)
        kernels[device_type] = {
            name: build_table_batch(group, optimizer=spec, device=device).kernel
            for name, spec in optimizers.items()
        }

    return kernels


def _collectives() -> tuple[str, ...]:
    import torch.distributed as dist

    if not dist.is_available():
        return ()
    backends = (("gloo", dist.is_gloo_available()), ("nccl", dist.is_nccl_available()))
    return tuple(name for name, available in backends if available)


def _notebook_cell() -> object:
    """Number of the notebook cell that is running; None outside notebooks."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return getattr(shell, "execution_count", None)


def _cores() -> int:
    """Cores that this process may use, which in a container is fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
