"""Quantized collections of raw ids: what both classes do with the mappings of ids to rows."""

import copy
from collections.abc import Sequence
from typing import Any, TypeVar

from tutorec.modules.embedding_configs import BaseEmbeddingConfig
from tutorec.modules.mc_modules import ManagedCollisionCollection
from tutorec.quant.packed_tables import PackedTables

_Quantized = TypeVar("_Quantized", bound=PackedTables)


def mappings_for(
    tables: Sequence[BaseEmbeddingConfig], mappings: ManagedCollisionCollection | None
) -> ManagedCollisionCollection:
    """The mappings of quantized tables, in eval mode.

    Raises:
        ValueError: There are none, or those of other tables.
    """
    names = [table.name for table in tables]
    mapped = None if mappings is None else [config.name for config in mappings.embedding_configs()]
    if mappings is None or mapped != names:
        raise ValueError(
            f"managed_collision_collection maps raw ids of tables {mapped}, and the tables are "
            f"{names}; give the mappings of these tables, in their order"
        )

    for module in mappings.eval()._managed_collision_modules.values():
        getattr(module, "reset_inference_mode", module.eval)()
    return mappings


def quantized_behind_mappings(cls: type[_Quantized], module: Any) -> _Quantized:
    """The quantized form of a collection of raw ids, with copies of its mappings.

    Args:
        cls: The quantized class.
        module: A managed collision collection of float tables; its ``qconfig`` names the formats.

    Returns:
        The quantized collection, in eval mode.
    """
    mappings = copy.deepcopy(module._managed_collision_collection)
    return cls.packed(
        module._embedding_module, module.qconfig, managed_collision_collection=mappings
    ).eval()
