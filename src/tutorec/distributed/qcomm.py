"""Rows and gradients in 16 bits while they travel: half the bytes, for an error per value sent that is known.

What is sent is rounded to the nearest number of the narrow type; what arrives is float32 again before anything is
computed with it, so that sums are made in float32 and only the values sent are rounded:

- FP16: a relative error of at most 2**-11 between 6.1e-5 and 65504; below that an absolute one of 2**-25; what is
  larger becomes infinite.
- BF16: a relative error of at most 2**-8, over nearly the range of float32.

Rows on their way home over two steps (table-row-wise, grid) are rounded twice. Gradients are often below 6.1e-5: send
them as BF16, or give FP16 a ``backward_loss_scale``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, unique

import torch


@unique
class CommType(Enum):
    """In what type values travel. FP32, FP16 and BF16 are supported; the others stand here to be refused by name.

    Source:
        TorchRec's ``torchrec.distributed.fbgemm_qcomm_codec.CommType``.
    """

    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"
    FP8 = "fp8"
    INT8 = "int8"
    MX4 = "mx4"

    def __str__(self) -> str:
        return self.value


@unique
class CommOp(Enum):
    """The moves that can have a narrow type of their own.

    Source:
        TorchRec's ``torchrec.distributed.types.CommOp``.
    """

    POOLED_EMBEDDINGS_ALL_TO_ALL = "pooled_embeddings_all_to_all"
    POOLED_EMBEDDINGS_REDUCE_SCATTER = "pooled_embeddings_reduce_scatter"
    SEQUENCE_EMBEDDINGS_ALL_TO_ALL = "sequence_embeddings_all_to_all"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class CommCodec:
    """How values become narrow before they are sent, and wide again when they have arrived.

    Args:
        dtype: What travels: float16 or bfloat16.
        loss_scale: Values are multiplied by it before they are rounded and divided by it on arrival; None: by nothing.

    Example:
        >>> codec = CommCodec(torch.bfloat16)
        >>> codec.encode(torch.tensor([1.0, 1.0 + 2**-8]))
        tensor([1., 1.], dtype=torch.bfloat16)
        >>> CommCodec(torch.float16, loss_scale=1024.0).decode(torch.tensor([1.0]).half(), torch.float32)
        tensor([0.0010])
    """

    dtype: torch.dtype
    loss_scale: float | None = None

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """``[N]`` to send."""
        return (values if self.loss_scale is None else values * self.loss_scale).to(self.dtype)

    def decode(self, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """``[N]`` that arrived, or a sum of them, in ``dtype``."""
        wide = values.to(dtype)
        return wide if self.loss_scale is None else wide / self.loss_scale


@dataclass(frozen=True)
class QuantizedCommCodecs:
    """The codecs of one move: of the rows on their way home, and of the gradients on their way back.

    Args:
        forward: None: as they are.
        backward: None: as they are.

    Source:
        TorchRec's ``torchrec.distributed.types.QuantizedCommCodecs``.
    """

    forward: CommCodec | None = None
    backward: CommCodec | None = None


@dataclass
class QCommsConfig:
    """In what type rows and gradients travel.

    TorchRec's other arguments (``fp8_*``, ``mx4_*``, ``output_dtype``) set up FP8 and MX4, which are not
    supported here.

    Args:
        forward_precision: Rows on their way home.
        backward_precision: Gradients on their way back.
        forward_loss_scale: Rows are multiplied by it while they travel; for what FP16 and BF16 would round to zero.
        backward_loss_scale: Gradients are multiplied by it while they travel.

    Raises:
        ValueError: A type that is not supported, or a scale that is no positive number.

    Source:
        TorchRec's ``torchrec.distributed.fbgemm_qcomm_codec.QCommsConfig``.
    """

    forward_precision: CommType = CommType.FP32
    backward_precision: CommType = CommType.FP32
    forward_loss_scale: float | None = None
    backward_loss_scale: float | None = None

    def __post_init__(self) -> None:
        _codec("forward", self.forward_precision, self.forward_loss_scale)
        _codec("backward", self.backward_precision, self.backward_loss_scale)


def get_qcomm_codecs_registry(
    qcomms_config: QCommsConfig,
    comm_ops: Sequence[CommOp] | None = None,
    device: torch.device | None = None,
) -> dict[str, QuantizedCommCodecs] | None:
    """What a sharder takes as ``qcomm_codecs_registry=``: the codecs of each move.

    Args:
        qcomms_config: The types.
        comm_ops: The moves that they are for, all by default.
        device: TorchRec's; has no effect. BF16 travels as BF16 on gloo too, where TorchRec falls back to FP16.

    Returns:
        Name of a `CommOp` -> its codecs; None where everything travels as float32.

    Example:
        >>> registry = get_qcomm_codecs_registry(QCommsConfig(forward_precision=CommType.FP16))
        >>> registry["POOLED_EMBEDDINGS_ALL_TO_ALL"]
        QuantizedCommCodecs(forward=CommCodec(dtype=torch.float16, loss_scale=None), backward=None)

    Source:
        TorchRec's ``torchrec.distributed.fbgemm_qcomm_codec.get_qcomm_codecs_registry``.
    """
    codecs = get_qcomm_codecs(qcomms_config)
    if codecs == QuantizedCommCodecs():
        return None
    return {op.name: codecs for op in (CommOp if comm_ops is None else comm_ops)}


def get_qcomm_codecs(qcomms_config: QCommsConfig | None) -> QuantizedCommCodecs:
    """The codecs of one move, what ``PooledEmbeddingsAllToAll`` and its kind take as ``codecs=``.

    Args:
        qcomms_config: The types; None: as they are.

    Raises:
        TypeError: It is no `QCommsConfig`.

    Example:
        >>> get_qcomm_codecs(QCommsConfig(backward_precision=CommType.BF16))
        QuantizedCommCodecs(forward=None, backward=CommCodec(dtype=torch.bfloat16, loss_scale=None))

    Source:
        TorchRec's ``torchrec.distributed.fbgemm_qcomm_codec.get_qcomm_codecs``.
    """
    if qcomms_config is None:
        return QuantizedCommCodecs()
    if not isinstance(qcomms_config, QCommsConfig):
        raise TypeError(
            f"types on the wire are a QCommsConfig, got {qcomms_config!r}: "
            "QCommsConfig(forward_precision=CommType.FP16, backward_precision=CommType.BF16)"
        )
    return QuantizedCommCodecs(
        _codec("forward", qcomms_config.forward_precision, qcomms_config.forward_loss_scale),
        _codec("backward", qcomms_config.backward_precision, qcomms_config.backward_loss_scale),
    )


_DTYPES = {CommType.FP32: None, CommType.FP16: torch.float16, CommType.BF16: torch.bfloat16}


def _codec(direction: str, precision: CommType, loss_scale: float | None) -> CommCodec | None:
    if not isinstance(precision, CommType):
        raise ValueError(f"{direction}_precision must be a CommType, got {precision!r}: try CommType.FP16")
    if precision not in _DTYPES:
        raise ValueError(
            f"{direction}_precision {precision.name} is not supported: rows and gradients travel as FP32, FP16 or BF16"
        )
    if loss_scale is not None and not loss_scale > 0:
        raise ValueError(f"{direction}_loss_scale must be a positive number or None, got {loss_scale!r}")
    dtype = _DTYPES[precision]
    return None if dtype is None else CommCodec(dtype, loss_scale)


__all__ = [
    "CommCodec",
    "CommOp",
    "CommType",
    "QCommsConfig",
    "QuantizedCommCodecs",
    "get_qcomm_codecs",
    "get_qcomm_codecs_registry",
]
