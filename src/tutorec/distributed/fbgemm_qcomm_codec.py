"""TorchRec's import path ``torchrec.distributed.fbgemm_qcomm_codec``."""

from tutorec.distributed.core.qcomm import (
    CommType,
    QCommsConfig,
    get_qcomm_codecs,
    get_qcomm_codecs_registry,
)

__all__ = ["CommType", "QCommsConfig", "get_qcomm_codecs", "get_qcomm_codecs_registry"]
