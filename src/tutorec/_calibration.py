"""The measured speeds of this machine, written by ``tutorec calibrate`` and read by planners.

The file holds the speeds under the names of `Topology`'s arguments, the date, and a fingerprint:
the hardware, the torch and the kernels that were measured. Where one of them has changed the speeds
are those of another machine, and nobody uses them.
"""

from __future__ import annotations

import json
import math
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tutorec._kernels.backend import backend
from tutorec._kernels.wheels import installed
from tutorec._whole_file import whole_file

__all__ = ["Calibration", "Kept", "cache_folder", "fingerprint", "kept", "processor_name"]

COMMAND = "tutorec calibrate"
_BANDWIDTHS = {"ddr_mem_bw", "hbm_mem_bw", "intra_host_bw", "hbm_to_ddr_mem_bw"}
_TIMES = {"bwd_compute_multiplier", "row_ms", "latency_ms"}


@dataclass(frozen=True)
class Calibration:
    """Speeds of a machine, and which machine it was.

    Args:
        date: When they were measured, as 2026-11-22.
        fingerprint: Fact -> what it was then, as of `fingerprint`.
        speeds: Device type -> argument of `Topology` -> number: bytes per ms, or ms.

    Example:
        >>> Calibration("2026-11-22", fingerprint(), {"cpu": {"row_ms": 2e-5}}).changes()
        ''
    """

    date: str
    fingerprint: Mapping[str, str]
    speeds: Mapping[str, Mapping[str, float]]

    def changes(self) -> str:
        """What this machine has become since; ``""`` where it is the same."""
        now = fingerprint()
        return ", ".join(
            f"{fact} {self.fingerprint.get(fact, 'unknown')} -> {value}"
            for fact, value in now.items()
            if self.fingerprint.get(fact) != value
        )

    def keep(self) -> Path:
        """Write the file, whole or not at all, and return where it is."""
        path = calibration_file()
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with whole_file(path) as draft:
            draft.write_text(json.dumps(asdict(self), indent=1), encoding="utf-8")
        return path


@dataclass(frozen=True)
class Kept:
    """What the file holds.

    Args:
        calibration: The speeds; None where there are none that fit this machine.
        state: One line: measured when, or why there are none and what helps.
        problem: Whether there is a file that cannot be used.
    """

    calibration: Calibration | None
    state: str
    problem: bool = False


def kept() -> Kept:
    """What was measured of this machine and still fits; never raises for what the file holds."""
    path = calibration_file()
    try:
        calibration = _checked(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return Kept(None, f"not calibrated; run `{COMMAND}`")
    except (OSError, ValueError) as error:
        return Kept(None, f"{path} is damaged ({error}); run `{COMMAND}`", problem=True)
    if changes := calibration.changes():
        return Kept(
            None,
            f"calibrated on {calibration.date}, which no longer fits ({changes}); run `{COMMAND}`",
            problem=True,
        )
    return Kept(calibration, f"measured on this machine on {calibration.date}")


def measure_in_own_process() -> None:
    """Run ``tutorec calibrate`` in a new process, so that nothing else runs beside its ranks.

    Raises:
        subprocess.CalledProcessError: It failed; its own words stand in the standard error.
    """
    subprocess.run(
        [sys.executable, "-m", "tutorec", "calibrate"], check=True, stdout=subprocess.DEVNULL
    )


def fingerprint() -> dict[str, str]:
    """What the speeds depend on: hardware, torch, kernels."""
    import torch

    versions, kernels = installed(), backend().name
    wheel = versions.get("fbgemm-gpu-cpu") or versions.get("fbgemm-gpu")
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "processor": processor_name(),
        "cores": str(os.cpu_count()),
        "GPUs": ", ".join(gpus) or "none",
        "torch": torch.__version__,
        "kernels": f"fbgemm {wheel}" if kernels == "fbgemm" else kernels,
    }


def processor_name() -> str:
    """The processor's name, as far as the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown processor"


def cache_folder() -> Path:
    """The user's cache folder of tutorec: ``TUTOREC_CACHE``, else below the system's."""
    if given := os.environ.get("TUTOREC_CACHE"):
        return Path(given)
    home = Path.home()
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or home / "AppData" / "Local") / "tutorec"
    usual = home / "Library" / "Caches" if sys.platform == "darwin" else home / ".cache"
    return Path(os.environ.get("XDG_CACHE_HOME") or usual) / "tutorec"


def calibration_file() -> Path:
    """``TUTOREC_CALIBRATION``, else ``calibration.json`` in the cache."""
    return Path(os.environ.get("TUTOREC_CALIBRATION") or cache_folder() / "calibration.json")


def _checked(read: Any) -> Calibration:
    """What a file held, if it can be meant.

    Raises:
        ValueError: It cannot.
    """
    try:
        calibration = Calibration(
            str(read["date"]), dict(read["fingerprint"]), dict(read["speeds"])
        )
        numbers = [
            (name, number)
            for speeds in calibration.speeds.values()
            for name, number in speeds.items()
        ]
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"no calibration: {error!r}") from None
    for name, number in numbers:
        known = isinstance(number, (int, float)) and math.isfinite(number)
        if (
            name not in _BANDWIDTHS | _TIMES
            or not known
            or number < 0
            or (name in _BANDWIDTHS and number == 0)
        ):
            raise ValueError(f"{name!r} is {number!r}")
    return calibration
