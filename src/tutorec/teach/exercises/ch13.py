"""Exercises of chapter 13: two codes in a byte, and rows packed for other ranks."""

from __future__ import annotations

import torch
from torch import Tensor

from tutorec.quant.packing import pack_rows, unpack_rows
from tutorec.spmd.rank import device
from tutorec.teach.grading import Exercise
from tutorec.teach.on_ranks import per_rank
from tutorec.types import DataType

_STEPS = torch.arange(64.0)


def _rows(rank: int) -> Tensor:
    """Two rows, a message for each rank."""
    return torch.stack([_STEPS.sin() + rank, (2 + rank) * _STEPS.cos()])


def _packed(message: int) -> Tensor:
    """The message of every rank in int8, without padding."""
    rows = torch.stack([_rows(0)[message], _rows(1)[message]])
    return pack_rows(rows, DataType.INT8, alignment=4)


def _read(packed: Tensor) -> Tensor:
    return unpack_rows(packed, 64, DataType.INT8)


def _on_grid_of_sender(rank: int) -> Tensor:
    """Codes that arrive on a rank, read on the grid of the row that this rank sent there."""
    grids = pack_rows(_rows(rank), DataType.INT8, alignment=4)[:, :4]
    return _read(torch.cat([grids, _packed(rank)[:, 4:]], dim=1))


EXERCISES = (
    Exercise(
        "13.1",
        compared="the numbers of the row, for every payload that was tried",
        right=[[-0.5, 0], [2, 5.75, 4.5, 3.75]],
        cases=(([0x21], 0.5, -1.0), ([0xF0, 0x7A], 0.25, 2.0)),
        mistakes={
            "Neighbours have changed places. Which half of a byte was filled first?": [
                [0, -0.5],
                [5.75, 2, 3.75, 4.5],
            ],
            "Small codes are right and large ones too small. A code counts steps from the "
            "smallest number of the row; can it be negative?": [[-0.5, 0], [2, 1.75, 0.5, 3.75]],
            "You multiply the bias by the scale. The bias is already a number of the row, the "
            "smallest one.": [[0, 0.5], [0.5, 4.25, 3, 2.25]],
        },
        shape="a function that returns a list of numbers, two for each byte",
    ),
    Exercise(
        "13.2",
        compared=("the rows that arrive on two ranks, and the 136 bytes that each of them sends"),
        right=[(_read(_packed(rank)), 136) for rank in (0, 1)],
        measure=per_rank(2, lambda rank: (_rows(rank).to(device()),), {"all_to_all_single": 1}),
        mistakes={
            "The rows arrive without any rounding, and each rank sends 512 bytes. Where are "
            "they packed?": [
                (torch.stack([_rows(0)[rank], _rows(1)[rank]]), 512) for rank in (0, 1)
            ],
            "The right rows arrive, but each rank sends 512 bytes. What has to be sent, the "
            "packed row or the weights that it represents?": [
                (_read(_packed(rank)), 512) for rank in (0, 1)
            ],
            "The codes arrive. With which row's scale and bias do you read them, and who "
            "knows these two?": [(_on_grid_of_sender(rank), 128) for rank in (0, 1)],
            "These are the codes, 0 to 255. Which function makes weights of them?": [
                (_packed(rank)[:, 4:], 136) for rank in (0, 1)
            ],
        },
        tolerance=1e-05,
        shape="a function that returns the rows that arrived, float32 [2, 64]",
    ),
)
