"""MCH: a policy scores ids; the highest scores get their own row, the other ids share one row."""

# No import of annotations: TorchScript reads them from the functions.

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tutorec._kernels.id_index import (
    BYTES_PER_ID,
    IdIndex,
    IdIndices,
    has_index,
    search_sorted_ids,
)
from tutorec.fx.utils import is_fx_symbolic_tracing
from tutorec.modules.mc_base import JointLookup, ManagedCollisionModule, with_values
from tutorec.modules.mc_evictions import MCHEvictionPolicy
from tutorec.sparse.jagged import JaggedTensor, jagged_from_parts

NO_ID = torch.iinfo(torch.int64).max


class MCHManagedCollisionModule(ManagedCollisionModule):
    """Ids that a policy chooses have rows of their own; all other ids share the last row.

    Every ``eviction_interval`` iterations in training mode the ids seen since the last time compete
    with those that have a row; the highest scores get the R - 1 rows. An id that keeps a row keeps
    the same one. Between two such iterations, and in eval mode, the mapping does not change.

    The state: ``_mch_sorted_raw_ids`` [R], the ids that have a row, rising, and the largest int64
    for each open row; ``_mch_remapped_ids_mapping`` [R], their rows; and the policy's metadata of
    each, ``_mch_counts`` and the like [R]. Ids seen since the last competition are not part of the
    stored state.

    Args:
        zch_size: R, rows.
        device: Where the mapping is held.
        eviction_policy: Who gets a row.
        eviction_interval: Iterations between two competitions.
        input_hash_size: Ids, after ``input_hash_func``, are below this.
        input_hash_func: ``(ids [N], input_hash_size) -> ids [N]``, called first.
        mch_size: Has no effect, as in TorchRec 1.8.0.
        mch_hash_func: Has no effect.
        name: Of the table.
        output_global_offset: Number of the first row, where this is one shard of a table.
        output_segments: As of `ManagedCollisionModule`; by default all rows are one segment.
        buckets: Into how many equal parts the rows can be split between ranks.

    Raises:
        ValueError: No rows, no interval, or state that was stored in other segments.

    Example:
        >>> from tutorec.modules.mc_evictions import LFU_EvictionPolicy
        >>> mapping = MCHManagedCollisionModule(
        ...     3, torch.device("cpu"), LFU_EvictionPolicy(), eviction_interval=1
        ... )
        >>> ids = JaggedTensor(
        ...     torch.tensor([10**12, 77, 10**12, 5, 77]), lengths=torch.tensor([5])
        ... )
        >>> mapping({"item": ids})["item"].values()  # 5 was seen once, the others twice
        tensor([1, 0, 1, 2, 0])

    Source:
        TorchRec's ``torchrec.modules.mc_modules.MCHManagedCollisionModule``.
    """

    row_ids = "_mch_sorted_raw_ids"
    index_bytes = BYTES_PER_ID

    _mch_sorted_raw_ids: Tensor
    _mch_remapped_ids_mapping: Tensor

    def __init__(
        self,
        zch_size: int,
        device: torch.device,
        eviction_policy: MCHEvictionPolicy,
        eviction_interval: int,
        input_hash_size: int = 2**63 - 1,
        input_hash_func: Callable[[Tensor, int], Tensor] | None = None,
        mch_size: int | None = None,
        mch_hash_func: Callable[[Tensor, int], Tensor] | None = None,
        name: str | None = None,
        output_global_offset: int = 0,
        output_segments: list[int] | None = None,
        buckets: int = 1,
    ) -> None:
        if zch_size <= 0 or eviction_interval <= 0:
            raise ValueError(
                f"MCHManagedCollisionModule {name or ''}: zch_size={zch_size}, "
                f"eviction_interval={eviction_interval}; both must be above 0"
            )

        rows = range(output_global_offset, output_global_offset + zch_size)
        segments = [rows.start, rows.stop] if output_segments is None else output_segments
        super().__init__(device, segments)
        if mch_size is not None or mch_hash_func is not None:
            warnings.warn(
                "MCHManagedCollisionModule: mch_size and mch_hash_func have no effect", stacklevel=2
            )

        self._name = name
        self._zch_size = zch_size
        self._rows = rows
        self._output_segments = segments
        self._eviction_policy = eviction_policy
        self._eviction_interval = eviction_interval
        self._input_hash_size = input_hash_size
        self._input_hash_func = input_hash_func
        self._buckets = buckets
        self.register_buffer("_mch_sorted_raw_ids", torch.full((zch_size,), NO_ID, device=device))
        self.register_buffer(
            "_mch_remapped_ids_mapping", torch.arange(rows.start, rows.stop, device=device)
        )

        for info in eviction_policy.metadata_info:
            if info.is_mch_metadata:
                buffer = torch.zeros(zch_size, dtype=torch.int64, device=device)
                self.register_buffer(f"_mch_{info.metadata_name}", buffer)

        self._current_iter = -1
        self._history: list[tuple[Tensor, dict[str, Tensor]]] = []
        self._evicted_rows: Tensor | None = None
        self._index: IdIndex | None = None
        self._indexed_version: tuple[int, int, int] | None = None

    @property
    def is_traced_whole(self) -> bool:
        """Whether its call is one call in a traced graph; in eval mode its parts are."""
        return self.training

    def __getstate__(self) -> dict[str, Any]:
        """A copy makes an index of its own when it needs one."""
        return {**self.__dict__, "_index": None}

    def preprocess(self, features: dict[str, JaggedTensor]) -> dict[str, JaggedTensor]:
        """Raw ids -> what ``input_hash_func`` makes of them."""
        if self._input_hash_func is None:
            return features
        hashed = self._input_hash_func
        return with_values(features, lambda ids: hashed(ids, self._input_hash_size))

    @torch.no_grad()
    def profile(self, features: dict[str, JaggedTensor]) -> dict[str, JaggedTensor]:
        """In training mode record the ids; every ``eviction_interval`` batches, evict."""
        if not self.training:
            return features

        if self._current_iter < 0:
            self._current_iter = int(self._current_iter_tensor)

        self._current_iter += 1
        self._current_iter_tensor += 1
        policy = self._eviction_policy
        recorded = [info.metadata_name for info in policy.metadata_info if info.is_history_metadata]

        for lists in features.values():
            ids = lists.values().to(torch.int64, copy=True)
            metadata = {name: torch.empty_like(ids) for name in recorded}
            policy.record_history_metadata(self._current_iter, ids, metadata)
            self._history.append((ids, metadata))

        if self._current_iter % self._eviction_interval == 0:
            self._evict_by_score()

        return features

    def remap(
        self,
        features: dict[str, JaggedTensor],
        mutate_miss_lengths: bool = True,
        write_weights: Tensor | None = None,
    ) -> dict[str, JaggedTensor]:
        """Ids -> rows; the last row for an id that has none."""
        if is_fx_symbolic_tracing():
            ids = self._mch_sorted_raw_ids
            rows = self._mch_remapped_ids_mapping
            return rows_by_search(features, ids, rows, self._rows.stop - 1)
        return with_values(features, self._rows_of)

    def evict(self) -> Tensor | None:
        """Rows [U] that have been given to an id since the last call, or None."""
        rows = self._evicted_rows
        self._evicted_rows = None
        return rows

    def output_size(self) -> int:
        """R, rows."""
        return self._zch_size

    def input_size(self) -> int:
        """Ids, after ``input_hash_func``, are below this."""
        return self._input_hash_size

    def open_slots(self) -> Tensor:
        """Rows that no id has, without the one that ids without a row share [1]."""
        return (self._mch_sorted_raw_ids[:-1] == NO_ID).sum().view(1)

    def reset_inference_mode(self) -> None:
        """Forget which rows were given to another id."""
        self._evicted_rows = None

    def validate_state(self) -> None:
        """Check that stored segments begin and end where these rows do, and load the state.

        Raises:
            ValueError: They do not, or an id has two rows.
        """
        stored = self._output_segments_tensor.tolist()
        if not {self._rows.start, self._rows.stop} <= set(stored):
            raise ValueError(
                f"MCHManagedCollisionModule {self._name or ''}: rows {self._rows.start} to "
                f"{self._rows.stop} cannot be built from the stored segments "
                f"{[boundary for boundary in stored if boundary >= 0]}"
            )

        self._output_segments_tensor[: len(self._output_segments)] = torch.tensor(
            self._output_segments
        )
        self._output_segments_tensor[len(self._output_segments) :] = -1
        self._current_iter = -1
        self._history = []
        self._sort()
        raw = self._mch_sorted_raw_ids
        twice = raw[1:][(raw[1:] == raw[:-1]) & (raw[1:] != NO_ID)]
        if len(twice):
            raise ValueError(
                f"MCHManagedCollisionModule {self._name or ''}: the loaded state gives id "
                f"{int(twice[0])} more than one row; load a state that a mapping has stored"
            )

    def state_by_row(self) -> dict[str, Tensor]:
        """A copy of the state in the order of the rows; the position of an id is its row."""
        order = torch.argsort(self._mch_remapped_ids_mapping)
        state = super().state_by_row()
        del state["_mch_remapped_ids_mapping"]
        return {
            name: value if name in self.once_per_table else value[order]
            for name, value in state.items()
        }

    @torch.no_grad()
    def load_state_by_row(self, state: Mapping[str, Tensor]) -> None:
        """Load what `state_by_row` of a mapping onto the same rows returned."""
        super().load_state_by_row(state)
        self._mch_remapped_ids_mapping.copy_(torch.arange(self._rows.start, self._rows.stop))
        self._current_iter = -1
        self._history = []
        self._evicted_rows = None
        self._sort()

    def rebuild_with_output_id_range(
        self,
        output_id_range: tuple[int, int],
        output_segments: list[int],
        device: torch.device | None = None,
    ) -> "MCHManagedCollisionModule":
        """A new mapping onto the rows of one shard."""
        return type(self)(
            zch_size=output_id_range[1] - output_id_range[0],
            device=device or self.device,
            eviction_policy=self._eviction_policy,
            eviction_interval=self._eviction_interval,
            input_hash_size=self._input_hash_size,
            input_hash_func=self._input_hash_func,
            name=self._name,
            output_global_offset=output_id_range[0],
            output_segments=output_segments,
            buckets=len(output_segments) - 1,
        )

    def _metadata(self) -> dict[str, Tensor]:
        """The policy's metadata of the id of each row [R], in the order of the ids."""
        infos = self._eviction_policy.metadata_info
        return {
            info.metadata_name: getattr(self, f"_mch_{info.metadata_name}")
            for info in infos
            if info.is_mch_metadata
        }

    def _find(self, ids: Tensor) -> Tensor:
        """The row of each id [N], below 0 for an id without one."""
        sorted_ids, rows = self._ids_and_rows()
        if not has_index(sorted_ids):
            return _search(sorted_ids, rows, ids, -1)

        if self._index is None:
            self.use_index(IdIndices([self._zch_size]).tables[0])
        index = self._refresh_index()
        rows = index.find(ids)

        return torch.where(rows < 0, rows, rows + self._rows.start) if self._rows.start else rows

    def use_index(self, index: IdIndex) -> None:
        """Look ids up in this index from now on; it is filled before the next lookup."""
        self._index = index
        self._indexed_version = None

    def _refresh_index(self) -> IdIndex:
        """Fill the index again if the mapping has changed since."""
        index = self._index
        assert index is not None, "use_index comes before _refresh_index"
        version = self._mapping_version()
        if self._indexed_version == version:
            return index

        occupied = (self._mch_sorted_raw_ids != NO_ID).nonzero().view(-1)
        # Frequent ids come last, and get their first slots.
        for metadata in [*self._metadata().values()][:1]:
            occupied = occupied[metadata[occupied].argsort(stable=True)]

        rows = self._mch_remapped_ids_mapping[occupied] - self._rows.start
        index.fill(self._mch_sorted_raw_ids[occupied], rows)
        self._indexed_version = version
        return index

    def _mapping_version(self) -> tuple[int, int, int]:
        """A value that differs after each change of the mapping, from outside, too."""
        raw, rows = self._ids_and_rows()
        return raw.data_ptr(), raw._version, rows._version

    def _ids_and_rows(self) -> tuple[Tensor, Tensor]:
        """Two buffers, in a tenth of the time that attributes of a module take."""
        buffers = vars(self)["_buffers"]
        return buffers["_mch_sorted_raw_ids"], buffers["_mch_remapped_ids_mapping"]

    @torch.no_grad()
    def _rows_of(self, ids: Tensor) -> Tensor:
        """The row of each id [N]; the last one for an id that has none."""
        rows = self._find(ids.long())
        has_row = rows >= 0
        self.counts.add(len(rows), (~has_row).sum())
        return torch.where(has_row, rows, self._rows.stop - 1).to(ids.dtype)

    def _evict_by_score(self) -> None:
        """Let the recorded ids compete with the ids that have a row."""
        policy = self._eviction_policy
        history = self._history
        self._history = []
        metadata: dict[str, Tensor] = {}
        for name in history[0][1]:
            metadata[name] = torch.cat([recorded[name] for _, recorded in history])

        ids, inverse, counts = torch.unique(
            torch.cat([ids for ids, _ in history]), return_inverse=True, return_counts=True
        )
        admitted = None
        if policy._threshold_filtering_func is not None:
            admitted = policy._threshold_filtering_func(counts)[0]

        metadata = policy.coalesce_history_metadata(
            self._current_iter, metadata, counts, inverse, threshold_mask=admitted
        )
        if admitted is not None:
            ids = ids[admitted]
            counts = counts[admitted]

        order = torch.argsort(counts, descending=True, stable=True)
        ids = ids[order]
        rows = self._find(ids)
        has_row = rows >= 0

        # Where the id of each row is among the sorted ids.
        position = torch.empty_like(self._mch_remapped_ids_mapping)
        position[self._mch_remapped_ids_mapping - self._rows.start] = torch.arange(
            self._zch_size, device=position.device
        )

        evicted, selected = policy.update_metadata_and_generate_eviction_scores(
            self._current_iter,
            self._zch_size,
            order,
            counts[order],
            has_row,
            position[rows[has_row] - self._rows.start],
            self._metadata(),
            metadata,
        )
        self._assign(evicted, ids[~has_row][selected])

    def _assign(self, positions: Tensor, ids: Tensor) -> None:
        """Give the rows at these positions of the sorted ids [U] to other ids."""
        index = self._index if self._indexed_version == self._mapping_version() else None
        rows = self._mch_remapped_ids_mapping[positions]
        evicted_ids = self._mch_sorted_raw_ids[positions]
        evicted_ids = evicted_ids[evicted_ids != NO_ID]
        self.counts.evictions = self.counts.evictions + evicted_ids.numel()
        self._mch_sorted_raw_ids[positions] = ids
        if self._evicted_rows is None:
            self._evicted_rows = rows
        else:
            self._evicted_rows = torch.cat([self._evicted_rows, rows]).unique()

        self._sort()
        if index is not None:
            index.replace(evicted_ids, ids, rows - self._rows.start)
            self._indexed_version = self._mapping_version()

    def _sort(self) -> None:
        """Sort the ids, and all states of rows in the same order."""
        order = torch.argsort(self._mch_sorted_raw_ids, stable=True)
        buffers = [self._mch_sorted_raw_ids, self._mch_remapped_ids_mapping]
        for buffer in (*buffers, *self._metadata().values()):
            buffer.copy_(buffer[order])


def _search(
    sorted_ids: Tensor, rows: Tensor, ids: Tensor, absent_row: int, no_id: int = NO_ID
) -> Tensor:
    """The row of each id [N]; ``sorted_ids`` [R] are ``no_id`` where ``rows`` [R] are open."""
    remapped = search_sorted_ids(sorted_ids, rows, ids, absent_row)
    return torch.where(ids != no_id, remapped, absent_row)


@torch.fx.wrap
def rows_by_search(
    features: dict[str, JaggedTensor], sorted_ids: Tensor, rows: Tensor, absent_row: int
) -> dict[str, JaggedTensor]:
    """`MCHManagedCollisionModule.remap` in a traced graph and in TorchScript: one call.

    Args:
        features: Lists of ids, by name.
        sorted_ids: The ids that have a row, rising [R].
        rows: Their rows [R].
        absent_row: The row of all other ids.

    Returns:
        Lists of rows.
    """
    remapped: dict[str, JaggedTensor] = {}
    for name, lists in features.items():
        values = _search(sorted_ids, rows, lists.values().long(), absent_row)
        remapped[name] = jagged_from_parts(
            values.to(lists.values().dtype),
            lists.weights_or_none(),
            lists.lengths_or_none(),
            lists.offsets_or_none(),
        )

    return remapped


class JointMCHLookup(JointLookup):
    """Mappings by policy on the CPU whose ids are looked up in one call.

    Args:
        modules: Table name -> `MCHManagedCollisionModule`.
    """

    module_type = MCHManagedCollisionModule
    ids_buffer = "_mch_sorted_raw_ids"

    def __init__(self, modules: Mapping[str, Any]) -> None:
        self._modules: list[MCHManagedCollisionModule] = [*modules.values()]
        super().__init__(modules, IdIndices([module.output_size() for module in self._modules]))
        self._first_rows = torch.tensor([module._rows.start for module in self._modules])
        self._are_shards = bool(self._first_rows.any())

    @property
    def observes(self) -> bool:
        """Whether the mappings are given the ids one by one before they are looked up."""
        return any(
            module.training or module._input_hash_func is not None for module in self._modules
        )

    @torch.no_grad()
    def rows(self, ids: Tensor, counts: Sequence[int]) -> Tensor:
        """The row of each id [N]; the first ``counts[0]`` are of the first mapping, and so on."""
        for module in self._modules:
            module._refresh_index()

        rows, misses = self._indices.find(ids.long(), counts)
        if self._are_shards:
            rows += self._first_rows.repeat_interleave(torch.tensor(counts))

        for module, count, absent in zip(self._modules, counts, misses, strict=True):
            module.counts.add(count, absent)

        return rows
