"""Exercises of chapter 00."""

from __future__ import annotations

from tutorec.teach.grading import Exercise

EXERCISES: tuple[Exercise, ...] = ()
