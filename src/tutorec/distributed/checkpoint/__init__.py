"""Checkpoints that any plan and any number of ranks can load."""

from tutorec._lazy import lazy_package
from tutorec.distributed.checkpoint.gathering import full_state_dict
from tutorec.distributed.checkpoint.loading import load_checkpoint
from tutorec.distributed.checkpoint.manager import CheckpointManager
from tutorec.distributed.checkpoint.reading import (
    CheckpointInfo,
    latest_checkpoint,
    read_info,
    read_state_dict,
)
from tutorec.distributed.checkpoint.saving import save_checkpoint

__all__ = [
    "CheckpointInfo",
    "CheckpointManager",
    "full_state_dict",
    "latest_checkpoint",
    "load_checkpoint",
    "read_info",
    "read_state_dict",
    "save_checkpoint",
]

__getattr__, __dir__ = lazy_package(__name__)
