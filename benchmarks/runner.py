"""``python -m benchmarks``: find the benchmarks, run one, print its table, write its JSON.

A benchmark is a module beside this one that has ``NAME``, ``ROUNDS`` and ``run(options) ->
Report``. Its docstring's first line is its help. Common options: ``--rounds``, ``--json``,
``--vs``. One that names its parts in ``SIZES`` or ``CASES`` takes ``--sizes`` or ``--cases``: a run
of some of them. One that runs on several ranks names the numbers of them in ``WORLDS`` and takes
``--world``. One whose tables can have more or fewer rows names the usual factor in ``SCALE`` and
takes ``--scale``.
"""

from __future__ import annotations

import argparse
import json
import pkgutil
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType

_WITHOUT_PEER = ("backends", "cache", "estimates", "mc", "validation")


@dataclass(frozen=True)
class Options:
    """What the command line asks of a benchmark.

    Attributes:
        rounds: rounds that count.
        vs: name of an installed package to compare with, found when the benchmark runs; None for no
            peer.
        sizes: which sizes to run; None for all.
        cases: which cases to run; None for all.
        world: how many ranks; None for the benchmark's own choice.
        scale: how many times as many rows; None for the benchmark's own choice.
        device: the device type that ``bench gpu`` runs on; None for ``"cuda"``. The command line
            has it for tests.
    """

    rounds: int
    vs: str | None = None
    sizes: tuple[str, ...] | None = None
    cases: tuple[str, ...] | None = None
    world: int | None = None
    scale: float | None = None
    device: str | None = None


def benchmarks() -> dict[str, ModuleType]:
    """Name -> module of every benchmark in this folder.

    Example:
        >>> from benchmarks.runner import benchmarks
        >>> print(*sorted(benchmarks())[:8])
        backends cache ebc estimates gpu import kjt mc
        >>> print(*sorted(benchmarks())[8:])
        pipeline planner quant sharded train validation
    """
    package = __name__.rpartition(".")[0]
    folder = Path(__file__).parent
    modules = [
        import_module(f"{package}.{module.name}") for module in pkgutil.iter_modules([str(folder)])
    ]
    return {module.NAME: module for module in modules if hasattr(module, "NAME")}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a benchmark.

    Args:
        argv: the words after ``bench``.

    Returns:
        The exit status: 1 when a bar was judged and missed.
    """
    known = benchmarks()
    parser = _parser(known)
    options = parser.parse_args(argv)
    module = known[options.name]
    for part in ("sizes", "cases"):
        if getattr(options, part) and not hasattr(module, part.upper()):
            parser.error(f"bench {options.name} has no --{part} to choose from")
    if options.vs and options.name in _WITHOUT_PEER:
        parser.error(f"bench {options.name} measures tutorec alone and takes no --vs")
    if options.world is not None and not hasattr(module, "WORLDS"):
        parser.error(f"bench {options.name} runs in one process and takes no --world")
    if options.scale is not None and not hasattr(module, "SCALE"):
        parser.error(f"bench {options.name} has tables of one size and takes no --scale")
    if options.scale is not None and not options.scale > 0:
        parser.error(f"--scale {options.scale}: it must be above 0")
    rounds = module.ROUNDS if options.rounds is None else options.rounds
    report = module.run(
        Options(
            rounds,
            options.vs,
            options.sizes,
            options.cases,
            options.world,
            options.scale,
            options.device,
        )
    )
    print(report)
    if options.json is not None:
        options.json.write_text(json.dumps(report.to_dict(), indent=1) + "\n", encoding="utf-8")
    return int(report.missed)


def _parser(known: dict[str, ModuleType]) -> argparse.ArgumentParser:
    listing = "\n".join(
        f"  {name:<12}{(module.__doc__ or '').splitlines()[0]}" for name, module in known.items()
    )
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=(
            "Measure: variants in turn, medians of paired ratios with their 95 % intervals."
        ),
        epilog=f"benchmarks:\n{listing}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "name", choices=sorted(known), metavar="NAME", help="one of the benchmarks below"
    )
    parser.add_argument(
        "--vs", metavar="PEER", help="an installed package with the same names to compare with"
    )
    parser.add_argument(
        "--rounds", type=int, metavar="N", help="rounds that count; from 30 on a bar is judged"
    )
    for part in ("sizes", "cases"):
        parts = "; ".join(
            f"{name}: {', '.join(getattr(module, part.upper(), ())) or 'none'}"
            for name, module in known.items()
            if hasattr(module, part.upper())
        )
        parser.add_argument(
            f"--{part}", type=_words, metavar="A,B", help=f"only these {part} ({parts})"
        )
    worlds = [
        f"{name}: {', '.join(map(str, m.WORLDS))}"
        for name, m in known.items()
        if hasattr(m, "WORLDS")
    ]
    parser.add_argument(
        "--world", type=int, metavar="W", help=f"how many ranks ({'; '.join(worlds) or 'none'})"
    )
    scales = [f"{name}: {m.SCALE}" for name, m in known.items() if hasattr(m, "SCALE")]
    parser.add_argument(
        "--scale", type=float, metavar="X", help=f"X times as many rows ({'; '.join(scales)})"
    )
    parser.add_argument("--device", help=argparse.SUPPRESS)
    parser.add_argument(
        "--json",
        type=Path,
        metavar="PATH",
        help="write samples, ratios, versions and hardware there",
    )
    return parser


def _words(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())
