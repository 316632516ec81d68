import pytest
import torch

from tutorec.sparse.jagged import JaggedTensor
from tutorec.sparse.keyed import KeyedTensor
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor


def test_jagged_tensor_prints_one_list_per_sample() -> None:
    jagged = JaggedTensor(values=torch.tensor([5, 7, 1]), lengths=torch.tensor([1, 2]))
    assert str(jagged) == "JaggedTensor({\n    [[5], [7, 1]]\n})\n"


def test_weighted_jagged_tensor_prints_values_and_weights() -> None:
    jagged = JaggedTensor(
        torch.tensor([5, 7, 1]), torch.tensor([0.5, 1.0, 2.0]), lengths=torch.tensor([1, 2])
    )
    assert (
        str(jagged)
        == 'JaggedTensor({\n    "values": [[5], [7, 1]],\n    "weights": [[0.5], [1.0, 2.0]]\n})\n'
    )


@pytest.mark.parametrize(
    ("product", "user", "text"),
    [
        (
            ([1, 2, 3, 1, 5, 7, 9], [3, 4]),
            ([2, 3, 4, 1], [2, 2]),
            (
                'KeyedJaggedTensor({\n    "product": [[1, 2, 3], [1, 5, 7, 9]],\n    "user": [[2, '
                "3], "
                "[4, 1]]\n})\n"
            ),
        ),
        (
            ([1, 2, 1, 5], [3, 1]),
            ([2, 3, 4, 1], [2, 2]),
            (
                'KeyedJaggedTensor({\n    "product": [[1, 2, 1], [5]],\n    "user": [[2, 3], [4, '
                "1]]\n})\n"
            ),
        ),
    ],
)
def test_keyed_jagged_tensor_prints_as_in_the_documents(
    product: tuple[list[int], list[int]], user: tuple[list[int], list[int]], text: str
) -> None:
    parts = {
        name: JaggedTensor(torch.tensor(values), lengths=torch.tensor(lengths))
        for name, (values, lengths) in {"product": product, "user": user}.items()
    }
    assert str(KeyedJaggedTensor.from_jt_dict(parts)) == text


def test_weighted_keyed_jagged_tensor_prints_values_and_weights_per_key() -> None:
    batch = KeyedJaggedTensor(
        ["a", "b"],
        torch.tensor([3, 1, 2]),
        torch.tensor([0.5, 1.0, 2.0]),
        lengths=torch.tensor([1, 1, 0, 1]),
    )
    assert str(batch) == (
        'KeyedJaggedTensor({\n    "a": {\n        "values": [[3], [1]],\n        "weights": '
        "[[0.5], [1.0]]\n    },\n"
        '    "b": {\n        "values": [[], [2]],\n        "weights": [[], [2.0]]\n    }\n})\n'
    )


def test_keyed_tensor_prints_one_row_per_sample() -> None:
    pooled = KeyedTensor(["a", "b"], [1, 2], torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.5]]))
    assert (
        str(pooled)
        == 'KeyedTensor({\n    "a": [[1.0], [4.0]],\n    "b": [[2.0, 3.0], [5.0, 6.5]]\n})\n'
    )


def test_nothing_prints_as_empty_parentheses() -> None:
    assert str(KeyedJaggedTensor.empty()) == "KeyedJaggedTensor()\n"
    assert str(KeyedTensor([], [], torch.zeros(2, 0))) == "KeyedTensor()\n"
    assert str(JaggedTensor.empty()) == "JaggedTensor({\n    []\n})\n"
