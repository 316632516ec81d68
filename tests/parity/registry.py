"""The cases that both libraries run, and the inputs that they share.

A case takes the library's root name and returns plain values. Inputs are written out or follow from
a formula, so that no generator stands between the two runs.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable
from typing import Any, NoReturn

Case = Callable[[str], Any]
CASES: dict[str, Case] = {}


def case(function: Case) -> Case:
    """Register a case under its function's name."""
    CASES[function.__name__] = function
    return function


def of(root: str, path: str) -> Any:
    """The module of this path in the library with this root."""
    return importlib.import_module(f"{root}.{path}")


def print_and_end(results: Any) -> NoReturn:
    """Print as JSON, and end before Python takes itself down: gloo's threads may still hold
    tensors, and then abort.
    """
    print(json.dumps(results), flush=True)
    os._exit(0)


def numbers(tensor: Any) -> Any:
    return tensor.detach().double().tolist() if tensor.is_floating_point() else tensor.tolist()


def jagged(root: str, weighted: bool = False) -> Any:
    """Two features, three samples: an empty bag, a repeated id, ids that both tables have."""
    import torch

    return of(root, "sparse.jagged_tensor").KeyedJaggedTensor.from_lengths_sync(
        keys=["item", "user"],
        values=torch.tensor([7, 8, 7, 4, 5, 1, 1]),
        lengths=torch.tensor([2, 0, 1, 1, 1, 2]),
        weights=torch.tensor([0.5, 1.0, 2.0, 1.5, 1.0, 0.25, 3.0]) if weighted else None,
    )


def filled(rows: int, columns: int, first: float = 0.0) -> Any:
    """Row r, column d holds first + r + d / 10."""
    import torch

    return first + torch.arange(rows, dtype=torch.float32)[:, None] + torch.arange(columns) / 10


def collection(root: str, pooling: str = "SUM", weighted: bool = False) -> Any:
    """Two tables with known rows."""
    import torch

    configs, modules = of(root, "modules.embedding_configs"), of(root, "modules.embedding_modules")
    pool = getattr(configs.PoolingType, pooling)
    tables = [
        configs.EmbeddingBagConfig(
            name="t_item", embedding_dim=4, num_embeddings=10, feature_names=["item"], pooling=pool
        ),
        configs.EmbeddingBagConfig(
            name="t_user", embedding_dim=8, num_embeddings=6, feature_names=["user"], pooling=pool
        ),
    ]
    made = modules.EmbeddingBagCollection(
        tables=tables, is_weighted=weighted, device=torch.device("cpu")
    )
    with torch.no_grad():
        for index, bag in enumerate(made.embedding_bags.values()):
            bag.weight.copy_(filled(*bag.weight.shape, first=index))
    return made


def same_width(root: str) -> Any:
    import torch

    configs, modules = of(root, "modules.embedding_configs"), of(root, "modules.embedding_modules")
    tables = [
        configs.EmbeddingBagConfig(
            name=f"t_{f}", embedding_dim=4, num_embeddings=10, feature_names=[f]
        )
        for f in ("item", "user")
    ]
    return modules.EmbeddingBagCollection(tables=tables, device=torch.device("cpu"))
