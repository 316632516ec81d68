"""The number formats of table weights, by TorchRec's names."""

from enum import Enum, unique

import torch


@unique
class DataType(Enum):
    """The format in which a table keeps its numbers; TorchRec's ``DataType``.

    Example:
        >>> DataType.FP16.value
        'FP16'
        >>> data_type_to_dtype(DataType.FP16)
        torch.float16
    """

    FP32 = "FP32"
    FP16 = "FP16"
    BF16 = "BF16"
    INT64 = "INT64"
    INT32 = "INT32"
    INT8 = "INT8"
    UINT8 = "UINT8"
    INT4 = "INT4"
    INT2 = "INT2"
    NFP8 = "NFP8"

    def __str__(self) -> str:
        return self.value


DTYPES: dict[DataType, torch.dtype] = {
    DataType.FP32: torch.float32,
    DataType.FP16: torch.float16,
    DataType.BF16: torch.bfloat16,
    DataType.INT64: torch.int64,
    DataType.INT32: torch.int32,
    DataType.INT8: torch.int8,
    DataType.UINT8: torch.uint8,
    DataType.INT4: torch.quint4x2,
    DataType.INT2: torch.quint2x4,
    DataType.NFP8: torch.float8_e4m3fn,
}
_DATA_TYPES: dict[torch.dtype, DataType] = {dtype: data_type for data_type, dtype in DTYPES.items()}


def data_type_to_dtype(data_type: DataType) -> torch.dtype:
    """The torch dtype that stores a table of this format; formats of 4 and 2 bits share bytes.

    Args:
        data_type: Format of the table.

    Returns:
        The dtype, ``torch.quint4x2`` and ``torch.quint2x4`` for the two formats below a byte.

    Example:
        >>> data_type_to_dtype(DataType.FP32)
        torch.float32
    """
    return DTYPES[data_type]


def dtype_to_data_type(dtype: torch.dtype) -> DataType:
    """The table format of a torch dtype.

    Args:
        dtype: Any dtype of ``DataType``'s list.

    Returns:
        The format.

    Raises:
        ValueError: No table format has this dtype.

    Example:
        >>> import torch
        >>> dtype_to_data_type(torch.float16).name
        'FP16'
    """
    if dtype not in _DATA_TYPES:
        known = ", ".join(str(known) for known in _DATA_TYPES)
        raise ValueError(f"no table format has dtype {dtype}; tables are kept as one of {known}")
    return _DATA_TYPES[dtype]
