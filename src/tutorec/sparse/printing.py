"""The printed forms of the jagged types: one list per sample, as the documents show them."""

from itertools import pairwise

from torch import Tensor


def _row_text(values: Tensor) -> str:
    if values.dim() > 2:
        raise ValueError(f"only values of one or two dimensions can be printed, got shape {list(values.shape)}")
    return str(values.tolist())


def lists_text(values: Tensor, offsets: Tensor, start: int, end: int) -> str:
    """Lists ``start`` to ``end`` of a jagged tensor as text.

    Args:
        values: ``[N]`` or ``[N, D]``.
        offsets: ``[L + 1]``.
        start: First list.
        end: One past the last list.

    Returns:
        The lists, such as ``[[1, 2], [], [3]]``.
    """
    bounds: list[int] = offsets[start : end + 1].tolist()
    lists = [_row_text(values[low:high]) for low, high in pairwise(bounds)]
    return "[" + ", ".join(lists) + "]"


def object_text(what: object) -> str:
    """What Python shows for an object: the class by the path that users import it from, and an address."""
    return f"<tutorec.sparse.jagged_tensor.{type(what).__name__} object at {hex(id(what))}>"


def jagged_text(values: Tensor, weights: Tensor | None, offsets: Tensor) -> str:
    """The printed form of a JaggedTensor."""
    samples = offsets.numel() - 1
    text = lists_text(values, offsets, 0, samples)
    if weights is None:
        return "JaggedTensor({\n    " + text + "\n})\n"
    weights_text = lists_text(weights, offsets, 0, samples)
    return f'JaggedTensor({{\n    "values": {text},\n    "weights": {weights_text}\n}})\n'


def keyed_jagged_text(
    keys: list[str], values: Tensor, weights: Tensor | None, offsets: Tensor, bounds: list[int]
) -> str:
    """The printed form of a KeyedJaggedTensor.

    Args:
        keys: F feature names.
        values: ``[N]``.
        weights: ``[N]`` or None.
        offsets: ``[F * B + 1]``.
        bounds: Where each key's lists start, and the end of the last.

    Returns:
        One line per key, three with weights.
    """
    if not keys:
        return "KeyedJaggedTensor()\n"
    entries = []
    for key, (start, end) in zip(keys, pairwise(bounds), strict=True):
        text = lists_text(values, offsets, start, end)
        if weights is not None:
            weights_text = lists_text(weights, offsets, start, end)
            text = f'{{\n        "values": {text},\n        "weights": {weights_text}\n    }}'
        entries.append(f'    "{key}": {text}')
    return "KeyedJaggedTensor({\n" + ",\n".join(entries) + "\n})\n"


def keyed_text(entries: dict[str, Tensor]) -> str:
    """The printed form of a KeyedTensor."""
    if not entries:
        return "KeyedTensor()\n"
    rows = [f'    "{key}": [' + ", ".join(_row_text(row) for row in value) + "]" for key, value in entries.items()]
    return "KeyedTensor({\n" + ",\n".join(rows) + "\n})\n"
