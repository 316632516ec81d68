"""The solutions of chapter 16's exercises, against the library that they are about."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from tutorec.modules.compressions import QR, Compression, IdMap, Part
from tutorec.modules.embedding_configs import EmbeddingBagConfig
from tutorec.sparse.hashing import mixing_hash
from tutorec.teach import check
from tutorec.teach.grading import grade


def test_stored_rows_are_those_of_the_parts():
    exercise = check.find("16.1")
    for (rows, buckets), stored in zip(exercise.cases, exercise.right, strict=True):
        parts = QR(buckets).parts(EmbeddingBagConfig(rows, 8, "t"))
        assert stored == sum(part.table.num_embeddings for part in parts)


def test_the_twin_of_a_bag_has_its_sums_and_not_its_products():
    exercise = check.find("16.2")
    torch.manual_seed(16)
    for (first, second, buckets), ids in zip(exercise.cases, exercise.right, strict=True):
        quotients, remainders = torch.randn(40, 4), torch.randn(buckets, 4)
        bag, twin = torch.tensor([first, second]), torch.tensor(ids)
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
        return {
            first // buckets * buckets + second % buckets,
            second // buckets * buckets + first % buckets,
        }

    assert grade(check.find("16.2"), twin).status == "wrong"


class Stub(Compression):
    def __init__(self, rows, own):
        self.rows = rows
        self.own = own

    def parts(self, table) -> Any:
        return ...

    def combine(self, results) -> Any:
        return ...


class Joined(Stub):
    """Shared columns, found by a hash, and an id's own columns."""

    def parts(self, table):
        width = table.embedding_dim
        shared = replace(
            table, name="shared", num_embeddings=self.rows, embedding_dim=width - self.own
        )
        own = replace(table, name="own", embedding_dim=self.own)
        return [Part(shared, (IdMap("#", self.map_ids),)), Part(own)]

    def map_ids(self, ids):
        return mixing_hash(ids, self.rows)

    def combine(self, results):
        return torch.cat(list(results), dim=-1)


class Summed(Joined):
    """Parts of two widths, added up."""

    def combine(self, results):
        return torch.stack(list(results)).sum(0)


def test_a_compression_is_tried_and_a_stub_is_not_attempted():
    exercise = check.find("16.3")
    assert grade(exercise, Stub).status == "not attempted"
    assert grade(exercise, Joined).status == "right"
    verdict = grade(exercise, Summed)
    assert verdict.status == "wrong" and "RuntimeError" in verdict.text
