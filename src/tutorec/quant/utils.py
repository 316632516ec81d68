"""Allocation of quantized models that were built without rows.

Corresponds to TorchRec's ``torchrec.quant.utils``.
"""

from __future__ import annotations

from torch import nn

from tutorec.quant.packed_tables import PackedTables

__all__ = ["meta_to_cpu_placement"]


def meta_to_cpu_placement(module: nn.Module) -> None:
    """Allocate the quantized tables of a model that are on the meta device, on the CPU, in place.

    Their rows are zeros until they are loaded. The rest of the model is not changed.

    Args:
        module: A quantized collection, or a model with quantized collections.

    Example:
        >>> import torch
        >>> from tutorec.modules.embedding_configs import EmbeddingBagConfig
        >>> from tutorec.quant.embedding_modules import EmbeddingBagCollection
        >>> model = EmbeddingBagCollection(
        ...     [EmbeddingBagConfig(10, 4, "item")], False, torch.device("meta")
        ... )
        >>> meta_to_cpu_placement(model)
        >>> model.device, int(model.packed_rows("item").sum())
        (device(type='cpu'), 0)

    Source:
        TorchRec's ``torchrec.quant.utils.meta_to_cpu_placement``, which replaces the collections by
        new ones, and does not change a model that is itself a collection.
    """
    for submodule in module.modules():
        if isinstance(submodule, PackedTables) and submodule.device.type == "meta":
            submodule.to_empty(device="cpu")
            submodule.clear_rows()
