"""Checks of ids in a graph: the message of a scripted one, the assertions of an exported one.

`id_check` calls both. TorchScript reads the annotations, so that this file imports none of them
from the future.
"""

import torch
from torch.fx.node import has_side_effect
from torch.jit import is_scripting  # pyright: ignore[reportPrivateImportUsage]

from tutorec.sparse.deferred import FeatureRows
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor

_LARGEST = torch.iinfo(torch.int64).max


# Kept in a graph although it returns nothing; TorchScript compiles it as it stands.
@has_side_effect
def check_ids_in_graph(
    features: KeyedJaggedTensor, feature_rows: list[tuple[str, str, int]]
) -> None:
    """`check_ids` as a call of a graph.

    Args:
        features: The batch.
        feature_rows: As for ``check_ids``.

    Raises:
        ValueError: An id is not a row; under TorchScript a ``torch.jit.Error`` contains its text.

    Example:
        >>> batch = KeyedJaggedTensor(["item"], torch.tensor([9]), lengths=torch.tensor([1]))
        >>> check_ids_in_graph(batch, [("item", "items", 8)])
        Traceback (most recent call last):
            ...
        ValueError: table 'items' has 8 rows (ids 0 to 7), and feature 'item', sample 0, ...
    """
    if not is_scripting():
        _check_now(features, feature_rows)
        return
    values = features.values()
    if values.numel() > 0 and len(feature_rows) > 0:
        fewest = feature_rows[0][2]
        for _, _, rows in feature_rows:
            fewest = min(fewest, rows)
        low, high = torch.aminmax(values)
        if int(low) < 0 or int(high) >= fewest:
            _refuse_ids(features, feature_rows)


def _check_now(features: KeyedJaggedTensor, feature_rows: list[tuple[str, str, int]]) -> None:
    """`check_ids`, for a traced graph that Python runs."""
    from tutorec.sparse.id_check import check_ids

    check_ids(features, feature_rows)


def _refuse_ids(features: KeyedJaggedTensor, feature_rows: list[tuple[str, str, int]]) -> None:
    """Search the first id that is not a row, feature by feature; TorchScript compiles this.

    Raises:
        ValueError: There is one. The message is that of ``deferred.bad_id``.
    """
    values, offsets, samples = features.values(), features.offsets(), features.stride_per_key()
    for feature, table, rows in feature_rows:
        first_list = 0
        for position, key in enumerate(features.keys()):
            lists = samples[position]
            if key == feature:
                start, stop = int(offsets[first_list]), int(offsets[first_list + lists])
                ids = values[start:stop]
                wrong = torch.nonzero((ids < 0) | (ids >= rows))
                if wrong.numel() > 0:
                    at = int(wrong[0])
                    sample = int((offsets <= start + at).sum()) - 1 - first_list
                    raise ValueError(
                        f"table '{table}' has {rows} rows (ids 0 to {rows - 1}), and feature "
                        f"'{feature}', sample {sample}, holds id {int(ids[at])}; {wrong.shape[0]} "
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
    index, values, lengths = features.index_per_key(), features.values(), features.lengths()
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
