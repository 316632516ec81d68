"""The solutions of chapter 12."""

from __future__ import annotations

from tutorec.teach import check


def test_from_the_least_number_of_rows_on_arithmetic_takes_as_long_as_memory():
    exercise = check.find("12.1")
    for (i, o, size, peak, bandwidth), least in zip(exercise.cases, exercise.right, strict=True):

        def arithmetic_is_longer(b, i=i, o=o, size=size, peak=peak, bandwidth=bandwidth):
            seconds_in_memory = size * (b * i + i * o + b * o) / bandwidth
            return 2 * b * i * o / peak >= seconds_in_memory

        if least is None:
            assert not arithmetic_is_longer(10**9)
        else:
            assert arithmetic_is_longer(least) and not arithmetic_is_longer(least - 1)
