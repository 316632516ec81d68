"""Checks of ids on a device that runs behind the program: made there, and raised later.

Reading a number from a GPU makes the program wait for it. So the check is a few operators on the
device: they find the ids that are not rows of their tables, replace them by 0 for the lookup, and
leave one flag, which is copied to page-locked memory. A wrong id therefore reads and writes no
memory outside its table. The flag is read at the next named sync point, or at a later check when
the device has come by; which id it was is searched only then::

    ids = check_ids(batch 1)   operators, copy of a flag          the program goes on
    lookup(ids)                ...
    check_ids(batch 2)         has batch 1's check run? raise what it found
    batch 2 .sync()            wait for all checks, raise what they found
"""

from bisect import bisect
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from tutorec.sparse.layout import starts_of_keys

_INT64 = torch.iinfo(torch.int64)
# So many deferred checks may be under way before the oldest is waited for.
_MOST = 8
# Bounds of so many collections stay on the device: to copy them there again waits for the device.
_COLLECTIONS = 256

FeatureRows = Sequence[tuple[str, str, int]]


class _Check:
    """One check under way: where its flag arrives, and the batch, to search for what is wrong.

    Args:
        bad: Which ids are not rows ``[N]``.
        ids: ``[N]``.
        offsets: ``[L + 1]``.
        keys: F feature names.
        samples: Samples of each key.
        feature_rows: As for ``check_ids``.
    """

    def __init__(
        self,
        bad: Tensor,
        ids: Tensor,
        offsets: Tensor,
        keys: list[str],
        samples: list[int],
        feature_rows: FeatureRows,
    ) -> None:
        self._batch = (bad, ids, offsets)
        self._keys = keys
        self._samples = samples
        self._feature_rows = feature_rows
        self._arrived: Any = None
        self._flag = bad.any()
        if bad.is_cuda:
            self._flag = torch.empty((), dtype=torch.bool, pin_memory=True).copy_(
                self._flag, non_blocking=True
            )
            self._arrived = torch.cuda.Event()
            # Of the ids' device, which need not be the current one.
            self._arrived.record(torch.cuda.current_stream(bad.device))

    def ready(self) -> bool:
        """Whether the flag can be read without waiting."""
        if self._arrived is None:
            return self._flag.device.type == "cpu"
        try:
            return self._arrived.query()
        except RuntimeError:  # The device has failed since; what was copied before is there.
            return True

    def read(self) -> ValueError | None:
        """Wait for the flag; the error if it tells of one."""
        if self._arrived is not None:
            with suppress(RuntimeError):  # As above.
                self._arrived.synchronize()
        if not bool(self._flag):
            return None

        with suppress(RuntimeError):
            for tensor in self._batch:
                if tensor.is_cuda:  # The check may have run on another stream.
                    tensor.record_stream(torch.cuda.current_stream(tensor.device))
            bad, ids, offsets = (tensor.cpu() for tensor in self._batch)

            position = int(bad.nonzero()[0])
            starts = starts_of_keys(offsets, self._samples).tolist()
            # From 0 to F - 1 whatever the offsets hold.
            feature = bisect(starts[1:-1], position)
            key = self._keys[feature]
            number = int(ids[position])
            first = starts[feature]
            last = starts[feature + 1]
            sample = bisect(offsets.tolist(), position) - 1 - sum(self._samples[:feature])
            outside = int(bad[first:last].sum())
            for name, table, rows in self._feature_rows:
                if name == key and not 0 <= number < rows:
                    return ValueError(
                        bad_id(table, rows, key, sample, number, outside, last - first)
                    )

        tables = sorted({table for _, table, _ in self._feature_rows})
        return ValueError(
            f"a batch with the keys {self._keys} held ids that are not rows of tables {tables}; "
            "the first of them is not known, because the batch was changed or its device failed "
            "since: look a batch up on the CPU, where the error comes at once and names the id"
        )


_under_way: list[_Check] = []


def bad_id(
    table: str, rows: int, feature: str, sample: int, number: int, outside: int, total: int
) -> str:
    """The message for an id that is not a row of its table.

    Args:
        table: Name of the table.
        rows: R, its rows.
        feature: The feature that holds the id.
        sample: The sample that holds it.
        number: The id.
        outside: How many of the feature's ids are outside.
        total: How many ids the feature has.

    Returns:
        What is wrong, where, the numbers, and what would work.

    Example:
        >>> bad_id("items", 8, "item", 1, 9, 1, 2)[:65]
        "table 'items' has 8 rows (ids 0 to 7), and feature 'item', sample"
    """
    return (
        f"table {table!r} has {rows} rows (ids 0 to {rows - 1}), and feature {feature!r}, sample "
        f"{sample}, holds id {number}; {outside} of the feature's {total} ids are outside: hash or "
        "clamp them to rows, or give the table more rows"
    )


def check_ids_on_device(
    ids: Tensor, offsets: Tensor, keys: list[str], samples: list[int], feature_rows: FeatureRows
) -> Tensor:
    """Check a batch's ids on their device; ``raise_deferred_id_errors`` raises what is wrong.

    Args:
        ids: ``[N]``, on any device.
        offsets: ``[L + 1]``.
        keys: F feature names.
        samples: Samples of each key.
        feature_rows: One entry for each table of each feature: feature, table, rows R of the table.

    Returns:
        The ids to look up ``[N]``, with 0 in place of wrong ones.

    Example:
        >>> import torch
        >>> ids, offsets = torch.tensor([3, 9]), torch.tensor([0, 1, 2])
        >>> check_ids_on_device(ids, offsets, ["item"], [2], [("item", "t", 8)]).tolist()
        [3, 0]
        >>> raise_deferred_id_errors()
        Traceback (most recent call last):
            ...
        ValueError: table 't' has 8 rows (ids 0 to 7), and feature 'item', sample 1, ...

    See Also:
        ``id_check.check_ids``, which calls this for a batch that is not on the CPU.
    """
    if ids.numel() == 0 or (ids.is_cuda and torch.cuda.is_current_stream_capturing()):
        return ids

    bounds = _bounds_of(tuple(keys), tuple(feature_rows), ids.device)
    if ids.is_cuda:  # They may have been made for a batch of another stream.
        bounds.record_stream(torch.cuda.current_stream(ids.device))
    starts = starts_of_keys(offsets, samples)[1:-1].contiguous()
    feature = torch.bucketize(torch.arange(ids.numel(), device=ids.device), starts, right=True)
    low, high = bounds.index_select(1, feature)
    bad = (ids < low) | (ids >= high)

    _under_way.append(_Check(bad, ids, offsets, list(keys), samples, feature_rows))
    return torch.where(bad, 0, ids)


def raise_deferred_id_errors(block: bool = True) -> None:
    """Raise what a deferred check found; costs next to nothing when none is pending.

    Args:
        block: Whether to wait for checks that have not run yet, as a named sync point does anyway.

    Raises:
        ValueError: An id is not a row of its table. All other checks are forgotten then.
    """
    while _under_way:
        if not (block or len(_under_way) > _MOST or _under_way[0].ready()):
            return
        error = _under_way.pop(0).read()
        if error is not None:
            _under_way.clear()
            raise error


@lru_cache(maxsize=_COLLECTIONS)
def _bounds_of(
    keys: tuple[str, ...], feature_rows: tuple[tuple[str, str, int], ...], device: torch.device
) -> Tensor:
    """Smallest id and one past the largest that fit each key's tables [2, F].

    They are there when this returns, whatever stream a later batch is checked on.
    """
    low = dict.fromkeys(keys, _INT64.min)
    high = dict.fromkeys(keys, _INT64.max)
    for feature, _, rows in feature_rows:
        low[feature] = 0
        high[feature] = min(rows, high[feature])
    return torch.tensor([[*low.values()], [*high.values()]], device=device)
