"""Specification of a table-batched operator: its tables, their pooling, and its optimizer.

The optimizers run inside backward. Per touched row with g, the sum of its gradients; m_r and v_r
are one number for the whole row:

====================  ============================================  ==========================
kind                  what happens                                  what is kept
====================  ============================================  ==========================
sgd                   w -= lr * g                                   nothing
adagrad               m += g^2, w -= lr * g / (sqrt(m) + eps)       momentum1 [R, D]
rowwise_adagrad       m_r += mean(g^2),                             momentum1 [R]
                      w -= lr * g / (sqrt(m_r) + eps)
adam                  see ``row_rules``                             momentum1, exp_avg_sq
                                                                    [R, D], step
partial_rowwise_adam  the same with v_r, of mean(g^2)               momentum1 [R, D],
                                                                    exp_avg_sq [R], step
====================  ============================================  ==========================
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Literal, NamedTuple, get_args

try:
    import resource
except ImportError:  # Windows
    resource = None

import torch
from torch import Tensor

from tutorec._check import require_finite

__all__ = [
    "FBGEMM_KINDS",
    "POOLINGS",
    "FirstRows",
    "GroupSpec",
    "OptimizerKind",
    "OptimizerSpec",
    "PoolingKind",
    "StateSpec",
    "TableSpec",
    "UpdateStep",
    "fbgemm_cpu_columns",
    "kernel_pooling",
    "memory_of_tables",
]

PoolingKind = Literal["sum", "mean", "sqrtn", "none"]
POOLINGS: tuple[PoolingKind, ...] = ("sum", "mean", "sqrtn", "none")
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Rows [R, D] of each table; or what writes the rows of table number i in place, so that they
# exist once.
FirstRows = Sequence[Tensor] | Callable[[int, Tensor], None]


@dataclass(frozen=True)
class TableSpec:
    """One table: its name, R rows and D columns.

    Raises:
        ValueError: The kernels do not train rows of this dtype.

    Example:
        >>> from tutorec._kernels.specs import TableSpec
        >>> TableSpec("item", rows=100, columns=8).columns
        8
    """

    name: str
    rows: int
    columns: int
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        if self.dtype not in _DTYPES:
            raise ValueError(
                f"table {self.name!r} has dtype {self.dtype}: trained tables are one of {_DTYPES}"
            )


@dataclass(frozen=True)
class GroupSpec:
    """Tables that are looked up in one call, and which feature reads which table.

    Args:
        tables: The tables of the group, all of one dtype.
        feature_tables: For each input feature, in input order, the index of its table; a table may
            serve several.
        pooling: ``"sum"``, ``"mean"`` or ``"sqrtn"`` (see ``pooling.py``) of a bag's rows, or
            ``"none"``: one row for each id.
        weighted: Whether each id carries a weight.

    Example:
        >>> from tutorec._kernels.specs import GroupSpec, TableSpec
        >>> group = GroupSpec(
        ...     (TableSpec("user", 10, 4), TableSpec("item", 20, 8)), feature_tables=(0, 1, 1)
        ... )
        >>> group.feature_columns
        (4, 8, 8)
    """

    tables: tuple[TableSpec, ...]
    feature_tables: tuple[int, ...]
    pooling: PoolingKind = "sum"
    weighted: bool = False

    @property
    def feature_columns(self) -> tuple[int, ...]:
        """Width D of each input feature's table, in input order."""
        return tuple(self.tables[table].columns for table in self.feature_tables)

    @property
    def dtype(self) -> torch.dtype:
        """Data type of the rows."""
        return self.tables[0].dtype

    @property
    def names(self) -> list[str]:
        """Names of the tables."""
        return [table.name for table in self.tables]


@contextmanager
def memory_of_tables(tables: Sequence[tuple[str, int, int, int]], remedy: str) -> Iterator[None]:
    """Where there is not enough memory for tables, have the error name them.

    Args:
        tables: Of each its name, R, D, and the bytes of a row as stored, optimizer state included.
        remedy: What to do about it.

    Raises:
        RuntimeError: There is not enough, as torch raises it: on a GPU ``torch.OutOfMemoryError``.
        MemoryError: The system says so itself, for the file of a table.

    Example:
        >>> try:
        ...     with memory_of_tables([("item", 10**12, 64, 256)], "shard it"):
        ...         torch.empty(10**12, 64)
        ... except RuntimeError as error:
        ...     print(str(error).partition(": ")[2])
        1,000,000,000,000 rows of 64 columns need 256,000,000,000,000 bytes; shard it
    """
    try:
        yield
    except (RuntimeError, MemoryError, OSError) as error:
        if not _lacks_memory(error):
            raise

        name, rows, columns, row_bytes = max(tables, key=lambda table: table[1] * table[3])
        total = sum(rows * row_bytes for _, rows, _, row_bytes in tables)
        others = f" ({total:,} with the tables of its group)" if len(tables) > 1 else ""
        error_type = MemoryError if isinstance(error, OSError) else type(error)
        raise error_type(
            f"not enough memory for table {name!r}: {rows:,} rows of {columns} columns need "
            f"{rows * row_bytes:,} bytes{others}; {remedy}"
        ) from error


def _lacks_memory(error: Exception) -> bool:
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    known = isinstance(error, (MemoryError, torch.OutOfMemoryError))
    return known or "can't allocate memory" in str(error) or "not enough memory" in str(error)


def kernel_pooling(pooling: PoolingKind, weighted: bool) -> PoolingKind:
    """The pooling of the kernel that gets the weights of ``bag_weights``.

    Example:
        >>> from tutorec._kernels.specs import kernel_pooling
        >>> (
        ...     kernel_pooling("sqrtn", weighted=False),
        ...     kernel_pooling("mean", False),
        ...     kernel_pooling("mean", True),
        ... )
        ('sum', 'mean', 'sum')
    """
    return "sum" if pooling == "sqrtn" or (pooling == "mean" and weighted) else pooling


OptimizerKind = Literal["sgd", "adagrad", "rowwise_adagrad", "adam", "partial_rowwise_adam"]
_ADAMS: tuple[OptimizerKind, ...] = ("adam", "partial_rowwise_adam")
# Those that fbgemm has a kernel for, by device; the others run in torch, under both backends.
FBGEMM_KINDS: dict[str, tuple[OptimizerKind, ...]] = {
    "cpu": ("sgd", "adagrad", "rowwise_adagrad"),
    "cuda": ("sgd", "adagrad", "rowwise_adagrad", *_ADAMS),
}


# fbgemm's kernels for the CPU sum the gradients of so many rows on the stack of a thread, and end
# the process where it is too small: `grad_blocked_buffer[C_BLOCK * D]` for row-wise Adagrad,
# `grad_buffer[D]` for the others.
_ROWS_ON_STACK: dict[OptimizerKind, int] = {"rowwise_adagrad": 64}
_STACK = 1 << 20  # bytes that they may take: half of what the smallest threads usually have


@cache
def fbgemm_cpu_columns(kind: OptimizerKind) -> int:
    """The widest rows that fbgemm's kernel of an optimizer updates safely on the CPU.

    Example:
        >>> fbgemm_cpu_columns("sgd") // fbgemm_cpu_columns("rowwise_adagrad")
        64
    """
    stack = _STACK
    if resource is not None:
        limit, _ = resource.getrlimit(resource.RLIMIT_STACK)
        stack = min(stack, limit // 2) if limit != resource.RLIM_INFINITY else stack
    return stack // 4 // _ROWS_ON_STACK.get(kind, 1)


class StateSpec(NamedTuple):
    """A state of an optimizer: its name, and whether it has a number for each row or element."""

    name: str
    rowwise: bool


# Names as TorchRec's state dicts have them: the first is momentum1 whatever it is, a second keeps
# fbgemm's name. A kind that TorchRec lacks gives its states names of their own: checkpoints tell
# kinds apart by the names and shapes of states.
_STATES: dict[OptimizerKind, tuple[StateSpec, ...]] = {
    "sgd": (),
    "adagrad": (StateSpec("momentum1", False),),
    "rowwise_adagrad": (StateSpec("momentum1", True),),
    "adam": (StateSpec("momentum1", False), StateSpec("exp_avg_sq", False)),
    "partial_rowwise_adam": (StateSpec("momentum1", False), StateSpec("exp_avg_sq", True)),
}


@dataclass(frozen=True)
class OptimizerSpec:
    """The optimizer that a fused operator applies in its backward.

    Args:
        kind: One of ``OptimizerKind``.
        learning_rate: The rate of the first step; ``TableBatch.learning_rate`` changes it.
        eps: Added to the root.
        weight_decay: Of the Adams: how much of a touched row goes at each step, times the rate.
            Must be 0 for the others: fbgemm's CPU kernels take the argument and ignore it.
        beta1: How much of the mean gradient is kept; of the Adams.
        beta2: How much of the mean squared gradient is kept; of the Adams.
        max_gradient: Each number of the gradient of the pooled rows is cut to within plus and minus
            this; None leaves it as it is.
        stochastic_rounding: Whether an updated row of 16 bits becomes one of its two neighbours at
            random, the nearer the likelier, so that small updates are not lost on average. False
            rounds to the nearest.

    Raises:
        ValueError: An unknown kind, or a number that is negative, not finite, out of range, or
            would have no effect.

    Example:
        >>> from tutorec._kernels.specs import OptimizerSpec
        >>> first, second = OptimizerSpec("adam", learning_rate=0.1).states
        >>> second
        StateSpec(name='exp_avg_sq', rowwise=False)
    """

    kind: OptimizerKind
    learning_rate: float = 0.01
    eps: float = 1e-8
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    max_gradient: float | None = None
    stochastic_rounding: bool = False

    def __post_init__(self) -> None:
        if self.kind not in get_args(OptimizerKind):
            known = ", ".join(get_args(OptimizerKind))
            raise ValueError(f"optimizer {self.kind!r} has no fused kernel: use one of {known}")

        for name in ("learning_rate", "eps", "weight_decay"):
            require_finite(name, getattr(self, name), 0)
        if self.max_gradient is not None:
            require_finite("max_gradient", self.max_gradient, 0)
        for name, beta, default in (("beta1", self.beta1, 0.9), ("beta2", self.beta2, 0.999)):
            if not 0.0 <= beta < 1.0:
                raise ValueError(f"{name}={beta} must be at least 0 and less than 1")
            if self.kind not in _ADAMS and beta != default:
                raise ValueError(f"{name}={beta} is for {' and '.join(_ADAMS)}, not {self.kind}")

        if self.weight_decay != 0.0 and self.kind not in _ADAMS:
            raise ValueError(
                f"weight_decay={self.weight_decay} with {self.kind}: the fused CPU kernels ignore "
                f"weight decay, so only weight_decay=0.0 is accepted; {' and '.join(_ADAMS)} have "
                "it, and dense parameters decay through their own optimizer"
            )

    @property
    def states(self) -> tuple[StateSpec, ...]:
        """What it keeps for each table, apart from the number of steps."""
        return _STATES[self.kind]

    @property
    def counts_steps(self) -> bool:
        """Whether a step depends on how many there were before."""
        return self.kind in _ADAMS

    @property
    def averages_squares(self) -> bool:
        """Whether a step needs the mean of a row's squared gradients; padding would change it."""
        return any(state.rowwise for state in self.states)

    @property
    def rounds_once(self) -> bool:
        """Whether fbgemm's kernel for the CPU rounds an updated row of 16 bits once, to nearest."""
        return self.kind == "rowwise_adagrad" and not self.stochastic_rounding

    @property
    def moves_without_gradient(self) -> bool:
        """Whether a row of the batch moves where its gradient is 0, too: on, along its mean."""
        return self.kind in _ADAMS

    def limited(self, grad: Tensor) -> Tensor:
        """The gradient of pooled rows, with its elements clamped to plus and minus max_gradient."""
        return (
            grad if self.max_gradient is None else grad.clamp(-self.max_gradient, self.max_gradient)
        )


class UpdateStep(NamedTuple):
    """What a forward fixes for the update of one table that its backward makes.

    Args:
        rule: The optimizer.
        rate: Its learning rate.
        number: The number t of this step, from 1; 0 for rules that do not count.
        seed: Of the random numbers of stochastic rounding.
    """

    rule: OptimizerSpec
    rate: float
    number: float = 0.0
    seed: int = 0
