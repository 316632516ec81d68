"""The solutions of chapter 16's exercises, against the library that they are about."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.testing import assert_close

from tutorec.modules.compressions import QR, Compression
from tutorec.modules.embedding_configs import EmbeddingBagConfig
from tutorec.teach import check
from tutorec.teach.grading import grade


def test_stored_rows_are_those_of_the_parts():
    exercise = check.find("16.1")
    assert exercise.cases is not None
    for rows, buckets in exercise.cases:
        parts = QR(buckets).parts(EmbeddingBagConfig(rows, 8, "t"))
        assert exercise.solution(rows, buckets) == sum(part.table.num_embeddings for part in parts)


def test_the_twin_of_a_bag_has_its_sums_and_not_its_products():
    exercise = check.find("16.2")
    assert exercise.cases is not None
    torch.manual_seed(16)
    for first, second, buckets in exercise.cases:
        quotients, remainders = torch.randn(40, 4), torch.randn(buckets, 4)
        bag, twin = (
            torch.tensor([first, second]),
            torch.tensor(exercise.solution(first, second, buckets)),
        )
        found = [(quotients[ids // buckets], remainders[ids % buckets]) for ids in (bag, twin)]
        sums = [(q.sum(0), r.sum(0)) for q, r in found]
        assert_close(sums[0], sums[1])
        if sorted(bag.tolist()) != twin.tolist():
            products = [(q * r).sum(0) for q, r in found]
            assert (products[0] - products[1]).abs().max() > 0.01


@pytest.mark.parametrize(
    ("make", "status"), [(set, "right"), (sorted, "right"), (lambda ids: ids, "hint")]
)
def test_a_twin_may_be_a_set_and_a_list_is_in_order(make, status):
    def twin(first, second, buckets):
        one = first // buckets * buckets + second % buckets
        other = second // buckets * buckets + first % buckets
        return make([one, other])

    assert grade(check.find("16.2"), twin).status == status


def test_a_twin_that_takes_no_care_of_a_shared_quotient_is_not_right():
    def twin(first, second, buckets):
        if first // buckets == second // buckets:
            return []
        return check.find("16.2").solution(first, second, buckets)

    assert grade(check.find("16.2"), twin).status == "wrong"


class Stub(Compression):
    def __init__(self, rows, own):
        self.rows = rows
        self.own = own

    def parts(self, table) -> Any:
        return ...

    def combine(self, results) -> Any:
        return ...


class Summed(Stub):
    """The parts of the solution, added up: the base class does that."""

    def parts(self, table):
        return check.find("16.3").solution(self.rows, self.own).parts(table)

    def combine(self, results):
        return sum(results[1:], start=results[0])


def test_a_compression_is_tried_and_a_stub_is_not_attempted():
    exercise = check.find("16.3")
    assert grade(exercise, Stub).status == "not attempted"
    assert grade(exercise, exercise.solution).status == "right"
    verdict = grade(exercise, Summed)
    assert verdict.status == "wrong" and "RuntimeError" in verdict.text
