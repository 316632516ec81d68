"""Which batch was in which stage, and when: a line for each batch, from measured intervals."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tutorec._text import spaced_percents
from tutorec.distributed.train_pipeline.timeline import Interval
from tutorec.teach.canvas import caption, rank_color
from tutorec.teach.units import number

__all__ = ["Gantt", "gantt"]

_LEFT, _WIDTH = 15.0, 84.0  # percent: where the bars begin, and the room that they have
_LINE, _BAR, _TITLE = 28, 16, 22  # pixels: a batch, its bar, the title of a panel
_OPACITY = (0.6, 0.1, 0.35, 0.2)
_DASHES = ("none", "5 3", "1 2")
_SHORT = "too short for a letter"
_STRIPES = (
    '<defs><pattern id="stripes" width="5" height="5" patternUnits="userSpaceOnUse" '
    'patternTransform="rotate(45)">'
    '<path d="M0 0V5" stroke="currentColor" stroke-opacity="0.5" '
    'stroke-width="2"/></pattern></defs>'
)


@dataclass(frozen=True)
class Gantt:
    """A gantt chart: HTML as the last expression of a notebook cell, text in a terminal.

    Attributes:
        claim: The title.
        alt: What is seen, for those who do not see it.
        svg: The drawing. Bars grow with the page, text does not.
        legend: What letters and lines mean.
        facts: The numbers of the claim.
    """

    claim: str
    alt: str
    svg: str
    legend: str
    facts: Mapping[str, Any] = field(default_factory=dict)

    def _repr_html_(self) -> str:
        """What Jupyter and the book render."""
        style = "display: block; font-style: normal; font-weight: normal"
        legend = f'<small style="{style}">{html.escape(self.legend)}</small>'
        words = f"<figcaption>{caption(self.claim)}{legend}</figcaption>"
        return f'<figure class="drawn">{self.svg}{words}</figure>'

    def __repr__(self) -> str:
        """What a reader without images sees."""
        return f"<figure: {self.claim}. {self.alt}>"


def gantt(
    panels: Mapping[str, Sequence[Interval]],
    *,
    letters: Mapping[str, str],
    between: Mapping[str, tuple[float, float]],
    claim: str,
    alt: str,
    waiting: Sequence[str] = ("wait",),
    names: Mapping[str, str] | None = None,
) -> Gantt:
    """A panel for each record, on one scale of time; a line for each batch.

    A bar is a stage of a batch on this rank, in the colour of the rank. Stages of `waiting` are cut
    out of the bars that they interrupt, and drawn hollow (the first one) or striped (the others).
    Stages without a letter are thin lines below the bar: messages that are on their way while the
    rank does something else.

    Args:
        panels: Title -> intervals of one rank.
        letters: Stage -> the letter in its bars; the legend names those that occur, and last the
            stages whose bars are too short for one. Shades follow their order.
        between: Title -> the time that is shown: seconds from, seconds to.
        claim: The title; may use {window} (the longest time shown, ms) and, of the first panel,
            {waiting_share} (of the time shown), with more panels {waiting_share_2}, ...
        alt: What is seen.
        waiting: The stages in which the rank does nothing; shares are those of the first one.
        names: Stage -> what the legend calls it; its own name by default.

    Raises:
        ValueError: A panel shows nothing.
    """
    scale = max(end - start for start, end in between.values())
    facts: dict[str, Any] = {"window": number(1e3 * scale)}
    every = [each for intervals in panels.values() for each in intervals]
    flights = list(
        dict.fromkeys(
            each.stage
            for each in every
            if each.stage not in {*letters, *waiting} and each.end > each.start
        )
    )
    shapes: list[str] = []
    top = 0
    for place, (title, intervals) in enumerate(panels.items()):
        start, end = between[title]
        shown = [each for each in intervals if each.end > start and each.start < end]
        if not shown:
            raise ValueError(f"gantt {title!r} has no interval between {start:.3f} and {end:.3f} s")
        waited = [each for each in shown if each.stage in waiting]
        idle = sum(
            min(each.end, end) - max(each.start, start)
            for each in waited
            if each.stage == waiting[0]
        )
        facts[f"waiting_share_{place + 1}" if place else "waiting_share"] = idle / (end - start)
        shapes.append(f'<text x="0" y="{top + 15}" font-weight="bold">{html.escape(title)}</text>')
        top += _TITLE
        pen = _Pen(start, end, scale, top, sorted({each.batch for each in shown}))
        for each in shown:
            if each.stage in letters:
                shapes += pen.busy(each, [w for w in waited if w.batch == each.batch], letters)
            elif each.stage in waiting:
                shapes += pen.idle(each, is_striped=each.stage != waiting[0])
            elif each.stage in flights:
                shapes += pen.flight(each, flights.index(each.stage))
        shapes += [
            f'<text x="0" y="{top + _LINE * line + 13}">batch {batch}</text>'
            for line, batch in enumerate(pen.batches)
        ]
        top += _LINE * len(pen.batches) + 8
    ticks = "".join(
        (
            f'<text x="{_LEFT + _WIDTH * part:.1f}%" y="{top + 12}" '
            f'text-anchor="{anchor}">{label_text}</text>'
        )
        for part, anchor, label_text in ((0, "start", "0"), (1, "end", f"{facts['window']} ms"))
    )
    heading = spaced_percents(claim.format(**facts))
    label = html.escape(f"{heading}. {alt}", quote=True)
    svg = (
        f'<svg role="img" aria-label="{label}" style="display: block; width: 100%; height: '
        f'{top + 18}px" '
        'font-family="inherit" font-size="12" '
        f'fill="currentColor">{_STRIPES}{"".join(shapes)}{ticks}</svg>'
    )
    stages = {each.stage for each in every}
    drawn = {stage: letters[stage] for stage in letters if stage in stages}
    idle_looks = {
        stage: "striped" if i else "hollow" for i, stage in enumerate(waiting) if stage in stages
    }
    return Gantt(heading, alt, svg, _legend(drawn, flights, idle_looks, names or {}, svg), facts)


def _legend(
    letters: Mapping[str, str],
    flights: Sequence[str],
    waiting: Mapping[str, str],
    names: Mapping[str, str],
    svg: str,
) -> str:
    by_letter: dict[str, list[str]] = {}
    for stage, written in letters.items():
        letter = written if f">{written}<" in svg else _SHORT
        by_letter.setdefault(letter, []).append(names.get(stage, stage.replace("_", " ")))
    short = {_SHORT: by_letter.pop(_SHORT)} if _SHORT in by_letter else {}
    entries = [
        f"{letter}: {', '.join(dict.fromkeys(stages))}"
        for letter, stages in (by_letter | short).items()
    ]
    lines = ("thin line", "dashed line", "dotted line")
    entries += [f"{lines[i % 3]}: {names.get(stage, stage)}" for i, stage in enumerate(flights)]
    entries += [f"{look}: {names.get(stage, 'the rank waits')}" for stage, look in waiting.items()]
    return "; ".join(entries) + "."


@dataclass(frozen=True)
class _Pen:
    """Draws the intervals of one panel."""

    start: float
    end: float
    scale: float
    top: int
    batches: Sequence[int]

    def busy(
        self, each: Interval, waited: Sequence[Interval], letters: Mapping[str, str]
    ) -> list[str]:
        """Bars of a stage, without the time in which the rank waited inside of it."""
        parts, begin = [], each.start
        for wait in sorted(waited, key=lambda wait: wait.start):
            if each.start <= wait.start and wait.end <= each.end:
                parts.append((begin, wait.start))
                begin = wait.end
        parts.append((begin, each.end))
        color, letter = rank_color(each.rank), letters[each.stage]
        opacity = _OPACITY[list(dict.fromkeys(letters.values())).index(letter) % len(_OPACITY)]
        y, drawn = self._y(each), []
        for part in parts:
            left, width = self._place(*part)
            if width <= 0:
                continue
            look = f'fill="{color}" fill-opacity="{opacity}" stroke="{color}"'
            drawn.append(
                f'<rect x="{left:.2f}%" y="{y}" width="{width:.2f}%" height="{_BAR}" {look}/>'
            )
        left, width = self._place(*max(parts, key=lambda part: part[1] - part[0]))
        if width > 1.6:
            middle = left + width / 2
            drawn.append(
                f'<text x="{middle:.2f}%" y="{y + 12}" '
                f'text-anchor="middle">{html.escape(letter)}</text>'
            )
        return drawn

    def idle(self, each: Interval, is_striped: bool) -> list[str]:
        """A hollow or striped bar; waits that are too short to be seen are left out."""
        left, width = self._place(each.start, each.end)
        if width <= 0.5:
            return []
        y, look = self._y(each), 'fill="none" stroke="currentColor" stroke-dasharray="3 2"'
        if is_striped:
            look = 'fill="url(#stripes)" stroke="currentColor" stroke-opacity="0.5"'
        return [f'<rect x="{left:.2f}%" y="{y}" width="{width:.2f}%" height="{_BAR}" {look}/>']

    def flight(self, each: Interval, kind: int) -> list[str]:
        """A line below the bar of the batch."""
        left, width = self._place(each.start, each.end)
        y, look = (
            self._y(each) + _BAR + 4,
            f'stroke="currentColor" stroke-width="3" stroke-dasharray="{_DASHES[kind]}"',
        )
        return (
            [f'<line x1="{left:.2f}%" x2="{left + width:.2f}%" y1="{y}" y2="{y}" {look}/>']
            if width > 0
            else []
        )

    def _y(self, each: Interval) -> int:
        return self.top + _LINE * self.batches.index(each.batch)

    def _place(self, start: float, end: float) -> tuple[float, float]:
        """Percent of the width: start and width; what lies outside of the shown time is cut."""
        first, last = max(start, self.start), min(end, self.end)
        return _LEFT + _WIDTH * (first - self.start) / self.scale, max(
            0.0, _WIDTH * (last - first) / self.scale
        )
