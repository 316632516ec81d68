"""Packed rows read in plain torch: the numbers of a row, and the lookup of all tables of a group.

Every function runs on any device, compiles under ``torch.jit.script`` and exports with dynamic
numbers of ids and samples. Numbers are summed in float32, as fbgemm's operators do.
"""

import torch
from torch import Tensor

from tutorec._kernels.pooling import bag_weights

__all__ = [
    "assert_rows",
    "check_rows",
    "numbers_of_rows",
    "packed_lookup",
    "split_codes",
    "sqrtn_weights",
]


def numbers_of_rows(packed: Tensor, bits: int, columns: int) -> Tensor:
    """Packed rows [R, row_bytes] -> the numbers in them, float32 [R, columns].

    Args:
        packed: Rows in the layout of ``packed_layout``.
        bits: Of one column: 32, 16, 8, 4 or 2.
        columns: How many to read.

    Example:
        >>> import torch
        >>> row = torch.tensor([[0.5, -1.0]], dtype=torch.float16).view(
        ...     torch.uint8
        ... )  # scale and bias
        >>> numbers_of_rows(
        ...     torch.cat([row, torch.tensor([[2, 4]], dtype=torch.uint8)], 1),
        ...     bits=8,
        ...     columns=2,
        ... ).tolist()
        [[0.0, 1.0]]
    """
    if bits == 32:
        return _first_bytes(packed, 4 * columns, torch.float32)
    if bits == 16:
        return _first_bytes(packed, 2 * columns, torch.float16).float()

    scale_bias = _first_bytes(packed, 4, torch.float16).float()
    per_byte = 8 // bits
    payload = packed[:, 4 : 4 + (columns + per_byte - 1) // per_byte]
    if bits < 8:
        payload = split_codes(payload, bits)[:, :columns]
    return torch.addcmul(scale_bias[:, 1:], payload.float(), scale_bias[:, :1])


def split_codes(payload: Tensor, bits: int) -> Tensor:
    """Bytes [R, B] -> the codes of 4 or 2 bits in them; the first is in the lowest bits.

    Example:
        >>> split_codes(torch.tensor([[0b1110_0100]], dtype=torch.uint8), bits=2)
        tensor([[0, 1, 2, 3]], dtype=torch.uint8)
    """
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=payload.device)
    codes = torch.bitwise_right_shift(payload.unsqueeze(2), shifts).bitwise_and((1 << bits) - 1)
    return codes.flatten(1)


def _first_bytes(packed: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    """The first bytes of each row as numbers; a copy, as TorchScript cannot view another dtype.

    ``contiguous()`` in place of ``clone`` would fix in an exported graph whether there is one row
    or many.
    """
    return torch.view_copy(
        packed[:, :size].clone(memory_format=torch.contiguous_format), dtype=dtype
    )


def packed_lookup(
    flat: Tensor,
    places: Tensor,
    blocks: list[list[int]],
    indices: Tensor,
    offsets: Tensor,
    pooling: str,
    weights: Tensor | None,
) -> Tensor:
    """Rows of all features, pooled [B, sum of D] or one by one [N, D].

    Args:
        flat: The bytes of all tables.
        places: For each feature where its table begins in ``flat`` [F].
        blocks: For each run of neighbouring features of one kind: how many, bits, columns, bytes of
            a row.
        indices: Ids [N], feature by feature.
        offsets: Where each bag begins and the last one ends [F*B+1].
        pooling: ``"sum"``, ``"mean"`` or ``"none"``.
        weights: One for each id [N], or None.

    Example:
        >>> import torch
        >>> flat = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]).view(
        ...     torch.uint8
        ... )  # two tables [2, 2] in fp32
        >>> ids, offsets = torch.tensor([0, 1, 1]), torch.tensor([0, 2, 3])
        >>> packed_lookup(
        ...     flat, torch.tensor([0, 16]), [[2, 32, 2, 8]], ids, offsets, "sum", None
        ... ).tolist()
        [[4.0, 6.0, 7.0, 8.0]]
    """
    features = places.shape[0]
    lengths = offsets.diff()
    batch = lengths.shape[0] // features
    count = indices.shape[0]
    bags = torch.arange(lengths.shape[0], device=indices.device)
    bags = bags.repeat_interleave(lengths, output_size=count)
    starts = places.index_select(0, bags // batch)

    outputs: list[Tensor] = []
    first = 0
    for in_block, bits, columns, row_bytes in blocks:
        low = first * batch
        high = (first + in_block) * batch
        first += in_block
        own_ids = indices
        own_starts = starts
        own_bags = bags
        own_weights = weights
        if in_block != features:
            own = ((bags >= low) & (bags < high)).nonzero().squeeze(1)
            own_ids = indices.index_select(0, own)
            own_starts = starts.index_select(0, own)
            own_bags = bags.index_select(0, own)
            if weights is not None:
                own_weights = weights.index_select(0, own)

        # Tables begin anywhere, so that there is no one matrix of rows; but rows begin at every
        # fourth byte at most.
        packed = flat[:0].view(0, row_bytes)
        if flat.shape[0] >= row_bytes:
            packed = flat.unfold(0, row_bytes, 4)
        packed = packed.index_select(0, (own_starts + own_ids.long() * row_bytes) // 4)
        rows = numbers_of_rows(packed, bits, columns)

        if own_weights is not None:
            rows = rows * own_weights.float().unsqueeze(1)
        if pooling != "none":
            # Bag f * B + b is row b * F + f of the sums, so that a sample's sums are neighbours.
            own_rows = own_bags % batch * in_block + (own_bags - low) // batch
            pooled = rows.new_zeros([batch * in_block, columns]).index_add(0, own_rows, rows)
            if pooling == "mean":
                row = torch.arange(batch * in_block, device=flat.device)
                counts = lengths.index_select(0, low + row % in_block * batch + row // in_block)
                pooled = pooled / counts.clamp(min=1).unsqueeze(1)
            rows = pooled.view(batch, in_block * columns)
        outputs.append(rows)

    if len(outputs) == 1:
        return outputs[0]
    return torch.cat(outputs, dim=0 if pooling == "none" else 1)


def check_rows(rows: list[int], names: list[str], indices: Tensor, offsets: Tensor) -> Tensor:
    """The ids, after a check that each is a row of the table that its feature reads.

    Args:
        rows: R of each feature's table [F].
        names: Of these tables [F].
        indices: Ids [N], feature by feature.
        offsets: Where each bag begins and the last one ends [F*B+1].

    Raises:
        ValueError: An id is negative or not below R; under ``torch.jit.script`` its text is in a
            ``torch.jit.Error``.

    Example:
        >>> import torch
        >>> check_rows([4], ["items"], torch.tensor([3, 4]), torch.tensor([0, 2]))
        Traceback (most recent call last):
            ...
        ValueError: table 'items' has 4 rows (ids 0 to 3), and the batch holds id 4; ...
    """
    features = len(rows)
    batch = (offsets.shape[0] - 1) // max(features, 1)

    for feature in range(features):
        own = indices[int(offsets[feature * batch]) : int(offsets[(feature + 1) * batch])]
        if own.numel() > 0:
            low = int(own.min())
            high = int(own.max())
            if low < 0 or high >= rows[feature]:
                raise ValueError(
                    f"table '{names[feature]}' has {rows[feature]} rows (ids 0 to "
                    f"{rows[feature] - 1}), and the batch holds id {low if low < 0 else high}; "
                    "hash ids to the table's rows, or make it larger"
                )
    return indices


def assert_rows(last_rows: Tensor, indices: Tensor, offsets: Tensor) -> None:
    """The same check for exported graphs, in which the assertion stays; no number is read.

    Args:
        last_rows: R - 1 of each feature's table [F].
        indices: Ids [N], feature by feature.
        offsets: Where each bag begins and the last one ends [F*B+1].

    Example:
        >>> import torch
        >>> assert_rows(torch.tensor([3]), torch.tensor([3, 0]), torch.tensor([0, 2]))
    """
    lengths = offsets.diff()
    bags = torch.arange(lengths.shape[0], device=indices.device)
    bags = bags.repeat_interleave(lengths, output_size=indices.shape[0])

    # By index: to repeat each table's number B times would tell a graph that B is not 1.
    limits = last_rows.index_select(0, bags // (lengths.shape[0] // last_rows.shape[0]))
    inside = ((indices >= 0) & (indices <= limits)).all()
    torch.ops.aten._assert_async(inside, "an id is not a row of the table of its feature")


def sqrtn_weights(indices: Tensor, offsets: Tensor, weights: Tensor | None) -> Tensor:
    """Weights with which a sum over bags is the pooling ``"sqrtn"`` [N].

    Args:
        indices: Ids [N].
        offsets: Where each bag begins and the last one ends [L+1].
        weights: One for each id [N], or None.

    Example:
        >>> import torch
        >>> sqrtn_weights(torch.tensor([5, 6, 7, 8]), torch.tensor([0, 4]), None)
        tensor([0.5000, 0.5000, 0.5000, 0.5000])
    """
    factors = bag_weights("sqrtn", offsets, weights, indices.shape[0])
    assert factors is not None, "this pooling weighs every id"
    return factors
