"""Managed collisions written out in plain Python: what the mapping of ids to rows must be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class Slot:
    """A row, the id that has it, how often that id occurred and when it did last."""

    row: int
    id: int | None = None
    count: int = 0
    last: int = 0


@dataclass
class Oracle:
    """R rows, of which the last is shared by all ids without one; `policy` is lfu, lru
    or distance.
    """

    rows: int
    policy: str
    interval: int
    decay: float = 1.0
    admits: Callable[[int, list[int]], bool] = lambda count, counts: True
    now: int = 0
    evictions: int = 0
    seen: dict[int, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.slots = [Slot(row) for row in range(self.rows - 1)]

    def score(self, count: int, last: int) -> float:
        age = (self.now - last + 1) ** self.decay
        return {"lfu": count, "lru": -age, "distance": count / age}[self.policy]

    def train(self, ids: list[int]) -> list[int]:
        """One iteration; the rows that have another id since."""
        self.now += 1
        for each in ids:
            self.seen[each] = [self.seen.get(each, [0])[0] + 1, self.now]
        return [] if self.now % self.interval else self.compete()

    def compete(self) -> list[int]:
        counts = [count for count, _ in self.seen.values()]
        new = {key: value for key, value in self.seen.items() if self.admits(value[0], counts)}
        self.seen = {}
        for slot in self.slots:
            if slot.id in new:
                count, slot.last = new.pop(slot.id)
                slot.count += count
        arrivals = sorted(new.items(), key=lambda item: (-item[1][0], item[0]))
        scores = [self.score(slot.count, slot.last) for slot in self.slots] + [
            self.score(*one) for _, one in arrivals
        ]
        order = sorted(range(len(scores)), key=lambda place: -scores[place])  # stable
        leave = [self.slots[place] for place in order[self.rows - 1 :] if place < self.rows - 1]
        come = [
            arrivals[place - self.rows + 1]
            for place in order[: self.rows - 1]
            if place >= self.rows - 1
        ]
        self.evictions += sum(slot.id is not None for slot in leave)
        for slot, (new_id, (count, last)) in zip(leave, come, strict=True):
            slot.id, slot.count, slot.last = new_id, count, last
        self.slots.sort(key=lambda slot: float("inf") if slot.id is None else slot.id)
        return sorted(slot.row for slot in leave)

    def remap(self, ids: list[int]) -> list[int]:
        rows = {slot.id: slot.row for slot in self.slots if slot.id is not None}
        return [rows.get(each, self.rows - 1) for each in ids]
