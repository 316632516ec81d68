"""Exercises of chapter 06: shapes between the stages, rows without pooling, bytes of a backward."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from tutorec.sparse.keyed_jagged import KeyedJaggedTensor
from tutorec.sparse.lists import kjt_from_lists
from tutorec.spmd.rank import device
from tutorec.teach.grading import Exercise, Mistake
from tutorec.teach.on_ranks import per_rank

__all__ = ["EXERCISES"]


_BATCHES = (
    {"user": [[2], []], "product": [[7], [7, 2]]},
    {"user": [[2, 3, 5], [4, 1]], "product": [[1, 2, 1], [5]]},
)


def _send_ids(batch: KeyedJaggedTensor) -> tuple[Tensor, list[int], list[int]]:
    """Ids of my key from all ranks, how many came from each, and how many went to each."""
    ids_for = torch.tensor(batch.length_per_key(), device=batch.values().device)
    ids_from = torch.empty_like(ids_for)
    dist.all_to_all_single(ids_from, ids_for)

    outgoing = batch.values()
    incoming = outgoing.new_empty(int(ids_from.sum()))
    dist.all_to_all_single(incoming, outgoing, ids_from.tolist(), ids_for.tolist())
    return incoming.long(), ids_from.tolist(), ids_for.tolist()


def _unpooled(batch: KeyedJaggedTensor, weight: Tensor) -> Tensor:
    """A row for each id, back in the order of the ids."""
    ids, ids_from, ids_for = _send_ids(batch)
    rows = weight[ids]
    returned = rows.new_empty(sum(ids_for), rows.shape[1])
    dist.all_to_all_single(returned, rows, ids_for, ids_from)
    return returned


def _not_sent(batch: KeyedJaggedTensor, weight: Tensor) -> Tensor:
    """The rows of the ids that arrived, which stay where they are."""
    ids, _, _ = _send_ids(batch)
    return weight[ids]


def _own_ids(batch: KeyedJaggedTensor, weight: Tensor) -> Tensor:
    """All ids of the batch in the one table that this rank holds."""
    _send_ids(batch)
    return weight[batch.values().long()]


def _inputs(rank: int) -> tuple[KeyedJaggedTensor, Tensor]:
    """A batch of each rank, and its table."""
    batch = kjt_from_lists(_BATCHES[rank], dtype=torch.int32).to(device())
    return batch, torch.arange(16.0, device=device()).view(8, 2) + 100 * rank


EXERCISES: tuple[Exercise, ...] = (
    Exercise(
        id="06.1",
        compared="three features of 400 samples, and 8 + 8 + 16 columns",
        solution=[1200, 400, 32],
        mistakes=(
            Mistake(
                "looks up its own samples only",
                [300, 100, 32],
                "Those are the samples of rank 2 alone. Whose bags has `input_dist` brought to "
                "rank 2?",
            ),
            Mistake(
                "counts tables instead of features",
                [800, 400, 24],
                "A table that serves two features is looked up for each of them. How many columns "
                "does each of the two lookups give?",
            ),
            Mistake(
                "takes a row for each bag",
                [1200, 1200, 32],
                "The columns of a sample's features stand side by side. How many samples are "
                "there?",
            ),
        ),
        shape="a list of three numbers: bags, rows, columns",
    ),
    Exercise(
        id="06.2",
        compared="two ranks get a row for each of their ids, in the order of the batch",
        solution=_unpooled,
        measure=per_rank(2, _inputs),
        mistakes=(
            Mistake(
                "rows stay where their table is",
                _not_sent,
                "Those are the rows of the ids that arrived here. Whose samples are they for?",
            ),
            Mistake(
                "every rank has every table",
                _own_ids,
                "Rank r has the table of key r only. The rows of the other key lie on the other "
                "rank.",
            ),
        ),
        shape="a function that returns a tensor [ids, columns]",
    ),
    Exercise(
        id="06.3",
        compared="100 samples, the 64 columns of the other ranks, and 4 bytes",
        solution=25_600,
        mistakes=(
            Mistake(
                "sends to itself, too",
                32_000,
                "That includes the columns of rank 0. Do their gradients leave the rank?",
            ),
            Mistake(
                "counts what the rank sends in forward",
                19_200,
                "Those are the rows that rank 0 sends in a forward: its own columns for the "
                "samples of others. In backward it has gradients of its own samples.",
            ),
            Mistake(
                "counts numbers, not bytes",
                6_400,
                "That many numbers. How many bytes has a float32?",
            ),
        ),
        shape="a number of bytes",
    ),
)
