"""Optimizers: by parameter name, combined, and fused into backward."""

from tutorec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from tutorec.optim.emb_optim_type import EmbOptimType
from tutorec.optim.fused import EmbeddingFusedOptimizer, FusedOptimizer, FusedOptimizerModule
from tutorec.optim.keyed import CombinedOptimizer, KeyedOptimizer, KeyedOptimizerWrapper
from tutorec.optim.optimizers import in_backward_optimizer_filter
from tutorec.optim.rowwise_adagrad import RowWiseAdagrad

__all__ = [
    "CombinedOptimizer",
    "EmbOptimType",
    "EmbeddingFusedOptimizer",
    "FusedOptimizer",
    "FusedOptimizerModule",
    "KeyedOptimizer",
    "KeyedOptimizerWrapper",
    "RowWiseAdagrad",
    "apply_optimizer_in_backward",
    "in_backward_optimizer_filter",
]
