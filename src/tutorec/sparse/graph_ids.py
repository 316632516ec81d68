"""Checks of ids in a graph: the message of a scripted one, the assertions of an exported one.

`id_check` leaves them there. TorchScript reads the annotations, so that this file imports none of
them from the future.
"""

import torch
from torch import Tensor
from torch.fx.node import has_side_effect
from torch.jit import is_scripting  # pyright: ignore[reportPrivateImportUsage]

from tutorec._kernels.backend import backend
from tutorec._kernels.packed import are_rows
from tutorec.sparse.deferred import FeatureRows
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor
from tutorec.sparse.layout import checkable

torch.fx.wrap("check_ids_in_graph")
torch.fx.wrap("check_ids_by_fbgemm")

_LARGEST = torch.iinfo(torch.int64).max


def leave_check(features: KeyedJaggedTensor, feature_rows: FeatureRows) -> None:
    """Leave a call that checks ids in a graph that is traced.

    Args:
        features: The batch, a proxy.
        feature_rows: As for ``check_ids``.
    """
    names, least = least_rows(feature_rows)
    rows = list(feature_rows)
    if not names:
        return

    if backend().name == "fbgemm":
        check_ids_by_fbgemm(features, names, least, torch.tensor(least) - 1, rows)
    else:
        check_ids_in_graph(features, names, least, rows)


def least_rows(feature_rows: FeatureRows) -> tuple[list[str], list[int]]:
    """The features in order, each once, and the rows R of the smallest table of each.

    Args:
        feature_rows: As for ``check_ids``.

    Example:
        >>> least_rows([("item", "items", 8), ("item", "groups", 3), ("user", "users", 5)])
        (['item', 'user'], [3, 5])
    """
    least: dict[str, int] = {}
    for feature, _, rows in feature_rows:
        least[feature] = min(least.get(feature, rows), rows)
    return [*least], [*least.values()]


# Kept in a graph although it returns nothing; TorchScript compiles it as it stands.
@has_side_effect
def check_ids_in_graph(
    features: KeyedJaggedTensor,
    names: list[str],
    least: list[int],
    feature_rows: list[tuple[str, str, int]],
) -> None:
    """`check_ids` as a call of a graph.

    Args:
        features: The batch.
        names: The features that are looked up, from `least_rows`.
        least: The rows R of the smallest table of each.
        feature_rows: As for ``check_ids``.

    Raises:
        ValueError: An id is not a row; under TorchScript a ``torch.jit.Error`` contains its text.

    Example:
        >>> batch = KeyedJaggedTensor(["item"], torch.tensor([9]), lengths=torch.tensor([1]))
        >>> check_ids_in_graph(batch, ["item"], [8], [("item", "items", 8)])
        Traceback (most recent call last):
            ...
        ValueError: table 'items' has 8 rows (ids 0 to 7), and feature 'item', sample 0, ...
    """
    values = features.values()
    if not is_scripting():  # noqa: SIM102 (TorchScript compiles both sides of an `and`)
        if not checkable(values):
            return

    if values.numel() > 0 and len(names) > 0:
        low, high = torch.aminmax(values)
        fit = int(low) >= 0 and int(high) < min(least)
        if not fit and not _fit_their_tables(features, names, least):
            _refuse_ids(features, feature_rows)


@has_side_effect
def check_ids_by_fbgemm(
    features: KeyedJaggedTensor,
    names: list[str],
    least: list[int],
    last_rows: Tensor,
    feature_rows: list[tuple[str, str, int]],
) -> None:
    """The same by one operator, where the features come in the order of the tables.

    Args:
        features: The batch.
        names: As for `check_ids_in_graph`.
        least: As for `check_ids_in_graph`.
        last_rows: R - 1 of the smallest table of each feature [F].
        feature_rows: As for ``check_ids``.

    Raises:
        ValueError: An id is not a row; under TorchScript a ``torch.jit.Error`` contains its text.
    """
    values = features.values()
    fit = False
    if features.keys() == names and not features.variable_stride_per_key():
        fit = are_rows(last_rows.to(values.device), values, features.offsets())
    if not fit:
        check_ids_in_graph(features, names, least, feature_rows)


def _fit_their_tables(features: KeyedJaggedTensor, names: list[str], least: list[int]) -> bool:
    """Whether each id is a row of the smallest table of its own feature."""
    # In most requests the features come in the order of the tables, and no name is looked at.
    limits = least
    if features.keys() != names:
        limits = [0x7FFF_FFFF_FFFF_FFFF for _ in features.keys()]
        for position, key in enumerate(features.keys()):
            for name, rows in zip(names, least):  # noqa: B905 (TorchScript has no strict)
                if key == name:
                    limits[position] = rows

    values = features.values()
    offsets = features.offsets()
    if features.variable_stride_per_key():
        ends = [0]
        for samples in features.stride_per_key():
            ends.append(ends[-1] + samples)
        offsets = offsets.index_select(0, torch.tensor(ends, device=offsets.device))
    else:
        offsets = offsets[:: features.stride()]

    limit_per_id = torch.tensor(limits, device=values.device).repeat_interleave(
        offsets.diff(), output_size=values.numel()
    )
    return bool(((values >= 0) & (values < limit_per_id)).all())


def _refuse_ids(features: KeyedJaggedTensor, feature_rows: list[tuple[str, str, int]]) -> None:
    """Search the first id that is not a row, feature by feature; TorchScript compiles this.

    Raises:
        ValueError: There is one. The message is that of ``deferred.bad_id``.
    """
    values = features.values()
    offsets = features.offsets()
    samples = features.stride_per_key()
    for feature, table, rows in feature_rows:
        first_list = 0
        for position, key in enumerate(features.keys()):
            lists = samples[position]
            if key == feature:
                start = int(offsets[first_list])
                ids = values[start : int(offsets[first_list + lists])]
                wrong = torch.nonzero((ids < 0) | (ids >= rows))
                if wrong.numel() > 0:
                    position_in_ids = int(wrong[0])
                    number = int(ids[position_in_ids])
                    sample = int((offsets <= start + position_in_ids).sum()) - 1 - first_list

                    raise ValueError(
                        f"table '{table}' has {rows} rows (ids 0 to {rows - 1}), and feature "
                        f"'{feature}', sample {sample}, holds id {number}; {wrong.shape[0]} "
                        f"of the feature's {ids.numel()} ids are outside: hash or clamp them to "
                        "rows, or give the table more rows"
                    )
            first_list += lists


def assert_ids(features: KeyedJaggedTensor, feature_rows: FeatureRows) -> None:
    """Leave an assertion for each feature in a graph that is exported; it cannot name an id.

    Args:
        features: The batch, whose numbers are not known.
        feature_rows: Feature, table and its rows R, as for ``check_ids``.
    """
    index = features.index_per_key()
    values = features.values()
    lengths = features.lengths()

    least: dict[int, tuple[int, str, str]] = {}
    for feature, table, rows in feature_rows:
        key = index[feature]
        least[key] = min(least.get(key, (rows, table, feature)), (rows, table, feature))
    ends = [least[key][0] if key in least else _LARGEST for key in range(len(index))]
    limits = torch.tensor(ends, device=values.device)

    lists = torch.arange(lengths.shape[0], device=values.device)
    lists = lists.repeat_interleave(lengths, output_size=values.shape[0])
    keys = lists // (lengths.shape[0] // len(index))
    wrong = (values < 0) | (values >= limits.index_select(0, keys))
    counts = torch.zeros_like(limits).index_add(0, keys, wrong.to(limits.dtype))
    fits = (counts == 0).unbind()

    for key, (rows, table, feature) in least.items():
        torch.ops.aten._assert_async(
            fits[key],
            f"table {table!r} has {rows} rows (ids 0 to {rows - 1}), and feature {feature!r} holds "
            "an id outside of them: hash or clamp ids to rows, or give the table more rows",
        )
