"""Row-wise Adagrad of tables that lie apart, by a step of SGD whose ids are weighted.

On an AMD Zen 3 fbgemm's row-wise Adagrad takes twice as long for an id as its SGD. But once a row's state
is known, its move is that of SGD with another rate, and the state needs one number for each bag: the mean square of its
gradient. So the state is moved here, the rows by fbgemm's SGD with ``1 / (sqrt(state) + eps)`` as each id's weight.

That holds for rows that are in the batch once. Of rows that repeat the gradients are summed first, as always: scaling
them one by one would blow up what is left by rounding where they cancel. They are few, or this is not worth its while.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path

import torch
from torch import Tensor

from tutorec._kernels.separate import SeparateTables
from tutorec._kernels.tbe_update import RowGroups, pick_rows, sort_ids, sum_rows

__all__ = ["FEW_IDS", "PooledBatch", "is_zen3", "step_rowwise_adagrad"]


def is_zen3(cpuinfo: str) -> bool:
    r"""Whether Linux tells of an AMD Zen 3: of family 25 the models 0 to 15 and 32 to 95; the others are Zen 4.

    Args:
        cpuinfo: What ``/proc/cpuinfo`` holds.

    Example:
        >>> is_zen3("vendor_id : AuthenticAMD\ncpu family : 25\nmodel : 1\n")
        True
    """
    lines = (line.partition(":") for line in cpuinfo.split("\n\n")[0].splitlines())
    facts = {name.strip(): value.strip() for name, _, value in lines}
    model = int(facts.get("model", -1)) if facts.get("model", "").isdigit() else -1
    amd19h = (facts.get("vendor_id"), facts.get("cpu family")) == ("AuthenticAMD", "25")
    return amd19h and (0 <= model < 16 or 32 <= model < 96)


def _cpuinfo() -> str:
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return ""


# Ids for each table up to which fbgemm's own row-wise Adagrad is the faster one. For 67,000 ids of 64 columns this way
# takes two thirds of its time on a Zen 3. On a Zen 4 it takes three times as long, and six times with one id a bag,
# with AVX-512 and on a virtual machine that hides it; on others it was not measured. The processor's kind decides and
# no measurement: every rank that holds a copy of a table, and every run, is to round alike.
FEW_IDS: float = 600 if is_zen3(_cpuinfo()) else math.inf

_MOST_SUMS = 4 << 20  # elements of summed gradients that are held at once


@dataclass(frozen=True)
class PooledBatch:
    """What all features of a collection look up, in the order of its tables.

    Attributes:
        values: Ids [N], feature after feature.
        offsets: [F * B + 1].
        weights: Factor of each id [N], or None for 1; without gradient.
        mean: Whether a bag's sum is divided by its number of ids.
        feature_tables: For each feature the index of its table [F].
    """

    values: Tensor
    offsets: Tensor
    weights: Tensor | None
    mean: bool
    feature_tables: tuple[int, ...]


@torch.no_grad()
def step_rowwise_adagrad(
    found: SeparateTables,
    tables: Sequence[Tensor],
    sums: Sequence[Tensor],
    batch: PooledBatch,
    grad: Tensor,
    rate: float,
    eps: float,
) -> bool:
    """Move the state and the rows of a batch, or nothing where another way is faster.

    Args:
        found: The tables as fbgemm addresses them.
        tables: [R, D] in float32.
        sums: State of each table [R], contiguous; a table that stands twice has one state.
        batch: What was looked up.
        grad: Of the pooled rows [B, sum of D].
        rate: Learning rate.
        eps: Added to the root.

    Returns:
        Whether it was done: not where tables differ in width, or where most ids repeat.
    """
    if len({table.shape[1] for table in tables}) > 1:
        return False
    samples, count = grad.shape[0], batch.values.numel()
    # The rows of all tables as if they lay behind one another; tied tables are one.
    first_of = {id(table): index for index, table in reversed(list(enumerate(tables)))}
    bases = [*accumulate((table.shape[0] for table in tables), initial=0)]
    read = torch.tensor([bases[first_of[id(tables[table])]] for table in batch.feature_tables])
    ids = batch.values + read.repeat_interleave(batch.offsets[::samples].diff(), output_size=count)
    rows, starts, places = sort_ids(ids, bases[-1])
    by_bag, bags, weights = _bags_of_ids(batch, grad)
    groups = RowGroups(rows, starts, bags[places], None if weights is None or batch.mean else weights[places])
    repeats = (starts.diff() > 1).nonzero().view(-1)
    again = pick_rows(groups, repeats)
    if again.bags.numel() * 2 > count or repeats.numel() * by_bag.shape[1] > _MOST_SUMS:
        return False
    moves = sum_rows(by_bag, again)
    squares = by_bag.square().mean(1).index_select(0, groups.bags[starts[:-1]])
    if groups.weights is not None:
        squares *= groups.weights[starts[:-1]].square()
    squares[repeats] = moves.square().mean(1)
    factors = _add_to_state(sums, bases, rows, squares).sqrt_().add_(eps).reciprocal_()
    moves *= (-rate * factors[repeats]).unsqueeze(1)
    factors[repeats] = 0.0
    of_ids = torch.empty(count, dtype=torch.float32)
    of_ids[places] = factors.repeat_interleave(starts.diff(), output_size=count)
    found.step_sgd(
        grad, (batch.values, batch.offsets, of_ids if weights is None else of_ids.mul_(weights), False), rate
    )
    for table, part, base in _parts(again.rows, bases):
        tables[table].detach().index_add_(0, again.rows[part] - base, moves[part])
    return True


def _add_to_state(sums: Sequence[Tensor], bases: Sequence[int], rows: Tensor, squares: Tensor) -> Tensor:
    """Add to the state of each touched row, and return what it is then [U]."""
    after = torch.empty_like(squares)
    for table, part, base in _parts(rows, bases):
        own = rows[part] - base
        sums[table].index_add_(0, own, squares[part])
        torch.index_select(sums[table], 0, own, out=after[part])
    return after


def _parts(rows: Tensor, bases: Sequence[int]) -> Iterator[tuple[int, slice, int]]:
    """Of rising rows, those of each table: its index, where they stand, and the number of its first row."""
    cuts = torch.searchsorted(rows, torch.tensor(bases)).tolist()
    for table, (start, end) in enumerate(pairwise(cuts)):
        if end > start:
            yield table, slice(start, end), bases[table]


def _bags_of_ids(batch: PooledBatch, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradient of each bag [B * F, D], which of its rows each id belongs to [N], and each id's factor [N] or None.

    Row ``b * F + f`` is feature f's bag of sample b: the gradient as it lies. With a mean it is divided already.
    """
    samples, features, count = grad.shape[0], len(batch.feature_tables), batch.values.numel()
    lengths, by_bag = batch.offsets.diff(), grad.reshape(samples * features, -1)
    order = torch.arange(samples * features).view(samples, features).t().flatten()
    bags = order.repeat_interleave(lengths, output_size=count)
    if not batch.mean:
        return by_bag, bags, None if batch.weights is None else batch.weights.float()
    shares = lengths.clamp(min=1).reciprocal()
    by_bag = by_bag * shares.view(features, samples).t().reshape(-1, 1)
    return by_bag, bags, shares.repeat_interleave(lengths, output_size=count)
