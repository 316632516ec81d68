"""What a batch sends when its keys are dealt out to ranks tensor by tensor, and how it is rebuilt from what arrives.

An exchange that is told nothing about batches asks one for its labels, its splits and its tensors, sends slice r of
each tensor to rank r, and hands what arrives to ``dist_init``::

    dist_labels()             ["lengths", "values"]  and  "strides" with variable batch, "weights" with weights
    dist_splits([2, 1])       of each label, how many elements each rank is sent
    dist_tensors()            of each label, the tensor
    dist_init(keys, ...)      the batch of the keys that a rank got, of what all ranks have sent

``distributed.collectives.kjt.KJTAllToAll`` does the same in one round less, by packing lengths and ids together. These
are here because code written for TorchRec calls them. They are methods of `KeyedJaggedTensor`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tutorec._kernels.jagged import lengths_to_offsets
from tutorec.sparse.kjt_layout import segment_sums

if TYPE_CHECKING:
    from tutorec.sparse.keyed_jagged import KeyedJaggedTensor


@torch.jit.unused
def dist_labels(batch: KeyedJaggedTensor) -> list[str]:
    """What is sent, in the order in which it is sent."""
    labels = ["lengths", "values"]
    if batch.variable_stride_per_key():
        labels.append("strides")
    if batch.weights_or_none() is not None:
        labels.append("weights")
    return labels


@torch.jit.unused
def dist_splits(batch: KeyedJaggedTensor, key_splits: list[int]) -> list[list[int]]:
    """Of each label, how many elements each rank is sent, if rank r gets the next ``key_splits[r]`` keys.

    Raises:
        ValueError: The splits hold another number of keys than the batch.

    Example:
        >>> from tutorec.sparse.keyed_jagged import KeyedJaggedTensor
        >>> batch = KeyedJaggedTensor(["a", "b"], torch.tensor([1, 2, 3]), lengths=torch.tensor([2, 0, 1, 0]))
        >>> batch.dist_splits([1, 1])
        [[2, 2], [2, 1]]
    """
    keys = batch.keys()
    if sum(key_splits) != len(keys):
        raise ValueError(
            f"KeyedJaggedTensor.dist_splits: key_splits {key_splits} hold {sum(key_splits)} keys, and the batch has "
            f"{len(keys)}: {keys}"
        )
    ids = segment_sums(batch.length_per_key(), key_splits)
    splits = [segment_sums(batch.stride_per_key(), key_splits), ids]
    if batch.variable_stride_per_key():
        splits.append(key_splits)
    if batch.weights_or_none() is not None:
        splits.append(ids)
    return splits


@torch.jit.unused
def dist_tensors(batch: KeyedJaggedTensor) -> list[Tensor]:
    """Of each label, the tensor: lengths ``[F * B]``, values ``[N]``, strides ``[F]``, weights ``[N]``."""
    tensors = [batch.lengths(), batch.values()]
    if batch.variable_stride_per_key():
        tensors.append(torch.tensor(batch.stride_per_key(), device=batch.device()))
    weights = batch.weights_or_none()
    return tensors if weights is None else [*tensors, weights]


@torch.jit.unused
def dist_init(
    keys: list[str],
    tensors: list[Tensor],
    variable_stride_per_key: bool,
    num_workers: int,
    recat: Tensor | None,
    stride_per_rank: list[int] | None,
    stagger: int = 1,
) -> KeyedJaggedTensor:
    """The batch that arrived: F keys, the samples of all ranks.

    Args:
        keys: F keys that this rank got.
        tensors: Of each label what arrived, rank after rank.
        variable_stride_per_key: Whether strides are among them.
        num_workers: W.
        recat: Where the pieces stand in the result, as positions in what arrived: of a rank's key each ``[F * W]``; of
            a list of ids each ``[F * sum of B_r]`` where ranks differ in B. None leaves what arrived as it stands.
        stride_per_rank: B of every rank; None with variable batch.
        stagger: With variable batch, in which order ranks stand: the first of each of ``stagger`` hosts, then the
            second, ...

    Raises:
        ValueError: There are other tensors than the labels say, or ``stride_per_rank`` is missing.

    Example:
        >>> from tutorec.sparse.keyed_jagged import KeyedJaggedTensor
        >>> arrived = [torch.tensor([1, 1, 1, 0]), torch.tensor([7, 8, 9])]  # of rank 0 a: 7, b: 8; of rank 1 a: 9
        >>> batch = KeyedJaggedTensor.dist_init(["a", "b"], arrived, False, 2, torch.tensor([0, 2, 1, 3]), [1, 1])
        >>> batch["a"].values(), batch["b"].values()
        (tensor([7, 9]), tensor([8]))
    """
    from tutorec.sparse.keyed_jagged import KeyedJaggedTensor  # here: its class has this function as a method

    due = 3 if variable_stride_per_key else 2
    if len(tensors) not in (due, due + 1):
        kinds = "lengths, values, strides" if variable_stride_per_key else "lengths, values"
        raise ValueError(
            f"KeyedJaggedTensor.dist_init: {len(tensors)} tensors; pass {due} ({kinds}), or {due + 1} with weights"
        )
    lengths, values, weights = tensors[0], tensors[1], tensors[due] if len(tensors) > due else None
    strides: Tensor | None = None
    if variable_stride_per_key:
        strides = _strides(tensors[2], len(keys), num_workers, stagger)
        sizes = tensors[2]
    elif stride_per_rank is None:
        raise ValueError("KeyedJaggedTensor.dist_init: stride_per_rank is None; without strides it says B of each rank")
    else:
        sizes = _lists_of_pieces(stride_per_rank, len(keys), lengths)
    if recat is not None and lengths.numel():
        ids = lengths_to_offsets(lengths.long())[lengths_to_offsets(sizes.long())].diff()
        lengths, values = _taken(lengths, sizes, recat), _taken(values, ids, recat)
        weights = None if weights is None else _taken(weights, ids, recat)
    stride = None if stride_per_rank is None or variable_stride_per_key else sum(stride_per_rank)
    return KeyedJaggedTensor._from_parts(keys, values, weights, lengths, None, stride, None, strides).sync()


def _strides(arrived: Tensor, keys: int, ranks: int, stagger: int) -> Tensor:
    """Lists of each key and rank ``[F, W]`` on the CPU, from those of each rank and key ``[W * F]``."""
    strides = arrived.cpu().view(ranks, keys).t()
    if stagger > 1:
        strides = strides[:, torch.arange(ranks).view(stagger, -1).t().reshape(-1)]
    return strides.contiguous()


def _lists_of_pieces(stride_per_rank: list[int], keys: int, lengths: Tensor) -> Tensor:
    """How many lists move as one: all of a rank's key, or where ranks differ in B each for itself."""
    if len(set(stride_per_rank)) == 1:
        return lengths.new_full([keys * len(stride_per_rank)], stride_per_rank[0])
    return torch.ones_like(lengths)


def _taken(tensor: Tensor, sizes: Tensor, order: Tensor) -> Tensor:
    """The pieces of a tensor, ``sizes[i]`` elements each, with piece ``order[i]`` at position i."""
    sizes, order = sizes.long(), order.long()
    moved = sizes[order]
    distance = lengths_to_offsets(sizes)[:-1][order] - lengths_to_offsets(moved)[:-1]
    count = tensor.numel()
    at = torch.arange(count, device=tensor.device) + distance.repeat_interleave(moved, output_size=count)
    return tensor[at]
