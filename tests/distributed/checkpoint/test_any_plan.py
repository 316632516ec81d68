"""Any plan and world size loads what any other saved: every ordered pair of sharding types, under
every optimizer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from distributed.cases import CUT_IN_TWO, KINDS
from distributed.checkpoint_cases import (
    BY_ROW,
    Held,
    by_column,
    dense_of,
    expected_pieces,
    held,
    kind_under,
    sharded,
    train,
)
from torch import Tensor

from tutorec.distributed.checkpoint import load_checkpoint, save_checkpoint
from tutorec.spmd import Ranks

FIRST, MORE = range(3), range(3, 5)


def saved(
    path: str, shift: int, rank: int
) -> tuple[Held, dict[str, Tensor], Held, dict[str, Tensor], float]:
    """Train, save, go on: what there was when it was saved, and at the end."""
    model, optimizer = sharded(shift)
    train(model, optimizer, rank, FIRST)
    save_checkpoint(path, model, optimizer, step=len(FIRST), position={"batch": len(FIRST)})
    then, dense = held(model), dense_of(model, optimizer)
    loss = train(model, optimizer, rank, MORE)
    return then, dense, held(model), dense_of(model, optimizer), loss


def resumed(
    path: str, shift: int, rank: int
) -> tuple[Any, Held, dict[str, Tensor], Held, dict[str, Tensor], float]:
    """Load into a new model, go on: what was loaded, and what there is at the end."""
    model, optimizer = sharded(shift)
    info = load_checkpoint(path, model, optimizer)
    then, dense = held(model), dense_of(model, optimizer)
    loss = train(model, optimizer, rank, MORE)
    return info, then, dense, held(model), dense_of(model, optimizer), loss


def assert_same(found: Held, expected: Held, exact: bool, what: str) -> None:
    assert found.keys() == expected.keys(), what
    for name, pieces in found.items():
        for (place, values), (_, wanted) in zip(pieces, expected[name], strict=True):
            assert values.keys() == wanted.keys(), f"{what}: {name}"
            for key, value in values.items():
                message = f"{what}: {key} of {name} at {place}"
                if exact:
                    assert torch.equal(value, wanted[key]), message
                else:
                    torch.testing.assert_close(
                        value, wanted[key], msg=lambda text, m=message: f"{m}\n{text}"
                    )


def merges_slices(name: str, before: int, after: int) -> bool:
    """Whether a table's rows of numbers are another average under the later plan than under the
    earlier one.
    """
    index = int(name.removesuffix(".weight")[-1])
    cut = [kind_under(shift, index) in CUT_IN_TWO for shift in (before, after)]
    return cut[0] != cut[1] and any(f".{kind}" in name for kind in BY_ROW)


def check_pair(before: list[Any], after: list[Any], shifts: tuple[int, int]) -> None:
    title = f"plan {shifts[0]} -> {shifts[1]}, {len(before)} -> {len(after)} ranks"
    whole = by_column([each[0] for each in before])
    for rank, (info, loaded, dense, *_) in enumerate(after):
        assert (info.step, info.position, info.world_size) == (
            len(FIRST),
            {"batch": len(FIRST)},
            len(before),
        )
        # Only a mean over several slices rounds.
        wanted = expected_pieces(whole, loaded)
        averaged = {name for name in loaded if merges_slices(name, *shifts)}
        assert_same(
            {name: own for name, own in loaded.items() if name not in averaged},
            {name: own for name, own in wanted.items() if name not in averaged},
            True,
            title,
        )
        assert_same(loaded, wanted, False, title)
        assert dense.keys() == before[0][1].keys()
        assert all(torch.equal(dense[name], value) for name, value in before[0][1].items()), (
            f"{title}: rank {rank}"
        )
        assert {"weight.exp_avg", "bias.step", "seen"} <= dense.keys()


@pytest.fixture(scope="module")
def stored(ranks, tmp_path_factory) -> tuple[Path, list[Any]]:
    """A checkpoint of two ranks under plan 0, and what they held."""
    path = tmp_path_factory.mktemp("two") / "model"
    return path, ranks(2).run(lambda rank: saved(str(path), 0, rank))


@pytest.mark.parametrize("shift", range(len(KINDS)))
def test_every_type_loads_what_every_other_saved_and_goes_on_as_if_nothing_had_been(
    ranks, stored, shift
):
    path, before = stored
    if shift == 0:  # In processes that have seen nothing of the first ones.
        with Ranks(2) as world:
            after = world.run(lambda rank: resumed(str(path), shift, rank))
    else:
        after = ranks(2).run(lambda rank: resumed(str(path), shift, rank))
    check_pair(before, after, (0, shift))
    end = by_column([each[2] for each in before])
    for rank, (*_, last, dense, loss) in enumerate(after):
        if shift == 0:
            assert_same(last, before[rank][2], True, "the same plan")
            assert all(torch.equal(dense[name], value) for name, value in before[rank][3].items())
            assert loss == before[rank][4]
            continue
        # A row-wise optimizer takes other steps where the columns are cut otherwise.
        index_of = {name: int(name.removesuffix(".weight")[-1]) for name in last}
        same_cut = {
            name: own
            for name, own in last.items()
            if not any(f".{kind}" in name for kind in BY_ROW)
            or (kind_under(0, index_of[name]) in CUT_IN_TWO)
            == (kind_under(shift, index_of[name]) in CUT_IN_TWO)
        }
        assert len(same_cut) >= 3 * len(KINDS)
        wanted = expected_pieces(end, same_cut)
        assert_same(same_cut, wanted, False, f"2n steps under plan {shift}")
        for name, value in before[rank][3].items():
            torch.testing.assert_close(dense[name], value, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize("shift", [0, 3])
def test_one_rank_loads_what_two_saved_and_two_what_one_saved(ranks, stored, tmp_path, shift):
    path, before = stored
    alone = ranks(1).run(lambda rank: resumed(str(path), shift, rank))
    check_pair(before, alone, (0, shift))
    back = tmp_path / "one"
    before = ranks(1).run(lambda rank: saved(str(back), shift, rank))
    check_pair(before, ranks(2).run(lambda rank: resumed(str(back), 5, rank)), (shift, 5))


@pytest.mark.world4
def test_four_ranks_on_two_hosts_load_what_two_saved_and_back(ranks, stored, tmp_path):
    path, before = stored
    four = ranks(4, hosts=2)
    check_pair(before, four.run(lambda rank: resumed(str(path), 1, rank)), (0, 1))
    wide = tmp_path / "four"
    before = four.run(lambda rank: saved(str(wide), 2, rank))
    check_pair(before, ranks(2).run(lambda rank: resumed(str(wide), 6, rank)), (2, 6))
    check_pair(before, four.run(lambda rank: resumed(str(wide), 2, rank)), (2, 2))
