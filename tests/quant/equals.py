"""The float collection that holds what a quantized one reads: the reference of everything that is
looked up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from tutorec.modules.embedding_collection import EmbeddingCollection
from tutorec.modules.embedding_configs import (
    BaseEmbeddingConfig,
    EmbeddingBagConfig,
    EmbeddingConfig,
    QuantConfig,
)
from tutorec.modules.embedding_modules import EmbeddingBagCollection
from tutorec.quant.embedding_modules import EmbeddingBagCollection as QuantEmbeddingBagCollection
from tutorec.quant.embedding_modules import EmbeddingCollection as QuantEmbeddingCollection
from tutorec.quant.packed_tables import PackedTables
from tutorec.quant.packing import unpack_rows
from tutorec.types import DataType

DTYPES = (torch.int8, torch.quint4x2, torch.quint2x4, torch.float16, torch.float32)


def bags(
    tables: Sequence[EmbeddingBagConfig],
    weight: torch.dtype | dict[str, torch.dtype],
    weighted: bool = False,
) -> tuple[EmbeddingBagCollection, QuantEmbeddingBagCollection]:
    """A float collection of values of very different size, and its quantized form."""
    ebc = EmbeddingBagCollection(list(tables), is_weighted=weighted)
    return ebc, QuantEmbeddingBagCollection.from_float(_spread(ebc, weight))


def rows(
    tables: Sequence[EmbeddingConfig],
    weight: torch.dtype | dict[str, torch.dtype],
    need_indices: bool = False,
) -> tuple[EmbeddingCollection, QuantEmbeddingCollection]:
    ec = EmbeddingCollection(list(tables), need_indices=need_indices)
    return ec, QuantEmbeddingCollection.from_float(_spread(ec, weight))


def _spread(collection, weight):
    with torch.no_grad():
        for index, each in enumerate(collection.parameters()):
            each.copy_(torch.randn(each.shape) * 10.0 ** (index % 3 - 1))
    per_table = weight if isinstance(weight, dict) else None
    collection.qconfig = QuantConfig(torch.float, torch.int8 if per_table else weight, per_table)
    return collection


def dequantized(quantized: PackedTables):
    """A float collection whose tables are the numbers that the packed rows stand for."""
    pooled = isinstance(quantized, QuantEmbeddingBagCollection)
    configs: Sequence[BaseEmbeddingConfig] = (
        quantized.embedding_bag_configs() if pooled else quantized.embedding_configs()
    )
    plain = [replace(config, data_type=DataType.FP32) for config in configs]
    collection = (
        EmbeddingBagCollection(plain, quantized.is_weighted())
        if pooled
        else EmbeddingCollection(plain, need_indices=quantized.need_indices())
    )
    held = collection.embedding_bags if pooled else collection.embeddings
    with torch.no_grad():
        for config in configs:
            numbers = unpack_rows(
                quantized.packed_rows(config.name), config.embedding_dim, config.data_type
            )
            held[config.name].weight.copy_(numbers)
    return collection.requires_grad_(False)


def assert_close_in_half(actual: Tensor, expected: Tensor) -> None:
    """Equal but for the rounding of each row's numbers to half precision.

    In it fbgemm's CUDA kernels make numbers of codes, before they add them in float32.
    """
    bound = float(expected.abs().max()) * 2**-9
    torch.testing.assert_close(actual, expected, rtol=2e-3, atol=bound)
