"""Pictures of data in place: the path of a batch, a jagged batch, its views."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from tutorec.sparse.jagged import JaggedTensor
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor
from tutorec.teach.canvas import ACCENT, Chart
from tutorec.teach.diagram import WIDTH, Diagram

__all__ = ["here", "jagged", "views"]

Jagged = JaggedTensor | KeyedJaggedTensor

#: The path of a batch, from the click log to the served row; `here` fills one station.
_STATIONS = ("log", "KJT", "wire", "row", "bag", "gradient", "update", "int8")


def here(station: str) -> Chart:
    """The path of a batch with the present station filled."""
    diagram = Diagram(lines=3.4)
    step = WIDTH / len(_STATIONS)
    for position, name in enumerate(_STATIONS):
        rank = ACCENT if name == station else None
        node = diagram.strip(step * position + 0.2, 1, [name], rank=rank, cell=step - 2.2)
        if position + 1 < len(_STATIONS):
            diagram.arrow(node.right, (node.right[0] + 2.2, node.right[1]))
    place = _STATIONS.index(station) + 1
    claim = f"You are here: {station}, station {place} of {len(_STATIONS)} on a batch's path"
    return diagram.chart(claim)


def jagged(batch: Any, *, claim: str) -> Chart:
    """A batch by samples (a list of ids per feature) and as it is in memory (feature by feature).

    Args:
        batch: A KeyedJaggedTensor of a few samples.
        claim: Title; may use {samples}, {features} and {ids}.
    """
    lists = {key: [ids.tolist() for ids in batch[key].to_dense()] for key in batch.keys()}
    bags = [ids for rows in lists.values() for ids in rows]
    samples = len(bags) // len(lists)
    lengths = [len(ids) for ids in bags]
    offsets = [0, *accumulate(lengths)]

    left = 12.0
    longest = max(2, *lengths) + 1
    cell = min(7.0, (WIDTH - left) / max(longest * len(lists), sum(lengths) + 1))
    diagram = Diagram(lines=1.6 * samples + 6.6)
    memory = 1.6 * samples + 2.6
    for name, y in {"values": memory, "lengths": memory + 1.4, "offsets": memory + 2.6}.items():
        diagram.text(left - 2, y + 0.6, name, align="right")

    for number, ids in enumerate(bags):
        feature, sample = divmod(number, samples)
        # samples alternate between filled and hollow cells
        rank = None if sample % 2 else ACCENT
        x = left + cell * longest * feature
        y = 1.4 + 1.6 * sample
        diagram.strip(x, y, ids, rank=rank, cell=cell)
        if not ids:
            diagram.text(x, y + 0.6, "(empty)")
        if feature == 0:
            diagram.text(left - 2, y + 0.6, f"sample {sample}", align="right")

        start = left + cell * offsets[number]
        node = diagram.strip(start, memory, ids, rank=rank, cell=cell)
        diagram.text(node.top[0], memory + 2, str(len(ids)), align="center")
        if sample == 0:
            diagram.text(x, 0.6, list(lists)[feature], bold=True)
            diagram.text(start, memory - 0.6, list(lists)[feature], bold=True)
            diagram.box(start, memory - 0.2, "", width=0.01, lines=1.6)

    for offset in sorted(set(offsets)):
        count = offsets.count(offset)
        text = f"{offset} (x{count})" if count > 1 else str(offset)
        diagram.text(left + cell * offset, memory + 3.2, text, align="center")
    return diagram.chart(claim, samples=samples, features=len(lists), ids=sum(lengths))


def views(
    batch: KeyedJaggedTensor,
    results: Mapping[str, Jagged | Sequence[Jagged]],
    *,
    claim: str,
) -> Chart:
    """The ids of a batch and of what operations made of it: views hollow, copies filled.

    A view is drawn below the ids whose memory it uses.

    Args:
        batch: A few ids.
        results: Name of an operation to what it returned, one jagged tensor or several.
        claim: Title; may use {ids} (of the batch), {views} and {copies} (the operations that copy
            no id, and the others).

    Example:
        >>> import torch
        >>> batch = KeyedJaggedTensor(
        ...     ["a", "b"], torch.tensor([7, 2]), lengths=torch.ones(2).int()
        ... )
        >>> made = {"split": batch.split([1, 1]), "permute": batch.permute([1, 0])}
        >>> views(batch, made, claim="").facts["copies"]
        ['permute']
    """
    left = 24
    diagram = Diagram(lines=2.4 + 2.2 * len(results))
    diagram.text(0, 1.8, "the batch")
    start = left
    for key in batch.keys():
        ids = batch[key].values().tolist()
        start += diagram.strip(start, 1.2, ids, rank=ACCENT, title=key).width

    memory = batch.values().untyped_storage().data_ptr()
    names: dict[str, list[str]] = {"views": [], "copies": []}
    for line, (name, result) in enumerate(results.items(), start=1):
        y = 1.2 + 2.2 * line
        tensors = [result] if isinstance(result, JaggedTensor | KeyedJaggedTensor) else list(result)
        values = [tensor.values() for tensor in tensors]
        copied = [ids for ids in values if ids.untyped_storage().data_ptr() != memory]

        end = left
        for ids in values:
            x = end if copied else left + 3 * int(ids.storage_offset())
            end = x + diagram.strip(x, y, ids.tolist(), rank=ACCENT if copied else None).width

        names["copies" if copied else "views"].append(name)
        size = sum(ids.nbytes for ids in copied)
        shared_by = "view" if len(values) == 1 else f"{len(values)} views"
        diagram.text(0, y + 0.6, name)
        diagram.text(start + 3, y + 0.6, f"copies {size} bytes" if copied else shared_by)
    return diagram.chart(claim, ids=batch.values().numel(), **names)
