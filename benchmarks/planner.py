"""The planner: quality of plans beside a lower bound and a peer's plans, and planning time.

``seeds`` draws twelve models of 10 to 100 tables for 2 to 128 ranks, and plans them. With ``--vs
torchrec`` the peer plans the same tables on the same topology, and our search looks for a better
plan among the peer's own options, by the peer's own estimates and on what its own reservation
leaves; ``ms`` of a plan is its slowest rank, and the bars are on that.

``growth`` plans ever larger models for ever more ranks; enumeration is included, as in all times
here.

A plan is the same in every run, so that one round decides; times are the median of a few, the
peer's of one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from benchmarks.harness import Bar, Comparison, Ratio, Report, machine, median_of
from benchmarks.library import OURS, Library, chosen, libraries
from benchmarks.planner_peer import BATCH_SIZE, Draw, Model, Planned
from benchmarks.runner import Options
from tutorec.distributed.planner.problem import broken_rules, cost, lower_bound
from tutorec.distributed.planner.search import search

NAME = "planner"
ROUNDS = 30
CASES = ("seeds", "growth")

# seed, tables, ranks, ranks of a host, filled part of what the ranks have for tables
DRAWS = (
    Draw(0, 10, 2, 2, 0.8),
    Draw(1, 10, 8, 8, 0.5),
    Draw(2, 16, 4, 4, 0.9),
    Draw(3, 20, 8, 8, 0.9),
    Draw(4, 24, 16, 8, 0.5),
    Draw(5, 30, 8, 8, 0.8),
    Draw(6, 40, 16, 8, 0.9),
    Draw(7, 40, 32, 8, 0.5),
    Draw(8, 60, 8, 8, 0.9),
    Draw(9, 60, 64, 8, 0.3),
    Draw(10, 80, 16, 8, 0.8),
    Draw(11, 100, 128, 8, 0.5),
)
GROWTH = tuple(
    Draw(0, tables, world_size, 8, 0.1)
    for tables, world_size in ((10, 8), (100, 8), (100, 128), (1000, 128), (1000, 512), (5000, 512))
)
SIZES = tuple(dict.fromkeys(draw.name for draw in (*DRAWS, *GROWTH)))

_REPEATS = 3
_NEVER_WORSE = Bar("at most", 1.0, rounds=1)
_MEAN = Bar("at most", 0.8, rounds=1)
_FASTER = {"100x128": Bar("at least", 20.0, rounds=1)}
# seconds that planning may take
_SECONDS = {"100x128": 2.0, "1000x128": 10.0}
# times the bound where the memory of ranks is loose, as it is where models grow
_LOOSE = Bar("at most", 1.5, rounds=1)


def run(options: Options) -> Report:
    """Plan the drawn models.

    Args:
        options: The peer, which ``--cases`` and ``--sizes`` (tables x ranks); of rounds three at
            most.

    Returns:
        Seconds of planning, and milliseconds of plans, those of the peer beside ours.

    Raises:
        ValueError: The peer is not installed, or an unknown case or size.
    """
    sides = libraries(options.vs)
    cases = chosen(CASES, options.cases, "--cases")
    sizes = chosen(SIZES, options.sizes, "--sizes")
    settings = {
        "B of a rank": BATCH_SIZE,
        "device": "cuda, 32 GiB, 8 ranks a host",
    }
    report = Report(NAME, settings, context=machine(options.vs))
    repeats = min(options.rounds, _REPEATS)
    draws = [draw for draw in DRAWS if draw.name in sizes and "seeds" in cases]
    growth = [draw for draw in GROWTH if draw.name in sizes and "growth" in cases]

    ratios = [ratio for draw in draws if (ratio := _plan_seed(report, draw, sides, repeats))]
    if len(ratios) > 1:
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        title = f"geometric mean of {len(ratios)}: {OURS} / {options.vs}, its estimates"
        report.comparisons.append(Comparison(title, "plan", _once(mean), _MEAN))
    for draw in growth:
        _grow(report, draw, repeats)
    return report


def _plan_seed(report: Report, draw: Draw, sides: Sequence[Library], repeats: int) -> float | None:
    """Plan a drawn model with ours and the peer; our step over theirs, by the peer's estimates."""
    title = f"seed {draw.seed}, {draw.name}, {draw.filled:.0%} full"
    model = Model(Library(OURS), draw)
    ours = [model.plan() for _ in range(repeats)]
    report.samples[f"{title}: {OURS}"] = [planned.sample for planned in ours]
    _add_bounded(report, f"{title}: {OURS}", ours[0], None)
    if len(sides) == 1:
        return None

    peer = Model(sides[1], draw)
    theirs = peer.plan()
    _compare_seconds(report, title, ours, theirs, peer)
    return _compare_plans(report, title, theirs, peer)


def _compare_seconds(
    report: Report, title: str, ours: Sequence[Planned], theirs: Planned, peer: Model
) -> None:
    """Seconds of planning."""
    name = peer.library.root
    report.samples[f"{title}: {name}"] = [theirs.sample]
    samples = [planned.sample for planned in ours]
    for clock in ("cpu", "wall"):
        medians = (getattr(theirs.sample, clock), median_of(samples, clock))
        bar = _FASTER.get(peer.draw.name) if clock == "cpu" else None
        ratio = _once(medians[0] / medians[1])
        report.comparisons.append(
            Comparison(f"{title}: {name} / {OURS}", clock, ratio, bar, medians)
        )


def _compare_plans(report: Report, title: str, theirs: Planned, peer: Model) -> float | None:
    """Our plan of the peer's options over the peer's plan, by the peer's estimates."""
    name = peer.library.root
    problem = peer.problem()
    placement = search(problem)
    if placement is None or theirs.ms is None:
        ours_text = "no plan" if placement is None else "a plan"
        theirs_text = f"none: {theirs.error}" if theirs.ms is None else "a plan"
        report.notes.append(
            f"{title}, by the estimates of {name}: {OURS} finds {ours_text}, {name} {theirs_text}"
        )
        return None

    broken = broken_rules(problem, placement)
    assert not broken, f"{title}: our plan of the options of {name} breaks rules: {broken[:3]}"
    milliseconds = cost(problem, placement)
    title_of_plans = f"{title}: {OURS} / {name}, its estimates"
    _add_plans(report, title_of_plans, milliseconds, theirs.ms, _NEVER_WORSE)
    title_of_bound = f"{title}: {name}, its estimates / lower bound"
    _add_plans(report, title_of_bound, theirs.ms, lower_bound(problem).ms)
    return milliseconds / theirs.ms


def _grow(report: Report, draw: Draw, repeats: int) -> None:
    """Seconds of planning a model of some size, and its distance from the bound."""
    model = Model(Library(OURS), draw)
    planned = [model.plan() for _ in range(repeats if draw.tables < 1000 else 1)]
    title = f"growth, {draw.tables} tables x {draw.world_size} ranks"
    samples = [plan.sample for plan in planned]
    report.samples[title] = samples

    if draw.name in _SECONDS:
        seconds = median_of(samples, "cpu")
        bar = Bar("at most", _SECONDS[draw.name], rounds=1)
        report.comparisons.append(
            Comparison(f"{title} / 1 s", "cpu", _once(seconds), bar, (seconds, 1.0))
        )
    _add_bounded(report, title, planned[0], _LOOSE)


def _add_bounded(report: Report, title: str, planned: Planned, bar: Bar | None) -> None:
    """Our plan beside the bound of all plans."""
    if planned.ms is None or planned.bound is None:
        report.notes.append(f"{title} finds no plan: {planned.error}")
    else:
        _add_plans(report, f"{title}: plan / lower bound", planned.ms, planned.bound, bar)


def _add_plans(
    report: Report, title: str, above: float, below: float, bar: Bar | None = None
) -> None:
    """Milliseconds of two plans."""
    medians = (above / 1e3, below / 1e3)
    report.comparisons.append(Comparison(title, "plan", _once(above / below), bar, medians))


def _once(ratio: float) -> Ratio:
    """A ratio that is the same in every round."""
    return Ratio(ratio, ratio, ratio, 1)
