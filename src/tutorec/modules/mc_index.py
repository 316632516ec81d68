"""Mappings whose ids are found by an index: a mapping alone, or all of a collection in one call.

The index is derived from the state of a mapping and follows its changes; it is never saved. It is
an `IdIndex` on the CPU, and the search of the mapping itself on other devices.
"""

# No import of annotations: TorchScript reads them from the functions.

from abc import abstractmethod
from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import starmap
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor, nn

from tutorec._kernels.id_index import BYTES_PER_ID, IdIndex, IdIndices, has_index
from tutorec.modules.mc_base import ManagedCollisionModule
from tutorec.sparse.jagged import JaggedTensor


class Lookup(NamedTuple):
    """Ids that were looked up in one mapping.

    Args:
        ids: Preprocessed ids [N].
        rows: What the index has for each [N]; ``absent_row`` of the mapping without a row.
        misses: How many ids have no row.
        table: The table, where a collection looks up.
    """

    ids: Tensor
    rows: Tensor
    misses: Tensor | int
    table: str = ""


class IndexedMapping(ManagedCollisionModule):
    """A mapping that looks ids up in an index of its state. A base class.

    In training mode a batch is looked up, ``learn`` observes it and may give rows to other ids, and
    then the batch is looked up again if any were.

    Attributes:
        are_ids_mixed: Whether ``preprocess`` mixes the bits of ids.
        absent_row: What the index has for an id without a row.
    """

    index_bytes = BYTES_PER_ID
    are_ids_mixed: ClassVar[bool] = False

    absent_row: int
    _rows: int
    _input_hash_size: int = 0
    _index: IdIndex | None = None
    _indexed_version: tuple[int, int] | None = None
    _last_lookup: Lookup | None = None

    def __getstate__(self) -> dict[str, Any]:
        """A copy makes an index of its own when it needs one."""
        return {**self.__dict__, "_index": None, "_last_lookup": None}

    def output_size(self) -> int:
        """R, rows of this shard."""
        return self._rows

    def input_size(self) -> int:
        """Raw ids, after ``preprocess``, are below this; 0 without a bound."""
        return self._input_hash_size

    @abstractmethod
    def stored_ids(self) -> Tensor:
        """The state with the id of each row."""

    @abstractmethod
    def indexed_rows(self) -> tuple[Tensor, Tensor]:
        """The ids that have a row [U], and what the index is to have for each [U]."""

    def search(self, ids: Tensor) -> Tensor:
        """What the index would have for each id [N], on a device that has none."""
        raise NotImplementedError(f"a {type(self).__name__} is looked up on the CPU only")

    def hash_ids(self, ids: Tensor) -> Tensor:
        """Raw ids -> the ids that are mapped [N]."""
        return ids

    def joint_settings(self) -> Hashable | None:
        """What mappings that are looked up in one call have in common; None: not in one call."""
        return None

    def needs_table_rows(self) -> bool:
        """Whether ``table_rows`` does something."""
        return self.first_row > 0

    def table_rows(self, lookup: Lookup) -> Tensor:
        """The row of each id in the whole table [N]."""
        return lookup.rows + self.first_row if self.first_row else lookup.rows

    @staticmethod
    def joint_table_rows(modules: Sequence["IndexedMapping"], lookups: Sequence[Lookup]) -> Tensor:
        """``table_rows`` of several mappings, one after the other [N]."""
        tables = zip(modules, lookups, strict=True)
        return torch.cat([module.table_rows(lookup) for module, lookup in tables])

    def observe(self, lookup: Lookup, iteration: int) -> bool:
        """Record the ids of a batch; returns whether the rows of ids have changed."""
        raise NotImplementedError(f"a {type(self).__name__} learns in another way")

    def compete(self, iteration: int) -> bool:
        """At its interval, let ids compete for rows; returns whether they did."""
        return False

    @torch.no_grad()
    def profile(self, features: dict[str, JaggedTensor]) -> dict[str, JaggedTensor]:
        """In training mode observe a batch and update the mapping; ids do not change."""
        if self.training:
            self.learn(self.look_up(lists.values()) for lists in features.values())
        return features

    def learn(self, lookups: Iterable[Lookup]) -> bool:
        """Observe the lists of one batch; returns whether the rows of ids have changed."""
        self._current_iter_tensor += 1
        iteration = int(self._current_iter_tensor)
        changed = False
        for lookup in lookups:
            changed |= self.observe(lookup, iteration)
            self._last_lookup = lookup

        changed |= self.compete(iteration)
        if changed:
            self._last_lookup = None

        return changed

    @torch.no_grad()
    def _rows_of(self, ids: Tensor) -> Tensor:
        lookup = self._last_lookup
        self._last_lookup = None
        if lookup is None or lookup.ids is not ids:
            lookup = self.look_up(ids)

        self.count(ids.numel(), lookup.misses)
        return self.table_rows(lookup).to(ids.dtype)

    def count(self, lookups: int, misses: Tensor | int) -> None:
        """Count the ids of a batch for the report."""
        self.counts.add(lookups, misses)

    def look_up(self, ids: Tensor) -> Lookup:
        """Look up preprocessed ids [N] in this mapping alone."""
        ids = ids.long()
        if has_index(self.stored_ids()):
            if self._index is None:
                indices = IdIndices([self.output_size()], are_mixed=self.are_ids_mixed)
                self.use_index(indices.tables[0])
            rows = self.refresh_index().find(ids, self.absent_row)
        else:
            self._index = None
            rows = self.search(ids)

        return Lookup(ids, rows, (rows == self.absent_row).sum())

    def use_index(self, index: IdIndex) -> None:
        """Look ids up in this index from now on; it is filled before the next lookup."""
        self._index = index
        self._indexed_version = None

    def refresh_index(self) -> IdIndex:
        """The index, filled again if the state was changed from outside."""
        index = self._index
        assert index is not None, "use_index comes before refresh_index"
        version = self._state_version()
        if self._indexed_version != version:
            index.fill(*self.indexed_rows())
            self._indexed_version = version

        return index

    def update_index(self, evicted_ids: Tensor, ids: Tensor, rows: Tensor) -> None:
        """After a change of the state replace ids [L] by ids [U] with their rows [U]."""
        if self._index is not None:
            self._index.replace(evicted_ids, ids, rows)
            self._indexed_version = self._state_version()

    def _state_version(self) -> tuple[int, int]:
        """A value that differs after each change of the stored ids, from outside, too."""
        ids = self.stored_ids()
        return ids.data_ptr(), ids._version


class JointLookup:
    """The mappings of a collection on the CPU, whose ids are looked up in one call.

    The indices of all mappings are parts of one `IdIndices`; each mapping keeps its own part up to
    date.

    Args:
        modules: Table name -> mapping; `joint_lookup` says whether they can be looked up so.
    """

    def __init__(self, modules: Mapping[str, IndexedMapping]) -> None:
        self._names = [*modules]
        self._modules = [*modules.values()]
        self._indices = IdIndices(
            [module.output_size() for module in self._modules],
            [module.absent_row for module in self._modules],
            self._modules[0].are_ids_mixed,
        )
        for module, index in zip(self._modules, self._indices.tables, strict=True):
            module.use_index(index)

    def is_in_use(self) -> bool:
        """Whether all mappings use their part of the indices."""
        tables = zip(self._modules, self._indices.tables, strict=True)
        return all(module._index is index for module, index in tables)

    @torch.no_grad()
    def rows(self, ids: Tensor, counts: Sequence[int], is_preprocessed: bool = False) -> Tensor:
        """The row of each id [N]; the first ``counts[0]`` are of the first mapping, and so on.

        In training mode the mappings learn first.
        """
        for module in self._modules:
            module.refresh_index()

        hashed = ids if is_preprocessed else self._modules[0].hash_ids(ids)
        ids = hashed.long()
        rows, misses = self._indices.find(ids, counts)
        if self._modules[0].training:
            changed = False
            lookups = self._by_table(ids, rows, counts, misses)
            for module, lookup in zip(self._modules, lookups, strict=True):
                changed |= module.learn([lookup])
            if changed:
                rows, misses = self._indices.find(ids, counts)

        for module, count, absent in zip(self._modules, counts, misses, strict=True):
            module.count(count, absent)

        if any(module.needs_table_rows() for module in self._modules):
            lookups = self._by_table(ids, rows, counts, misses)
            rows = self._modules[0].joint_table_rows(self._modules, lookups)

        return rows.to(hashed.dtype)

    def _by_table(
        self, ids: Tensor, rows: Tensor, counts: Sequence[int], misses: Sequence[int]
    ) -> list[Lookup]:
        """The lookups of the tables, ``counts`` ids each."""
        counts = list(counts)
        tables = zip(ids.split(counts), rows.split(counts), misses, self._names, strict=True)
        return list(starmap(Lookup, tables))


def joint_lookup(
    modules: Mapping[str, ManagedCollisionModule | None], earlier: JointLookup | None
) -> JointLookup | None:
    """The lookup of these mappings in one call; None if they are looked up one by one.

    Args:
        modules: Table name -> mapping, or None.
        earlier: That of an earlier batch of these mappings, which is used again.
    """
    distinct = {*modules.values()}
    settings = {_settings(module) for module in distinct}
    if len(distinct) < len(modules) or len(settings) != 1 or None in settings:
        return None
    if earlier is not None and earlier.is_in_use():
        return earlier
    return JointLookup(cast(Mapping[str, IndexedMapping], modules))


def _settings(module: nn.Module | None) -> Hashable | None:
    """What mappings that are looked up in one call have in common; None: not in one call."""
    if not isinstance(module, IndexedMapping):
        return None
    if module._forward_hooks or module._forward_pre_hooks or not has_index(module.stored_ids()):
        return None

    settings = module.joint_settings()
    return None if settings is None else (type(module), module.training, settings)
