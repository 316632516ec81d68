"""Put pretended GPUs under every Python process that has this folder on PYTHONPATH and
TUTOREC_PRETEND_GPUS set.

Ranks, notebook kernels and torchrun's workers are processes of their own, so that a fixture cannot
reach them. This waits for ``import torch`` and then installs the pretended devices.
"""

import gc
import importlib.util
import os
import sys
from importlib.machinery import ModuleSpec


class _AfterTorch:
    """A finder that lets the others find torch and adds a step to its import."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def execute_and_install(module: object) -> None:
            gc.disable()  # a sixth of the import, which every process of a test pays
            execute(module)
            gc.enable()
            sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
            try:
                import pretend_cuda
            finally:
                del sys.path[0]
            pretend_cuda.install(int(os.environ["TUTOREC_PRETEND_GPUS"]))

        spec.loader.exec_module = execute_and_install
        return spec


if os.environ.get("TUTOREC_PRETEND_GPUS"):
    sys.meta_path.insert(0, _AfterTorch())
