"""Whole programs to read and change, started from a terminal, alone or under ``torchrun``."""
