"""What a caller gives by mistake is refused where he gives it, with what was wrong and what would
be right.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tutorec.modules.embedding_configs import EmbeddingBagConfig
from tutorec.modules.embedding_modules import EmbeddingBagCollection
from tutorec.sparse.jagged import JaggedTensor
from tutorec.sparse.keyed import KeyedTensor
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor

ONES, IDS = torch.tensor([1, 1]), torch.tensor([7, 8])
ROWS = torch.tensor([[1, 2, 3], [4, 5, 6]])


def kjt(**parts: object) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(**{"keys": ["a", "b"], "values": IDS, "lengths": ONES, **parts})  # type: ignore[arg-type]


def kt(**parts: object) -> KeyedTensor:
    given = {"keys": ["a", "b"], "length_per_key": [1, 2], "values": torch.zeros(2, 3), **parts}
    return KeyedTensor(**given)  # type: ignore[arg-type]


def lookup(values: torch.Tensor, weights: torch.Tensor | None = None) -> object:
    table = EmbeddingBagConfig(10, 4, "t", feature_names=["a"])
    batch = KeyedJaggedTensor(["a"], values, weights, lengths=torch.tensor([1]))
    return EmbeddingBagCollection([table], is_weighted=weights is not None)(batch)


WRONG: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "jagged: one number": (
        lambda: JaggedTensor(torch.tensor(3), lengths=ONES[:1]),
        ValueError,
        "values are one number without a dimension",
    ),
    "dense: one length for all": (
        lambda: JaggedTensor.from_dense_lengths(ROWS, torch.tensor([0])),
        ValueError,
        r"values have shape \[2, 3\] and lengths \[1\]; give one row for each sample",
    ),
    "dense: one row": (
        lambda: JaggedTensor.from_dense_lengths(IDS, ONES),
        ValueError,
        r"values have shape \[2\] and lengths \[2\]",
    ),
    "dense: weights of one sample": (
        lambda: JaggedTensor.from_dense_lengths(ROWS, ONES, torch.ones(1, 3)),
        ValueError,
        r"weights have shape \[1, 3\] and values \[2, 3\]",
    ),
    "dense: longer than a row": (
        lambda: JaggedTensor.from_dense_lengths(ROWS, torch.tensor([1, 4])),
        ValueError,
        r"lengths\[1\] = 4, and a row has 3 values",
    ),
    "jagged: complex weights": (
        lambda: JaggedTensor(IDS, lengths=ONES, weights=torch.tensor([1 + 2j, 3])),
        ValueError,
        r"weights are torch.complex64, .* give their real part: weights.real",
    ),
    "dense: complex weights": (
        lambda: JaggedTensor.from_dense([IDS], [torch.tensor([1 + 2j, 3])]),
        ValueError,
        r"from_dense: weights are torch.complex64, .* give their real part: weights.real",
    ),
    "batch: complex weights": (
        lambda: kjt(weights=torch.tensor([1 + 2j, 3], dtype=torch.complex128)),
        ValueError,
        r"weights are torch.complex128, .* give their real part: weights.real",
    ),
    "padded: half a value": (
        lambda: JaggedTensor(IDS, lengths=ONES).to_padded_dense(2.5),  # type: ignore[arg-type]
        ValueError,
        "desired_length must be 0 or more, got 2.5; it is a whole number",
    ),
    "padded: half an id": (
        lambda: JaggedTensor(IDS, lengths=ONES).to_padded_dense(2, 1.5),
        ValueError,
        "padding_value 1.5 is not a torch.int64",
    ),
    "keyed: another dimension": (
        lambda: kt(key_dim=5),
        ValueError,
        r"key_dim 5 is not a dimension of values of shape \[2, 3\]",
    ),
    "batch: indices alone": (
        lambda: kjt(inverse_indices=IDS),
        TypeError,
        r"inverse_indices must be a pair, keys and a tensor \[F, B\], got torch.Tensor",
    ),
    "from_jt_dict: a list of features": (
        lambda: KeyedJaggedTensor.from_jt_dict([JaggedTensor(IDS, lengths=ONES)]),  # type: ignore[arg-type]
        TypeError,
        "a dict of JaggedTensors by feature is needed, got list",
    ),
    "from_jt_dict: a tensor": (
        lambda: KeyedJaggedTensor.from_jt_dict({"a": IDS}),  # type: ignore[dict-item]
        TypeError,
        r"feature 'a' must be a JaggedTensor, got torch.Tensor; make one: JaggedTensor\(torch.as",
    ),
    "padded: negative width": (
        lambda: JaggedTensor(IDS, lengths=ONES).to_padded_dense(-1),
        ValueError,
        "desired_length must be 0 or more, got -1",
    ),
    "padded: no number for ids": (
        lambda: JaggedTensor(IDS, lengths=ONES).to_padded_dense(2, float("nan")),
        ValueError,
        "padding_value nan is not a torch.int64",
    ),
    "batch: other index": (
        lambda: kjt(index_per_key={"a": 1, "b": 0}),
        ValueError,
        r"index_per_key is \{'a': 1, 'b': 0\}, and the other arguments say \{'a': 0, 'b': 1\}",
    ),
    "batch: other list bounds": (
        lambda: kjt(lengths_offset_per_key=[0, 2, 2]),
        ValueError,
        r"lengths_offset_per_key is \[0, 2, 2\], and the other arguments say \[0, 1, 2\]",
    ),
    "batch: other features": (
        lambda: kjt(jt_dict={"c": JaggedTensor(IDS, lengths=ONES)}),
        ValueError,
        r"jt_dict has the keys \['c'\], and the batch \['a', 'b'\]",
    ),
    "split: negative": (
        lambda: kjt().split([-1, 3]),
        ValueError,
        r"segments \[-1, 3\] hold a negative number of keys",
    ),
    "keyed: negative columns": (
        lambda: kt(length_per_key=[4, -1]),
        ValueError,
        r"length_per_key \[4, -1\] adds up to 3.* no length is negative",
    ),
    "keyed: other starts": (
        lambda: kt(offset_per_key=[0, 2, 3]),
        ValueError,
        r"offset_per_key is \[0, 2, 3\], and length_per_key \[1, 2\]",
    ),
    "keyed: other index": (
        lambda: kt(index_per_key={"a": 1, "b": 0}),
        ValueError,
        r"index_per_key is \{'a': 1, 'b': 0\}, and the keys are \['a', 'b'\]",
    ),
    "regroup: one name for two groups": (
        lambda: KeyedTensor.regroup_as_dict([kt()], [["a"], ["b"]], ["g", "g"]),
        ValueError,
        r"regroup_as_dict: 2 groups for 2 keys \['g', 'g'\]",
    ),
    "lookup: rows of ids": (
        lambda: lookup(ROWS[:1]),
        ValueError,
        r"batch's values have shape \[1, 3\]",
    ),
    "lookup: rows of weights": (
        lambda: lookup(ONES[:1], torch.ones(1, 1)),
        ValueError,
        r"values have shape \[1\] and weights \[1, 1\]",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_mistake_is_named_where_it_is_made(name: str) -> None:
    make, kind, message = WRONG[name]
    with pytest.raises(kind, match=message):
        make()


@pytest.mark.parametrize("lengths", [torch.tensor([1, 1, 1, 0]), torch.tensor([1, 1, 0, 1])])
def test_a_copy_that_does_not_fit_changes_nothing(lengths: torch.Tensor) -> None:
    target = KeyedJaggedTensor(["a", "b"], torch.tensor([1, 2]), lengths=torch.tensor([1, 1, 0, 0]))
    source = KeyedJaggedTensor(["a", "b"], torch.tensor([4, 5, 6]), lengths=lengths)
    with pytest.raises(
        ValueError,
        match=r"\[3\].*4 lengths.*\[2\].*4",
    ):
        target.copy_(source)
    assert (target.values().tolist(), target.lengths().tolist()) == ([1, 2], [1, 1, 0, 0])


def test_what_follows_from_the_parts_may_be_given() -> None:
    known = kjt(index_per_key={"a": 0, "b": 1}, lengths_offset_per_key=[0, 1, 2])
    assert known["b"].values().tolist() == [8]
    assert kt(offset_per_key=[0, 1, 3], index_per_key={"a": 0, "b": 1})["b"].shape == (2, 2)
    assert (
        KeyedJaggedTensor(["a", "b"], IDS, lengths=ONES, jt_dict=known.to_dict()).to_dict()
        == known.to_dict()
    )


# Each constructor, as a function of one argument that should be a tensor: the name by which an
# error calls it, how it is called, and values that are right.
TENSORS: dict[str, tuple[str, Callable[[Any], object], torch.Tensor]] = {
    "batch values": ("values", lambda part: kjt(values=part), IDS),
    "batch weights": ("weights", lambda part: kjt(weights=part), IDS),
    "batch lengths": ("lengths", lambda part: kjt(lengths=part), ONES),
    "batch offsets": ("offsets", lambda part: kjt(lengths=None, offsets=part), torch.arange(3)),
    "batch inverse": (
        r"inverse_indices\[1\]",
        lambda part: kjt(inverse_indices=(["a"], part)),
        torch.tensor([[0]]),
    ),
    "from_lengths_sync values": (
        "values",
        lambda part: KeyedJaggedTensor.from_lengths_sync(["a"], part, ONES),
        IDS,
    ),
    "from_lengths_sync lengths": (
        "lengths",
        lambda part: KeyedJaggedTensor.from_lengths_sync(["a"], IDS, part),
        ONES,
    ),
    "from_lengths_sync weights": (
        "weights",
        lambda part: KeyedJaggedTensor.from_lengths_sync(["a"], IDS, ONES, part),
        IDS,
    ),
    "from_offsets_sync values": (
        "values",
        lambda part: KeyedJaggedTensor.from_offsets_sync(["a"], part, torch.arange(3)),
        IDS,
    ),
    "from_offsets_sync offsets": (
        "offsets",
        lambda part: KeyedJaggedTensor.from_offsets_sync(["a"], IDS, part),
        torch.arange(3),
    ),
    "dist_init": (
        "values",
        lambda part: KeyedJaggedTensor.dist_init(["a"], [ONES, part], False, 1, None, [2]),
        IDS,
    ),
    "jagged values": ("values", lambda part: JaggedTensor(part, lengths=ONES), IDS),
    "jagged weights": ("weights", lambda part: JaggedTensor(IDS, part, ONES), IDS),
    "jagged lengths": ("lengths", lambda part: JaggedTensor(IDS, lengths=part), ONES),
    "jagged offsets": ("offsets", lambda part: JaggedTensor(IDS, offsets=part), torch.arange(3)),
    "from_dense values": (
        r"values\[1\]",
        lambda part: JaggedTensor.from_dense([IDS, part]),
        IDS,
    ),
    "from_dense weights": (
        r"weights\[0\]",
        lambda part: JaggedTensor.from_dense([IDS], [part]),
        IDS,
    ),
    "from_dense_lengths values": (
        "values",
        lambda part: JaggedTensor.from_dense_lengths(part, ONES),
        ROWS,
    ),
    "from_dense_lengths lengths": (
        "lengths",
        lambda part: JaggedTensor.from_dense_lengths(ROWS, part),
        ONES,
    ),
    "from_dense_lengths weights": (
        "weights",
        lambda part: JaggedTensor.from_dense_lengths(ROWS, ONES, part),
        ROWS,
    ),
    "keyed values": ("values", lambda part: kt(values=part), torch.zeros(2, 3)),
    "keyed list": (
        r"tensors\[0\]",
        lambda part: KeyedTensor.from_tensor_list(["a"], [part]),
        ROWS,
    ),
}


@pytest.mark.parametrize(
    ("name", "make", "right"), TENSORS.values(), ids=[case.replace(" ", "-") for case in TENSORS]
)
def test_what_is_not_a_tensor_is_named_with_a_remedy_that_works(
    name: str, make: Callable[[Any], object], right: torch.Tensor
) -> None:
    array, numbers = right.numpy(), right.tolist()
    for part, kind in ((array, "numpy.ndarray"), (numbers, "list"), (tuple(numbers), "tuple")):
        with pytest.raises(
            TypeError,
            match=rf": {name} must be a tensor, got {kind}; convert: torch.as_tensor\({name}",
        ):
            make(part)
        make(torch.as_tensor(part))
    for part in ("ids", 3):
        with pytest.raises(TypeError, match=rf": {name} must be a tensor, got \w+$"):
            make(part)
