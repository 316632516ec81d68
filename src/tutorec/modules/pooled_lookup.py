"""Pooled lookup of all tables of a collection in one call, and their updates in backward.

``EmbeddingBagCollection.forward`` calls ``pool_at_once`` first, and looks table by table if it
returns None.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter, itemgetter

import torch
from torch import Tensor, nn

from tutorec._kernels.pooling import bag_weights
from tutorec._kernels.scattered_tables import address_tables
from tutorec._kernels.specs import PoolingKind
from tutorec._kernels.tbe_layout import PooledBatch, select_features
from tutorec.optim.updating_lookup import is_updated_in_backward, look_up
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor

# Mapped over the bags of every batch: a loop would cost more than a small lookup.
_parameters = attrgetter("_parameters")
_HOOKS = tuple(map(attrgetter, ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")))
_own_weight = itemgetter("weight")
_PLAIN = {nn.EmbeddingBag}
# One call runs on one thread, a call per table on all threads. Calling, waking the threads and
# waiting for them takes as long as looking up this many ids of 64 columns (30 us and 20 ns, 2
# cores).
_IDS_PER_CALL = 1500


@dataclass(frozen=True)
class PooledLookups:
    """The lookups of a collection, one entry per result.

    Attributes:
        features: Name of the feature.
        tables: Index of the table, ascending.
        poolings: How bags are pooled.
        weighted: Whether each id carries a weight.
    """

    features: tuple[str, ...]
    tables: tuple[int, ...]
    poolings: tuple[PoolingKind, ...]
    weighted: bool

    @cached_property
    def one_pooling(self) -> PoolingKind | None:
        """The pooling of all results, or None if they differ."""
        return self.poolings[0] if len(set(self.poolings)) == 1 else None

    @cached_property
    def keys(self) -> list[str]:
        """The distinct features."""
        return list(dict.fromkeys(self.features))


def pool_at_once(
    features: KeyedJaggedTensor, bags: nn.ModuleDict, lookups: PooledLookups
) -> Tensor | None:
    """Pooled rows of all tables [B, D], or None if one call per table is needed or faster.

    One call avoids the overhead of the others, which dominates for a small batch. It runs on one
    thread and has no gradient, so it is used without grad, and for tables that an optimizer updates
    in backward.

    Args:
        features: The batch, with checked ids.
        bags: The tables.
        lookups: The lookups of the collection.

    Returns:
        Pooled rows in float32. float16 rows are also summed in float32, unlike table by table.
    """
    if torch.compiler.is_compiling() or type(features) is not KeyedJaggedTensor:
        return None  # traced: a graph contains the calls table by table
    tables = _weights_of(bags)
    if tables is None or type(features.values()) is not Tensor:
        return None

    updated = [is_updated_in_backward(table) for table in tables]
    weights = features.weights_or_none() if lookups.weighted else None
    trains_weights = torch.is_grad_enabled() and weights is not None and weights.requires_grad
    if any(updated):
        at_once = all(updated) and not trains_weights and _one_call(tables, lookups)
        batch = _batch_in_order(features, lookups) if at_once else None
        return (
            _pool_by_feature(features, bags, tables, lookups)
            if batch is None
            else look_up(tables, [batch])[0]
        )

    if trains_weights or (torch.is_grad_enabled() and any(table.requires_grad for table in tables)):
        return None
    if tables[0].is_cpu and not _one_call_pays(len(lookups.features), features.values().numel()):
        return None
    scattered = address_tables(tables, lookups.tables)
    batch = None if scattered is None else _batch_in_order(features, lookups)
    return None if batch is None or scattered is None else scattered.pool(batch)


def _one_call(tables: Sequence[Tensor], lookups: PooledLookups) -> bool:
    """Whether tables that backward updates are looked up at once: on a GPU only by fbgemm."""
    return tables[0].is_cpu or address_tables(tables, lookups.tables) is not None


def _one_call_pays(features: int, ids: int) -> bool:
    """Whether one call on one thread is faster than a parallel call per feature."""
    threads = torch.get_num_threads()
    return ids * (threads - 1) <= features * threads * _IDS_PER_CALL


def side_by_side(
    features: KeyedJaggedTensor, lookups: PooledLookups, pooled: Sequence[Tensor]
) -> Tensor:
    """Concatenate each feature's pooled rows to [B, D].

    For a variable batch, pooled bags are expanded to samples by ``inverse_indices``.

    Args:
        features: The batch.
        lookups: The lookups of the collection.
        pooled: One tensor per result.

    Raises:
        KeyError: The inverse indices lack a feature.
        ValueError: Features have different numbers of samples, and there are no inverse indices.
    """
    if isinstance(features, torch.fx.Proxy):
        return torch.cat(list(pooled), dim=1)
    if not pooled:
        return torch.empty(features.stride(), 0, dtype=torch.float32, device=features.device())
    variable = features.variable_stride_per_key()
    return join_samples(lookups.features, pooled, features.inverse_indices_or_none(), variable)


def join_samples(
    features: Sequence[str],
    pooled: Sequence[Tensor],
    inverse_indices: tuple[list[str], Tensor] | None,
    variable: bool,
) -> Tensor:
    """Expand the pooled bags of each result to samples, and concatenate them to [B, D].

    Args:
        features: The feature of each result.
        pooled: [bags, D] of each result.
        inverse_indices: Keys, and the stored bag of each sample [F, B]; None if bags are samples.
        variable: Whether features may have different numbers of bags.

    Raises:
        KeyError: The inverse indices lack a feature.
        ValueError: Features have different numbers of samples, and there are no inverse indices.

    Example:
        >>> pooled = [torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0]])]
        >>> join_samples(
        ...     ["a", "b"], pooled, (["a", "b"], torch.tensor([[1, 0], [0, 0]])), variable=True
        ... ).tolist()
        [[2.0, 3.0], [1.0, 3.0]]
    """
    if inverse_indices is not None and inverse_indices[1].numel():
        return process_pooled_embeddings(pooled, reorder_inverse_indices(inverse_indices, features))

    if variable:
        samples = {name: rows.shape[0] for name, rows in zip(features, pooled, strict=True)}
        if len(set(samples.values())) > 1:
            raise ValueError(
                f"features have different numbers of samples, {samples}, so that their pooled rows "
                "do not stand side by side; build the batch with inverse_indices, which say which "
                "of a feature's lists each sample means"
            )
    return torch.cat(list(pooled), dim=1)


def reorder_inverse_indices(
    inverse_indices: tuple[list[str], Tensor] | None, feature_names: Sequence[str]
) -> Tensor:
    """The rows of inverse indices in the order of the results.

    Args:
        inverse_indices: Keys, and the stored bag of each sample [F, B]; None for a batch without
            them.
        feature_names: The feature of each result, or its name ``feature@table``.

    Returns:
        [results, B]; an empty tensor for a batch without inverse indices.

    Raises:
        KeyError: The inverse indices lack a feature.

    Example:
        >>> reorder_inverse_indices(
        ...     (["a", "b"], torch.tensor([[1, 0], [0, 2]])), ["b@t1", "a", "b@t2"]
        ... ).tolist()
        [[0, 2], [1, 0], [0, 2]]

    See Also:
        TorchRec's ``torchrec.modules.embedding_modules.reorder_inverse_indices``.
    """
    if inverse_indices is None:
        return torch.empty(0)

    keys, indices = inverse_indices
    positions = {key: position for position, key in enumerate(keys)}
    names = [name.partition("@")[0] for name in feature_names]
    missing = [name for name in dict.fromkeys(names) if name not in positions]
    if missing:
        raise KeyError(f"inverse_indices lack the features {missing}; they have {keys}")
    return indices[[positions[name] for name in names]]


def process_pooled_embeddings(
    pooled_embeddings: Sequence[Tensor], inverse_indices: Tensor
) -> Tensor:
    """Expand the pooled bags of each result to samples, and concatenate them to [B, D].

    Args:
        pooled_embeddings: [bags, D] of each result.
        inverse_indices: The stored bag of each sample [results, B]; empty if bags are samples.

    Example:
        >>> pooled = [torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0]])]
        >>> process_pooled_embeddings(pooled, torch.tensor([[1, 0], [0, 0]])).tolist()
        [[2.0, 3.0], [1.0, 3.0]]

    See Also:
        TorchRec's ``torchrec.modules.embedding_modules.process_pooled_embeddings``.
    """
    pooled = list(pooled_embeddings)
    if inverse_indices.numel():
        pooled = [
            rows.index_select(0, row)
            for rows, row in zip(pooled, inverse_indices.unbind(0), strict=True)
        ]
    return torch.cat(pooled, dim=1)


def _weights_of(bags: nn.ModuleDict) -> list[Tensor] | None:
    """The tables [R, D]; None if a bag was replaced or has hooks, which one call would skip."""
    modules = bags._modules.values()
    if set(map(type, modules)) != _PLAIN or any([any(map(hooks, modules)) for hooks in _HOOKS]):
        return None
    try:
        return list(map(_own_weight, map(_parameters, modules)))
    except KeyError:  # the weight is computed, for example by pruning
        return None


def _batch_in_order(features: KeyedJaggedTensor, lookups: PooledLookups) -> PooledBatch | None:
    """The batch, feature by feature in table order.

    None if one call cannot pool it: features differ in pooling or in their number of samples.
    """
    pooling = lookups.one_pooling
    if (
        pooling is None
        or features.variable_stride_per_key()
        or features.inverse_indices_or_none() is not None
    ):
        return None

    values = features.values()
    offsets = features.offsets()
    weights = features.weights_or_none() if lookups.weighted else None
    keys = features.keys()
    if tuple(keys) != lookups.features:
        index: Mapping[str, int] = features.index_per_key()
        order = [index[name] for name in lookups.features]
        values, offsets, weights = select_features(values, offsets, weights, order, len(keys))

    weights = bag_weights(pooling, offsets, weights, values.numel())
    return PooledBatch(values, offsets, weights, pooling == "mean", lookups.tables)


def _pool_by_feature(
    features: KeyedJaggedTensor,
    bags: nn.ModuleDict,
    tables: Sequence[Tensor],
    lookups: PooledLookups,
) -> Tensor:
    """Pooled rows [B, D]; backward updates tables with an optimizer, others get gradients."""
    lists = features.to_dict()
    modules = [*bags.values()]
    pooled: list[Tensor | None] = []
    batches: list[PooledBatch] = []

    for name, table, pooling in zip(
        lookups.features, lookups.tables, lookups.poolings, strict=True
    ):
        entry = lists[name]
        weights = bag_weights(
            pooling,
            entry.offsets(),
            entry.weights() if lookups.weighted else None,
            entry.values().numel(),
        )
        if is_updated_in_backward(tables[table]):
            batches.append(
                PooledBatch(entry.values(), entry.offsets(), weights, pooling == "mean", (table,))
            )
            pooled.append(None)
        else:
            weights = None if weights is None else weights.to(tables[table].dtype)
            pooled.append(modules[table](entry.values(), entry.offsets(), weights).float())

    moved = iter(look_up(tables, batches))
    return side_by_side(
        features, lookups, [next(moved) if entry is None else entry for entry in pooled]
    )
