"""The planner: quality of plans beside a lower bound and a peer's plans, and planning time.

``seeds`` draws twelve models of 10 to 100 tables for 2 to 128 ranks, and plans them. With ``--vs
torchrec`` the peer plans the same tables on the same topology, and our search looks for a better
plan among the peer's own options, by the peer's own estimates and on what its own reservation
leaves; ``ms`` of a plan is its slowest rank, and the bars are on that. Beside them stands the
critical path of both planners' own plans in the traffic simulator, where tables that the peer keeps
in host memory are taken for tables in the GPU's, which favours it.

``growth`` plans ever larger models for ever more ranks; enumeration is included, as in all times
here.

A plan is the same in every run, so that one round decides; times are the median of a few, the
peer's of one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from benchmarks.harness import Bar, Comparison, Ratio, Report, machine
from benchmarks.peer import OURS, Library, chosen, libraries
from benchmarks.planner_peer import BATCH_SIZE, Draw, Model, Planned, feature_of
from benchmarks.runner import Options
from tutorec.distributed.planner.problem import broken_rules, cost, lower_bound
from tutorec.distributed.planner.search import search
from tutorec.distributed.planner.topology import Topology
from tutorec.distributed.simulate.loads import Load
from tutorec.distributed.simulate.simulation import simulate

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
_NEVER_WORSE, _MEAN, _FASTER = 1.0, 0.8, 20.0
# seconds that planning may take
_SECONDS = {"100x128": 2.0, "1000x128": 10.0}
# times the bound where the memory of ranks is loose, as it is where models grow
_LOOSE_BAR = 1.5


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
    cases, sizes = chosen(CASES, options.cases, "--cases"), chosen(SIZES, options.sizes, "--sizes")
    report = Report(
        name=NAME,
        settings={
            "B of a rank": BATCH_SIZE,
            "device": "cuda, 32 GiB, 8 ranks a host",
            "estimates": "nothing is run",
        },
        context=machine(options.vs),
    )
    repeats = min(options.rounds, _REPEATS)
    if "seeds" in cases:
        ratios = [_seed(report, draw, sides, repeats) for draw in DRAWS if draw.name in sizes]
        valid = [ratio for ratio in ratios if ratio is not None]
        if len(valid) > 1:
            mean = math.exp(sum(map(math.log, valid)) / len(valid))
            report.comparisons.append(
                Comparison(
                    f"geometric mean of {len(valid)}: {OURS} / {options.vs}, its estimates",
                    "plan",
                    _once(mean),
                    Bar("at most", _MEAN, rounds=1),
                )
            )
    if "growth" in cases:
        for draw in GROWTH:
            if draw.name in sizes:
                _grow(report, draw, repeats)
    return report


def _seed(report: Report, draw: Draw, sides: Sequence[Library], repeats: int) -> float | None:
    """Plan a drawn model with ours and the peer; our step over theirs, by the peer's estimates."""
    title = f"seed {draw.seed}, {draw.name}, {draw.filled:.0%} full"
    model = Model(Library(OURS), draw)
    ours = [model.plan() for _ in range(repeats)]
    report.samples[f"{title}: {OURS}"] = [planned.sample for planned in ours]
    _bounded(report, f"{title}: {OURS}", ours[0], None)
    if len(sides) == 1:
        return None
    return _beside(report, title, ours, Model(sides[1], draw))


def _beside(report: Report, title: str, ours: Sequence[Planned], peer: Model) -> float | None:
    """The peer's plan of the same model, and ours of its options."""
    name = peer.library.root
    planned, problem = peer.plan(), peer.problem()
    report.samples[f"{title}: {name}"] = [planned.sample]
    for clock in ("cpu", "wall"):
        their_ms = getattr(planned.sample, clock)
        our_ms = float(np.median([getattr(one.sample, clock) for one in ours]))
        bar = (
            Bar("at least", _FASTER, rounds=1)
            if clock == "cpu" and peer.draw.name == "100x128"
            else None
        )
        report.comparisons.append(
            Comparison(
                f"{title}: {name} / {OURS}",
                clock,
                _once(their_ms / our_ms),
                bar,
                (their_ms, our_ms),
            )
        )
    placement = search(problem)
    if placement is None or planned.ms is None:
        report.notes.append(
            f"{title}, by the estimates of {name}: {OURS} finds "
            f"{'a' if placement is not None else 'no'} plan, {name} "
            f"{'a plan' if planned.ms is not None else 'none: ' + planned.error}"
        )
        return None
    broken = broken_rules(problem, placement)
    assert not broken, f"{title}: our plan of the options of {name} breaks rules: {broken[:3]}"
    priced = cost(problem, placement)
    never_worse = Bar("at most", _NEVER_WORSE, rounds=1)
    report.comparisons.append(
        _of_plans(f"{title}: {OURS} / {name}, its estimates", priced, planned.ms, bar=never_worse)
    )
    report.comparisons.append(
        _of_plans(
            f"{title}: {name}, its estimates / lower bound", planned.ms, lower_bound(problem).ms
        )
    )
    _simulate(report, title, ours[0], planned, peer)
    return priced / planned.ms


def _simulate(report: Report, title: str, ours: Planned, theirs: Planned, peer: Model) -> None:
    """The critical path of both planners' own plans."""
    if ours.plan is None or theirs.plan is None:
        return
    draw, our_model = peer.draw, Model(Library(OURS), peer.draw)
    topology = Topology(
        world_size=draw.world_size, local_world_size=draw.local_size, compute_device="cuda"
    )
    load = Load(BATCH_SIZE, {feature_of(table): table.pooling for table in our_model.tables})
    steps = [
        simulate(plan, topology, our_model.module, load).step_ms
        for plan in (ours.plan, theirs.plan)
    ]
    report.comparisons.append(
        _of_plans(f"{title}: {OURS} / {peer.library.root}, own plans simulated", *steps)
    )


def _grow(report: Report, draw: Draw, repeats: int) -> None:
    """Seconds of planning a model of some size, and its distance from the bound."""
    model = Model(Library(OURS), draw)
    planned = [model.plan() for _ in range(repeats if draw.tables < 1000 else 1)]
    title = f"growth, {draw.tables} tables x {draw.world_size} ranks"
    report.samples[title] = [one.sample for one in planned]
    if draw.name in _SECONDS:
        seconds = float(np.median([one.sample.cpu for one in planned]))
        bar = Bar("at most", _SECONDS[draw.name], rounds=1)
        report.comparisons.append(
            Comparison(f"{title} / 1 s", "cpu", _once(seconds), bar, (seconds, 1.0))
        )
    _bounded(report, title, planned[0], Bar("at most", _LOOSE_BAR, rounds=1))


def _bounded(report: Report, title: str, planned: Planned, bar: Bar | None) -> None:
    """Our plan beside the bound of all plans."""
    if planned.ms is None or planned.bound is None:
        report.notes.append(f"{title} finds no plan: {planned.error}")
    else:
        report.comparisons.append(
            _of_plans(f"{title}: plan / lower bound", planned.ms, planned.bound, bar=bar)
        )


def _of_plans(title: str, above: float, below: float, *, bar: Bar | None = None) -> Comparison:
    """Milliseconds of two plans."""
    return Comparison(title, "plan", _once(above / below), bar, (above / 1e3, below / 1e3))


def _once(ratio: float) -> Ratio:
    """A ratio that is the same in every round."""
    return Ratio(ratio, ratio, ratio, 1)
