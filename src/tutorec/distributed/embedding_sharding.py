"""Bucketize a batch before an exchange by hand, under TorchRec's name.

tutorec's own row-wise sharding uses `tutorec._kernels.bucketize`, which takes row ranges.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tutorec.sparse.keyed_jagged import KeyedJaggedTensor

__all__ = ["bucketize_kjt_before_all2all"]


def bucketize_kjt_before_all2all(
    kjt: KeyedJaggedTensor,
    num_buckets: int,
    block_sizes: Tensor,
    total_num_blocks: Tensor | None = None,
    output_permute: bool = False,
    bucketize_pos: bool = False,
    block_bucketize_row_pos: list[Tensor] | None = None,
    keep_original_indices: bool = False,
) -> tuple[KeyedJaggedTensor, Tensor | None]:
    """Divide the ids of each bag into W buckets, bucket after bucket, as `KJTAllToAll` sends them.

    Of a feature with block size s and n blocks in all, a bucket has n / W blocks. An id below s * n
    belongs to the bucket of its block, and becomes its row there; any other, and every id where s
    is 0, to block ``id % n``, and becomes ``id // n``. Ids of a bag keep their order in each
    bucket.

    Args:
        kjt: F features.
        num_buckets: W.
        block_sizes: s of each feature ``[F]``.
        total_num_blocks: n of each feature ``[F]``, multiples of W; W by default.
        output_permute: Whether to return where each id went.
        bucketize_pos: Whether the position of an id in its bag takes the place of its weight.
        block_bucketize_row_pos: Row ranges of each feature ``[W + 1]``, which replace the blocks.
        keep_original_indices: Whether ids stay as they are.

    Returns:
        The batch of W * F features, whose keys repeat, and the position of each id in it ``[N]`` or
        None.

    Raises:
        ValueError: Features and block sizes differ in number.

    Example:
        >>> batch = KeyedJaggedTensor(
        ...     ["item"], torch.tensor([7, 1, 5]), lengths=torch.tensor([2, 1])
        ... )
        >>> in_halves, _ = bucketize_kjt_before_all2all(batch, 2, torch.tensor([4]))
        >>> in_halves.lengths().tolist(), in_halves.values().tolist()
        ([1, 0, 1, 1], [1, 3, 1])

    Source:
        TorchRec's ``bucketize_kjt_before_all2all``.
    """
    strides = kjt.stride_per_key()
    ids = kjt.values()
    lengths = kjt.lengths()
    if block_sizes.numel() != len(strides):
        raise ValueError(
            f"{block_sizes.numel()} block sizes for the {len(strides)} features {kjt.keys()}"
        )

    device = ids.device
    bag = torch.arange(lengths.numel(), device=device).repeat_interleave(
        lengths, output_size=ids.numel()
    )
    feature = torch.arange(len(strides), device=device).repeat_interleave(
        torch.tensor(kjt.length_per_key(), device=device)
    )

    if block_bucketize_row_pos is None:
        size = block_sizes.to(device, ids.dtype)[feature]
        count = torch.full_like(size, num_buckets)
        if total_num_blocks is not None:
            count = total_num_blocks.to(device, ids.dtype)[feature]
        blocks_per_bucket = count // num_buckets
        rows = (size * blocks_per_bucket).clamp(min=1)
        inside = ids < size * count
        bucket = torch.where(inside, ids // rows, ids % count // blocks_per_bucket)
        local = torch.where(inside, ids % rows, ids // count)
    else:
        starts = torch.stack(block_bucketize_row_pos).to(device, ids.dtype)[feature]
        bucket = (ids.unsqueeze(1) >= starts[:, 1:-1]).sum(1)
        local = ids - starts.gather(1, bucket.unsqueeze(1)).squeeze(1)

    cell = bucket * lengths.numel() + bag
    order = cell.argsort(stable=True)

    weights = kjt.weights_or_none()
    if bucketize_pos:
        weights = (torch.arange(ids.numel(), device=device) - kjt.offsets()[bag]).float()
    variable = kjt.variable_stride_per_key()
    bucketized = KeyedJaggedTensor._from_parts(
        kjt.keys() * num_buckets,
        (ids if keep_original_indices else local)[order],
        None if weights is None else weights[order],
        cell.bincount(minlength=num_buckets * lengths.numel()).to(lengths.dtype),
        None,
        None if variable else kjt.stride(),
        None,
        torch.tensor(strides * num_buckets, dtype=torch.int32).view(-1, 1) if variable else None,
    )
    return bucketized, order.argsort() if output_permute else None
