"""Quantized tables: rows of 8, 4 or 2 bits, packed and looked up."""

from tutorec.quant.embedding_collection import EmbeddingCollection
from tutorec.quant.embedding_modules import EmbeddingBagCollection

__all__ = ["EmbeddingBagCollection", "EmbeddingCollection"]
