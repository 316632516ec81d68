"""The figures of table batching and of updates inside backward have the numbers of their data."""

from __future__ import annotations

import torch

from tutorec.sparse.lists import kjt_from_lists
from tutorec.teach import draw


def test_a_stack_has_the_rows_of_all_tables():
    batch = kjt_from_lists({"a": [[7, 1]], "b": [[3]], "c": [[]]})
    chart = draw.table_batching(batch, [10, 20, 5])
    assert chart.facts == {"tables": 3, "rows": 35}
    texts = [text.get_text() for axes in chart.figure.axes for text in axes.texts]
    for expected in ("a + 0", "b + 10", "13", "c + 30", "one stack of 35 rows"):
        assert expected in texts


def test_an_update_writes_the_rows_of_the_bag():
    gradient = torch.tensor([0.0, 1.0, 2.0, 0.0])
    chart = draw.updates([2, 1, 2], gradient, gradient)
    assert chart.facts == {"rows": 4, "updated": 2}
    assert chart.claim == "a dense step writes 4 rows, an update in backward 2"
