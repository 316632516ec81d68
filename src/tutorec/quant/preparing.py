"""The options of a quantized collection, read from ``qconfig`` and attributes of the float one.

torch's ``quantize_dynamic`` passes only a module to ``from_float``, so further options are set on
the module first, by the functions ``quant_prep_*``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from tutorec._kernels.packed_layout import ROW_ALIGNMENT, RowAlignment
from tutorec.modules.embedding_configs import BaseEmbeddingConfig
from tutorec.quant.table_formats import output_type, packed_type

MODULE_ATTR_REGISTER_TBES_BOOL = "__register_tbes_in_named_modules"
MODULE_ATTR_QUANT_STATE_DICT_SPLIT_SCALE_BIAS = "__quant_state_dict_split_scale_bias"
MODULE_ATTR_ROW_ALIGNMENT_INT = "__register_row_alignment_in_named_modules"
MODULE_ATTR_EMB_CONFIG_NAME_TO_NUM_ROWS_POST_PRUNING_DICT = "__emb_name_to_num_rows_post_pruning"

_Config = TypeVar("_Config", bound=BaseEmbeddingConfig)


def for_each_module_of_type_do(
    module: nn.Module, module_types: Sequence[type[nn.Module]], op: Callable[[nn.Module], None]
) -> None:
    """Apply a function to each submodule of certain types, including the module itself.

    Args:
        module: The root module.
        module_types: Types of the submodules; subclasses count.
        op: The function.

    Example:
        >>> for_each_module_of_type_do(nn.Sequential(nn.Linear(2, 3)), [nn.Linear], print)
        Linear(in_features=2, out_features=3, bias=True)

    See Also:
        TorchRec's ``torchrec.quant.embedding_modules.for_each_module_of_type_do``.
    """
    for submodule in module.modules():
        if isinstance(submodule, tuple(module_types)):
            op(submodule)


def quant_prep_enable_register_tbes(
    module: nn.Module, module_types: Sequence[type[nn.Module]]
) -> None:
    """Make the operators of the quantized collections submodules ``tbes``.

    Args:
        module: The model.
        module_types: The float collections concerned.

    See Also:
        TorchRec's ``torchrec.quant.embedding_modules.quant_prep_enable_register_tbes``.
    """
    for_each_module_of_type_do(
        module,
        module_types,
        lambda collection: setattr(collection, MODULE_ATTR_REGISTER_TBES_BOOL, True),
    )


def quant_prep_enable_quant_state_dict_split_scale_bias(module: nn.Module) -> None:
    """Store scale and bias of a collection's quantized tables in separate buffers.

    Args:
        module: The float collection.

    See Also:
        TorchRec's
        ``torchrec.quant.embedding_modules.quant_prep_enable_quant_state_dict_split_scale_bias``.
    """
    setattr(module, MODULE_ATTR_QUANT_STATE_DICT_SPLIT_SCALE_BIAS, True)


def quant_prep_enable_quant_state_dict_split_scale_bias_for_types(
    module: nn.Module, module_types: Sequence[type[nn.Module]]
) -> None:
    """Store scale and bias of all quantized tables of a model in separate buffers.

    Args:
        module: The model.
        module_types: The float collections concerned.

    See Also:
        TorchRec's function of the same name in ``torchrec.quant.embedding_modules``.
    """
    for_each_module_of_type_do(
        module, module_types, quant_prep_enable_quant_state_dict_split_scale_bias
    )


def quant_prep_customize_row_alignment(
    module: nn.Module, module_types: Sequence[type[nn.Module]], row_alignment: RowAlignment
) -> None:
    """Pad the rows of the quantized tables to a multiple of a number of bytes.

    Args:
        module: The model.
        module_types: The float collections concerned.
        row_alignment: Bytes.

    See Also:
        TorchRec's ``torchrec.quant.embedding_modules.quant_prep_customize_row_alignment``.
    """
    for_each_module_of_type_do(
        module,
        module_types,
        lambda collection: setattr(collection, MODULE_ATTR_ROW_ALIGNMENT_INT, row_alignment),
    )


def prepared(
    module: nn.Module, qconfig: Any, row_alignment: RowAlignment | None = None
) -> dict[str, Any]:
    """The options that a float collection has for its quantized form, as constructor arguments.

    Args:
        module: The float collection.
        qconfig: A ``QuantConfig``, or torch's ``QConfig``.
        row_alignment: Bytes; by default the module's option, or 16.

    Raises:
        ValueError: The output dtype is not supported.
    """
    return {
        "output_dtype": output_type(qconfig.activation),
        "register_tbes": getattr(module, MODULE_ATTR_REGISTER_TBES_BOOL, False),
        "quant_state_dict_split_scale_bias": getattr(
            module, MODULE_ATTR_QUANT_STATE_DICT_SPLIT_SCALE_BIAS, False
        ),
        "row_alignment": alignment_of(module, row_alignment),
    }


def alignment_of(
    module: nn.Module, requested: RowAlignment | None, default: RowAlignment = ROW_ALIGNMENT
) -> RowAlignment:
    """The row alignment: as requested, else the collection's option, else the default."""
    return (
        getattr(module, MODULE_ATTR_ROW_ALIGNMENT_INT, default) if requested is None else requested
    )


def quantized_configs(
    tables: Sequence[_Config], qconfig: Any, module: nn.Module | None = None
) -> list[_Config]:
    """Copies of the tables' configs with the packed formats and the numbers of rows after pruning.

    Args:
        tables: Configs of the float collection.
        qconfig: A ``QuantConfig``, or torch's ``QConfig``, which has no formats per table.
        module: The float collection, which may have the number of rows after pruning.

    Raises:
        ValueError: A format is not supported.

    Example:
        >>> from tutorec.modules.embedding_configs import EmbeddingBagConfig, QuantConfig
        >>> quantized_configs(
        ...     [EmbeddingBagConfig(10, 4, "item")], QuantConfig(torch.float, torch.int8)
        ... )[0].data_type
        <DataType.INT8: 'INT8'>
    """
    per_table = getattr(qconfig, "per_table_weight_dtype", None) or {}
    rows_kept = getattr(module, MODULE_ATTR_EMB_CONFIG_NAME_TO_NUM_ROWS_POST_PRUNING_DICT, {})

    configs = []
    for table in tables:
        config = copy(table)
        config.data_type = packed_type(per_table.get(table.name, qconfig.weight), table.name)
        config.feature_names = list(table.feature_names)
        config.num_embeddings_post_pruning = rows_kept.get(
            table.name, table.num_embeddings_post_pruning
        )
        configs.append(config)
    return configs


def weight_of(table: nn.Module) -> Tensor:
    """The weight [R, D] of a table of a float collection: a parameter, or a computed tensor."""
    weight = table.weight
    assert isinstance(weight, Tensor), f"a table's weight is a {type(weight).__name__}"
    return weight


def device_of(tables: nn.ModuleDict, default: torch.device) -> torch.device:
    """Device of a float collection's tables; the default if it has none.

    Raises:
        ValueError: They are on several devices.
    """
    devices = {name: weight_of(table).device for name, table in tables.items()}
    if len(set(devices.values())) > 1:
        devices_by_table = {name: str(device) for name, device in devices.items()}
        raise ValueError(
            f"the tables are on several devices, {devices_by_table}: move the model to one"
        )
    return next(iter(devices.values()), default)
