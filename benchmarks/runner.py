"""``python -m benchmarks``: find the benchmarks, run one, print its table, write its JSON.

A benchmark is a module beside this one that has ``NAME``, ``ROUNDS`` and ``run(options) ->
Report``. Its docstring's first line is its help. Options of all: ``--rounds``, ``--json`` and
``--vs``, of which those in `_WITHOUT_PEER` take no ``--vs``. A benchmark with ``SIZES`` or
``CASES`` takes ``--sizes`` or ``--cases``: a run of some of them. One that runs on several ranks
has their numbers in ``WORLDS`` and takes ``--world``.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

# Modules of this folder, in the order in which the help lists them.
BENCHMARKS = (
    "imports backends kjt ebc quant sharded train pipeline planner estimates mc cache gpu".split()
)
_WITHOUT_PEER = ("backends", "cache", "estimates", "mc")
# What --tiny leaves of the sizes of a benchmark, by the name of the field.
_TINY = {"tables": 3, "rows": 2000, "samples": 8, "calls": 2}

T = TypeVar("T")


@dataclass(frozen=True)
class Options:
    """Options of the command line.

    Attributes:
        rounds: rounds that count.
        vs: name of an installed package to compare with, found when the benchmark runs; None for no
            peer.
        sizes: which sizes to run; None for all.
        cases: which cases to run; None for all.
        world: how many ranks; None for the benchmark's own choice.
        device: the device type that the benchmark ``gpu`` runs on; None for ``"cuda"``.
        tiny: whether tables and batches are tiny: whether a benchmark runs, not how fast.
    """

    rounds: int
    vs: str | None = None
    sizes: tuple[str, ...] | None = None
    cases: tuple[str, ...] | None = None
    world: int | None = None
    device: str | None = None
    tiny: bool = False

    def fit(self, sizes: T) -> T:
        """Sizes of a benchmark, which are a dataclass, or the same with tiny tables and batches.

        Example:
            >>> from benchmarks.library import Sizes
            >>> print(Options(30).fit(Sizes()), Options(1, tiny=True).fit(Sizes()), sep="; ")
            26 x 30,000 x 64; 3 x 2,000 x 64
        """
        return _tiny(sizes) if self.tiny else sizes

    @property
    def memory_runs(self) -> int:
        """How many processes measure the same memory."""
        return 1 if self.tiny else 3


def _tiny(sizes: Any) -> Any:
    changes: dict[str, Any] = {}
    for field in fields(sizes):
        value = getattr(sizes, field.name)
        if is_dataclass(value):
            changes[field.name] = _tiny(value)
        elif field.name in _TINY and value is not None:
            changes[field.name] = min(value, _TINY[field.name])

    return replace(sizes, **changes)


def benchmarks() -> dict[str, ModuleType]:
    """Name -> module of every benchmark."""
    modules = [import_module(f"benchmarks.{name}") for name in BENCHMARKS]
    return {module.NAME: module for module in modules}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a benchmark.

    Args:
        argv: the command line.

    Returns:
        The exit status: 1 when a bar was judged and missed, but for tiny tables.
    """
    known = benchmarks()
    parser = _parser(known)
    arguments = vars(parser.parse_args(argv))
    name = arguments.pop("name")
    path = arguments.pop("json")
    module = known[name]

    for option, constant in (("sizes", "SIZES"), ("cases", "CASES"), ("world", "WORLDS")):
        if arguments[option] is not None and not hasattr(module, constant):
            parser.error(f"{name} takes no --{option}: it has none to choose from")
    if arguments["vs"] and name in _WITHOUT_PEER:
        parser.error(f"{name} measures tutorec alone and takes no --vs")
    if arguments["rounds"] is None:
        arguments["rounds"] = module.ROUNDS

    options = Options(**arguments)
    report = module.run(options)
    print(report)

    if path is not None:
        path.write_text(json.dumps(report.to_dict(), indent=1) + "\n", encoding="utf-8")
    return int(report.missed and not options.tiny)


def _parser(known: dict[str, ModuleType]) -> argparse.ArgumentParser:
    listing = [f"  {name:<12}{_first_line(module)}" for name, module in known.items()]
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measure: sides in turn, medians of paired ratios with their 95 % intervals.",
        epilog="\n".join(["benchmarks:", *listing]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("name", choices=list(known), metavar="NAME", help="one of the benchmarks below")
    add("--vs", metavar="PEER", help="an installed package with the same names to compare with")
    add("--rounds", type=int, metavar="N", help="rounds that count; from 30 on a bar is judged")
    add("--sizes", type=_names, metavar="A,B", help=f"only these ({_choices(known, 'SIZES')})")
    add("--cases", type=_names, metavar="A,B", help=f"only these ({_choices(known, 'CASES')})")
    add("--world", type=int, metavar="W", help=f"how many ranks ({_choices(known, 'WORLDS')})")
    add("--tiny", action="store_true", help="tiny tables: whether it runs, not how fast")
    add("--json", type=Path, metavar="PATH", help="write samples, ratios, versions, hardware there")
    add("--device", help=argparse.SUPPRESS)
    return parser


def _first_line(module: ModuleType) -> str:
    return (module.__doc__ or "").splitlines()[0]


def _choices(known: dict[str, ModuleType], constant: str) -> str:
    """The values of an option, of each benchmark that has it."""
    choices = [
        f"{name}: {', '.join(map(str, getattr(module, constant)))}"
        for name, module in known.items()
        if hasattr(module, constant)
    ]
    return "; ".join(choices)


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())
