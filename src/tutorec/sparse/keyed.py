"""KeyedTensor: dense columns by name, what a collection of embedding tables returns."""

from typing import Any

import torch
from torch import Tensor
from torch.jit import is_scripting  # pyright: ignore[reportPrivateImportUsage]

from tutorec.sparse.kjt_layout import positions, running_sum
from tutorec.sparse.printing import keyed_text
from tutorec.sparse.regroup import regroup
from tutorec.sparse.validate import check_keys, checkable, key_list, missing_key


class KeyedTensor:
    """Named slices of one dense tensor: for pooled embeddings, ``[B, D]`` cut into columns per feature.

    Args:
        keys: Names, distinct, in storage order.
        length_per_key: Size of each key's slice along ``key_dim``.
        values: The slices, end to end along ``key_dim``.
        key_dim: The dimension that the keys cut.
        offset_per_key: Where each slice starts, where the caller knows it.
        index_per_key: Position of each key, where the caller knows it.

    Raises:
        ValueError: The lengths do not add up to the size of ``values`` along ``key_dim``, or a key occurs twice.

    Example:
        >>> import torch
        >>> pooled = KeyedTensor(["item", "user"], [2, 1], torch.tensor([[1.0, 2.0, 3.0]]))
        >>> pooled["item"]
        tensor([[1., 2.]])
        >>> print(pooled, end="")
        KeyedTensor({
            "item": [[1.0, 2.0]],
            "user": [[3.0]]
        })

    See Also:
        TorchRec's ``torchrec.sparse.jagged_tensor.KeyedTensor``.
    """

    __slots__ = ("_index_per_key", "_key_dim", "_keys", "_length_per_key", "_offset_per_key", "_values")

    def __init__(
        self,
        keys: list[str],
        length_per_key: list[int],
        values: Tensor,
        key_dim: int = 1,
        offset_per_key: list[int] | None = None,
        index_per_key: dict[str, int] | None = None,
    ) -> None:
        self._keys: list[str] = keys
        self._length_per_key: list[int] = length_per_key
        self._values: Tensor = values
        self._key_dim: int = key_dim
        self._offset_per_key: list[int] | None = offset_per_key
        self._index_per_key: dict[str, int] | None = index_per_key
        if not is_scripting():
            self._keys = key_list("KeyedTensor", keys)
            _check(self)

    @staticmethod
    @torch.jit.unused
    def from_tensor_list(keys: list[str], tensors: list[Tensor], key_dim: int = 1, cat_dim: int = 1) -> "KeyedTensor":
        """One keyed tensor from one tensor per key, joined along ``cat_dim``."""
        if len(keys) != len(tensors):
            raise ValueError(f"KeyedTensor.from_tensor_list: {len(keys)} keys {keys} for {len(tensors)} tensors")
        return KeyedTensor(
            keys, [tensor.shape[key_dim] for tensor in tensors], torch.cat(tensors, dim=cat_dim), key_dim
        )

    def keys(self) -> list[str]:
        """Names, in storage order."""
        return self._keys

    def values(self) -> Tensor:
        """All slices, end to end: ``[B, D]`` for pooled embeddings."""
        return self._values

    def key_dim(self) -> int:
        """The dimension that the keys cut."""
        return self._key_dim

    def device(self) -> torch.device:
        """Where the values are."""
        return self._values.device

    def length_per_key(self) -> list[int]:
        """Size of each key's slice."""
        return self._length_per_key

    def offset_per_key(self) -> list[int]:
        """Where each key's slice starts, and the end of the last."""
        starts = self._offset_per_key
        if starts is None:
            starts = running_sum(self._length_per_key)
            self._offset_per_key = starts
        return starts

    def index_per_key(self) -> dict[str, int]:
        """Position of each key."""
        index = self._index_per_key
        if index is None:
            index = positions(self._keys)
            self._index_per_key = index
        return index

    def __getitem__(self, key: str) -> Tensor:
        """One key's slice: a view."""
        index = self.index_per_key()
        if key not in index:
            if is_scripting():
                raise KeyError(key)
            raise missing_key("KeyedTensor", key, self._keys)
        position = index[key]
        return self._values.narrow(self._key_dim, self.offset_per_key()[position], self._length_per_key[position])

    def to_dict(self) -> dict[str, Tensor]:
        """Every slice by name: views."""
        out: dict[str, Tensor] = {}
        pieces = self._values.split_with_sizes(self._length_per_key, self._key_dim)
        for position, key in enumerate(self._keys):
            out[key] = pieces[position]
        return out

    @staticmethod
    @torch.jit.unused
    def regroup(keyed_tensors: list["KeyedTensor"], groups: list[list[str]]) -> list[Tensor]:
        """One tensor for each group of names, the names' slices side by side, from whichever tensor holds them."""
        return regroup(keyed_tensors, groups)

    @staticmethod
    @torch.jit.unused
    def regroup_as_dict(
        keyed_tensors: list["KeyedTensor"], groups: list[list[str]], keys: list[str]
    ) -> dict[str, Tensor]:
        """The groups of ``regroup`` by name."""
        if len(groups) != len(keys):
            raise ValueError(f"KeyedTensor.regroup_as_dict: {len(groups)} groups for {len(keys)} keys {keys}")
        return dict(zip(keys, regroup(keyed_tensors, groups), strict=True))

    @torch.jit.unused
    def to(self, device: torch.device, non_blocking: bool = False) -> "KeyedTensor":
        """A copy on ``device``."""
        moved = self._values.to(device, non_blocking=non_blocking)
        return KeyedTensor(
            self._keys, self._length_per_key, moved, self._key_dim, self._offset_per_key, self._index_per_key
        )

    @torch.jit.unused
    def record_stream(self, stream: Any) -> None:
        """Tell the allocator that ``stream`` reads the values."""
        self._values.record_stream(stream)

    @torch.jit.unused
    def size_in_bytes(self) -> int:
        """Bytes of the values."""
        return self._values.numel() * self._values.element_size()

    @torch.jit.unused
    def __str__(self) -> str:
        return keyed_text(self.to_dict())

    @torch.jit.unused
    def __fx_create_arg__(self, tracer: Any) -> Any:
        """In a traced graph, a keyed tensor that leaves the graph is a call of its constructor."""
        parts = {
            "keys": self._keys,
            "length_per_key": self._length_per_key,
            "values": self._values,
            "key_dim": self._key_dim,
        }
        return tracer.create_node("call_function", KeyedTensor, (), tracer.create_arg(parts))


def _check(keyed: KeyedTensor) -> None:
    """Check that keys and lengths describe the values."""
    if not checkable(keyed._values):
        return
    keys, lengths, dim = keyed._keys, keyed._length_per_key, keyed._key_dim
    check_keys("KeyedTensor", keys)
    if len(lengths) != len(keys):
        raise ValueError(f"KeyedTensor: {len(lengths)} lengths {lengths} for {len(keys)} keys {keys}")
    size = keyed._values.shape[dim]
    if sum(lengths) != size:
        raise ValueError(
            f"KeyedTensor: length_per_key {lengths} adds up to {sum(lengths)}, and values has {size} columns "
            f"(shape {list(keyed._values.shape)}, key_dim {dim}) for keys {keys}"
        )
