"""What results should be, in plain Python loops over plain lists: slow, and short enough to be
believed.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from tutorec.modules.embedding_configs import BaseEmbeddingConfig, EmbeddingBagConfig, PoolingType

Lists = dict[str, list[list[int]]]
WeightLists = dict[str, list[list[float]]]


def pool_bag(
    weight: Tensor, bag: Sequence[int], pooling: PoolingType, weights: Sequence[float] | None
) -> Tensor:
    """One bag's pooled row [D]: rows added one by one, zeros without ids.

    MEAN divides by their number, SQRTN by the root of the sum of squared weights (of ones, where
    there are none).
    """
    row = torch.zeros(weight.shape[1])
    for position, number in enumerate(bag):
        row = row + weight[number] * (1.0 if weights is None else weights[position])
    if pooling is PoolingType.MEAN and len(bag) > 0:
        row = row / len(bag)
    if pooling is PoolingType.SQRTN:
        norm = (
            sum(number**2 for number in weights) ** 0.5 if weights is not None else len(bag) ** 0.5
        )
        row = row / norm if norm > 0 else row * 0.0
    return row


def pool_collection(
    tables: Sequence[EmbeddingBagConfig],
    table_weights: dict[str, Tensor],
    ids: Lists,
    weights: WeightLists | None,
    samples: int,
) -> Tensor:
    """Every feature of every table, side by side in table order [B, D]; differentiable in the table
    weights.
    """
    columns = []
    for table in tables:
        for feature in table.feature_names:
            rows = [
                pool_bag(
                    table_weights[table.name],
                    ids[feature][sample],
                    table.pooling,
                    None if weights is None else weights[feature][sample],
                )
                for sample in range(samples)
            ]
            columns.append(torch.stack(rows) if rows else torch.zeros(0, table.embedding_dim))
    return torch.cat(columns, dim=1) if columns else torch.zeros(samples, 0)


def rows_of_collection(
    tables: Sequence[BaseEmbeddingConfig], table_weights: dict[str, Tensor], ids: Lists
) -> tuple[dict[str, Tensor], dict[str, list[int]], dict[str, list[int]]]:
    """For each feature of each table, by its result's name: rows one by one [N, D], their ids, the
    lists' lengths.
    """
    readers = [feature for table in tables for feature in table.feature_names]
    rows, numbers, lengths = {}, {}, {}
    for table in tables:
        for feature in table.feature_names:
            name = f"{feature}@{table.name}" if readers.count(feature) > 1 else feature
            numbers[name] = [number for bag in ids[feature] for number in bag]
            lengths[name] = [len(bag) for bag in ids[feature]]
            found = [table_weights[table.name][number] for number in numbers[name]]
            rows[name] = torch.stack(found) if found else table_weights[table.name][:0]
    return rows, numbers, lengths
