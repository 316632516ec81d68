import pytest
import torch

from tutorec.types import DataType, data_type_to_dtype, dtype_to_data_type


def test_data_types_have_torchrecs_names() -> None:
    names = ["FP32", "FP16", "BF16", "INT64", "INT32", "INT8", "UINT8", "INT4", "INT2", "NFP8"]
    assert (
        [data_type.value for data_type in DataType]
        == [data_type.name for data_type in DataType]
        == names
    )
    assert str(DataType.FP32) == "FP32"


@pytest.mark.parametrize("data_type", list(DataType))
def test_a_data_type_is_found_again_from_its_dtype(data_type: DataType) -> None:
    assert dtype_to_data_type(data_type_to_dtype(data_type)) is data_type


def test_a_dtype_of_no_table_is_refused() -> None:
    with pytest.raises(ValueError, match=r"dtype torch\.complex64"):
        dtype_to_data_type(torch.complex64)
