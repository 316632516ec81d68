"""Ranks that work: values, arguments, identity of what cells define, kept objects,
simulated hosts.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import importlib.util
import os
import sys
import types

import pytest
import torch

import tutorec._validation as validation_switch
from tutorec.errors import RankError
from tutorec.spmd import Kept, Ranks, init, run_ranks

OFFSET = 10
SEEN: list[int] = []


class Color(enum.Enum):
    RED = 1


@dataclasses.dataclass
class Point:
    x: int


def add_ranks(rank, world_size, x):
    value = torch.tensor([x + rank + OFFSET])
    torch.distributed.all_reduce(value)
    return rank, world_size, value.item()


def test_run_returns_values_in_rank_order(ranks):
    assert ranks(2).run(add_ranks, 7) == [(0, 2, 35), (1, 2, 35)]
    assert ranks(2).run(add_ranks, x=8) == [(0, 2, 37), (1, 2, 37)]


def test_run_ranks_runs_once_and_fills_in_the_rank():
    assert run_ranks(add_ranks, 2, 1) == [(0, 2, 23), (1, 2, 23)]
    assert run_ranks(lambda rank: rank) == [0, 1]


def test_four_ranks_join_one_group(ranks):
    assert ranks(4).run(add_ranks, 0) == [(rank, 4, 46) for rank in range(4)]


def test_ranks_use_one_thread_and_gloo_without_gpus(ranks):
    def settings():
        return (
            torch.get_num_threads(),
            torch.distributed.get_backend(),
            torch.distributed.get_world_size(),
        )

    expected = "nccl" if torch.cuda.is_available() and torch.cuda.device_count() >= 2 else "gloo"
    assert ranks(2).run(settings) == [(1, expected, 2)] * 2
    assert ranks(2).backend == expected


def test_callables_of_every_kind_are_called(ranks):
    class Adder:
        def __init__(self, start):
            self.start = start

        def __call__(self, rank):
            return self.start + rank

        def method(self, world_size):
            return self.start * world_size

    assert ranks(2).run(Adder(5)) == [5, 6]
    assert ranks(2).run(Adder(5).method) == [10, 10]
    assert ranks(2).run(functools.partial(add_ranks, x=0))[1] == (1, 2, 21)
    assert ranks(2).run(max, 3, 4) == [4, 4]
    assert ranks(2).run(os.path.join, "a", "b") == [os.path.join("a", "b")] * 2


@pytest.mark.parametrize(
    ("fn", "args", "kwargs", "expected"),
    [
        pytest.param(
            lambda rank, world_size, x: (rank, x), (7,), {}, [(0, 7), (1, 7)], id="in-front"
        ),
        pytest.param(lambda x, rank: (x, rank), (7,), {}, [(7, 0), (7, 1)], id="behind"),
        pytest.param(
            lambda rank, x=1: (rank, x), (7,), {}, [(0, 7), (1, 7)], id="before-a-default"
        ),
        pytest.param(lambda rank, x=1: (rank, x), (), {}, [(0, 1), (1, 1)], id="default-kept"),
        pytest.param(
            lambda x, rank: (x, rank), (7, 5), {}, [(7, 5), (7, 5)], id="given-by-position"
        ),
        pytest.param(lambda rank: rank, (), {"rank": 9}, [9, 9], id="given-by-name"),
        pytest.param(
            lambda rank, *rest: (rank, rest), (7, 8), {}, [(0, (7, 8)), (1, (7, 8))], id="rest"
        ),
        pytest.param(
            lambda *, rank, **rest: (rank, rest),
            (),
            {"y": 1},
            [(0, {"y": 1}), (1, {"y": 1})],
            id="keywords",
        ),
    ],
)
def test_arguments_bind_around_rank_and_world_size(ranks, fn, args, kwargs, expected):
    assert ranks(2).run(fn, *args, **kwargs) == expected


def test_arguments_that_do_not_fit_are_refused_before_the_ranks_are_asked(ranks):
    pool = ranks(2)
    pool.run(add_ranks, 1)
    before = pool.pids
    with pytest.raises(TypeError, match=r"add_ranks\(rank, world_size, x\)"):
        pool.run(add_ranks)
    with pytest.raises(TypeError, match="unexpected keyword argument 'z'"):
        pool.run(add_ranks, 1, z=2)
    assert pool.pids == before


def make_things(rank):
    return Point(rank), Color.RED


def know_things(point, color):
    return isinstance(point, Point), color is Color.RED


def test_classes_keep_their_identity_from_call_to_call(ranks):
    things = ranks(2).run(make_things)
    assert [(type(point), color) for point, color in things] == [(Point, Color.RED)] * 2
    assert things[1][0] == Point(1)
    assert ranks(2).run(know_things, *things[1]) == [(True, True)] * 2


CELLS = """
LIMITS = {"rows": [1, 2, 3]}


def remember_limits(world):
    return world.keep(LIMITS)


def same_limits(kept):
    return kept is LIMITS


def change_limits():
    LIMITS["rows"].append(4)
    return len(LIMITS["rows"])
"""


def test_constants_are_one_object_for_all_functions_until_the_caller_changes_them(ranks, tmp_path):
    # A module that no rank can import, whatever the path of this process is: it travels as cells
    # do.
    file = tmp_path / "cells_of_a_notebook.py"
    file.write_text(CELLS, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None, "the file was just written"
    assert spec.loader is not None, "a source file has a loader"
    cells = sys.modules[file.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(cells)
    pool = ranks(2)
    try:
        kept = pool.run(cells.remember_limits, pool)[0]
        assert pool.run(cells.same_limits, kept) == [True, True]
        assert pool.run(cells.change_limits) == [4, 4]
        assert pool.run(cells.change_limits) == [5, 5]
        cells.LIMITS["note"] = [0]
        assert pool.run(cells.same_limits, kept) == [False, False]
        assert pool.run(cells.change_limits) == [4, 4]
    finally:
        del sys.modules[file.stem]


def test_arguments_are_fresh_copies_in_every_call(ranks):
    def append(items):
        items.append(0)
        return len(items)

    mine = [1]
    assert ranks(2).run(append, mine) == [2, 2]
    assert ranks(2).run(append, mine) == [2, 2]
    assert mine == [1]


def test_a_function_is_sent_once_and_keeps_its_globals(ranks):
    def count():
        SEEN.append(0)
        return len(SEEN)

    assert ranks(2).run(count) == [1, 1]
    assert ranks(2).run(count) == [2, 2]
    assert SEEN == []


def build(world, rank):
    return world.keep(torch.full((2,), float(rank))), world.keep([])


def use(kept, nested):
    kept += 1
    nested["deep"][0].append(kept[0].item())
    return kept, nested["deep"][0]


def test_kept_objects_are_the_same_on_later_calls(ranks):
    pool = ranks(2)
    (tensor, items), other = pool.run(build, pool)
    assert isinstance(tensor, Kept)
    assert tensor == other[0]
    assert tensor != items
    assert repr(tensor).startswith("<Tensor kept on the ranks by run ")
    assert "in build, line" in repr(tensor)
    pool.run(use, tensor, {"deep": (items,)})
    values = pool.run(use, tensor, {"deep": (other[1],)})
    assert [seen for _, seen in values] == [[1.0, 2.0], [2.0, 3.0]]
    torch.testing.assert_close(
        [t for t, _ in values], [torch.full((2,), 2.0), torch.full((2,), 3.0)]
    )


def test_kept_objects_resolve_as_globals_of_the_function(ranks):
    pool = ranks(2)
    namespace = {"world": pool, "__name__": "__main__", "__builtins__": __builtins__}
    exec("def build(rank):\n    return world.keep([rank])\n", namespace)
    namespace["state"] = pool.run(namespace["build"])[0]
    exec("def step():\n    state.append(world.rank)\n    return list(state)\n", namespace)
    assert pool.run(namespace["step"]) == [[0, 0], [1, 1]]
    assert pool.run(namespace["step"]) == [[0, 0, 0], [1, 1, 1]]


def keep_unevenly(world, rank):
    extra = world.keep("only here") if rank == 0 else None
    return world.keep(("mine", rank)), extra


def test_a_handle_means_the_object_kept_at_the_same_place_of_the_code(ranks):
    pool = ranks(2)
    (first, extra), (second, _) = pool.run(keep_unevenly, pool)
    assert first == second
    assert pool.run(lambda x: x, second) == [("mine", 0), ("mine", 1)]
    with pytest.raises(RankError, match=r"rank 1.*not.*run \d+.*keep_un"):
        pool.run(lambda x: x, extra)


def test_dropped_handles_free_what_they_stood_for(ranks):
    class Canary:
        pass

    def plant(world):
        import weakref

        canary = Canary()
        sys.modules["canary"] = types.SimpleNamespace(ref=weakref.ref(canary))  # pyright: ignore[reportArgumentType]
        return world.keep(canary)

    def alive():
        return sys.modules["canary"].ref() is not None

    pool = ranks(2)
    handles = pool.run(plant, pool)
    assert pool.run(alive) == [True, True]
    del handles
    assert pool.run(alive) == [False, False]


def test_keep_outside_of_a_run_says_where_it_belongs(ranks):
    with pytest.raises(RuntimeError, match=r"keep\(\) was called"):
        ranks(2).keep([])
    with pytest.raises(AttributeError, match="inside a run only"):
        _ = ranks(2).rank


def test_run_inside_of_a_run_is_refused(ranks):
    pool = ranks(2)
    with pytest.raises(RankError, match=r"run\(\).*rank \d: call len\(\)"):
        pool.run(lambda world: world.run(len, ()), pool)


def test_a_handle_of_another_pool_is_refused(ranks):
    pool = ranks(2)
    handle = pool.run(build, pool)[0][0]
    with pytest.raises(RankError, match="belongs to another pool"):
        ranks(4).run(lambda x: x, handle)


@pytest.mark.parametrize(
    ("hosts", "local", "groups"), [(1, [0, 1, 2, 3], [0] * 4), (2, [0, 1, 0, 1], [0, 0, 1, 1])]
)
def test_hosts_split_the_ranks_in_order(ranks, hosts, local, groups):
    def place():
        return {
            name: int(os.environ[name])
            for name in ("RANK", "LOCAL_RANK", "GROUP_RANK", "LOCAL_WORLD_SIZE")
        }

    places = ranks(4, hosts=hosts).run(place)
    assert [p["RANK"] for p in places] == [0, 1, 2, 3]
    assert [p["LOCAL_RANK"] for p in places] == local
    assert [p["GROUP_RANK"] for p in places] == groups
    assert {p["LOCAL_WORLD_SIZE"] for p in places} == {4 // hosts}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"world_size": 0}, "1 or more, got 0"),
        ({"world_size": -1}, "got -1"),
        ({"world_size": 2.0}, r"got 2\.0"),
        ({"world_size": True}, "got True"),
        (
            {"world_size": 4, "hosts": 3},
            r"hosts=3 cannot share 4 ranks evenly; use one of \[1, 2, 4\]",
        ),
        ({"world_size": 4, "hosts": 0}, "hosts=0"),
        ({"world_size": 2, "backend": "mpi"}, "'auto', 'gloo' or 'nccl', got 'mpi'"),
        ({"world_size": 2, "timeout": 0}, "positive number of seconds, at most 1,000,000, got 0"),
        ({"world_size": 2, "timeout": float("nan")}, "got nan"),
        ({"world_size": 2, "timeout": float("inf")}, "at most 1,000,000, got inf"),
        ({"world_size": 2, "timeout": 1e9}, "at most 1,000,000, got 1000000000.0"),
    ],
)
def test_options_that_cannot_be_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Ranks(**arguments)


def test_the_longest_timeout_is_one_that_the_system_can_wait():
    with Ranks(1, timeout=1_000_000) as world:
        assert world.run(len, ()) == [0]


def test_a_closed_pool_says_so_and_closing_twice_is_harmless():
    world = Ranks(2)
    world.close()
    world.close()
    assert world.closed
    with pytest.raises(ValueError, match=r"after close\(\).*Ranks\(2\)"):
        world.run(len, ())


def test_ranks_inherit_the_validation_switch():
    def checks():
        return validation_switch.validation_enabled()

    with validation_switch.validation(False), Ranks(1) as world:
        assert world.run(checks) == [False]
    with Ranks(1) as world:
        assert world.run(checks) == [True]


def test_ranks_follow_later_changes_of_the_import_path(ranks, tmp_path, monkeypatch):
    pool = ranks(2)
    pool.run(len, ())
    (tmp_path / "late_module_of_a_test.py").write_text("def answer(rank):\n    return 42 + rank\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import late_module_of_a_test  # pyright: ignore[reportMissingImports]

    assert pool.run(late_module_of_a_test.answer) == [42, 43]


def test_random_numbers_differ_between_ranks_unless_seeded(ranks):
    def draw():
        import numpy as np

        return np.random.random(), torch.rand(1).item()

    with Ranks(2) as world:
        (first, _), (second, _) = world.run(draw)
    assert first != second


def test_large_values_travel_both_ways(ranks):
    big = torch.arange(3_000_000)
    for rank, value in enumerate(ranks(2).run(lambda x, rank: x + rank, big)):
        torch.testing.assert_close(value, big + rank)


def test_init_gives_one_group_however_often_it_is_called(ranks):
    def sizes():
        return init().size(), init() is init()

    assert ranks(2).run(sizes) == [(2, True)] * 2
    already = torch.distributed.is_initialized()
    group = init()
    try:
        assert init() is group
        assert group.size() == 1
    finally:
        if not already:
            torch.distributed.destroy_process_group()


def test_constants_that_hold_functions_of_their_module_travel_with_it(ranks, monkeypatch, tmp_path):
    # A module that ranks cannot import: only this test knows its folder.
    file = tmp_path / "written_in_a_test.py"
    file.write_text(
        "WORDS = {'seven': lambda: 7}\n\n\ndef look_up():\n    return WORDS['seven']()\n"
    )
    spec = importlib.util.spec_from_file_location("written_in_a_test", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    assert ranks(1).run(module.look_up) == [7]
