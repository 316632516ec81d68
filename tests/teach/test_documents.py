import pytest

from tutorec.teach import documents
from tutorec.teach.documents import agree, disagreement

TREE = "Sharded(\n  (0): SplitTableBatchedEmbeddingBagsCodegen()\n)"


@pytest.mark.parametrize(
    ("kind", "expected", "shown"),
    [
        ("exact", "a \nb", "first\na\nb  \nlast"),
        ("exact", "<class 'torchrec.optim.keyed.X'>", "<class 'tutorec.optim.keyed.X'>"),
        ("form", "KeyedTensor at 0x73ded379b390>", "KeyedTensor at 0x1>"),
        ("form", "P90: 26.737 s | 34.801 GB", "P90: 0.1 s | 2 GB"),
        ("form", TREE, TREE.replace("SplitTableBatchedEmbeddingBagsCodegen", "TorchTableBatchedEmbeddingBags")),
        ("value", "tensor([1., 1.])", "[1.00001, 0.99999]"),
        ("differs", "x", "y"),
        ("prose", "x", "y"),
    ],
)
def test_texts_that_agree(kind, expected, shown):
    assert disagreement(kind, expected, shown, tolerance=1e-3) == ""


@pytest.mark.parametrize(
    ("kind", "expected", "shown", "words"),
    [
        ("exact", "lr: 0.02", "lr: 0.01", "'lr: 0.02' is missing"),
        ("exact", "a\nb", "b\na", "not in this order"),
        ("exact", TREE, TREE.replace("Split", "Dense"), "is missing"),
        ("form", "GPU: 1", "CPU: 1", "'GPU: #' is missing"),
        ("value", "1 2", "1", "1 numbers here, 2 in the document"),
        ("value", "10.222113", "10.3", "number 0 is 10.3"),
    ],
)
def test_texts_that_differ_say_where(kind, expected, shown, words):
    assert words in disagreement(kind, expected, shown, tolerance=1e-3)


def test_agree_reads_the_list_of_the_clone():
    agree("notebook-18", "tensor([[1., 1.],\n        [1., 1.],\n        [1., 1.]])")
    with pytest.raises(AssertionError, match=r"notebook-18 \(exact\)"):
        agree("notebook-18", "tensor([1.])")
    with pytest.raises(KeyError, match="'notebook-99' is not an id"):
        agree("notebook-99", "")


def test_agree_is_silent_outside_of_a_clone(monkeypatch):
    monkeypatch.setattr(documents, "_rows", lambda: None)
    agree("notebook-99", "")
