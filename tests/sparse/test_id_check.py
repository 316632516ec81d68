from typing import Any

import pytest
import torch

from tutorec.sparse.id_check import check_ids
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor


def ints(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


def kjt(**parts: Any) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(**{"keys": ["item", "user"], "values": ints(7, 8, 9, 4, 5), **parts})


BAD_IDS = {
    "too large": (
        ints(7, 8, 9, 4, 5),
        (
            r"table 'items' has 9 rows \(ids 0 to 8\), and feature 'item', sample 1, holds id 9; 1 "
            r"of "
            r"the feature's 3 ids"
        ),
    ),
    "negative": (
        ints(7, -1, 3, 4, 5),
        r"table 'items' has 9 rows.*feature 'item', sample 0, holds id -1",
    ),
    "second feature": (
        ints(7, 8, 3, 4, 6),
        r"table 'users' has 6 rows \(ids 0 to 5\), and feature 'user', sample 1, holds id 6",
    ),
}
TABLES = [("item", "items", 9), ("user", "users", 6)]


@pytest.mark.parametrize(("ids", "message"), BAD_IDS.values(), ids=BAD_IDS.keys())
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_an_id_outside_its_table_is_found(
    ids: torch.Tensor, message: str, dtype: torch.dtype
) -> None:
    with pytest.raises(ValueError, match=message):
        check_ids(kjt(values=ids.to(dtype), lengths=ints(2, 1, 0, 2)), TABLES)


def test_an_id_after_empty_samples_is_found_in_its_sample() -> None:
    batch = KeyedJaggedTensor(["item"], ints(1, 12), lengths=ints(0, 1, 0, 0, 1, 0))
    with pytest.raises(ValueError, match="sample 4, holds id 12"):
        check_ids(batch, [("item", "items", 10)])


def test_ids_that_fit_their_own_table_pass() -> None:
    check_ids(kjt(values=ints(8, 8, 0, 5, 5), lengths=ints(2, 1, 0, 2)), TABLES)
    check_ids(KeyedJaggedTensor(["item"], ints(), lengths=ints(0, 0)), [("item", "items", 1)])


def test_ids_of_other_features_are_not_looked_at() -> None:
    check_ids(kjt(values=ints(8, 8, 0, 5_000_000, -5), lengths=ints(2, 1, 0, 2)), TABLES[:1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.int16, torch.bool])
def test_ids_that_are_no_integers_are_refused(dtype: torch.dtype) -> None:
    batch = kjt(values=ints(1, 1, 1, 1, 1).to(dtype), lengths=ints(2, 1, 0, 2))
    with pytest.raises(
        ValueError, match=f"int32 or int64 to be looked up, and the batch's values are {dtype}"
    ):
        check_ids(batch, TABLES)


def test_a_feature_that_is_not_there_is_named() -> None:
    with pytest.raises(KeyError, match=r"no feature 'shop'.*table 'shops'.*\['item'"):
        check_ids(kjt(lengths=ints(2, 1, 0, 2)), [*TABLES, ("shop", "shops", 3)])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("count", [1, 64, 65, 300])
def test_few_and_many_ids_are_looked_at_alike(count: int, dtype: torch.dtype) -> None:
    rows = [("item", "items", 9), ("user", "users", 6)]
    for place in (0, count - 1):
        for wrong in (-1, 9):
            ids = torch.zeros(count, dtype=dtype)
            check_ids(kjt(values=torch.cat([ids, ids]), lengths=ints(count, count)), rows)
            ids[place] = wrong
            batch = kjt(values=torch.cat([ids, ids * 0]), lengths=ints(count, count))
            with pytest.raises(
                ValueError,
                match=rf"'items' has 9 rows.*feature 'item', sample 0, holds id {wrong}; 1 of",
            ):
                check_ids(batch, rows)
