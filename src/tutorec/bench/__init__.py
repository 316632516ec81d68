"""Benchmarks on one harness: ``tutorec bench NAME``; one file per benchmark."""

from tutorec.bench.runner import main as main

__all__ = ["main"]
