"""What results should be, in plain Python loops over plain lists: slow, and short enough to be believed."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tutorec.modules.embedding_configs import EmbeddingBagConfig, PoolingType

Lists = dict[str, list[list[int]]]
WeightLists = dict[str, list[list[float]]]


def pool_bag(weight: Tensor, bag: Sequence[int], pooling: PoolingType, weights: Sequence[float] | None) -> Tensor:
    """One bag's pooled row [D]: rows added one by one, divided by their number for MEAN; zeros without ids."""
    row = torch.zeros(weight.shape[1])
    for position, number in enumerate(bag):
        row = row + weight[number] * (1.0 if weights is None else weights[position])
    if pooling is PoolingType.MEAN and len(bag) > 0:
        row = row / len(bag)
    return row


def pool_collection(
    tables: Sequence[EmbeddingBagConfig],
    table_weights: dict[str, Tensor],
    ids: Lists,
    weights: WeightLists | None,
    samples: int,
) -> Tensor:
    """Every feature of every table, side by side in table order [B, D]; differentiable in the table weights."""
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
