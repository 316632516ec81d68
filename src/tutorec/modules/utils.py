"""Helpers for models with mappings of raw ids."""

from __future__ import annotations

from torch import nn

from tutorec.modules.hash_mc_modules import HashZchManagedCollisionModule


def make_hash_zch_buckets_non_persistent(module: nn.Module) -> int:
    """Leave the number of buckets out of the states of all hash mappings of a model.

    Its state can then be loaded from a checkpoint that does not hold this number.

    Args:
        module: The model.

    Returns:
        How many mappings held it.

    Example:
        >>> import torch
        >>> mapping = HashZchManagedCollisionModule(4, torch.device("cpu"), total_num_buckets=1)
        >>> make_hash_zch_buckets_non_persistent(mapping), [*mapping.state_dict()]
        (1, ['_hash_zch_identities'])

    Source:
        TorchRec's ``torchrec.modules.utils.make_hash_zch_buckets_non_persistent``.
    """
    bucket = HashZchManagedCollisionModule.BUCKET_BUFFER
    count = 0

    for submodule in module.modules():
        if bucket in submodule._buffers and bucket not in submodule._non_persistent_buffers_set:
            submodule._non_persistent_buffers_set.add(bucket)
            count += 1
    return count
