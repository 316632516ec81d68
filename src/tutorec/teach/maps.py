"""Pictures of data in place: a jagged batch, its views, the path of a batch, the life of an id."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from matplotlib.patches import FancyBboxPatch, Rectangle

from tutorec.sparse.jagged import JaggedTensor
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor
from tutorec.teach.canvas import ACCENT, INK, Chart, canvas, finish, style
from tutorec.teach.diagram import Diagram

__all__ = ["STATIONS", "here", "jagged", "life", "views"]

Jagged = JaggedTensor | KeyedJaggedTensor

#: The path of a batch, from the click log to the served row; `here` lights one station.
STATIONS = ("log", "KJT", "wire", "row", "bag", "gradient", "update", "int8")


def _lists(batch: Any) -> dict[str, list[list[Any]]]:
    """Feature to one list of ids per sample, from a KJT or from plain lists."""
    if isinstance(batch, Mapping):
        return {
            key: [torch.as_tensor(ids).tolist() for ids in lists] for key, lists in batch.items()
        }
    return {key: [ids.tolist() for ids in batch[key].to_dense()] for key in batch.keys()}


def jagged(batch: Any, *, claim: str | None = None) -> Chart:
    """A batch by samples (a list of ids per feature) and as it is in memory (feature by feature).

    Args:
        batch: A KeyedJaggedTensor, or a mapping from feature to a list of ids per sample; a few
            samples only.
        claim: Title; may use {samples}, {features}, {ids}, {longest}, {empty} (lists without an
            id), {padding} (the share of a padded rectangle that would hold nothing).
    """
    lists = _lists(batch)
    samples = len(next(iter(lists.values())))
    flat = [ids for rows in lists.values() for ids in rows]
    longest = max(map(len, flat))
    count = sum(map(len, flat))
    room = longest * len(flat)

    fields = {
        "samples": samples,
        "features": len(lists),
        "ids": count,
        "longest": longest,
        "empty": sum(not ids for ids in flat),
        "padding": 1 - count / room if room else 0.0,
    }

    with style():
        figure = canvas(2.5 + 0.42 * samples)
        upper, lower = figure.subplots(2, 1, height_ratios=[samples + 1, 2.8])
        _samples(upper, lists, longest)
        _memory(lower, lists, count)

        default = (
            "{ids} ids in {features} features of {samples} samples; padding would waste "
            "{padding:.0%} of the room"
        )
        return finish(figure, claim, default, fields)


def _samples(axes: Any, lists: Mapping[str, list[list[Any]]], longest: int) -> None:
    """The batch as a table: samples down, features across, ids in boxes."""
    step = max(longest, 2) + 1.0
    for column, (feature, rows) in enumerate(lists.items()):
        axes.text(column * step, -0.75, feature, ha="left", va="center", weight="bold")
        for row, ids in enumerate(rows):
            for position, identifier in enumerate(ids):
                _box(axes, column * step + position, row, identifier, shade=row)
            if not ids:
                axes.text(column * step, row, "(empty)", ha="left", va="center", style="italic")

    samples = len(next(iter(lists.values())))
    for row in range(samples):
        axes.text(-0.4, row, f"sample {row}", ha="right", va="center")
    axes.set(xlim=(-2.4, len(lists) * step), ylim=(samples - 0.4, -1.2))
    axes.axis("off")


def _memory(axes: Any, lists: Mapping[str, list[list[Any]]], count: int) -> None:
    """The same ids as one flat vector with the lengths and the offsets under it."""
    start = 0
    offsets = [0]
    for feature, rows in lists.items():
        width = sum(map(len, rows))
        axes.text(start, -0.85, feature, ha="left", va="center", weight="bold")
        for row, ids in enumerate(rows):
            for identifier in ids:
                _box(axes, start, 0, identifier, shade=row)
                start += 1
            axes.text(start - len(ids) / 2, 0.8, str(len(ids)), ha="center", va="center")
            offsets.append(start)
        if width:
            axes.plot([start, start], [-0.6, 0.6], color=INK, linewidth=2)

    for offset in sorted(set(offsets)):
        times = offsets.count(offset)
        axes.text(
            offset,
            1.5,
            f"{offset}" + (f" (x{times})" if times > 1 else ""),
            ha="center",
            va="center",
        )

    axes.text(-0.35, 0, "values", ha="right", va="center")
    axes.text(-0.35, 0.8, "lengths", ha="right", va="center")
    axes.text(-0.35, 1.5, "offsets", ha="right", va="center")
    axes.set(xlim=(-2.4, max(count, 4) + 0.6), ylim=(1.95, -1.3))
    axes.axis("off")


def _box(axes: Any, x: float, y: float, text: Any, shade: int) -> None:
    """One id; samples alternate between filled and hollow boxes."""
    filled = shade % 2 == 0
    face = ACCENT if filled else "none"
    axes.add_patch(
        Rectangle((x + 0.06, y - 0.36), 0.88, 0.72, facecolor=face, edgecolor=ACCENT, linewidth=1.5)
    )
    axes.text(x + 0.5, y, str(text), ha="center", va="center", color="white" if filled else INK)


def _stations(axes: Any, names: Sequence[str], lit: set[str]) -> None:
    """A row of stations joined by a line, the lit ones filled."""
    for position, name in enumerate(names):
        is_lit = name in lit
        face, edge = (ACCENT, ACCENT) if is_lit else ("none", INK)
        shape = FancyBboxPatch(
            (position - 0.44, -0.2),
            0.88,
            0.4,
            boxstyle="round,pad=0,rounding_size=0.12",
            facecolor=face,
            edgecolor=edge,
        )
        axes.add_patch(shape)

        weight = "bold" if is_lit else "normal"
        axes.text(
            position,
            0,
            name,
            ha="center",
            va="center",
            color="white" if is_lit else INK,
            weight=weight,
            size=10.5,
        )
        if position:
            axes.plot([position - 0.56, position - 0.44], [0, 0], color=INK, linewidth=1.5)

    axes.set_xlim(-0.47, len(names) - 0.53)
    axes.axis("off")


def here(
    station: str, facts: Mapping[str, str] | None = None, *, claim: str | None = None
) -> Chart:
    """The path of a batch with the present station lit.

    Args:
        station: One of `STATIONS`.
        facts: What was recorded at some of the stations ("2 x 64 floats"), written below them.
        claim: Title; may use {station}, {place}, {of}, {before}, {after}.

    Raises:
        ValueError: The station is not on the map.
    """
    if station not in STATIONS:
        raise ValueError(f"station {station!r} is not on the map of {', '.join(STATIONS)}")

    position = STATIONS.index(station)
    known = {
        "station": station,
        "place": position + 1,
        "of": len(STATIONS),
        "before": STATIONS[position - 1] if position else "nothing",
        "after": STATIONS[position + 1] if position + 1 < len(STATIONS) else "nothing",
    }

    with style():
        figure = canvas(1.15 if not facts else 1.6)
        axes = figure.add_subplot()
        _stations(axes, STATIONS, {station})
        for name, text in (facts or {}).items():
            lines = "\n".join(textwrap.wrap(text, 10))
            axes.text(STATIONS.index(name), -0.3, lines, ha="center", va="top", size=10)
        axes.set_ylim(-0.3 if not facts else -0.85, 0.3)
        return finish(
            figure,
            claim,
            "You are here: {station}, station {place} of {of} on a batch's path",
            known,
        )


def life(identity: int, states: Mapping[str, str], *, claim: str | None = None) -> Chart:
    """The life of one id so far: what was recorded of it at each station.

    Args:
        identity: The id.
        states: Station to what the id was there, in order of the path.
        claim: Title; may use {id}, {last}, {steps}.

    Raises:
        ValueError: A station is not on the map.
    """
    unknown = [name for name in states if name not in STATIONS]
    if unknown or not states:
        raise ValueError(
            f"life of id {identity}: stations {unknown} are not on the map {', '.join(STATIONS)}"
        )

    known = {"id": identity, "last": list(states)[-1], "steps": len(states)}
    width = max(12, 64 // len(states))
    below = ["\n".join(textwrap.wrap(text, width)) for text in states.values()]
    lines = max(text.count("\n") + 1 for text in below)

    with style():
        figure = canvas(1.15 + 0.22 * lines)
        axes = figure.add_subplot()
        _stations(axes, list(states), {list(states)[-1]})
        for position, text in enumerate(below):
            axes.text(position, -0.3, text, ha="center", va="top", size=11)
        axes.set_ylim(-0.35 - 0.16 * lines, 0.3)
        return finish(figure, claim, "The life of id {id}, up to its {last}", known)


def views(
    batch: KeyedJaggedTensor,
    results: Mapping[str, Jagged | Sequence[Jagged]],
    *,
    claim: str | None = None,
) -> Chart:
    """The ids of a batch and of what operations made of it: views hollow, copies filled.

    A view is drawn below the ids whose memory it uses.

    Args:
        batch: A few ids.
        results: Name of an operation to what it returned, one jagged tensor or several.
        claim: Title; may use {ids} (of the batch), {views} and {copies} (the operations that copy
            no id, and the others).

    Example:
        >>> batch = KeyedJaggedTensor(
        ...     ["a", "b"], torch.tensor([7, 2]), lengths=torch.ones(2).int()
        ... )
        >>> made = {"split": batch.split([1, 1]), "permute": batch.permute([1, 0])}
        >>> views(batch, made).facts["copies"]
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
            shared = not copied
            x = left + 3 * int(ids.storage_offset()) if shared else end
            end = x + diagram.strip(x, y, ids.tolist(), rank=None if shared else ACCENT).width

        names["copies" if copied else "views"].append(name)
        size = sum(ids.nbytes for ids in copied)
        shared_by = "view" if len(values) == 1 else f"{len(values)} views"
        diagram.text(0, y + 0.6, name)
        diagram.text(start + 3, y + 0.6, f"copies {size} bytes" if copied else shared_by)
    default = "{copies} copy ids, {views} do not"
    return diagram.chart(claim or default, ids=batch.values().numel(), **names)
