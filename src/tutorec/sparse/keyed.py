"""KeyedTensor: dense columns by name, what a collection of embedding tables returns."""

import torch
from torch import Tensor
from torch.jit import is_scripting  # pyright: ignore[reportPrivateImportUsage]

from tutorec.sparse.jagged import (
    bytes_of,
    class_for,
    constructor_call,
    object_text,
    read_on_stream,
    sharing,
)
from tutorec.sparse.layout import checkable, positions, running_sum
from tutorec.sparse.refuse import require_tensors
from tutorec.sparse.validate import check_keys, check_positions, key_list


class KeyedTensor:
    """Named slices of a dense tensor: pooled embeddings ``[B, D]`` cut into columns.

    Args:
        keys: Names, distinct, in storage order.
        length_per_key: Size of each key's slice along ``key_dim``.
        values: The slices, end to end along ``key_dim``.
        key_dim: The dimension that the keys cut.
        offset_per_key: Where each slice starts, where the caller knows it.
        index_per_key: Position of each key, where the caller knows it.

    Raises:
        ValueError: The lengths do not add up to the size of ``values`` along ``key_dim``, or a key
            occurs twice.

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

    __slots__ = (
        "_index_per_key",
        "_key_dim",
        "_keys",
        "_length_per_key",
        "_offset_per_key",
        "_values",
    )

    def __init__(
        self,
        keys: list[str],
        length_per_key: list[int],
        values: Tensor,
        key_dim: int = 1,
        offset_per_key: list[int] | None = None,
        index_per_key: dict[str, int] | None = None,
    ) -> None:
        self._keys = keys
        self._length_per_key = length_per_key
        self._values = values
        self._key_dim = key_dim
        self._offset_per_key = offset_per_key
        self._index_per_key = index_per_key
        if not is_scripting():
            self._keys = key_list("KeyedTensor", keys)
            _check(self)

    @staticmethod
    @torch.jit.unused
    def _from_parts(
        keys: list[str],
        length_per_key: list[int],
        values: Tensor,
        key_dim: int = 1,
    ) -> "KeyedTensor":
        """A keyed tensor from parts that fit, unchecked; lists are kept, not copied."""
        keyed = object.__new__(
            KeyedTensor if type(values) is Tensor else class_for(KeyedTensor, values)
        )
        keyed._keys = keys
        keyed._length_per_key = length_per_key
        keyed._values = values
        keyed._key_dim = key_dim
        keyed._offset_per_key = None
        keyed._index_per_key = None
        return keyed

    @staticmethod
    def from_tensor_list(
        keys: list[str], tensors: list[Tensor], key_dim: int = 1, cat_dim: int = 1
    ) -> "KeyedTensor":
        """One keyed tensor from one tensor per key, joined along ``cat_dim``."""
        if len(keys) != len(tensors) or len(keys) == 0:
            raise ValueError(
                f"KeyedTensor.from_tensor_list: {len(keys)} keys {keys} for {len(tensors)} tensors"
            )
        if not is_scripting():
            named = {f"tensors[{index}]": tensor for index, tensor in enumerate(tensors)}
            require_tensors("KeyedTensor.from_tensor_list", named)

        sizes = [tensor.size(key_dim) for tensor in tensors]
        return KeyedTensor(keys, sizes, torch.cat(tensors, dim=cat_dim), key_dim, None, None)

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
            raise KeyError(f"KeyedTensor has no key '{key}'; its keys are {self._keys}")

        position = index[key]
        return self._values.narrow(
            self._key_dim, self.offset_per_key()[position], self._length_per_key[position]
        )

    def to_dict(self) -> dict[str, Tensor]:
        """Every slice by name: views."""
        columns: dict[str, Tensor] = {}
        if len(self._keys) == 0:
            return columns

        slices = self._values.split_with_sizes(self._length_per_key, self._key_dim)
        for position, key in enumerate(self._keys):
            columns[key] = slices[position]
        return columns

    def permute(self, indices: list[int]) -> "KeyedTensor":
        """The keyed tensor with key ``indices[i]`` at position i; keys may be left out."""
        check_positions("KeyedTensor.permute", indices, self._keys)
        slices = self._values.split_with_sizes(self._length_per_key, self._key_dim)

        keys = [self._keys[index] for index in indices]
        sizes = [self._length_per_key[index] for index in indices]
        values = self._values.narrow(self._key_dim, 0, 0)
        if len(indices) > 0:
            values = torch.cat([slices[index] for index in indices], dim=self._key_dim)
        return KeyedTensor(keys, sizes, values, self._key_dim, None, None)

    @staticmethod
    def regroup(keyed_tensors: list["KeyedTensor"], groups: list[list[str]]) -> list[Tensor]:
        """A tensor for each group of names: their slices side by side, from any of the tensors."""
        return regroup_keyed(keyed_tensors, groups)

    @staticmethod
    def regroup_as_dict(
        keyed_tensors: list["KeyedTensor"], groups: list[list[str]], keys: list[str]
    ) -> dict[str, Tensor]:
        """The groups of ``regroup`` by name."""
        if len(groups) != len(keys) or len(positions(keys)) != len(keys):
            raise ValueError(
                f"KeyedTensor.regroup_as_dict: {len(groups)} groups for {len(keys)} keys {keys}"
            )

        regrouped = regroup_keyed(keyed_tensors, groups)
        return {key: regrouped[position] for position, key in enumerate(keys)}

    def to(self, device: torch.device, non_blocking: bool = False) -> "KeyedTensor":
        """A copy on ``device``; the values themselves where they are there already."""
        values = self._values.to(device, non_blocking=non_blocking)
        return KeyedTensor(self._keys, self._length_per_key, values, self._key_dim, None, None)

    _arguments = "keys length_per_key values key_dim"
    __fx_create_arg__ = constructor_call
    record_stream = read_on_stream
    size_in_bytes = bytes_of
    __copy__ = sharing
    __repr__ = object_text

    @torch.jit.unused
    def __str__(self) -> str:
        entries: list[str] = []
        for key, columns in self.to_dict().items():
            entries.append(f'    "{key}": {columns.tolist()}')

        return "KeyedTensor({\n" + ",\n".join(entries) + "\n})\n" if entries else "KeyedTensor()\n"


def regroup_keyed(keyed_tensors: list[KeyedTensor], groups: list[list[str]]) -> list[Tensor]:
    """``KeyedTensor.regroup`` as a function: one call in a traced graph; TorchScript compiles it.

    A slice is a view, so the whole cost is one copy into each group's result. On the CPU that beats
    operators that permute columns: they first join all tensors, and copy a second time.

    Args:
        keyed_tensors: Where the keys are looked up; a key may be in one of them only.
        groups: The keys of each result, in order. A key may be used more than once; a group without
            keys gives no columns, ``[B, 0]``, so that a model whose list of features is empty needs
            no case of its own.

    Returns:
        One tensor per group, ``[B, sum of the keys' columns]``.

    Raises:
        KeyError: No keyed tensor has a key of a group.
        ValueError: Two of them have it, they cut different dimensions, or there is none to take a
            group from.

    Example:
        >>> import torch
        >>> regroup_keyed(
        ...     [KeyedTensor(["a", "b"], [1, 1], torch.tensor([[1, 2]]))], [["b", "a"]]
        ... )
        [tensor([[2, 1]])]
    """
    slices: dict[str, Tensor] = {}
    names: list[str] = []
    dims: list[int] = []
    for keyed in keyed_tensors:
        keys = keyed.keys()
        names += keys
        dims.append(keyed.key_dim())
        if len(keys) == 1:
            slices[keys[0]] = keyed.values()
        else:
            columns = keyed.values().split_with_sizes(keyed.length_per_key(), keyed.key_dim())
            for index, name in enumerate(keys):
                slices[name] = columns[index]

    if len(slices) != len(names):
        raise ValueError(
            f"regroup: a key is in more than one keyed tensor: {names}; rename it in one"
        )
    dim = dims[0] if len(dims) > 0 else 1
    if dims.count(dim) != len(dims):
        raise ValueError(f"regroup: keyed tensors cut different dimensions {dims}; use one key_dim")

    regrouped: list[Tensor] = []
    for group in groups:
        group_slices: list[Tensor] = []
        for name in group:
            if name not in slices:
                raise KeyError(
                    f"regroup: group {group} wants key '{name}', and the keyed tensors have {names}"
                )
            group_slices.append(slices[name])

        if len(group_slices) > 0:
            regrouped.append(torch.cat(group_slices, dim=dim))
        elif len(keyed_tensors) > 0:
            regrouped.append(keyed_tensors[0].values().narrow(dim, 0, 0))
        else:
            raise ValueError("regroup: a group names no key, and no keyed tensor says what B is")
    return regrouped


torch.fx.wrap("regroup_keyed")


def _check(keyed: KeyedTensor) -> None:
    """Check that keys and lengths describe the values."""
    if type(keyed._values) is not Tensor:
        require_tensors("KeyedTensor", {"values": keyed._values})
        keyed.__class__ = class_for(KeyedTensor, keyed._values)
    if not checkable(keyed._values):
        return

    keys = keyed._keys
    lengths = keyed._length_per_key
    dim = keyed._key_dim
    shape = keyed._values.shape
    if not keys and not lengths:
        return
    check_keys("KeyedTensor", keys)
    if len(lengths) != len(keys):
        raise ValueError(
            f"KeyedTensor: {len(lengths)} lengths {lengths} for {len(keys)} keys {keys}"
        )
    if not -len(shape) <= dim < len(shape):
        raise ValueError(
            f"KeyedTensor: key_dim {dim} is not a dimension of values of shape {list(shape)} (keys "
            f"{keys})"
        )
    if sum(lengths) != shape[dim] or min(lengths) < 0:
        raise ValueError(
            f"KeyedTensor: length_per_key {lengths} adds up to {sum(lengths)}, and values has "
            f"{shape[dim]} columns (shape {list(shape)}, key_dim {dim}) for keys {keys}; no length "
            "is negative"
        )

    starts = keyed._offset_per_key
    index = keyed._index_per_key
    if starts is not None and list(starts) != running_sum(lengths):
        raise ValueError(
            f"KeyedTensor: offset_per_key is {starts}, and length_per_key {lengths}; leave it out"
        )
    if index is not None and index != positions(keys):
        raise ValueError(
            f"KeyedTensor: index_per_key is {index}, and the keys are {keys}; leave it out"
        )
