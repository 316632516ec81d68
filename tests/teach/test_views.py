"""The figure of views and copies says what the memory says."""

from __future__ import annotations

import pytest

from tutorec.sparse.jagged_tensor import KeyedJaggedTensor
from tutorec.sparse.lists import kjt_from_lists
from tutorec.teach import draw

BATCH = kjt_from_lists({"clicked": [[7, 2], []], "user": [[3], [4]]})


@pytest.mark.parametrize(
    ("name", "made", "copies"),
    [
        ("a feature", BATCH["user"], False),
        ("all features", list(BATCH.to_dict().values()), False),
        ("halves", BATCH.split([1, 1]), False),
        ("another order", BATCH.permute([1, 0]), True),
        ("joined halves", KeyedJaggedTensor.concat(BATCH.split([1, 1])), True),
    ],
)
def test_an_operation_is_a_view_or_a_copy(name, made, copies):
    facts = draw.views(BATCH, {name: made}, claim="").facts
    assert facts["copies" if copies else "views"] == [name]
    assert not facts["views" if copies else "copies"]


def test_the_claim_may_name_the_operations():
    made = {"whole": BATCH, "joined": KeyedJaggedTensor.concat(BATCH.split([1, 1]))}
    claim = draw.views(BATCH, made, claim="{copies} copy {ids} ids, {views} none").claim
    assert claim == "['joined'] copy 4 ids, ['whole'] none"
