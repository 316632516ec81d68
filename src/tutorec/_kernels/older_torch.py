"""Support of torch older than the pinned version: all branches on its version are here."""

from __future__ import annotations

import gc
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.compiler import is_compiling

__all__ = [
    "BEFORE_2_11",
    "BEFORE_2_13",
    "counts_of_rows",
    "exports_counts",
    "forget_written_block",
    "gloo_connects_silently",
    "renew_constants",
]


def _minor(version: str) -> tuple[int, int]:
    """(2, 8) of 2.8.0+cu128; development versions count as what they will be."""
    match = re.match(r"(\d+)\.(\d+)", version)
    assert match is not None, f"torch calls itself {version!r}"
    return int(match[1]), int(match[2])


# Beside the branches below, the first one decides where rows are padded (`jagged.py`): fbgemm 1.3,
# which belongs to torch 2.8, has no gradient there under a name that torch knows, and torch warns.
BEFORE_2_11, BEFORE_2_13 = (_minor(torch.__version__) < (2, minor) for minor in (11, 13))


def exports_counts() -> bool:
    """True while a torch before 2.13 exports a model, in which `counts_of_rows` counts.

    Its program would refuse a batch of one sample: it takes every i-th offset, and torch asks then
    whether i is 1.

    Example:
        >>> from tutorec._kernels.older_torch import exports_counts
        >>> exports_counts()  # nothing is exported
        False
    """
    return BEFORE_2_13 and is_compiling()


def counts_of_rows(offsets: Tensor, rows: int) -> list[int]:
    """Ids of each row of lists, for the program that a torch before 2.13 exports.

    Args:
        offsets: Where each list starts, and the end [L + 1].
        rows: Of equally many lists each.

    Example:
        >>> import torch
        >>> from tutorec._kernels.older_torch import counts_of_rows
        >>> counts_of_rows(torch.tensor([0, 1, 3, 3, 7]), 2)
        [3, 4]
    """
    counts: list[int] = offsets.long().diff().view(rows, -1).sum(1).tolist()
    if BEFORE_2_11:
        # It cannot compare a number that it has read with 0, as it must for each slice of that
        # length, unless the number is declared to be a size. Newer ones warn of the call.
        for count in counts:
            torch._check_is_size(count)
    return counts


def forget_written_block() -> None:
    """Call before `torch.save` writes a block of a checkpoint: older ones keep written blocks.

    `torch.save` leaves a block in a reference cycle there, and Python collects after so many
    objects, whatever their size: 56 MB piled up while a table of 128 MB was saved.

    Example:
        >>> from tutorec._kernels.older_torch import forget_written_block
        >>> forget_written_block()
    """
    if BEFORE_2_11:
        gc.collect(0)


@contextmanager
def gloo_connects_silently() -> Iterator[None]:
    """Show nothing that is printed meanwhile: older ones print how many ranks gloo has reached.

    For a process that has nothing else to print, such as a rank before its first task.

    Example:
        >>> from tutorec._kernels.older_torch import gloo_connects_silently
        >>> with gloo_connects_silently():
        ...     pass  # torch.distributed.init_process_group("gloo")
    """
    if not BEFORE_2_11:
        yield
        return

    sys.stdout.flush()
    stdout = os.dup(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)

    try:
        yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)


def renew_constants(program: torch.export.ExportedProgram) -> None:
    """Describe again the tensors that a graph made of numbers, in place.

    A torch before 2.11 may have freed its description, and then cannot save the program:
    "unsupported scalarType".

    Args:
        program: What `torch.export.export` has returned.
    """
    if not BEFORE_2_11:
        return
    from torch._subclasses.fake_tensor import FakeTensorMode

    targets = {spec.arg.name: spec.target for spec in program.graph_signature.input_specs}
    constants = {name: program.constants.get(str(target)) for name, target in targets.items()}
    placeholders = [node for node in program.graph.nodes if node.op == "placeholder"]
    mode = FakeTensorMode()  # a new one: the program's own remembers what was freed
    for node in placeholders:
        if isinstance(constant := constants.get(node.name), Tensor):
            node.meta["val"] = mode.from_tensor(constant)
