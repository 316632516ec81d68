"""Timings, most of them beside a peer: ``python -m benchmarks NAME``."""
