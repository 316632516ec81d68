"""Checks of ids against table rows: one pass over the ids, and a search only after it fails.

On another device than the CPU nothing is read here: the check runs there, and what it finds is
raised later (see ``deferred.py``). A model that is traced, scripted, exported or compiled has
no ids yet. A traced or scripted graph contains the check as a call, and an exported graph an
assertion for each feature. A compiled graph has the lookup only, whose operator checks bounds
itself on the CPU (aten's ``embedding_bag``).
"""

import warnings
from collections.abc import Sequence
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor, nn

from tutorec.sparse.deferred import FeatureRows, check_ids_on_device, raise_deferred_id_errors
from tutorec.sparse.graph_ids import assert_ids, leave_check
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor
from tutorec.sparse.layout import checkable, starts_of_keys
from tutorec.sparse.refuse import refuse_batch

# The dtypes of ids, and those in which the same bytes are numbers without a sign.
_UNSIGNED = {torch.int64: np.uint64, torch.int32: np.uint32}
_FEW_IDS = 64
# Collections that have warned that they do not use weights. Python's filter would show the warning
# at each step: it forgets what it has shown when filters change, as they do around some kernels.
_warned: WeakSet[nn.Module] = WeakSet()


def check_ids(
    features: KeyedJaggedTensor,
    feature_rows: FeatureRows,
    weighted: bool | None = None,
    tables: nn.Module | None = None,
) -> KeyedJaggedTensor:
    """Check, before any lookup, that each id is a row of the tables of its feature.

    One pass finds the largest id of the batch. Only if that is not a row of the smallest table, a
    second pass finds the largest id of each feature, and only if one of those is not a row of its
    table, the error is searched. A pooled collection that is not weighted ignores a batch's
    weights, and warns of it once. On another device than the CPU the error may be about an earlier
    batch. Ids on the meta device are refused unless the tables are there too.

    Args:
        features: The batch.
        feature_rows: One entry for each table of each feature: feature, table, rows R of the table.
        weighted: Whether the tables want a weight for each id; None where nothing is pooled, so
            that weights, if there are any, are the caller's own.
        tables: The collection that asks.

    Returns:
        The batch to look up: the same one, or on another device than the CPU one with 0 in place of
        wrong ids, which are told of later.

    Raises:
        KeyError: A feature is not in the batch.
        TypeError: ``features`` is not a KeyedJaggedTensor.
        ValueError: An id is not an integer from 0 to R - 1, weights are missing, lengths are wrong.

    Example:
        >>> import torch
        >>> batch = KeyedJaggedTensor(
        ...     ["item"], torch.tensor([3, 9]), lengths=torch.tensor([1, 1])
        ... )
        >>> check_ids(batch, [("item", "items", 8)])
        Traceback (most recent call last):
            ...
        ValueError: table 'items' has 8 rows (ids 0 to 7), and feature 'item', sample 1, ...
    """
    if isinstance(features, torch.fx.Proxy):
        leave_check(features, feature_rows)
        return features
    if not hasattr(features, "stride_per_key"):
        refuse_batch("a collection of tables", features)
    keys = features.keys()
    known = features.index_per_key()
    values = features.values()
    weights = features.weights_or_none()
    for feature, table, _ in feature_rows:
        if feature not in known:
            raise KeyError(
                f"the batch has no feature {feature!r}, which table {table!r} reads; its keys are "
                f"{list(keys)}"
            )
    if weighted is not None:
        check_weights(features, weighted, tables)

    if not checkable(values) or not feature_rows:
        if type(values) is Tensor and values.is_meta:
            _check_meta(keys, tables)
        elif feature_rows and torch.compiler.is_exporting():
            assert_ids(features, feature_rows)
        return features

    if values.dtype not in _UNSIGNED:
        raise ValueError(
            "ids must be int32 or int64 to be looked up, and the batch's values are "
            f"{values.dtype} (features {keys}); convert them: values.long()"
        )
    used_weights = weights if weighted else None
    if values.dim() != 1 or (used_weights is not None and used_weights.dim() != 1):
        shapes = [list(values.shape)]
        if used_weights is not None:
            shapes.append(list(used_weights.shape))
        raise ValueError(
            "ids to be looked up are one list, [N], one after the other, and the batch's values "
            f"have shape {' and weights '.join(map(str, shapes))}"
        )

    if not values.is_cpu:
        # To ask for events of a stream whose work is captured would end the capture.
        if not (values.is_cuda and torch.cuda.is_current_stream_capturing()):
            raise_deferred_id_errors(block=False)
        samples = features.stride_per_key()
        safe_ids = check_ids_on_device(values, features.offsets(), keys, samples, feature_rows)
        return features if safe_ids is values else features._with_ids(safe_ids, weights)

    features._check_numbers(count=False)
    if values.numel() == 0:
        return features

    fewest_rows = min([rows for _, _, rows in feature_rows])
    if values.numel() <= _FEW_IDS:  # in Python in half the time
        numbers = values.tolist()
        fit = min(numbers) >= 0 and max(numbers) < fewest_rows
    else:
        fit = np.maximum.reduce(_without_sign(values)) < fewest_rows
    if not fit:
        _check_each_feature(features, feature_rows)
    return features


def check_weights(
    features: KeyedJaggedTensor, weighted: bool | None, tables: nn.Module | None
) -> None:
    """Check that a batch has weights where they are needed; warn once where they are not used.

    Args:
        features: The batch.
        weighted: As for ``check_ids``.
        tables: The collection that asks.

    Raises:
        ValueError: Weights are missing.
    """
    has_weights = features.weights_or_none() is not None
    keys = list(features.keys())
    if weighted and not has_weights:
        raise ValueError(
            f"a weighted collection needs one weight per id, and the batch (keys {keys}) has no "
            "weights; build it with weights=, or make the collection with is_weighted=False"
        )
    if weighted is False and has_weights and tables is not None and tables not in _warned:
        _warned.add(tables)
        warnings.warn(
            f"{type(tables).__name__}: the batch (keys {keys}) has weights, and the collection is "
            "not weighted: it does not look at them. Make it with is_weighted=True, or the batch "
            "without weights=; this is said once",
            stacklevel=4,
        )


def _check_meta(keys: Sequence[str], tables: nn.Module | None) -> None:
    """Refuse ids without values for tables with them: the lookup would read unwritten memory."""
    if tables is None:
        return

    for tensor in (*tables.parameters(), *tables.buffers()):
        if not tensor.is_meta:
            raise ValueError(
                f"the batch (keys {list(keys)}) is on meta and the tables are on {tensor.device}: "
                "use one device, a batch with numbers, or tables that were made with device='meta'"
            )


def _without_sign(ids: Tensor) -> np.ndarray:
    """Ids [N], read so that a negative one is larger than any row."""
    return ids.numpy().view(_UNSIGNED[ids.dtype])


def _check_each_feature(features: KeyedJaggedTensor, feature_rows: FeatureRows) -> None:
    """Compare the largest id of each feature with the rows of its tables."""
    offsets = features.offsets()
    samples = features.stride_per_key()
    bounds = starts_of_keys(offsets, samples).numpy()
    filled = np.flatnonzero(bounds[:-1] < bounds[1:])
    ids = _without_sign(features.values())
    largest = dict(zip(filled.tolist(), np.maximum.reduceat(ids, bounds[filled]), strict=True))

    index = features.index_per_key()
    for feature, _, rows in feature_rows:
        if largest.get(index[feature], 0) >= rows:
            check_ids_on_device(features.values(), offsets, features.keys(), samples, feature_rows)
            raise_deferred_id_errors()  # finds the first such id, and raises
