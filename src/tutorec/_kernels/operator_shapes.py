"""Shapes of fbgemm's results, for ``torch.export`` and other tracers on meta tensors.

fbgemm writes them down in its Python package, which is not imported here. A rule is registered only
where there is none, and fbgemm's package, imported later, leaves a rule alone that is there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.library import Library

__all__ = ["register_shapes"]

_LOOKUP = "int_nbit_split_embedding_codegen_lookup_function"
_NO_POOLING = 2
_OUTPUT_TYPES = {0: torch.float32, 1: torch.float16, 5: torch.bfloat16}
# A registration ends with the object that made it.
_kept: list[Library] = []


def register_shapes() -> None:
    """Register the rules that are missing; fbgemm's libraries are loaded.

    Example:
        >>> from tutorec._kernels.backend import backend
        >>> if backend().name == "fbgemm":
        ...     register_shapes()  # the second time nothing is missing
    """
    if torch._C._dispatch_has_kernel_for_dispatch_key(f"fbgemm::{_LOOKUP}", "Meta"):
        return
    library = Library("fbgemm", "IMPL", "Meta")
    library.impl(_LOOKUP, _looked_up)
    _kept.append(library)


def _looked_up(*given: Any, **named: Any) -> Tensor:
    """[B, total_D], or [N, D] without pooling, on the device of the ids."""
    schema = torch.ops.fbgemm.int_nbit_split_embedding_codegen_lookup_function.default._schema
    arguments: dict[str, Any] = {
        argument.name: argument.default_value for argument in schema.arguments
    }
    arguments.update(zip(arguments, given, strict=False))
    arguments.update(named)

    indices = arguments["indices"]
    offsets = arguments["offsets"]
    total = arguments["total_D"]
    features = arguments["D_offsets"].shape[0] - 1
    if arguments["pooling_mode"] == _NO_POOLING:
        shape = (indices.shape[0], total // features)
    else:
        shape = ((offsets.shape[0] - 1) // features, total)
    return torch.empty(shape, dtype=_OUTPUT_TYPES[arguments["output_dtype"]], device=indices.device)
