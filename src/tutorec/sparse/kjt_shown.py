"""How a batch is shown, to a reader and to a tracer. These are special methods of `KeyedJaggedTensor`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from tutorec.sparse.kjt_checks import check_numbers
from tutorec.sparse.printing import keyed_jagged_text, object_text
from tutorec.sparse.traced import eager_kind

if TYPE_CHECKING:
    from tutorec.sparse.keyed_jagged import KeyedJaggedTensor


@torch.jit.unused
def represent(batch: Any) -> str:
    """TorchRec's form of an object: its class and where it is."""
    return object_text(batch)


@torch.jit.unused
def text(batch: Any) -> str:
    """TorchRec's printed form: each key with its lists, and their weights. Lengths are checked first."""
    kjt: KeyedJaggedTensor = batch
    check_numbers(kjt)
    return keyed_jagged_text(kjt._keys, kjt._values, kjt._weights, kjt.offsets(), kjt.lengths_offset_per_key())


@torch.jit.unused
def as_call(batch: Any, tracer: Any) -> Any:
    """In a traced graph, a batch that leaves the graph is a call of its constructor."""
    names = ("keys", "values", "weights", "lengths", "offsets", "stride", "stride_per_key_per_rank", "inverse_indices")
    parts = {name: getattr(batch, f"_{name}") for name in names}
    return tracer.create_node("call_function", eager_kind(batch), (), tracer.create_arg(parts))
