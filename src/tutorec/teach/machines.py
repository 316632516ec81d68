"""What tutorec would choose on a machine with other wheels than this one."""

from __future__ import annotations

from tutorec._kernels.wheels import BackendChoice, choose


def kernels_for(
    torch: str,
    cpu_wheel: str | None = None,
    gpu_wheel: str | None = None,
    cuda: str | None = None,
) -> BackendChoice:
    """The backend of a machine, from versions alone.

    Args:
        torch: Version of torch.
        cpu_wheel: Version of ``fbgemm-gpu-cpu``; None where it is not installed.
        gpu_wheel: Version of ``fbgemm-gpu``.
        cuda: Version of CUDA that torch was built for; None for a build without CUDA.

    Returns:
        Its ``name`` ("fbgemm" or "torch"), a ``reason``, and a ``remedy``, empty where none is
        needed.

    Example:
        >>> choice = kernels_for("2.13.0", cpu_wheel="1.7.0")
        >>> choice.name, choice.remedy
        ('torch', 'pip install "fbgemm-gpu-cpu==1.8.*"')
    """
    wheels = {"torch": torch, "fbgemm-gpu-cpu": cpu_wheel, "fbgemm-gpu": gpu_wheel}
    return choose(wheels, torch_cuda=cuda)
