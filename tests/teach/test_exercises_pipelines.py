"""The solutions of chapter 15's exercises, against what they are about."""

from __future__ import annotations

from tutorec.teach import check
from tutorec.teach.grading import grade


def test_ids_go_on_travelling_while_the_rank_waits_for_rows():
    exercise = check.find("15.1")
    for (backward, forward, rows, ids), step in zip(exercise.cases, exercise.right, strict=True):
        assert step == max(max(backward, rows) + forward, ids)


def test_nothing_travels_while_a_batch_is_trained_if_each_message_is_awaited_at_once():
    def plain(batches, send, look_up, train):
        for batch in batches:
            yield train(batch, look_up(send(batch).wait()).wait())

    verdict = grade(check.find("15.2"), plain)
    assert verdict.status == "hint" and "nothing travels meanwhile" in verdict.text


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
