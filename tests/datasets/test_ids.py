"""Generated ids: their range, their law, and that a seed is all that they depend on."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tutorec.datasets.ids import drifting_ids, power_law_ids, uniform_ids

EXPONENTS = st.one_of(st.sampled_from([0.0, 1.0, 1.0 + 1e-9, 2.0]), st.floats(0.0, 4.0))


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def law(rows: int, exponent: float) -> list[float]:
    mass = [k**-exponent for k in range(1, rows + 1)]
    return [part / sum(mass) for part in mass]


def follows(ids: Tensor, expected: list[float]) -> bool:
    """Chi-squared against a law; ids that are expected fewer than 10 times are taken together."""
    counts = torch.bincount(ids, minlength=len(expected)).tolist()
    cells: list[tuple[float, float]] = []
    rare = (0.0, 0.0)
    for count, share in zip(counts, expected, strict=True):
        hoped = share * ids.numel()
        if hoped >= 10:
            cells.append((count, hoped))
        else:
            rare = rare[0] + count, rare[1] + hoped
    if rare[1] >= 1:
        cells.append(rare)
    distance = sum((count - hoped) ** 2 / hoped for count, hoped in cells)
    return distance <= len(cells) + 8 * math.sqrt(2 * len(cells)) + 20


@given(
    count=st.integers(0, 300),
    rows=st.integers(1, 10**12),
    exponent=EXPONENTS,
    seed=st.integers(0, 2**31),
)
def test_ids_are_rows_and_depend_on_the_seed_alone(
    count: int, rows: int, exponent: float, seed: int
) -> None:
    draws: list[Callable[[torch.Generator], Tensor]] = [
        lambda source: uniform_ids(count, rows, source),
        lambda source: power_law_ids(count, rows, exponent, source),
    ]
    for draw in draws:
        ids = draw(seeded(seed))
        assert (ids.shape, ids.dtype) == ((count,), torch.int64)
        assert all(0 <= number < rows for number in ids.tolist())
        assert torch.equal(ids, draw(seeded(seed)))


@given(rows=st.integers(1, 200), exponent=EXPONENTS, seed=st.integers(0, 2**31))
def test_ids_follow_the_law_that_is_documented(rows: int, exponent: float, seed: int) -> None:
    assert follows(power_law_ids(4000, rows, exponent, seeded(seed)), law(rows, exponent))
    assert follows(uniform_ids(4000, rows, seeded(seed)), [1 / rows] * rows)


def test_the_check_of_the_law_sees_another_law() -> None:
    assert not follows(power_law_ids(4000, 50, 1.0, seeded()), law(50, 1.2))
    assert not follows(uniform_ids(4000, 50, seeded()), law(50, 0.2))


def test_a_billion_rows_cost_nothing_and_the_head_is_right() -> None:
    ids = power_law_ids(100_000, 10**9, 1.0, seeded())
    harmonic = math.log(10**9) + 0.5772156649
    assert math.isclose(float((ids == 0).float().mean()), 1 / harmonic, rel_tol=0.05)
    assert math.isclose(
        float((ids < 1000).float().mean()), (math.log(1000) + 0.5772) / harmonic, rel_tol=0.02
    )


def test_a_generator_goes_on_and_no_generator_is_torchs() -> None:
    source = seeded(3)
    first, second = power_law_ids(50, 100, 1.0, source), power_law_ids(50, 100, 1.0, source)
    assert not torch.equal(first, second)
    for draw in (lambda: power_law_ids(50, 100, 1.0), lambda: uniform_ids(50, 100)):
        torch.manual_seed(5)
        one = draw()
        torch.manual_seed(5)
        assert torch.equal(one, draw())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"count": -1, "rows": 5, "exponent": 1.0}, "count=-1 must be"),
        ({"count": 1, "rows": 0, "exponent": 1.0}, "rows=0 must be"),
        (
            {"count": 1, "rows": 5, "exponent": -0.5},
            "exponent=-0.5 must be a finite number, at least 0",
        ),
        ({"count": 1, "rows": 5, "exponent": math.nan}, "exponent=nan must be a finite number"),
        (
            {"count": 1, "rows": 2**54, "exponent": 1.0},
            f"rows={2**54} must be a whole number, 1 to {2**53}",
        ),
    ],
)
def test_what_cannot_be_drawn_is_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        power_law_ids(**options)  # type: ignore[arg-type]
    if options["rows"] < 1 or options["count"] < 0:
        with pytest.raises(ValueError, match=message):
            uniform_ids(options["count"], options["rows"])  # type: ignore[arg-type]


def test_numbers_that_are_not_whole_are_refused() -> None:
    with pytest.raises(ValueError, match=r"power_law_ids: count=2.5 .* whole number"):
        power_law_ids(2.5, 10, 1.0)  # type: ignore[arg-type]


def test_drifting_ids_follow_the_law_on_scattered_rows() -> None:
    batches = drifting_ids(200, 50, 20, 1.1)
    assert [batch.shape for batch in batches] == [(50,)] * 200
    counts = torch.cat(batches).bincount(minlength=20)
    ranks = counts.argsort(descending=True)
    assert follows(ranks.argsort()[torch.cat(batches)], law(20, 1.1))
    assert not torch.equal(ranks, torch.arange(20))
    assert all(map(torch.equal, batches, drifting_ids(200, 50, 20, 1.1)))
    assert not all(map(torch.equal, batches, drifting_ids(200, 50, 20, 1.1, seed=6)))


def test_drifting_ids_move_all_popularity_at_one_batch() -> None:
    still = drifting_ids(40, 500, 100, 1.1)
    moved = drifting_ids(40, 500, 100, 1.1, all_move_at=20)
    assert all(map(torch.equal, still[:20], moved[:20]))
    before, after = (
        torch.cat(part).bincount(minlength=100).argmax() for part in (moved[:20], moved[20:])
    )
    assert before != after


def test_drifting_ids_move_few_rows_in_each_batch() -> None:
    still, moving = drifting_ids(40, 500, 100, 1.1), drifting_ids(40, 500, 100, 1.1, moving=2)
    # The ranks are the same, and so is an id while its row was not drawn.
    same = [float((one == other).double().mean()) for one, other in zip(still, moving, strict=True)]
    assert 0.5 < same[0] < 1 and same[-1] < same[0]


def test_drifting_ids_of_no_batch_or_no_id_are_empty() -> None:
    assert drifting_ids(0, 5, 3, 1.0) == []
    assert [len(batch) for batch in drifting_ids(2, 0, 3, 1.0, moving=1)] == [0, 0]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [({"moving": 4}, "moving"), ({"all_move_at": -1}, "all_move_at"), ({"batches": -1}, "batches")],
)
def test_drifting_ids_refuse_numbers_out_of_range(wrong: dict[str, int], message: str) -> None:
    given = {"batches": 2, "ids": 2, "rows": 3} | wrong
    with pytest.raises(ValueError, match=f"drifting_ids: {message}"):
        drifting_ids(**given, exponent=1.0)
