"""Exercises of chapter 04."""

from __future__ import annotations

from tutorec.teach.grading import Exercise

EXERCISES: tuple[Exercise, ...] = ()
