"""What ranks forget: functions that were replaced or not used for long, their globals, models in
reference cycles.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from tutorec.modules.embedding_configs import EmbeddingBagConfig
from tutorec.modules.embedding_modules import EmbeddingBagCollection
from tutorec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from tutorec.spmd import Ranks
from tutorec.spmd import pool as spmd_pool
from tutorec.spmd.pickling import dump_function


@pytest.fixture(scope="module")
def world() -> Iterator[Ranks]:
    with Ranks(1) as pool:
        yield pool


def alive(kind: str) -> int:
    """Objects of a class of this name that this process holds."""
    return sum(type(obj).__name__ == kind for obj in gc.get_objects())


CELL = """
class Batch:
    def __init__(self, number):
        self.number = number

def helper():
    return batch.number

def step():
    return helper(), step.__name__
"""


def notebook() -> dict:
    """Globals of a notebook with one function, which refers to itself: an old version is a
    reference cycle.
    """
    namespace = {"__name__": "__main__", "__builtins__": __builtins__}
    exec(CELL, namespace)
    return namespace


def test_a_global_that_changes_at_each_run_leaves_one_version_on_the_rank(world):
    names = notebook()
    for number in range(40):
        names["batch"] = names["Batch"](number)
        assert world.run(names["step"]) == [(number, "step")]
    world.run(gc.collect)
    assert world.run(alive, "Batch") == [1]


def test_a_function_is_sent_again_when_a_global_of_a_helper_changed_and_only_then(world):
    names = notebook()
    names["batch"] = names["Batch"](1)
    world.run(names["step"])
    workers = world._pools[-1]
    prepared = dump_function(names["step"])
    assert workers._news(prepared)["payload"] is None
    names["batch"] = names["Batch"](2)
    changed = dump_function(names["step"])
    assert (changed.key, len(changed.constants)) == (prepared.key, 1)
    assert world.run(names["step"]) == [(2, "step")]


def test_closures_over_large_values_are_forgotten(world):
    class Parcel:
        def __init__(self, size: int) -> None:
            self.content = bytes(size)

    def use(parcel: Parcel):
        return lambda: len(parcel.content)

    for number in range(30):
        size = 1_000_000 + number
        assert world.run(use(Parcel(size))) == [size]
    world.run(gc.collect)
    (left,) = world.run(alive, "Parcel")
    assert left * 1_000_000 <= spmd_pool.FUNCTION_BYTES


def test_the_function_that_was_not_used_for_longest_is_forgotten_and_sent_again(world, monkeypatch):
    monkeypatch.setattr(spmd_pool, "FUNCTIONS", 2)

    def counter():
        names = {"count": 0, "__name__": "__main__", "__builtins__": __builtins__}
        exec("def add():\n    global count\n    count += 1\n    return count\n", names)
        return names["add"]

    add = counter()
    assert world.run(add) == [1]
    assert world.run(max, 1, 2) == [2]
    assert world.run(add) == [2]
    assert world.run(min, 1, 2) == [1]
    assert world.run(add) == [3], "it was used last but one"
    world.run(max, 1, 2)
    world.run(min, 1, 2)
    assert world.run(add) == [1], "two others were used since"


def test_models_with_optimizers_in_backward_do_not_pile_up(world):
    def build():
        gc.disable()  # what a long time between two collections amounts to
        model = EmbeddingBagCollection(
            [EmbeddingBagConfig(40_000, 16, "item", feature_names=["item"])]
        )
        apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
        return sum(
            type(obj) is torch.nn.Parameter and obj.numel() == 640_000 for obj in gc.get_objects()
        )

    counts = [count for _ in range(60) for count in world.run(build)]
    assert max(counts) <= 8, "of 2.5 MB each; garbage is collected when the rank has grown by 8"


def test_a_run_that_frees_what_it_took_costs_no_collection(world):
    def work():
        gc.disable()
        rows = [torch.ones(500_000) for _ in range(20)]
        assert sum(map(len, rows)) == 10_000_000
        return gc.get_stats()[2]["collections"]

    counts = [count for _ in range(20) for count in world.run(work)]
    assert counts[-1] == counts[3], "40 MB are taken and freed by each run; nothing is left"
