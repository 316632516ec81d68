"""Quantized tables: rows of 8, 4 or 2 bits per element, packed and looked up."""

from typing import TYPE_CHECKING

from tutorec._lazy import lazy_package

if TYPE_CHECKING:
    from tutorec.quant.choosing import choose_dtypes as choose_dtypes
    from tutorec.quant.choosing import table_menu as table_menu
    from tutorec.quant.embedding_collection import EmbeddingCollection as EmbeddingCollection
    from tutorec.quant.embedding_modules import EmbeddingBagCollection as EmbeddingBagCollection
    from tutorec.quant.packing import pack_rows as pack_rows
    from tutorec.quant.packing import round_trip_bound as round_trip_bound
    from tutorec.quant.packing import unpack_rows as unpack_rows
    from tutorec.quant.report import accuracy_report as accuracy_report
    from tutorec.quant.whole_model import quantize as quantize

_DEFINED_IN = {
    "EmbeddingBagCollection": ".embedding_modules",
    "EmbeddingCollection": ".embedding_collection",
    "accuracy_report": ".report",
    "choose_dtypes": ".choosing",
    "pack_rows": ".packing",
    "quantize": ".whole_model",
    "round_trip_bound": ".packing",
    "table_menu": ".choosing",
    "unpack_rows": ".packing",
}

__all__ = [
    "EmbeddingBagCollection",
    "EmbeddingCollection",
    "accuracy_report",
    "choose_dtypes",
    "pack_rows",
    "quantize",
    "round_trip_bound",
    "table_menu",
    "unpack_rows",
]

__getattr__, __dir__ = lazy_package(__name__, _DEFINED_IN)
