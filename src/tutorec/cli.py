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
        >>> import contextlib, io
        >>> from tutorec.cli import main
        >>> with contextlib.redirect_stdout(io.StringIO()):
        ...     status = main(["doctor"])
        >>> status in (0, 1)
        True
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["bench"]:  # the benchmarks parse their own words: each has options of its own
        from tutorec.bench.runner import main as bench

        return bench(words[1:])
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
