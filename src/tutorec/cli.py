"""The command line: ``python -m tutorec doctor`` and ``python -m tutorec bench``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: The words behind ``tutorec``; None takes them from the command line.

    Returns:
        The exit status: 0, or 1 when the doctor finds something broken or a benchmark misses its bar.

    Example:
        >>> from tutorec.cli import main
        >>> main(["doctor", "--help"])  # doctest: +SKIP
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["bench"]:  # the benchmarks parse their own words: each has options of its own
        from tutorec.bench import main as bench

        return int(bench(words[1:]) or 0)
    arguments = _parser().parse_args(words)
    from tutorec._doctor import doctor

    return 1 if doctor(json=arguments.json).broken else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tutorec", description="Distributed embeddings that run anywhere.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    doctor = commands.add_parser("doctor", help="what runs on this machine, why, and what would improve it")
    doctor.add_argument("--json", action="store_true", help="print the report as JSON, for programs")
    commands.add_parser("bench", help="measure: tutorec bench NAME; 'tutorec bench --help' lists the names")
    return parser
