"""What a caller gives by mistake is refused where he gives it, with what was wrong and what would be right."""

from collections.abc import Callable

import pytest
import torch

from tutorec._validation import validation
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
    "jagged: list of values": (
        lambda: JaggedTensor([1, 2], lengths=ONES),  # type: ignore[arg-type]
        TypeError,
        r"JaggedTensor: values must be a tensor, got list; write torch.tensor\(values\)",
    ),
    "jagged: list of lengths": (
        lambda: JaggedTensor(IDS, lengths=[1, 1]),  # type: ignore[arg-type]
        TypeError,
        "JaggedTensor: lengths must be a tensor, got list",
    ),
    "jagged: array of values": (
        lambda: JaggedTensor(IDS.numpy(), lengths=ONES),  # type: ignore[arg-type]
        TypeError,
        r"values must be a tensor, got ndarray; write torch.from_numpy\(values\)",
    ),
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
        r"lengths\[1\] = 4, and a row has 3 values \(sample 1\)",
    ),
    "padded: negative width": (
        lambda: JaggedTensor(IDS, lengths=ONES).to_padded_dense(-1),
        ValueError,
        "desired_length must be a whole number from 0 on, got -1",
    ),
    "padded: weights, half a width": (
        lambda: JaggedTensor(IDS, IDS * 0.5, lengths=ONES).to_padded_dense_weights(2.5),  # type: ignore[arg-type]
        ValueError,
        "desired_length must be a whole number from 0 on, got 2.5",
    ),
    "padded: no number for ids": (
        lambda: JaggedTensor(IDS, lengths=ONES).to_padded_dense(2, float("nan")),
        ValueError,
        "padding_value nan is no torch.int64",
    ),
    "batch: list of values": (lambda: kjt(values=[7, 8]), TypeError, "KeyedJaggedTensor: values must be a tensor"),
    "batch: list of lengths": (lambda: kjt(lengths=[1, 1]), TypeError, "KeyedJaggedTensor: lengths must be a tensor"),
    "batch: other index": (
        lambda: kjt(index_per_key={"a": 1, "b": 0}),
        ValueError,
        r"index_per_key is \{'a': 1, 'b': 0\}, and the keys are \['a', 'b'\]",
    ),
    "batch: other list bounds": (
        lambda: kjt(lengths_offset_per_key=[0, 2, 2]),
        ValueError,
        r"lengths_offset_per_key is \[0, 2, 2\], and the keys \['a', 'b'\] have \[1, 1\] samples",
    ),
    "batch: other features": (
        lambda: kjt(jt_dict={"c": JaggedTensor(IDS, lengths=ONES)}),
        ValueError,
        r"jt_dict has the keys \['c'\], and the batch \['a', 'b'\]",
    ),
    "batch: half a sample": (
        lambda: kjt(stride_per_key_per_rank=[[1.5], [1]]),
        ValueError,
        r"stride_per_key_per_rank is \[\[1.5\], \[1\]\]; it holds one list for each key with one whole number",
    ),
    "batch: ranks differ": (
        lambda: kjt(stride_per_key_per_rank=[[1, 0], [1]]),
        ValueError,
        r"stride_per_key_per_rank is \[\[1, 0\], \[1\]\]",
    ),
    "split: negative": (lambda: kjt().split([-1, 3]), ValueError, r"segments \[-1, 3\] hold a negative number of keys"),
    "split: one number": (
        lambda: kjt().split(1),  # type: ignore[arg-type]
        TypeError,
        "split takes a list of numbers of keys, got int: 1",
    ),
    "permute: names": (
        lambda: kjt().permute(["b", "a"]),  # type: ignore[list-item]
        TypeError,
        r"permute takes positions of keys, whole numbers, got 'b' in \['b', 'a'\]",
    ),
    "permute: tensor": (
        lambda: kjt().permute(ONES),  # type: ignore[arg-type]
        TypeError,
        "permute takes a list of positions of keys, got Tensor",
    ),
    "concat: one batch": (
        lambda: KeyedJaggedTensor.concat(kjt()),  # type: ignore[arg-type]
        TypeError,
        "concat takes a list of KeyedJaggedTensors, got no list",
    ),
    "concat: nothing among them": (
        lambda: KeyedJaggedTensor.concat([kjt(), None]),  # type: ignore[list-item]
        TypeError,
        r"got \['KeyedJaggedTensor', 'NoneType'\]",
    ),
    "from dict: plain tensors": (
        lambda: KeyedJaggedTensor.from_jt_dict({"a": IDS}),  # type: ignore[dict-item]
        TypeError,
        r"takes a JaggedTensor for each key, got \{'a': 'Tensor'\}",
    ),
    "from dict: no dict": (
        lambda: KeyedJaggedTensor.from_jt_dict([("a", IDS)]),  # type: ignore[arg-type]
        TypeError,
        "takes a dict of features, got list",
    ),
    "keyed: list of values": (lambda: kt(values=[[1, 2, 3]]), TypeError, "KeyedTensor: values must be a tensor"),
    "keyed: negative columns": (
        lambda: kt(length_per_key=[4, -1]),
        ValueError,
        r"length_per_key \[4, -1\] of keys \['a', 'b'\] holds a negative number of columns",
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
    "regroup: a string": (
        lambda: KeyedTensor.regroup([kt()], ["a", "b"]),  # type: ignore[list-item]
        ValueError,
        r"group 0 is the string 'a', no list of keys; write \['a'\]",
    ),
    "regroup: one name for two groups": (
        lambda: KeyedTensor.regroup_as_dict([kt()], [["a"], ["b"]], ["g", "g"]),
        ValueError,
        r"regroup_as_dict: keys occur twice: \['g'\]",
    ),
    "lookup: rows of ids": (lambda: lookup(ROWS[:1]), ValueError, r"batch's values have shape \[1, 3\]"),
    "lookup: rows of weights": (
        lambda: lookup(ONES[:1], torch.ones(1, 1)),
        ValueError,
        r"values have shape \[1\] and weights \[1, 1\]",
    ),
    "collection: one table": (
        lambda: EmbeddingBagCollection(EmbeddingBagConfig(10, 4, "t")),  # type: ignore[arg-type]
        TypeError,
        r"EmbeddingBagCollection takes a list of tables, got the one table 't'; write \[table\]",
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
        ValueError, match=r"values of shape \[3\] and 4 lengths, and the target has room for \[2\] and 4"
    ):
        target.copy_(source)
    assert (target.values().tolist(), target.lengths().tolist()) == ([1, 2], [1, 1, 0, 0])


def test_what_follows_from_the_parts_may_be_given() -> None:
    known = kjt(index_per_key={"a": 0, "b": 1}, lengths_offset_per_key=[0, 1, 2])
    assert known["b"].values().tolist() == [8]
    assert kt(offset_per_key=[0, 1, 3], index_per_key={"a": 0, "b": 1})["b"].shape == (2, 2)
    assert KeyedJaggedTensor(["a", "b"], IDS, lengths=ONES, jt_dict=known.to_dict()).to_dict() == known.to_dict()


def test_a_list_of_values_is_refused_without_validation_too() -> None:
    with validation(False), pytest.raises(TypeError, match="JaggedTensor: values must be a tensor, got list"):
        JaggedTensor([1, 2], lengths=ONES)  # type: ignore[arg-type]
