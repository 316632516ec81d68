"""Benchmarks on one harness: `python -m tutorec bench NAME`."""
