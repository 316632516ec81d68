"""The solutions of chapter 15's exercises, against what they are about."""

from __future__ import annotations

from tutorec.teach import check
from tutorec.teach.grading import grade


def test_ids_go_on_travelling_while_the_rank_waits_for_rows():
    exercise = check.find("15.1")
    assert exercise.cases is not None
    assert [exercise.solution(*case) for case in exercise.cases] == [40, 50, 60, 55]  # type: ignore[operator]


def test_ids_and_rows_travel_while_one_batch_is_trained():
    exercise = check.find("15.2")
    assert exercise.measure is not None
    losses, ids, rows = exercise.measure(exercise.solution)[-1]
    assert losses == [f"loss of batch {batch}" for batch in range(5)]
    assert (ids, rows) == ([1, 1, 1], [1, 1, 1, 1])


def test_what_has_not_arrived_and_what_is_missing_is_named():
    exercise = check.find("15.2")

    def never_waits(batches, send, look_up, train):
        for batch in batches:
            yield train(batch, look_up(send(batch)))

    def ends_badly(batches, send, look_up, train):
        batch = next(batches)
        yield train(batch, look_up(send(batch).wait()).wait())

    assert "`look_up` needs ids that have arrived" in grade(exercise, never_waits).text
    assert "With 0 batches it raises RuntimeError" in grade(exercise, ends_badly).text

    def stub(batches, send, look_up, train):
        yield ...

    assert grade(exercise, stub).status == "not attempted"
