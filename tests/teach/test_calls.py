"""Operators and functions of Python that one call runs."""

from __future__ import annotations

import sys

import pytest
import torch

from tutorec.teach.calls import Calls, count_calls


def test_count_calls_counts_operators_and_functions_apart():
    two = torch.ones(2)

    def inner():
        return two + two

    def outer():
        return inner() * inner()

    assert count_calls(outer) == Calls(operators=3, functions=3)


def test_count_calls_warms_up_before_it_counts():
    made = []

    def grow():
        if not made:
            made.append(torch.ones(1).exp())

    assert count_calls(grow) == Calls(operators=0, functions=1)


def test_count_calls_restores_the_profiler_after_an_error():
    before = sys.getprofile()
    done = []

    def fails_the_second_time():
        done.append(1)
        if len(done) == 2:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        count_calls(fails_the_second_time)
    assert sys.getprofile() is before
