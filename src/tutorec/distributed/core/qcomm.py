"""Quantized communication: rows and gradients are sent in 16 bits, half the bytes of float32.

Values are rounded to the nearest value of the narrow type before they are sent, and converted to
float32 on arrival. Sums are computed in float32, so only the sent values are rounded:

- FP16: a relative error of at most 2**-11 between 6.1e-5 and 65504; below that an absolute error of
  at most 2**-25; larger values become infinite.
- BF16: a relative error of at most 2**-8, over nearly the range of float32.

The two-step output exchange of table-row-wise and grid sharding rounds rows twice. Gradients are
often below 6.1e-5: send them as BF16, or set ``backward_loss_scale`` for FP16.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, unique

import torch


@unique
class CommType(Enum):
    """Data type in which values are sent. FP32, FP16 and BF16 are supported, others are refused.

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
    """The exchanges that can have a codec.

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
    """Converts values to a narrow type before they are sent, and back on arrival.

    Args:
        dtype: The type sent: float16 or bfloat16.
        loss_scale: Values are multiplied by it before rounding and divided by it on arrival; None
            for no scaling.

    Example:
        >>> codec = CommCodec(torch.bfloat16)
        >>> codec.encode(torch.tensor([1.0, 1.0 + 2**-8]))
        tensor([1., 1.], dtype=torch.bfloat16)
        >>> CommCodec(torch.float16, loss_scale=1024.0).decode(torch.tensor([1.0]).half())
        tensor([0.0010])
    """

    dtype: torch.dtype
    loss_scale: float | None = None

    def encode(self, values: torch.Tensor, ctx: None = None) -> torch.Tensor:
        """Convert ``[N]`` values for sending; ``ctx``, which TorchRec's FP8 needs, is not used."""
        return (values if self.loss_scale is None else values * self.loss_scale).to(self.dtype)

    def decode(self, values: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Convert received values ``[N]``, or a sum of them, to ``dtype``, float32 by default."""
        wide = values.to(torch.float32 if dtype is None else dtype)
        return wide if self.loss_scale is None else wide / self.loss_scale


@dataclass(frozen=True)
class QuantizedCommCodecs:
    """The codecs of one exchange, for rows and for their gradients.

    Args:
        forward: Codec of rows; None sends them unchanged.
        backward: Codec of gradients; None sends them unchanged.

    Source:
        TorchRec's ``torchrec.distributed.types.QuantizedCommCodecs``.
    """

    forward: CommCodec | None = None
    backward: CommCodec | None = None


@dataclass
class QCommsConfig:
    """Data types in which rows and gradients are sent.

    TorchRec's other arguments (``fp8_*``, ``mx4_*``, ``output_dtype``) configure FP8 and MX4, which
    are not supported.

    Args:
        forward_precision: Type of rows.
        backward_precision: Type of gradients.
        forward_loss_scale: Factor on rows while they are sent, for values that FP16 or BF16 would
            round to zero.
        backward_loss_scale: Factor on gradients while they are sent.

    Raises:
        ValueError: A type is not supported, or a scale is not a positive number.

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
    """The codecs of each exchange, a sharder's ``qcomm_codecs_registry=``.

    Args:
        qcomms_config: The data types.
        comm_ops: The exchanges that use them, all by default.
        device: TorchRec's; has no effect. BF16 is sent as BF16 on gloo, too, where TorchRec falls
            back to FP16.

    Returns:
        Name of a `CommOp` -> its codecs; None if everything is sent as float32.

    Example:
        >>> registry = get_qcomm_codecs_registry(QCommsConfig(forward_precision=CommType.FP16))
        >>> registry["POOLED_EMBEDDINGS_ALL_TO_ALL"].forward
        CommCodec(dtype=torch.float16, loss_scale=None)

    Source:
        TorchRec's ``torchrec.distributed.fbgemm_qcomm_codec.get_qcomm_codecs_registry``.
    """
    codecs = get_qcomm_codecs(qcomms_config)
    if codecs == QuantizedCommCodecs():
        return None
    return {op.name: codecs for op in (CommOp if comm_ops is None else comm_ops)}


def get_qcomm_codecs(qcomms_config: QCommsConfig | None) -> QuantizedCommCodecs:
    """The codecs of one exchange, as ``PooledEmbeddingsAllToAll(codecs=...)`` takes them.

    Args:
        qcomms_config: The data types; None for no codecs.

    Raises:
        TypeError: The argument is not a `QCommsConfig`.

    Example:
        >>> codecs = get_qcomm_codecs(QCommsConfig(backward_precision=CommType.BF16))
        >>> codecs.forward, codecs.backward
        (None, CommCodec(dtype=torch.bfloat16, loss_scale=None))

    Source:
        TorchRec's ``torchrec.distributed.fbgemm_qcomm_codec.get_qcomm_codecs``.
    """
    if qcomms_config is None:
        return QuantizedCommCodecs()
    if not isinstance(qcomms_config, QCommsConfig):
        raise TypeError(
            f"qcomms_config must be a QCommsConfig, got {qcomms_config!r}: "
            "QCommsConfig(forward_precision=CommType.FP16, backward_precision=CommType.BF16)"
        )

    return QuantizedCommCodecs(
        _codec("forward", qcomms_config.forward_precision, qcomms_config.forward_loss_scale),
        _codec("backward", qcomms_config.backward_precision, qcomms_config.backward_loss_scale),
    )


_DTYPES = {CommType.FP32: None, CommType.FP16: torch.float16, CommType.BF16: torch.bfloat16}


def _codec(direction: str, precision: CommType, loss_scale: float | None) -> CommCodec | None:
    if not isinstance(precision, CommType):
        raise ValueError(
            f"{direction}_precision must be a CommType, got {precision!r}: try CommType.FP16"
        )
    if precision not in _DTYPES:
        raise ValueError(
            f"{direction}_precision {precision.name} is not supported: "
            "rows and gradients are sent as FP32, FP16 or BF16"
        )
    if loss_scale is not None and not loss_scale > 0:
        raise ValueError(f"{direction}_loss_scale must be positive or None, got {loss_scale!r}")

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
