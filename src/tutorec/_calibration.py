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
import stat
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import date as Date
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from tutorec._kernels.backend import backend
from tutorec._kernels.wheels import installed
from tutorec._text import visible
from tutorec._whole_file import whole_file

__all__ = [
    "Calibration",
    "StoredCalibration",
    "cache_folder",
    "fingerprint",
    "kept",
    "processor_name",
    "require_place",
]

COMMAND = "tutorec calibrate"
_BANDWIDTHS = {"ddr_mem_bw", "hbm_mem_bw", "intra_host_bw", "hbm_to_ddr_mem_bw"}
_TIMES = {"bwd_compute_multiplier", "row_ms", "latency_ms"}
_LARGEST = 1 << 20  # bytes of a file; one that calibrate writes has some hundred
_LONGEST = 200  # characters of a message about what is wrong in it


@dataclass(frozen=True)
class Calibration:
    """Speeds of a machine, and which machine it was.

    Args:
        date: When they were measured, as 2026-11-22.
        fingerprint: Name -> value, the result of `fingerprint` at that time.
        speeds: Device type -> argument of `Topology` -> number: bytes per ms, or ms.

    Example:
        >>> Calibration("2026-11-22", fingerprint(), {"cpu": {"row_ms": 2e-5}}).changes()
        ''
    """

    date: str
    fingerprint: Mapping[str, str]
    speeds: Mapping[str, Mapping[str, float]]

    def changes(self) -> str:
        """The changes of this machine since the measurement; ``""`` if there are none."""
        now = fingerprint()
        return ", ".join(
            f"{name} {self.fingerprint.get(name, 'unknown')} -> {value}"
            for name, value in now.items()
            if self.fingerprint.get(name) != value
        )

    def keep(self) -> Path:
        """Write the file, whole or not at all, and return where it is.

        Raises:
            OSError: There is no folder for it that can be written to.
        """
        path = require_place()
        with whole_file(path) as draft:
            draft.write_text(json.dumps(asdict(self), indent=1), encoding="utf-8")
        return path


@dataclass(frozen=True)
class StoredCalibration:
    """The content of the file.

    Args:
        calibration: The speeds; None if there are none that fit this machine.
        state: One line: the day of the measurement, or why there are no speeds and the remedy.
        problem: Whether there is a file that cannot be used.
    """

    calibration: Calibration | None
    state: str
    problem: bool = False


def kept() -> StoredCalibration:
    """The speeds of this machine that still fit; never raises for the content of the file."""
    try:
        path = calibration_file()
    except OSError as error:
        return StoredCalibration(None, f"not calibrated; {error}")

    try:
        calibration = _checked(_read(path))
    except FileNotFoundError:
        return StoredCalibration(None, f"not calibrated; run `{COMMAND}`")
    except (OSError, ValueError, OverflowError, RecursionError, MemoryError) as error:
        reason = visible(str(error)[:_LONGEST])
        state = f"{visible(str(path))} is damaged ({reason}); run `{COMMAND}`"
        return StoredCalibration(None, state, problem=True)

    changes = visible(calibration.changes()[: 5 * _LONGEST])
    if changes:
        state = f"calibrated on {calibration.date}, which no longer fits ({changes})"
        return StoredCalibration(None, f"{state}; run `{COMMAND}`", problem=True)

    return StoredCalibration(calibration, f"measured on this machine on {calibration.date}")


def measure_in_own_process() -> None:
    """Run ``tutorec calibrate`` in a new process, whose ranks share it with no other work.

    Raises:
        OSError: There is no folder that can keep the result.
        subprocess.CalledProcessError: It failed; its message is on the standard error.
    """
    require_place()
    subprocess.run(
        [sys.executable, "-m", "tutorec", "calibrate"], check=True, stdout=subprocess.DEVNULL
    )


def fingerprint() -> dict[str, str]:
    """The hardware, torch and kernels on which the speeds depend."""
    import torch

    versions = installed()
    kernels = backend().name
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
    """The processor's name, if the system knows it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown processor"


def cache_folder() -> Path:
    """The user's cache folder of tutorec: ``TUTOREC_CACHE``, else below the system's.

    Raises:
        FileNotFoundError: The user has no home folder, and no variable names a folder.
    """
    own_folder = os.environ.get("TUTOREC_CACHE")
    if own_folder:
        return Path(own_folder)

    system_folder = os.environ.get("LOCALAPPDATA" if sys.platform == "win32" else "XDG_CACHE_HOME")
    if system_folder:
        return Path(system_folder) / "tutorec"

    try:
        user_folder = Path.home()
    except RuntimeError:  # neither HOME nor a line for this user in the system's list
        raise FileNotFoundError(
            "this user has no home folder for the cache: set TUTOREC_CACHE to a folder to use"
        ) from None

    usual = {"win32": "AppData/Local", "darwin": "Library/Caches"}.get(sys.platform, ".cache")
    return user_folder / usual / "tutorec"


def calibration_file() -> Path:
    """``TUTOREC_CALIBRATION``, else ``calibration.json`` in the cache.

    Raises:
        FileNotFoundError: As of `cache_folder`.
    """
    return Path(os.environ.get("TUTOREC_CALIBRATION") or cache_folder() / "calibration.json")


def require_place() -> Path:
    """The path of the calibration, in a folder that exists and can be written to.

    Raises:
        OSError: There is no such folder; the text says what to set.
    """
    path = calibration_file()
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        TemporaryFile(dir=path.parent).close()
    except OSError as error:
        text = f"{error.strerror}; set TUTOREC_CACHE to a folder that can be written to"
        raise OSError(error.errno, text, str(path.parent)) from None

    return path


def _read(path: Path) -> Any:
    """The content of a file of JSON."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"not a file: {stat.filemode(status.st_mode)}")
    if status.st_size > _LARGEST:
        raise ValueError(f"{status.st_size:,} bytes")
    return json.loads(path.read_text(encoding="utf-8"))


def _checked(read: Any) -> Calibration:
    """The calibration in the content of a file.

    Raises:
        ValueError: It is not a calibration.
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
        known = type(number) in (int, float) and math.isfinite(number)
        if (
            name not in _BANDWIDTHS | _TIMES
            or not known
            or number < 0
            or (name in _BANDWIDTHS and number == 0)
        ):
            raise ValueError(f"{name!r} is {number!r}")
    Date.fromisoformat(calibration.date)
    return calibration
