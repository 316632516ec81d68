"""Incremental export: the rows of growing tables that have changed since an earlier export."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

from torch import Tensor, nn

from tutorec.modules.growing import GrowingManagedCollisionModule


class ChangedRows(NamedTuple):
    """Rows of one table that training may have changed, those of this rank.

    A row is identified by its number: if its id differs from that of an earlier export, the earlier
    id has lost the row.

    Args:
        rows: Their numbers in the whole table [U].
        ids: Their raw ids [U].
        weights: Their values, copied [U, D].
        shared: Which of them are shared by ids without a row [U]; their entry in ``ids`` means
            nothing.
    """

    rows: Tensor
    ids: Tensor
    weights: Tensor
    shared: Tensor


def changed_rows(model: nn.Module, since_version: int = 0) -> tuple[int, dict[str, ChangedRows]]:
    """The changes that a parameter server or a cache needs to follow a model's growing tables.

    A row counts as changed when a training batch after ``since_version`` has looked it up, or has
    given it to an id. That is correct for optimizers that update only the rows of a batch: those in
    backward and the fused ones. Call it between training steps, after backward. On several ranks
    each has the changes of its own rows, under equal versions.

    Args:
        model: Holds collections with managed collisions, sharded or not.
        since_version: What an earlier call returned; 0 for all rows that have ever been used.

    Returns:
        The version for the next call, and table name -> its changed rows.

    Raises:
        ValueError: A mapping does not record changes.

    Example:
        >>> import torch
        >>> from tutorec.modules.embedding_configs import EmbeddingBagConfig
        >>> from tutorec.modules.embedding_modules import EmbeddingBagCollection
        >>> from tutorec.modules.mc_embedding_modules import (
        ...     ManagedCollisionEmbeddingBagCollection,
        ... )
        >>> from tutorec.modules.mc_modules import ManagedCollisionCollection
        >>> from tutorec.sparse.keyed_jagged import KeyedJaggedTensor
        >>> tables = [
        ...     EmbeddingBagConfig(100, 4, "t", feature_names=["item"], use_virtual_table=True)
        ... ]
        >>> mappings = ManagedCollisionCollection(
        ...     {"t": GrowingManagedCollisionModule(100)}, tables
        ... )
        >>> model = ManagedCollisionEmbeddingBagCollection(
        ...     EmbeddingBagCollection(tables), mappings
        ... )
        >>> def train(*ids):
        ...     model(
        ...         KeyedJaggedTensor(
        ...             ["item"], torch.tensor(ids), lengths=torch.tensor([len(ids)])
        ...         )
        ...     )
        >>> train(10**12, 10**12 + 1)
        >>> version, changes = changed_rows(model)
        >>> train(10**12 + 1, 5)
        >>> version, changes = changed_rows(model, version)
        >>> version, changes["t"].ids.tolist(), changes["t"].rows.tolist()
        (2, [1000000000001, 5], [1, 2])
    """
    versions: list[int] = []
    changes: dict[str, ChangedRows] = {}
    for module in model.modules():
        collection = cast(Any, module)
        mappings = getattr(module, "_managed_collision_collection", None)
        if mappings is None:
            continue

        weights = {
            path.split(".")[-2]: weight
            for path, weight in collection._embedding_module.named_parameters()
        }

        for table, mapping in mappings._managed_collision_modules.items():
            if not isinstance(mapping, GrowingManagedCollisionModule):
                raise ValueError(
                    f"table {table!r} has a {type(mapping).__name__}, which does not record "
                    "changes: give it a GrowingManagedCollisionModule"
                )

            version, rows, ids, shared = mapping.changed_since(since_version)
            versions.append(version)
            changes[table] = ChangedRows(
                rows + mapping.first_row, ids, weights[table].detach()[rows], shared
            )

    # A collection that has seen fewer batches is the one that sets the version: nothing of it is
    # left out.
    return min(versions, default=since_version), changes
