"""Optimizers: by parameter name, combined, and fused into backward."""

from tutorec.optim.emb_optim_type import EmbOptimType
from tutorec.optim.fused import EmbeddingFusedOptimizer, FusedOptimizer, FusedOptimizerModule
from tutorec.optim.keyed import CombinedOptimizer, KeyedOptimizer, KeyedOptimizerWrapper
from tutorec.optim.optimizers import in_backward_optimizer_filter

__all__ = [
    "CombinedOptimizer",
    "EmbOptimType",
    "EmbeddingFusedOptimizer",
    "FusedOptimizer",
    "FusedOptimizerModule",
    "KeyedOptimizer",
    "KeyedOptimizerWrapper",
    "in_backward_optimizer_filter",
]
