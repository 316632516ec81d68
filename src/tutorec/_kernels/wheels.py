"""Which fbgemm wheel fits this torch: judged from package metadata, before anything of it is loaded.

fbgemm-gpu's wheels name no torch version in their metadata, so pip installs any of them with any
torch. The rule: fbgemm 1.X belongs to torch 2.(X+5). Where it does not hold, the choice says so and
names the pip line that repairs it.
"""  # noqa: E501

from __future__ import annotations

import platform
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from tutorec.errors import BackendError

__all__ = [
    "ENV_VARIABLE",
    "BackendChoice",
    "BackendName",
    "choose",
    "installed",
    "refusal",
    "reinstall_line",
]

BackendName = Literal["fbgemm", "torch"]

ENV_VARIABLE = "TUTOREC_BACKEND"
_CPU_WHEEL = "fbgemm-gpu-cpu"
_CUDA_WHEEL = "fbgemm-gpu"
_ASK_TORCH = "ask torch"
# The CUDA wheels 1.X are linked against CUDA 12 up to this X and against CUDA 13 after it, unless
# "+cu" says otherwise.
_LAST_MINOR_OF_CUDA_12 = 5
_FIRST_PAIRED_TORCH_MINOR = 5
# X of the wheels fbgemm-gpu-cpu 1.X and fbgemm-gpu 1.X that are published, as of 2026-11-22, and
# whose operators take the arguments that are passed here (1.2 and older take other ones): a remedy
# names no other.
_SERVED_MINORS = range(3, 10)


@dataclass(frozen=True)
class BackendChoice:
    """The kernels that were chosen, and why.

    Attributes:
        name: ``"fbgemm"`` or ``"torch"``.
        reason: One sentence for a person.
        remedy: The one pip line that would improve things; None when nothing would.
        pair: Verdict on the two wheels, for example ``"fbgemm-gpu-cpu 1.8.0 belongs to torch
            2.13.0"``.
        versions: Distribution name -> version, None where it is not installed.
        broken: True when what is installed contradicts itself (a wrong pair, two wheels); False
            when fbgemm is absent.

    Example:
        >>> from tutorec._kernels.wheels import choose
        >>> choose(
        ...     {"torch": "2.13.0", "fbgemm-gpu-cpu": None, "fbgemm-gpu": None}, torch_cuda=None
        ... ).name
        'torch'
    """

    name: BackendName
    reason: str
    remedy: str | None
    pair: str
    versions: Mapping[str, str | None] = field(default_factory=dict)
    broken: bool = False

    def serves(self, device_type: str) -> bool:
        """Whether fbgemm's kernels run on a device type; ``"cuda"`` needs the CUDA wheel."""
        needs = {"cpu": True, "cuda": self.versions.get(_CUDA_WHEEL) is not None}
        return self.name == "fbgemm" and needs.get(device_type, False)


def installed() -> dict[str, str | None]:
    """Versions of torch and of both fbgemm wheels from package metadata; None where absent."""
    # here: it costs 20 ms and import tutorec needs it not
    from importlib.metadata import PackageNotFoundError, version

    versions: dict[str, str | None] = {}
    for name in ("torch", _CPU_WHEEL, _CUDA_WHEEL):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = None
    return versions


def choose(
    metadata: Mapping[str, str | None] | None = None,
    override: str | None = None,
    torch_cuda: str | None = _ASK_TORCH,
) -> BackendChoice:
    """Choose a backend from metadata alone; nothing of fbgemm is imported or loaded.

    Args:
        metadata: Versions as :func:`installed` returns them; None reads the machine's.
        override: ``"torch"``, ``"fbgemm"``, ``"auto"`` or None, as ``TUTOREC_BACKEND`` would say.
        torch_cuda: CUDA version that torch was built for, None for a CPU build; by default torch is
            asked. A remedy names the CUDA wheel where there is a GPU, which is taken for granted
            when the version is given.

    Returns:
        The choice. fbgemm chosen here can still fail to load: see ``backend.py``.

    Raises:
        ValueError: ``override`` is none of the three words.
        BackendError: ``override`` is ``"fbgemm"`` and it cannot be had.

    Example:
        >>> from tutorec._kernels.wheels import choose
        >>> choice = choose(
        ...     {"torch": "2.13.0", "fbgemm-gpu-cpu": "1.7.0", "fbgemm-gpu": None},
        ...     torch_cuda=None,
        ... )
        >>> choice.name, choice.remedy
        ('torch', 'pip install "fbgemm-gpu-cpu==1.8.*"')
    """
    requested = (override or "auto").strip().lower()
    if requested not in ("auto", "torch", "fbgemm"):
        raise ValueError(
            f"{ENV_VARIABLE}={override!r} names no backend: use 'auto' (the default), 'torch' or "
            "'fbgemm', or unset the variable"
        )

    versions = dict(installed() if metadata is None else metadata)
    has_gpu = torch_cuda is not None
    if torch_cuda == _ASK_TORCH:
        import torch

        torch_cuda = torch.version.cuda
        has_gpu = torch.cuda.is_available()
    judged = _judge(versions, torch_cuda, has_gpu)

    if requested == "torch":
        return replace(
            judged,
            name="torch",
            reason=f"{ENV_VARIABLE}=torch asks for it",
            remedy=None,
            broken=False,
        )
    if requested == "fbgemm" and judged.name != "fbgemm":
        raise BackendError(refusal(judged))
    if requested == "fbgemm":
        return replace(judged, reason=f"{ENV_VARIABLE}=fbgemm asks for it, and {judged.pair}")
    return judged


def _judge(
    versions: Mapping[str, str | None], torch_cuda: str | None, has_gpu: bool
) -> BackendChoice:
    """Choose fbgemm where the installed wheels fit, else torch with the reason and the remedy."""
    torch_version, cpu, cuda = (versions.get(name) for name in ("torch", _CPU_WHEEL, _CUDA_WHEEL))

    def refuse(pair: str, reason: str, remedy: str | None, broken: bool) -> BackendChoice:
        return BackendChoice("torch", reason, remedy, pair, versions, broken)

    fitting = _fitting_minor(torch_version)
    right = _wheel_for(torch_version, torch_cuda if has_gpu else None)
    line = _install_line(right, torch_version)

    if cpu is None and cuda is None:
        remedy = line if _wheel_exists_here() else None
        cause = (
            "fbgemm is not installed"
            if remedy
            else "fbgemm has no wheel for this platform and torch"
        )
        if remedy and fitting not in _SERVED_MINORS:
            oldest = _torch_of(_SERVED_MINORS[0])
            newest = _torch_of(_SERVED_MINORS[-1])
            cause = (
                f"no fbgemm wheel serves torch {torch_version}: those that do belong to {oldest} "
                f"to {newest}"
            )
        return refuse("no fbgemm wheel", cause, remedy, broken=False)

    if cpu is not None and cuda is not None:
        again = _install_line(right, torch_version, "--force-reinstall --no-deps ")
        remedy = f"pip uninstall -y {_CPU_WHEEL} {_CUDA_WHEEL}" + (f" && {again}" if again else "")
        both = f"{_CPU_WHEEL} {cpu} and {_CUDA_WHEEL} {cuda} are both installed"
        return refuse(both, f"{both} and overwrite each other's files", remedy, broken=True)

    wheel, version = (_CPU_WHEEL, cpu) if cpu is not None else (_CUDA_WHEEL, cuda)
    instead = f"pip uninstall -y {wheel} && {line}"
    minors = _release(version)
    if fitting is None or minors is None:
        text = f"{wheel} {version} beside torch {torch_version}: the pair cannot be judged"
        return refuse(text, f"{text} (development versions have no rule)", line, broken=False)
    if minors != (1, fitting):
        belongs = _torch_of(minors[1]) if minors[0] == 1 else "an older torch"
        text = f"{wheel} {version} belongs to {belongs}, not to torch {torch_version}"
        return refuse(text, text, instead if right != wheel else line, broken=True)

    if cuda is not None and (trouble := _cuda_trouble(cuda, minors, torch_cuda)):
        return refuse(trouble, trouble, instead, broken=True)
    pair = f"{wheel} {version} belongs to torch {torch_version}"
    return BackendChoice(
        "fbgemm",
        pair,
        instead if cpu is not None and right == _CUDA_WHEEL else None,
        pair,
        versions,
    )


def _release(version: str | None) -> tuple[int, int] | None:
    """(major, minor) of a released version; None for none and for development versions."""
    match = re.match(r"(\d+)\.(\d+)", version or "")
    if match is None or re.search(r"dev|\d(a|b)\d|\+git", version or ""):
        return None
    return int(match[1]), int(match[2])


def _fitting_minor(torch_version: str | None) -> int | None:
    """X of the fbgemm 1.X that belongs to this torch; None where the rule says nothing."""
    release = _release(torch_version)
    if release is None or release[0] != 2 or release[1] < _FIRST_PAIRED_TORCH_MINOR:
        return None
    return release[1] - _FIRST_PAIRED_TORCH_MINOR


def _torch_of(minor: int) -> str:
    """The torch that fbgemm 1.minor belongs to, for example ``torch 2.13``."""
    return f"torch 2.{minor + _FIRST_PAIRED_TORCH_MINOR}"


def _install_line(wheel: str, torch_version: str | None, options: str = "") -> str | None:
    """The pip line for this torch's wheel, or for the newest pair; None without a rule."""
    fitting = _fitting_minor(torch_version)
    if fitting is None or fitting in _SERVED_MINORS:
        return None if fitting is None else f'pip install {options}"{wheel}==1.{fitting}.*"'
    newest = _SERVED_MINORS[-1]
    return f'pip install "{_torch_of(newest).replace(" ", "==")}.*" "{wheel}==1.{newest}.*"'


def _cuda_major(minor: int) -> int:
    """The CUDA that the published wheel fbgemm-gpu 1.minor is linked against."""
    return 12 if minor <= _LAST_MINOR_OF_CUDA_12 else 13


def _wheel_for(torch_version: str | None, torch_cuda: str | None) -> str:
    """The wheel for a remedy: the CUDA one where published for torch's CUDA, else the CPU one."""
    fitting = _fitting_minor(torch_version)
    if (
        torch_cuda is None
        or fitting is None
        or (sys.platform, platform.machine()) != ("linux", "x86_64")
    ):
        return _CPU_WHEEL
    major = _cuda_major(fitting if fitting in _SERVED_MINORS else _SERVED_MINORS[-1])
    return _CUDA_WHEEL if major == int(torch_cuda.split(".")[0]) else _CPU_WHEEL


def _cuda_trouble(version: str, minors: tuple[int, int], torch_cuda: str | None) -> str | None:
    """Why a CUDA wheel of the right minor version cannot load beside this torch, or None."""
    if torch_cuda is None:
        return f"{_CUDA_WHEEL} {version} needs a CUDA build of torch, and this torch is a CPU build"
    tag = re.search(r"\+cu(\d{2})", version)
    major = int(tag[1]) if tag else _cuda_major(minors[1])
    if major != int(torch_cuda.split(".")[0]):
        return (
            f"{_CUDA_WHEEL} {version} is built for CUDA {major}, and this torch for CUDA "
            f"{torch_cuda}"
        )
    return None


def _wheel_exists_here() -> bool:
    """True where a CPU wheel of fbgemm is published: Linux on x86_64 and aarch64."""
    return sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64")


def refusal(choice: BackendChoice) -> str:
    """The message for a demanded fbgemm that cannot be had."""
    remedy = f"; this would help: {choice.remedy}" if choice.remedy else ""
    return f"fbgemm was demanded ({ENV_VARIABLE}=fbgemm) and cannot be had: {choice.reason}{remedy}"


def reinstall_line(versions: Mapping[str, str | None]) -> str | None:
    """The pip line where a fitting wheel is installed and does not load; None without a rule."""
    if versions.get(_CPU_WHEEL):
        return _install_line(_CPU_WHEEL, versions.get("torch"), "--force-reinstall --no-deps ")
    # The usual cause is a machine without an NVIDIA driver.
    line = _install_line(_CPU_WHEEL, versions.get("torch"))
    return None if line is None else f"pip uninstall -y {_CUDA_WHEEL} && {line}"
