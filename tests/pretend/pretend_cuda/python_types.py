"""``type(x)`` in the modules of tutorec: a tensor of a GPU is a ``Tensor`` there, no subclass."""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

import torch
from torch import Tensor

from pretend_cuda.tensors import OnDevice


class _TypeOnABox(type):
    """``type`` in the modules of tutorec: there, too, ``type(x) is Tensor`` for a
    tensor of a GPU.
    """

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and isinstance(args[0], OnDevice):
            return torch.nn.Parameter if isinstance(args[0], torch.nn.Parameter) else Tensor
        return type(*args, **kwargs)

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, type)

    def __getitem__(cls, of: Any) -> Any:
        return type[of]


class _Type(metaclass=_TypeOnABox):
    """Stands for ``type``."""


class _GiveType:
    """A finder that puts it into every module of tutorec before the module runs."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path) if name.startswith("tutorec.") else None
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def run_with_type(module: Any) -> None:
            module.type = _Type
            run(module)

        spec.loader.exec_module = run_with_type
        return spec


def install() -> None:
    """Give it to every module of tutorec that is imported from now on."""
    sys.meta_path.insert(0, _GiveType())
