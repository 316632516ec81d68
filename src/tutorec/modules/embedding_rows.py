"""How an EmbeddingCollection gets its rows in one call, and how stored lists become the samples of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tutorec._kernels.separate import find_tables
from tutorec._kernels.separate_rows import gather_rows
from tutorec.sparse.jagged import JaggedTensor
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor
from tutorec.sparse.kjt_layout import offsets_by_key, offsets_of_lengths

# Bytes of rows up to which one call for all tables is faster than one for each: larger pieces of memory cost more to
# get from the system than the calls do.
_ONE_PIECE = 512 << 10


@dataclass(frozen=True)
class ResultOrder:
    """The results of a collection in the order in which a batch stores its features.

    Attributes:
        picked: Positions of the features to take from the batch, or None where it is all of them, once and in order.
        tables: For each result its table.
        names: For each result its name.
    """

    picked: list[int] | None
    tables: tuple[int, ...]
    names: tuple[str, ...]


def order_of_results(keys: Sequence[str], places: Sequence[tuple[str, int, str]]) -> ResultOrder:
    """Sort results by where their feature stands in the batch.

    Args:
        keys: Of the batch.
        places: For each result its feature, its table and its name.

    Example:
        >>> order_of_results(["user", "item"], [("item", 0, "item"), ("user", 1, "user")])
        ResultOrder(picked=None, tables=(1, 0), names=('user', 'item'))
    """
    position = {key: index for index, key in enumerate(keys)}
    ordered = sorted(places, key=lambda place: position[place[0]])
    picked = [position[feature] for feature, _, _ in ordered]
    return ResultOrder(
        None if picked == [*range(len(keys))] else picked,
        tuple(table for _, table, _ in ordered),
        tuple(name for _, _, name in ordered),
    )


def plain_weights(tables: nn.ModuleDict) -> list[Tensor] | None:
    """The tables' weights, or None where a table does more than look a weight up: it is to be called then."""
    weights: list[Tensor] = []
    for table in tables._modules.values():
        if type(table) is not nn.Embedding or table._forward_hooks or table._forward_pre_hooks:
            return None
        weight = table._parameters.get("weight")
        if weight is None or table.max_norm is not None or table.padding_idx is not None:
            return None
        weights.append(weight)
    return weights


def rows_in_one_call(
    features: KeyedJaggedTensor, weights: Sequence[Tensor], order: ResultOrder, need_indices: bool
) -> dict[str, JaggedTensor] | None:
    """The rows of all features out of all tables, without autograd, or None where one call cannot be had or is slower.

    Args:
        features: F features of B samples each.
        weights: [R, D] of each table.
        order: Of the results.
        need_indices: Whether results carry their ids.
    """
    count, width = len(order.tables), weights[0].shape[1] if weights else 0
    if features.values().numel() * width * 4 > _ONE_PIECE or any(weight.shape[1] != width for weight in weights):
        return None
    tables = find_tables(weights, order.tables)
    if tables is None:
        return None
    if order.picked is not None:
        features = features.permute(order.picked)
    values, lengths, sizes = features.values(), features.lengths(), features.length_per_key()
    rows = gather_rows(tables, values, features.offsets()).split_with_sizes(sizes)
    ids = values.split_with_sizes(sizes) if need_indices else [None] * count
    offsets = offsets_by_key(lengths, features.offsets(), count, features.stride())
    parts = zip(order.names, rows, ids, lengths.view(count, -1).unbind(), offsets, strict=True)
    return {name: JaggedTensor._from_parts(row, own, length, starts) for name, row, own, length, starts in parts}


def samples_of_lists(
    found: dict[str, JaggedTensor], features: KeyedJaggedTensor, features_of_names: dict[str, str]
) -> dict[str, JaggedTensor]:
    """The results of a batch's samples, where it stores lists and says which of them each sample means.

    Args:
        found: The results of the stored lists, by name.
        features: The batch.
        features_of_names: The feature of each result.

    Returns:
        The results themselves where the batch has no inverse indices; else those of its B samples.

    Raises:
        KeyError: The inverse indices lack a feature.
    """
    inverse = features.inverse_indices_or_none() if type(features) is KeyedJaggedTensor else None
    if inverse is None or inverse[1].dim() < 2:
        return found
    position = {key: index for index, key in enumerate(inverse[0])}
    missing = sorted({feature for feature in features_of_names.values() if feature not in position})
    if missing:
        raise KeyError(f"inverse_indices lack the features {missing}; they have {inverse[0]}")
    return {name: _take_lists(rows, inverse[1][position[features_of_names[name]]]) for name, rows in found.items()}


def _take_lists(jagged: JaggedTensor, indices: Tensor) -> JaggedTensor:
    """The lists at ``indices`` [B], one after the other; a list may be taken several times."""
    lengths = jagged.lengths().index_select(0, indices)
    offsets = offsets_of_lengths(lengths)
    shift = jagged.offsets().index_select(0, indices) - offsets[:-1]
    places = torch.repeat_interleave(shift, lengths)
    places += torch.arange(places.numel(), device=places.device)
    weights = jagged.weights_or_none()
    return JaggedTensor._from_parts(
        jagged.values().index_select(0, places),
        None if weights is None else weights.index_select(0, places),
        lengths,
        offsets,
    )
