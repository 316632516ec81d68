"""All tables of a collection at once: one call where it is faster, and the updates that backward makes.

``EmbeddingBagCollection.forward`` asks ``pool_at_once`` first and goes table by table where it gets None.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter, itemgetter

import torch
from torch import Tensor, nn

from tutorec._kernels.pooling import PoolingKind, bag_weights
from tutorec._kernels.scattered_tables import address_tables
from tutorec._kernels.tbe_layout import PooledBatch, select_features
from tutorec.optim.updating_lookup import is_updated_in_backward, look_up
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor

# Mapped over the bags of every batch, in which a loop would cost more than a small lookup.
_parameters = attrgetter("_parameters")
_HOOKS = tuple(map(attrgetter, ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks")))
_own_weight = itemgetter("weight")
_PLAIN = {nn.EmbeddingBag}
# The CPU lookup runs on one thread, a call per table on all of them. Calling, waking the threads and waiting for them
# costs about what the lookup of so many ids of 64 columns does (30 us and 20 ns, 2 cores).
_IDS_PER_CALL = 1500


@dataclass(frozen=True)
class PooledLookups:
    """What a collection looks up, one entry for each result.

    Attributes:
        features: Name of the feature.
        tables: Index of the table, rising.
        poolings: How a bag becomes one row.
        weighted: Whether each id carries a weight.
    """

    features: tuple[str, ...]
    tables: tuple[int, ...]
    poolings: tuple[PoolingKind, ...]
    weighted: bool

    @cached_property
    def one_pooling(self) -> PoolingKind | None:
        """The pooling of all results, or None where they differ."""
        return self.poolings[0] if len(set(self.poolings)) == 1 else None

    @cached_property
    def keys(self) -> list[str]:
        """The features, each once."""
        return list(dict.fromkeys(self.features))


def pool_at_once(features: KeyedJaggedTensor, bags: nn.ModuleDict, lookups: PooledLookups) -> Tensor | None:
    """Pooled rows of all tables side by side [B, D], or None where one call for each table is wanted.

    One call saves the cost of the others, which is most of a small batch; but it runs on one thread, and it has no
    gradient. So it is made without grad, and for tables that an optimizer updates in backward.

    Args:
        features: The batch, its ids checked.
        bags: The tables.
        lookups: Who reads which table.

    Returns:
        Pooled rows in float32. With float16 tables they are summed in float32, which table by table they are not.
    """
    if torch.compiler.is_compiling() or type(features) is not KeyedJaggedTensor:
        return None  # traced: what the graph is to hold are the calls table by table
    tables = _weights_of(bags)
    if tables is None or type(features.values()) is not Tensor:
        return None
    updated = [is_updated_in_backward(table) for table in tables]
    weights = features.weights_or_none() if lookups.weighted else None
    trains_weights = torch.is_grad_enabled() and weights is not None and weights.requires_grad
    if any(updated):
        whole = all(updated) and not trains_weights and tables[0].is_cpu
        batch = _batch_in_order(features, lookups) if whole else None
        return _pool_by_feature(features, bags, tables, lookups) if batch is None else look_up(tables, [batch])[0]
    if trains_weights or (torch.is_grad_enabled() and any(table.requires_grad for table in tables)):
        return None
    if not _one_call_pays(len(lookups.features), features.values().numel()):
        return None
    scattered = address_tables(tables, lookups.tables)  # None on a device, where the order of a batch is a sync point
    batch = None if scattered is None else _batch_in_order(features, lookups)
    return None if batch is None or scattered is None else scattered.pool(batch)


def _one_call_pays(features: int, ids: int) -> bool:
    """Whether one call for all features, on one thread, is faster than one parallel call for each."""
    threads = torch.get_num_threads()
    return ids * (threads - 1) <= features * threads * _IDS_PER_CALL


def side_by_side(features: KeyedJaggedTensor, lookups: PooledLookups, pooled: Sequence[Tensor]) -> Tensor:
    """Each feature's pooled rows as columns of one tensor [B, D].

    With a variable batch each feature has pooled lists of its own; ``inverse_indices`` say which of them each sample
    means.

    Args:
        features: The batch.
        lookups: Who reads which table.
        pooled: One tensor for each result.

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
    """The pooled lists of each result -> the pooled rows of each sample, side by side [B, D].

    Args:
        features: The feature of each result.
        pooled: [lists, D] of each result.
        inverse_indices: Keys, and which list each sample means [F, B]; None where lists are samples.
        variable: Whether features may have different numbers of lists.

    Raises:
        KeyError: The inverse indices lack a feature.
        ValueError: Features have different numbers of samples, and there are no inverse indices.

    Example:
        >>> pooled = [torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0]])]
        >>> join_samples(["a", "b"], pooled, (["a", "b"], torch.tensor([[1, 0], [0, 0]])), variable=True).tolist()
        [[2.0, 3.0], [1.0, 3.0]]
    """
    if inverse_indices is not None and inverse_indices[1].numel():
        return process_pooled_embeddings(pooled, reorder_inverse_indices(inverse_indices, features))
    if variable:
        samples = {name: one.shape[0] for name, one in zip(features, pooled, strict=True)}
        if len(set(samples.values())) > 1:
            raise ValueError(
                f"features have different numbers of samples, {samples}, so that their pooled rows do not stand side "
                "by side; build the batch with inverse_indices, which say which of a feature's lists each sample means"
            )
    return torch.cat(list(pooled), dim=1)


def reorder_inverse_indices(inverse_indices: tuple[list[str], Tensor] | None, feature_names: Sequence[str]) -> Tensor:
    """The rows of inverse indices in the order of the results that they belong to.

    Args:
        inverse_indices: Keys, and which of a key's lists each sample means [F, B]; None for a batch without them.
        feature_names: The feature of each result, or its name ``feature@table``.

    Returns:
        [results, B]; an empty tensor for a batch without inverse indices.

    Raises:
        KeyError: The inverse indices lack a feature.

    Example:
        >>> reorder_inverse_indices((["a", "b"], torch.tensor([[1, 0], [0, 2]])), ["b@t1", "a", "b@t2"]).tolist()
        [[0, 2], [1, 0], [0, 2]]

    See Also:
        TorchRec's ``torchrec.modules.embedding_modules.reorder_inverse_indices``.
    """
    if inverse_indices is None:
        return torch.empty(0)
    keys, indices = inverse_indices
    places = {key: place for place, key in enumerate(keys)}
    names = [name.partition("@")[0] for name in feature_names]
    missing = [name for name in dict.fromkeys(names) if name not in places]
    if missing:
        raise KeyError(f"inverse_indices lack the features {missing}; they have {keys}")
    return indices[[places[name] for name in names]]


def process_pooled_embeddings(pooled_embeddings: Sequence[Tensor], inverse_indices: Tensor) -> Tensor:
    """The pooled lists of each result -> the pooled rows of each sample, side by side [B, D].

    Args:
        pooled_embeddings: [lists, D] of each result.
        inverse_indices: Which list each sample means [results, B]; empty where lists are samples.

    Example:
        >>> pooled = [torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0]])]
        >>> process_pooled_embeddings(pooled, torch.tensor([[1, 0], [0, 0]])).tolist()
        [[2.0, 3.0], [1.0, 3.0]]

    See Also:
        TorchRec's ``torchrec.modules.embedding_modules.process_pooled_embeddings``.
    """
    pooled = list(pooled_embeddings)
    if inverse_indices.numel():
        pooled = [one.index_select(0, row) for one, row in zip(pooled, inverse_indices.unbind(0), strict=True)]
    return torch.cat(pooled, dim=1)


def _weights_of(bags: nn.ModuleDict) -> list[Tensor] | None:
    """The tables [R, D]; None where a bag was replaced or has hooks, which a call for all tables would pass over."""
    modules = bags._modules.values()
    if set(map(type, modules)) != _PLAIN or any([any(map(hooks, modules)) for hooks in _HOOKS]):
        return None
    try:
        return list(map(_own_weight, map(_parameters, modules)))
    except KeyError:  # the weight is computed, as by pruning
        return None


def _batch_in_order(features: KeyedJaggedTensor, lookups: PooledLookups) -> PooledBatch | None:
    """The batch, feature by feature as the tables read them.

    None where one call cannot pool it: features differ in their pooling or in their number of samples.
    """
    pooling = lookups.one_pooling
    if pooling is None or features.variable_stride_per_key() or features.inverse_indices_or_none() is not None:
        return None
    values, offsets = features.values(), features.offsets()
    weights = features.weights_or_none() if lookups.weighted else None
    keys = features.keys()
    if len(keys) != len(lookups.features) or tuple(keys) != lookups.features:
        index: Mapping[str, int] = features.index_per_key()
        order = [index[name] for name in lookups.features]
        values, offsets, weights = select_features(values, offsets, weights, order, len(keys))
    weights = bag_weights(pooling, offsets, weights, values.numel())
    return PooledBatch(values, offsets, weights, pooling == "mean", lookups.tables)


def _pool_by_feature(
    features: KeyedJaggedTensor, bags: nn.ModuleDict, tables: Sequence[Tensor], lookups: PooledLookups
) -> Tensor:
    """Pooled rows [B, D]; backward updates the tables that have an optimizer, and gives the others their gradients."""
    lists, modules = features.to_dict(), [*bags.values()]
    pooled: list[Tensor | None] = []
    batches: list[PooledBatch] = []
    for name, table, pooling in zip(lookups.features, lookups.tables, lookups.poolings, strict=True):
        one = lists[name]
        weights = bag_weights(pooling, one.offsets(), one.weights() if lookups.weighted else None, one.values().numel())
        if is_updated_in_backward(tables[table]):
            batches.append(PooledBatch(one.values(), one.offsets(), weights, pooling == "mean", (table,)))
            pooled.append(None)
        else:
            weights = None if weights is None else weights.to(tables[table].dtype)
            pooled.append(modules[table](one.values(), one.offsets(), weights).float())
    moved = iter(look_up(tables, batches))
    return side_by_side(features, lookups, [next(moved) if one is None else one for one in pooled])
