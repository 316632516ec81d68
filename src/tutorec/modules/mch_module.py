"""MCH: a policy scores ids; the highest scores get their own row, the other ids share one row."""

# No import of annotations: TorchScript reads them from the functions.

import warnings
from collections.abc import Callable, Hashable, Mapping

import torch
from torch import Tensor

from tutorec._kernels.id_index import search_sorted_ids
from tutorec.fx.utils import is_fx_symbolic_tracing
from tutorec.modules.mc_base import with_values
from tutorec.modules.mc_evictions import MCHEvictionPolicy
from tutorec.modules.mc_index import IndexedMapping, Lookup
from tutorec.sparse.jagged import JaggedTensor, jagged_from_parts

NO_ID = torch.iinfo(torch.int64).max


class MCHManagedCollisionModule(IndexedMapping):
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

        end = output_global_offset + zch_size
        super().__init__(device, output_segments or [output_global_offset, end])
        if mch_size is not None or mch_hash_func is not None:
            warnings.warn(
                "MCHManagedCollisionModule: mch_size and mch_hash_func have no effect", stacklevel=2
            )

        self._name = name
        self._rows = zch_size
        self.first_row = output_global_offset
        self.absent_row = zch_size - 1
        self._eviction_policy = eviction_policy
        self._eviction_interval = eviction_interval
        self._input_hash_size = input_hash_size
        self._input_hash_func = input_hash_func
        self._buckets = buckets
        self.register_buffer("_mch_sorted_raw_ids", torch.full((zch_size,), NO_ID, device=device))
        self.register_buffer(
            "_mch_remapped_ids_mapping", torch.arange(output_global_offset, end, device=device)
        )

        for info in eviction_policy.metadata_info:
            if info.is_mch_metadata:
                buffer = torch.zeros(zch_size, dtype=torch.int64, device=device)
                self.register_buffer(f"_mch_{info.metadata_name}", buffer)

        self._history: list[tuple[Tensor, dict[str, Tensor]]] = []

    @property
    def is_traced_whole(self) -> bool:
        """Whether its call is one call in a traced graph; in eval mode its parts are."""
        return self.training

    def preprocess(self, features: dict[str, JaggedTensor]) -> dict[str, JaggedTensor]:
        """Raw ids -> what ``input_hash_func`` makes of them."""
        if self._input_hash_func is None:
            return features
        return with_values(features, self.hash_ids)

    def hash_ids(self, ids: Tensor) -> Tensor:
        """Raw ids -> what ``input_hash_func`` makes of them [N]."""
        if self._input_hash_func is None:
            return ids
        return self._input_hash_func(ids, self._input_hash_size)

    def observe(self, lookup: Lookup, iteration: int) -> bool:
        """Record the ids of a batch until they compete."""
        ids = lookup.ids.clone()
        metadata: dict[str, Tensor] = {}
        for info in self._eviction_policy.metadata_info:
            if info.is_history_metadata:
                metadata[info.metadata_name] = torch.empty_like(ids)

        self._eviction_policy.record_history_metadata(iteration, ids, metadata)
        self._history.append((ids, metadata))
        return False

    def compete(self, iteration: int) -> bool:
        """Every ``eviction_interval`` iterations, let the recorded ids compete for rows."""
        if iteration % self._eviction_interval:
            return False
        self._evict_by_score(iteration)
        return True

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
            return rows_by_search(features, ids, rows, self.first_row + self.absent_row)
        return with_values(features, self._rows_of)

    def open_slots(self) -> Tensor:
        """Rows that no id has, without the one that ids without a row share [1]."""
        return (self._mch_sorted_raw_ids[:-1] == NO_ID).sum().view(1)

    def reset_inference_mode(self) -> None:
        """Forget which rows were given to another id."""
        self._reassigned_rows = None

    def validate_state(self) -> None:
        """Check that stored segments begin and end where these rows do, and load the state.

        Raises:
            ValueError: They do not, or an id has two rows.
        """
        stored = self._output_segments_tensor.tolist()
        end = self.first_row + self._rows
        if not {self.first_row, end} <= set(stored):
            raise ValueError(
                f"MCHManagedCollisionModule {self._name or ''}: rows {self.first_row} to "
                f"{end} cannot be built from the stored segments "
                f"{[boundary for boundary in stored if boundary >= 0]}"
            )

        self._store_segments()
        self._history = []
        self._reassigned_rows = None
        self._sort()
        raw = self._mch_sorted_raw_ids
        twice = raw[1:][(raw[1:] == raw[:-1]) & (raw[1:] != NO_ID)]
        if len(twice):
            raise ValueError(
                f"MCHManagedCollisionModule {self._name or ''}: the loaded state gives id "
                f"{int(twice[0])} more than one row; load a state that a mapping has stored"
            )

    def state_by_row(self, first: int = 0, end: int | None = None) -> dict[str, Tensor]:
        """A copy of the state in the order of the rows; the position of an id is its row."""
        state = super().state_by_row()
        order = torch.argsort(state.pop("_mch_remapped_ids_mapping"))[first:end]
        return {
            name: value if name in self.once_per_table else value[order]
            for name, value in state.items()
        }

    @torch.no_grad()
    def load_state_by_row(self, state: Mapping[str, Tensor]) -> None:
        """Load what `state_by_row` of a mapping onto the same rows returned."""
        rows = torch.arange(self.first_row, self.first_row + self._rows)
        self._mch_remapped_ids_mapping.copy_(rows)
        super().load_state_by_row(state)

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
        return {
            info.metadata_name: self.get_buffer(f"_mch_{info.metadata_name}")
            for info in self._eviction_policy.metadata_info
            if info.is_mch_metadata
        }

    def joint_settings(self) -> Hashable | None:
        """What mappings that are looked up in one call have in common."""
        if type(self) is not MCHManagedCollisionModule:
            return None
        return self._input_hash_func, self._input_hash_size

    def stored_ids(self) -> Tensor:
        """The id of each row [R], rising; ``NO_ID`` for an open row."""
        return self._mch_sorted_raw_ids

    def indexed_rows(self) -> tuple[Tensor, Tensor]:
        """The ids that have a row [U], and their rows, counted from the first of this shard [U]."""
        occupied = (self._mch_sorted_raw_ids != NO_ID).nonzero().view(-1)
        # Frequent ids come last, and get their first slots.
        for metadata in [*self._metadata().values()][:1]:
            occupied = occupied[metadata[occupied].argsort(stable=True)]

        rows = self._mch_remapped_ids_mapping[occupied] - self.first_row
        return self._mch_sorted_raw_ids[occupied], rows

    def search(self, ids: Tensor) -> Tensor:
        """The row of each id, counted from the first of this shard [N]: a binary search."""
        rows = self._mch_remapped_ids_mapping - self.first_row
        return _search(self._mch_sorted_raw_ids, rows, ids, self.absent_row)

    def _evict_by_score(self, iteration: int) -> None:
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
            iteration, metadata, counts, inverse, threshold_mask=admitted
        )
        if admitted is not None:
            ids = ids[admitted]
            counts = counts[admitted]

        order = torch.argsort(counts, descending=True, stable=True)
        ids = ids[order]
        rows = self.look_up(ids).rows
        has_row = rows != self.absent_row

        # Where the id of each row is among the sorted ids.
        position = torch.empty_like(self._mch_remapped_ids_mapping)
        position[self._mch_remapped_ids_mapping - self.first_row] = torch.arange(
            self._rows, device=position.device
        )

        evicted, selected = policy.update_metadata_and_generate_eviction_scores(
            iteration,
            self._rows,
            order,
            counts[order],
            has_row,
            position[rows[has_row]],
            self._metadata(),
            metadata,
        )
        self._assign(evicted, ids[~has_row][selected])

    def _assign(self, positions: Tensor, ids: Tensor) -> None:
        """Give the rows at these positions of the sorted ids [U] to other ids."""
        rows = self._mch_remapped_ids_mapping[positions] - self.first_row
        evicted_ids = self._mch_sorted_raw_ids[positions]
        evicted_ids = evicted_ids[evicted_ids != NO_ID]
        self.counts.evictions = self.counts.evictions + evicted_ids.numel()
        self._mch_sorted_raw_ids[positions] = ids
        self._reassign(rows)
        self._sort()
        self.update_index(evicted_ids, ids, rows)

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
