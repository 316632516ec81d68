"""The numbers of many lists, and of all on a device, are checked once, at the first use that
depends on them.
"""

import copy
import io
import pickle
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from tutorec._validation import validation
from tutorec.modules.embedding_collection import EmbeddingCollection
from tutorec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from tutorec.modules.embedding_modules import EmbeddingBagCollection
from tutorec.sparse import validate
from tutorec.sparse.equality import kjt_is_equal
from tutorec.sparse.id_check import check_ids
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor
from tutorec.sparse.layout import FEW_LISTS
from tutorec.sparse.lists import kjt_to_lists, kjt_weights_to_lists
from tutorec.sparse.tensor_dict import kjt_to_td

KEYS = ["item", "shop", "user", "page"]
SAMPLES = 100
IDS = 399
CPU = torch.device("cpu")


def good_lengths() -> Tensor:
    return torch.arange(len(KEYS) * SAMPLES, dtype=torch.int32) % 3


def offsets_of(lengths: Tensor) -> Tensor:
    return torch.cat([torch.zeros(1, dtype=torch.int64), lengths.long().cumsum(0)])


def batch_of(
    ids: int | None = None, weighted: bool = False, keys: list[str] = KEYS, **parts: Any
) -> KeyedJaggedTensor:
    if not {"lengths", "offsets"} & parts.keys():
        parts["lengths"] = good_lengths()
    count = IDS if ids is None else ids
    return KeyedJaggedTensor(
        keys,
        torch.zeros(count, dtype=torch.int64),
        torch.ones(count) if weighted else None,
        **parts,
    )


def moved(lengths: Tensor, start: int, by: int) -> Tensor:
    """Lengths with a list longer by some, and the next one shorter by as many."""
    lengths[start] += by
    lengths[start + 1] -= by
    return lengths


BAD: dict[str, tuple[Callable[..., KeyedJaggedTensor], str]] = {
    "sum": (
        lambda **kw: batch_of(ids=500, **kw),
        "lengths add up to 399, and there are 500 values",
    ),
    "negative": (
        lambda **kw: batch_of(lengths=moved(good_lengths(), 250, 5), **kw),
        r"lengths\[251\] = -3 \(feature 'user', sample 51\)",
    ),
    "negative int64": (
        lambda **kw: batch_of(lengths=moved(good_lengths().long(), 250, 5), **kw),
        r"lengths\[251\] = -3 \(feature 'user', sample 51\)",
    ),
    "sum of int32 wraps": (
        lambda **kw: batch_of(
            ids=0, lengths=torch.tensor([2**30] * 4 + [0] * 396, dtype=torch.int32), **kw
        ),
        "lengths add up to|offsets must not fall",
    ),
    "falling offsets": (
        lambda **kw: batch_of(offsets=offsets_of(moved(good_lengths(), 250, 5)), **kw),
        r"offsets must not fall: offsets\[251\] .* \(feature 'user', sample 51\)",
    ),
    "start": (
        lambda **kw: batch_of(offsets=offsets_of(good_lengths()) + 1, **kw),
        r"must start at 0, got offsets\[0\] = 1",
    ),
    "end": (
        lambda **kw: batch_of(ids=500, offsets=offsets_of(good_lengths()), **kw),
        "offsets end at 399, and there are 500",
    ),
    "disagreement": (
        lambda **kw: batch_of(
            lengths=good_lengths(), offsets=offsets_of(moved(good_lengths(), 250, 1)), **kw
        ),
        (
            r"lengths and offsets disagree: lengths\[250\] = 1, and the offsets give 2 \(feature "
            r"'user', sample 50\)"
        ),
    ),
    "variable batch": (
        lambda **kw: batch_of(
            lengths=moved(good_lengths(), 250, 5),
            stride_per_key_per_rank=[[50], [150], [90], [110]],
            **kw,
        ),
        r"lengths\[251\] = -3 \(feature 'user', sample 51\)",
    ),
    "length_per_key": (
        lambda **kw: batch_of(length_per_key=[99, 100, 100, 100], **kw),
        "length_per_key is",
    ),
    "offset_per_key": (
        lambda **kw: batch_of(offset_per_key=[0, 98, 199, 299, 399], **kw),
        "offset_per_key is",
    ),
    "jt_dict": (
        lambda **kw: batch_of(ids=500, jt_dict={}, **kw),
        "lengths add up to 399, and there are 500 values",
    ),
    "inverse indices": (
        lambda **kw: batch_of(
            stride_per_key_per_rank=[[100]] * 4,
            inverse_indices=(KEYS, torch.full((4, 7), 100)),
            **kw,
        ),
        r"inverse_indices of feature 'item', sample 0, hold 100, and the feature has 100 lists",
    ),
}


def saved(batch: KeyedJaggedTensor) -> KeyedJaggedTensor:
    stream = io.BytesIO()
    torch.save(batch, stream)
    stream.seek(0)
    return torch.load(stream)


def pooled(batch: KeyedJaggedTensor) -> object:
    tables = [
        EmbeddingBagConfig(name="t", embedding_dim=4, num_embeddings=10, feature_names=["user"])
    ]
    return EmbeddingBagCollection(tables=tables, is_weighted=batch.weights_or_none() is not None)(
        batch
    )


def looked_up(batch: KeyedJaggedTensor) -> object:
    tables = [EmbeddingConfig(name="t", embedding_dim=4, num_embeddings=10, feature_names=["user"])]
    return EmbeddingCollection(tables=tables)(batch)


def named(prefix: str) -> KeyedJaggedTensor:
    return batch_of(keys=[prefix + key for key in KEYS])


def validated_late(batch: KeyedJaggedTensor) -> None:
    with validation(False):
        batch.sync()


def used_twice(batch: KeyedJaggedTensor) -> None:
    with suppress(ValueError):
        batch.sync()
    batch.sync()


USES: dict[str, Callable[[KeyedJaggedTensor], object]] = {
    "sync": lambda batch: batch.sync(),
    "length_per_key": lambda batch: batch.length_per_key(),
    "offset_per_key": lambda batch: batch.offset_per_key(),
    "split": lambda batch: batch.split([1, 3]),
    "split into single keys": lambda batch: batch.split([1] * 4),
    "split whole": lambda batch: batch.split([4]),
    "permute": lambda batch: batch.permute([1, 0]),
    "to_dict": lambda batch: batch.to_dict(),
    "to_dict without offsets": lambda batch: batch.to_dict(compute_offsets=False),
    "indexing": lambda batch: batch["item"],
    "printing": str,
    "lists": kjt_to_lists,
    "equality": lambda batch: kjt_is_equal(batch, batch),
    "check_ids": lambda batch: check_ids(batch, [("item", "items", 10)]),
    "pooled lookup": pooled,
    "lookup": looked_up,
    "pytree": pytree.tree_flatten,
    "after plain reads": lambda batch: (
        batch.values(),
        batch.lengths(),
        batch.offsets(),
        batch.sync(),
    ),
    "to": lambda batch: batch.to(CPU).sync(),
    "flatten_lengths": lambda batch: batch.flatten_lengths().sync(),
    "copy": lambda batch: copy.copy(batch).sync(),
    "deepcopy": lambda batch: copy.deepcopy(batch).sync(),
    "pickle": lambda batch: pickle.loads(pickle.dumps(batch)).sync(),
    "save": lambda batch: saved(batch).sync(),
    "copy_": lambda batch: KeyedJaggedTensor.empty_like(batch, CPU).copy_(batch).sync(),
    "concat": lambda batch: KeyedJaggedTensor.concat([batch]).sync(),
    "unsync": lambda batch: batch.unsync().sync(),
    "twice": used_twice,
    "with validation off since": validated_late,
}


def unchecked(make: Callable[..., KeyedJaggedTensor], **parts: Any) -> KeyedJaggedTensor:
    batch = make(**parts)
    assert not batch._layout._checked
    return batch


# What a caller gives that follows from the rest is compared with it at once.
LATE = {name: case for name, case in BAD.items() if not name.endswith("per_key")}


@pytest.mark.parametrize("name", [name for name in BAD if name not in LATE])
def test_wrong_ids_per_key_are_found_where_the_batch_is_built(name: str) -> None:
    make, message = BAD[name]
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("use", USES.values(), ids=USES.keys())
@pytest.mark.parametrize(("make", "message"), LATE.values(), ids=LATE.keys())
def test_every_use_finds_bad_numbers(
    make: Callable[..., KeyedJaggedTensor], message: str, use: Callable[[KeyedJaggedTensor], object]
) -> None:
    batch = unchecked(make)
    with pytest.raises(
        ValueError,
        match=r"lengths|offsets|inverse" if use is USES["after plain reads"] else message,
    ):
        use(batch)


@pytest.mark.parametrize(("make", "message"), LATE.values(), ids=LATE.keys())
def test_uses_of_weights_find_bad_numbers(
    make: Callable[..., KeyedJaggedTensor], message: str
) -> None:
    for use in (
        kjt_weights_to_lists,
        str,
        pooled,
        lambda batch: batch.split([1, 3]),
        lambda batch: batch["user"],
    ):
        with pytest.raises(ValueError, match=message):
            use(unchecked(make, weighted=True))


def test_a_tensor_dict_is_made_of_good_numbers_only() -> None:
    pytest.importorskip("tensordict")
    with pytest.raises(ValueError, match="add up to 399"):
        kjt_to_td(unchecked(batch_of, ids=500))


@pytest.mark.parametrize("name", LATE)
def test_a_joined_batch_is_checked_as_its_parts_are(name: str) -> None:
    make = LATE[name][0]
    bad = unchecked(make)
    if bad.variable_stride_per_key():
        other = batch_of(keys=["x"], stride_per_key_per_rank=[[400]])
        if bad.inverse_indices_or_none() is not None:
            rows = torch.zeros(1, 7, dtype=torch.int64)
            other = batch_of(
                keys=["x"], stride_per_key_per_rank=[[400]], inverse_indices=(["x"], rows)
            )
    else:
        other = named("x")
    with pytest.raises(ValueError, match=r"lengths|offsets|inverse_indices"):
        KeyedJaggedTensor.concat([other, bad]).sync()
    with pytest.raises(ValueError, match=r"lengths|offsets|inverse_indices"):
        once = KeyedJaggedTensor.concat([unchecked(make)])
        KeyedJaggedTensor.concat([KeyedJaggedTensor.concat([other]), once]).to_dict()


def test_sums_that_are_wrong_in_two_parts_and_right_together_are_found() -> None:
    one, two = unchecked(batch_of, ids=398), unchecked(batch_of, ids=400, keys=["a", "b", "c", "d"])
    with pytest.raises(ValueError, match=r"399.*398 values;.*400"):
        KeyedJaggedTensor.concat([named("x"), one, two])


def test_copying_and_plain_reads_do_not_look_at_the_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("the numbers were read")

    batch = unchecked(batch_of, weighted=True)
    for name in ("tolist", "item", "numpy", "min", "max", "__int__", "__bool__"):
        monkeypatch.setattr(Tensor, name, refuse)
    batch.values(), batch.weights(), batch.lengths(), batch.offsets(), batch.stride(), batch.keys()
    moved_batch = batch.to(CPU)
    monkeypatch.undo()
    for late in (batch, moved_batch):
        assert not late._layout._checked


def test_the_form_of_many_lists_is_checked_where_they_are_built() -> None:
    with pytest.raises(ValueError, match="399 lists of ids for 4 keys"):
        batch_of(lengths=good_lengths()[1:])
    with pytest.raises(ValueError, match="int32 or int64"):
        batch_of(lengths=good_lengths().float())
    with pytest.raises(ValueError, match="occur twice"):
        batch_of(keys=["item", "item", "user", "page"])


def test_few_lists_are_checked_as_the_batch_is_built() -> None:
    with pytest.raises(ValueError, match="add up to 3"):
        KeyedJaggedTensor(["item"], torch.zeros(4, dtype=torch.int64), lengths=torch.tensor([1, 2]))
    for count in (FEW_LISTS, FEW_LISTS + 1):
        ones = torch.ones(count, dtype=torch.int64)
        batch = KeyedJaggedTensor(["item"], ones, lengths=ones)
        assert batch._layout._checked == (count == FEW_LISTS)


@pytest.mark.parametrize("use", USES.values(), ids=USES.keys())
def test_good_numbers_pass_every_use_and_are_looked_at_once(
    use: Callable[[KeyedJaggedTensor], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[int] = []
    for name in ("count_ids", "_are_offsets"):
        look = getattr(validate, name)
        monkeypatch.setattr(
            validate, name, lambda *parts, look=look: (looks.append(1), look(*parts))[1]
        )
    batch = unchecked(batch_of, offsets=offsets_of(good_lengths()))
    use(batch)
    assert len(looks) == 1
    assert batch.length_per_key() == [int(part.sum()) for part in good_lengths().view(4, -1)]
