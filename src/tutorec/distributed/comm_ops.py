"""TorchRec's import path ``torchrec.distributed.comm_ops``."""

from tutorec.distributed.collectives.autograd import get_gradient_division, set_gradient_division
from tutorec.distributed.collectives.functions import (
    all_gather_base_pooled,
    alltoall_pooled,
    alltoall_sequence,
    reduce_scatter_base_pooled,
    reduce_scatter_pooled,
    reduce_scatter_v_per_feature_pooled,
    reduce_scatter_v_pooled,
    variable_batch_alltoall_pooled,
)

__all__ = [
    "all_gather_base_pooled",
    "alltoall_pooled",
    "alltoall_sequence",
    "get_gradient_division",
    "reduce_scatter_base_pooled",
    "reduce_scatter_pooled",
    "reduce_scatter_v_per_feature_pooled",
    "reduce_scatter_v_pooled",
    "set_gradient_division",
    "variable_batch_alltoall_pooled",
]
