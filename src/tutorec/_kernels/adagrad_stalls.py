"""Whether fbgemm's row-wise Adagrad is the slower way to update rows on this processor; measured once."""  # noqa: E501

from __future__ import annotations

from functools import cache
from time import perf_counter

import torch

from tutorec._kernels.scattered_tables import address_tables
from tutorec._kernels.specs import OptimizerKind, OptimizerSpec, UpdateStep
from tutorec._kernels.tbe_layout import PooledBatch

__all__ = ["updates_in_torch"]

_FEW_IDS = 400  # of a table: with fewer, what torch's update costs each table exceeds what it saves
_SLOW = 10.0  # measured: 18 where instructions stall; 6 remain without the time of the stalls


def updates_in_torch(kind: str, batch: PooledBatch) -> bool:
    """Whether the update of a batch is faster in torch than by fbgemm's CPU operator.

    It is for row-wise Adagrad, on processors where that operator stalls, unless the tables get few
    ids. The answer depends on the processor and the sizes of the batch alone, so that ranks of one
    host round alike.

    Args:
        kind: `OptimizerKind`.
        batch: What was looked up.
    """
    tables = len(set(batch.feature_tables))
    return (
        kind == "rowwise_adagrad"
        and batch.values.is_cpu
        and batch.values.numel() >= _FEW_IDS * tables
        and _row_wise_adagrad_stalls()
    )


@cache
def _row_wise_adagrad_stalls() -> bool:
    """Whether fbgemm's row-wise Adagrad is far slower than its SGD; 15 ms, once a process.

    For each row it changes six times between AVX and SSE instructions. Where each change stalls (50
    ns on an Intel Xeon of 2024), a row takes 430 ns instead of 140. CPUID does not tell: virtual
    machines hide the processor's model.
    """
    rows = 2048
    columns = 8
    table, state, grad = (
        torch.zeros(shape) for shape in ((rows, columns), (rows,), (rows, columns))
    )
    batch = PooledBatch(torch.arange(rows), torch.arange(rows + 1), None, False, (0,))
    scattered = address_tables([table], batch.feature_tables)
    assert scattered is not None, "a contiguous table in float32 can be addressed"

    def seconds(kind: OptimizerKind) -> float:
        start = perf_counter()
        scattered.step(grad, batch, [(state,)], UpdateStep(OptimizerSpec(kind), rate=0.0))
        return perf_counter() - start

    # The least of several: what else the machine does only ever adds.
    sgd, adagrad = (min(seconds(kind) for _ in range(7)) for kind in ("sgd", "rowwise_adagrad"))
    return adagrad > _SLOW * sgd
