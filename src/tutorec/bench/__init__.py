"""Benchmarks on one harness: ``python -m tutorec bench NAME``; one file per benchmark."""

from tutorec.bench.runner import main as main

__all__ = ["main"]
