"""Optimizers: keyed by parameter name, combined, fused into backward, with warmup and clipping."""

from tutorec._lazy import lazy_package
from tutorec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from tutorec.optim.clipping import GradientClipping, GradientClippingOptimizer
from tutorec.optim.debug_grads import debug_grads
from tutorec.optim.emb_optim_type import EmbOptimType
from tutorec.optim.fused import (
    EmbeddingFusedOptimizer,
    EmptyFusedOptimizer,
    FusedOptimizer,
    FusedOptimizerModule,
)
from tutorec.optim.keyed import (
    CombinedOptimizer,
    KeyedOptimizer,
    KeyedOptimizerWrapper,
    OptimizerWrapper,
)
from tutorec.optim.optimizers import (
    SGD,
    Adagrad,
    Adam,
    PartialRowWiseAdam,
    in_backward_optimizer_filter,
)
from tutorec.optim.rowwise_adagrad import RowWiseAdagrad
from tutorec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "CombinedOptimizer",
    "EmbOptimType",
    "EmbeddingFusedOptimizer",
    "EmptyFusedOptimizer",
    "FusedOptimizer",
    "FusedOptimizerModule",
    "GradientClipping",
    "GradientClippingOptimizer",
    "KeyedOptimizer",
    "KeyedOptimizerWrapper",
    "OptimizerWrapper",
    "PartialRowWiseAdam",
    "RowWiseAdagrad",
    "WarmupOptimizer",
    "WarmupPolicy",
    "WarmupStage",
    "apply_optimizer_in_backward",
    "debug_grads",
    "in_backward_optimizer_filter",
]

__getattr__, __dir__ = lazy_package(__name__)
