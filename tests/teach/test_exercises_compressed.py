"""The solutions of chapter 16's exercises, against the library that they are about."""

from __future__ import annotations

import torch
from torch.testing import assert_close

from tutorec.modules.compressions import QR
from tutorec.modules.embedding_configs import EmbeddingBagConfig
from tutorec.teach import check


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
        products = [(q * r).sum(0) for q, r in found]
        assert (products[0] - products[1]).abs().max() > 0.01
