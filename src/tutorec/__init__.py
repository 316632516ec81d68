"""tutorec: distributed embeddings that run anywhere, under TorchRec's names.

The names below are loaded when they are first used, so that ``import tutorec`` costs hardly more
than ``import torch``. Code moves to and from TorchRec by changing one word: ``torchrec.X`` is
``tutorec.X``.
"""

from typing import TYPE_CHECKING

from tutorec._lazy import lazy_package

__version__ = "0.1.0"

if TYPE_CHECKING:
    from tutorec import datasets as datasets
    from tutorec import distributed as distributed
    from tutorec import errors as errors
    from tutorec import fx as fx
    from tutorec import inference as inference
    from tutorec import models as models
    from tutorec import modules as modules
    from tutorec import optim as optim
    from tutorec import quant as quant
    from tutorec import sparse as sparse
    from tutorec import spmd as spmd
    from tutorec import streamable as streamable
    from tutorec import teach as teach
    from tutorec import test_utils as test_utils
    from tutorec import types as types
    from tutorec._doctor import doctor as doctor
    from tutorec._validation import validation as validation
    from tutorec._validation import validation_enabled as validation_enabled
    from tutorec.modules.embedding_collection import EmbeddingCollection as EmbeddingCollection
    from tutorec.modules.embedding_configs import BaseEmbeddingConfig as BaseEmbeddingConfig
    from tutorec.modules.embedding_configs import EmbeddingBagConfig as EmbeddingBagConfig
    from tutorec.modules.embedding_configs import EmbeddingConfig as EmbeddingConfig
    from tutorec.modules.embedding_configs import PoolingType as PoolingType
    from tutorec.modules.embedding_modules import EmbeddingBagCollection as EmbeddingBagCollection
    from tutorec.modules.embedding_modules import (
        EmbeddingBagCollectionInterface as EmbeddingBagCollectionInterface,
    )
    from tutorec.quant.whole_model import quantize as quantize
    from tutorec.sparse.jagged import JaggedTensor as JaggedTensor
    from tutorec.sparse.keyed import KeyedTensor as KeyedTensor
    from tutorec.sparse.keyed_jagged import KeyedJaggedTensor as KeyedJaggedTensor
    from tutorec.sparse.lists import kjt_from_lists as kjt_from_lists
    from tutorec.sparse.lists import kjt_to_lists as kjt_to_lists
    from tutorec.sparse.lists import kjt_weights_to_lists as kjt_weights_to_lists
    from tutorec.spmd import Ranks as Ranks
    from tutorec.spmd import run_ranks as run_ranks
    from tutorec.streamable import Multistreamable as Multistreamable
    from tutorec.streamable import Pipelineable as Pipelineable
    from tutorec.types import DataType as DataType

_DEFINED_IN = {
    "BaseEmbeddingConfig": ".modules.embedding_configs",
    "DataType": ".types",
    "EmbeddingBagCollection": ".modules.embedding_modules",
    "EmbeddingBagCollectionInterface": ".modules.embedding_modules",
    "EmbeddingBagConfig": ".modules.embedding_configs",
    "EmbeddingCollection": ".modules.embedding_collection",
    "EmbeddingConfig": ".modules.embedding_configs",
    "JaggedTensor": ".sparse.jagged",
    "KeyedJaggedTensor": ".sparse.keyed_jagged",
    "KeyedTensor": ".sparse.keyed",
    "Multistreamable": ".streamable",
    "Pipelineable": ".streamable",
    "PoolingType": ".modules.embedding_configs",
    "Ranks": ".spmd",
    "doctor": "._doctor",
    "kjt_from_lists": ".sparse.lists",
    "kjt_to_lists": ".sparse.lists",
    "kjt_weights_to_lists": ".sparse.lists",
    "quantize": ".quant.whole_model",
    "run_ranks": ".spmd",
    "validation": "._validation",
    "validation_enabled": "._validation",
}

__all__ = [
    "BaseEmbeddingConfig",
    "DataType",
    "EmbeddingBagCollection",
    "EmbeddingBagCollectionInterface",
    "EmbeddingBagConfig",
    "EmbeddingCollection",
    "EmbeddingConfig",
    "JaggedTensor",
    "KeyedJaggedTensor",
    "KeyedTensor",
    "Multistreamable",
    "Pipelineable",
    "PoolingType",
    "Ranks",
    "doctor",
    "kjt_from_lists",
    "kjt_to_lists",
    "kjt_weights_to_lists",
    "quantize",
    "run_ranks",
    "validation",
    "validation_enabled",
]

__getattr__, __dir__ = lazy_package(__name__, _DEFINED_IN)
