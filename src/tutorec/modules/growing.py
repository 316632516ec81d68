"""Tables that grow: admitted ids get rows in order, and at the cap others' rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tutorec._kernels.id_index import BYTES_PER_ID, IdIndex, IdIndices, has_index
from tutorec._kernels.unwritten import copy_written_rows, unwritten_zeros
from tutorec.modules.frequency import MOST_COUNTED, FrequencySketch
from tutorec.modules.mc_base import ManagedCollisionModule, with_values
from tutorec.modules.mc_evictions import LRU_EvictionPolicy, MCHEvictionPolicy
from tutorec.modules.row_index import RowIndex
from tutorec.sparse.hashing import mix_bits, unmix_bits
from tutorec.sparse.jagged import JaggedTensor

_OF_ROWS = ("_row_ids", "_counts", "_last_access_iter")


class GrowingManagedCollisionModule(ManagedCollisionModule):
    """Gives each id a row once it has appeared often enough; memory follows the rows in use.

    Rows are handed out in order, so that a table of ``max_rows`` rows, made with
    ``use_virtual_table=True``, takes memory for those handed out only. On a GPU it takes memory for
    all rows from the start. An id without a row reads and trains a row that such ids share. In
    training mode a batch is counted, ids are admitted, then all of its ids are remapped; in eval
    mode nothing changes.

    - Admission: an id gets a row at its ``admit_after``-th appearance, by the estimate of a
      `FrequencySketch`. The ids of a batch are admitted by falling estimate, then by rising mixed
      bits.
    - At the cap admitted ids wait for the next iteration that is a multiple of
      ``eviction_interval``. There they and the ids with rows compete by the scores of the policy;
      who has a row keeps it at equal scores.
    - An id belongs to one of ``buckets`` equal ranges of rows, by its mixed bits. Row-wise sharding
      gives each rank whole buckets, so that an id has one owner, and neither growth nor eviction
      moves a row between ranks. Of each bucket the last row is the shared one.

    ``evict()`` returns the rows that got an id, for the first time or another one: they are
    initialized by whoever holds the table, before they are looked up.

    Args:
        max_rows: R, the cap; ``num_embeddings`` of the table.
        device: Where the state lives.
        eviction_policy: Scores ids by ``counts`` and ``last_access_iter``; least recently used by
            default.
        eviction_interval: Iterations from eviction to eviction; each sorts the full buckets.
        admit_after: Appearances after which an id gets a row.
        buckets: A power of two that divides ``max_rows``; a multiple of the number of ranks.
        sketch_width: Counters of the sketch, 8 bytes each.
        output_id_range: The rows of this shard; all by default.

    Raises:
        ValueError: ``buckets`` does not divide ``max_rows``, leaves no row for an id, or cuts the
            shard's range; ``admit_after`` is more than the sketch counts.

    Example:
        >>> growing = GrowingManagedCollisionModule(max_rows=1000, admit_after=2)
        >>> def lists(*ids):
        ...     return {"t": JaggedTensor(torch.tensor(ids), lengths=torch.tensor([len(ids)]))}
        >>> growing(lists(10**15, 7, 10**15))[
        ...     "t"
        ... ].values().tolist()  # 7 shares row 999 with all others
        [0, 999, 0]
        >>> growing(lists(7, 8))["t"].values().tolist(), growing.evict().tolist()
        ([1, 999], [0, 1])
    """

    index_bytes = BYTES_PER_ID

    _row_ids: Tensor
    _counts: Tensor
    _last_access_iter: Tensor
    _used: Tensor

    def __init__(
        self,
        max_rows: int,
        device: torch.device | None = None,
        eviction_policy: MCHEvictionPolicy | None = None,
        eviction_interval: int = 1,
        admit_after: int = 1,
        buckets: int = 1,
        sketch_width: int = 1 << 16,
        output_id_range: tuple[int, int] | None = None,
    ) -> None:
        device = torch.device("cpu") if device is None else torch.device(device)
        _check_buckets(max_rows, buckets, output_id_range)
        if admit_after > MOST_COUNTED:
            raise ValueError(
                f"admit_after={admit_after}: the sketch counts to {MOST_COUNTED:,}; take no more"
            )

        per_bucket = max_rows // buckets
        boundaries = [*range(0, max_rows + 1, per_bucket)]
        super().__init__(device, boundaries)
        self._output_segments = boundaries
        self._max_rows = max_rows
        self._buckets = buckets
        self._per_bucket = per_bucket
        self._policy = eviction_policy or LRU_EvictionPolicy()
        self._interval = eviction_interval
        self._admit_after = admit_after
        self._sketch_width = sketch_width
        self.first_row, last = output_id_range or (0, max_rows)
        self._rows = last - self.first_row

        for name in _OF_ROWS:
            self.register_buffer(name, unwritten_zeros(self._rows, torch.int64, device))

        used = torch.zeros(self._rows // per_bucket, dtype=torch.int64, device=device)
        self.register_buffer("_used", used, persistent=False)
        self._index: IdIndex | RowIndex | None = None
        self._sketch = FrequencySketch(sketch_width, device)
        self._waiting: list[Tensor] = []
        self._reassigned: Tensor | None = None
        self._looked_up: tuple[Tensor, Tensor, Tensor] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """A copy makes an index of its own when it needs one."""
        return {**self.__dict__, "_index": None}

    def preprocess(self, features: dict[str, JaggedTensor]) -> dict[str, JaggedTensor]:
        """Mix the bits of the ids, reversibly."""
        return with_values(features, mix_bits)

    @torch.no_grad()
    def profile(self, features: dict[str, JaggedTensor]) -> dict[str, JaggedTensor]:
        """In training mode count the ids, admit new ones and evict."""
        if self.training:
            self._current_iter_tensor += 1
            for ids in (lists.values() for lists in features.values()):
                found = self._find(ids)
                self._looked_up = None if self._observe(*found) else found
        return features

    def evict(self) -> Tensor | None:
        """Rows [U] that have got an id since the last call, or None; they are to be initialized."""
        rows = self._reassigned
        self._reassigned = None
        return None if rows is None else rows + self.first_row

    def changed_since(self, version: int) -> tuple[int, Tensor, Tensor, Tensor]:
        """What training may have changed since a version: rows looked up, rows that got an id.

        Args:
            version: As an earlier call returned it; 0 for everything.

        Returns:
            The version now, local rows [U], their ids [U], and whether a row is a shared one,
            without an id [U].
        """
        rows = (self._last_access_iter > version).nonzero().view(-1)
        shared = rows % self._per_bucket == self._per_bucket - 1
        return int(self._current_iter_tensor), rows, unmix_bits(self._row_ids[rows]), shared

    def output_size(self) -> int:
        """R, rows of this shard."""
        return self._rows

    def input_size(self) -> int:
        """0: ids may be any number of 64 bits."""
        return 0

    def open_slots(self) -> Tensor:
        """Rows that no id has [1]."""
        return (self._per_bucket - 1 - self._used).sum().view(1)

    def validate_state(self) -> None:
        """Check that the loaded ids have rows of their buckets; they are indexed when needed."""
        boundaries = torch.tensor(self._output_segments)
        self._output_segments_tensor.fill_(-1)[: len(boundaries)] = boundaries
        rows = self._counts.nonzero().view(-1)
        buckets = rows // self._per_bucket
        place = rows % self._per_bucket
        self._used.copy_(buckets.bincount(minlength=len(self._used)))

        # A bucket hands its rows out in order, so that those with an id are its first.
        if bool(
            ((self._bucket(self._row_ids[rows]) != buckets) | (place >= self._used[buckets])).any()
        ):
            raise ValueError(
                f"the loaded state gives ids rows of other buckets than the {self._buckets} of "
                "this mapping: make it with as many buckets as the mapping that was stored"
            )

        self._index = None
        self._waiting = []
        self._reassigned = None
        self._looked_up = None

    def state_by_row(self) -> dict[str, Tensor]:
        """A copy of the state [R, ...] and the number of iterations [1]; unused rows are free."""
        state = {name: unwritten_zeros(self._rows, torch.int64, self.device) for name in _OF_ROWS}
        for name, value in state.items():
            copy_written_rows(value, self.get_buffer(name))
        return {**state, "_current_iter_tensor": self._current_iter_tensor.clone()}

    def load_state_by_row(self, state: Mapping[str, Tensor]) -> None:
        """Take up what `state_by_row` of a mapping onto the same rows gave."""
        for name in _OF_ROWS:
            copy_written_rows(self.get_buffer(name), state[name])
        self._current_iter_tensor.copy_(state["_current_iter_tensor"])
        self.validate_state()

    def rebuild_with_output_id_range(
        self,
        output_id_range: tuple[int, int],
        output_segments: list[int],
        device: torch.device | None = None,
    ) -> GrowingManagedCollisionModule:
        """The mapping of one shard's rows, with the ids that they have; from meta without ids."""
        shard = GrowingManagedCollisionModule(
            self._max_rows,
            device or self.device,
            self._policy,
            self._interval,
            self._admit_after,
            self._buckets,
            self._sketch_width,
            output_id_range,
        )
        if "meta" in (shard.device.type, self.device.type):
            return shard

        first, last = (row - self.first_row for row in output_id_range)
        state = {name: self.get_buffer(name)[first:last] for name in _OF_ROWS}
        shard.load_state_by_row({**state, "_current_iter_tensor": self._current_iter_tensor})

        return shard

    def _rows_of(self, ids: Tensor) -> Tensor:
        """Row of each id in the whole table [N]; the shared one of its bucket where it has none."""
        found = self._looked_up
        self._looked_up = None
        ids, places, misses = found if found and found[0] is ids else self._find(ids)
        self.counts.add(ids.numel(), misses)
        return self._rows_in_table(ids, places, misses)

    def _find(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Ids [N], the place of each in its bucket, the last if it has none, and how many such."""
        index = self._index
        if has_index(self._row_ids):
            if not isinstance(index, IdIndex):
                index = IdIndices([self._rows], are_mixed=True).tables[0]
                self.index_by(index)

            places = index.find(ids, self._per_bucket - 1)
        else:
            if not isinstance(index, RowIndex) or index.device != ids.device:
                self._index = index = RowIndex(self._rows, ids.device)
                index.replace(self._held(), self._row_ids)

            places = index.find(ids, self._row_ids) % self._per_bucket

        return ids, places, (places == self._per_bucket - 1).sum()

    def index_by(self, index: IdIndex) -> None:
        """Use this index on the CPU from now on. It holds places: all buckets begin with few."""
        rows = self._held()
        index.fill(self._row_ids[rows], rows % self._per_bucket)
        self._index = index

    def _held(self) -> Tensor:
        """Rows that have an id [U]."""
        firsts = range(0, self._rows, self._per_bucket)
        ranges = [
            torch.arange(one, one + used)
            for one, used in zip(firsts, self._used.tolist(), strict=True)
        ]
        return torch.cat(ranges).to(self._row_ids.device)

    def _rows_at(self, ids: Tensor, places: Tensor) -> Tensor:
        """Rows [N] of this shard, of ids [N] at these places of their buckets."""
        if self._rows == self._per_bucket:
            return places
        return self._bucket(ids) * self._per_bucket + places

    def _rows_in_table(self, ids: Tensor, places: Tensor, misses: Tensor | int) -> Tensor:
        """Rows [N] of the whole table, of what was found for ids [N]."""
        rows = self._rows_at(ids, places)
        if self.training and misses:  # these train the shared rows
            self._last_access_iter[rows[places == self._per_bucket - 1]] = self._current_iter_tensor
        return rows + self.first_row if self.first_row else rows

    def _observe(self, ids: Tensor, places: Tensor, misses: Tensor | int) -> bool:
        """Count a batch [N] that has these places [N], admit; returns whether rows were given."""
        iteration = int(self._current_iter_tensor)
        gives = False
        rows = self._rows_at(ids, places)
        known = places != self._per_bucket - 1
        of_known = rows[known] if misses else rows
        self._counts.index_add_(0, of_known, torch.ones_like(of_known))
        self._last_access_iter.index_fill_(0, of_known, iteration)
        if misses:
            unknown, counts = ids[~known].unique(return_counts=True)
            estimates = self._sketch.add(unknown, counts).long()
            admitted = estimates >= self._admit_after
            if gives := bool(admitted.any()):
                self._admit(unknown[admitted], estimates[admitted], iteration)

        if self._waiting and iteration % self._interval == 0:
            self._evict(iteration)
            return True

        return gives

    def _admit(self, ids: Tensor, counts: Tensor, iteration: int) -> None:
        """Give unassigned rows to new ids [U], in order; in a full bucket, ids wait."""
        ids, counts, buckets = self._by_bucket(ids, counts)
        ahead = torch.searchsorted(buckets, torch.arange(len(self._used), device=ids.device))
        place = self._used[buckets] + torch.arange(len(ids), device=ids.device) - ahead[buckets]
        fits = place < self._per_bucket - 1
        self._used += buckets[fits].bincount(minlength=len(self._used))
        self._give((buckets * self._per_bucket + place)[fits], ids[fits], counts[fits], iteration)
        if not fits.all():
            self._waiting.append(
                torch.stack([ids, counts, torch.full_like(ids, iteration)])[:, ~fits]
            )

    def _evict(self, iteration: int) -> None:
        """Let the ids that wait compete with those that have the rows of their buckets."""
        waiting = torch.cat(self._waiting, dim=1)
        self._waiting = []
        ids, which = waiting[0].unique(return_inverse=True)
        counts, seen = (
            torch.zeros_like(ids).scatter_reduce_(0, which, each, "amax") for each in waiting[1:]
        )
        ids, counts, buckets, seen = self._by_bucket(ids, counts, seen)

        for bucket in buckets.unique().tolist():
            new = buckets == bucket
            first = bucket * self._per_bucket
            rows = slice(first, first + self._per_bucket - 1)
            metadata = {
                "counts": torch.cat([self._counts[rows], counts[new]]),
                "last_access_iter": torch.cat([self._last_access_iter[rows], seen[new]]),
            }
            scores = self._policy.eviction_scores(iteration, metadata)
            leaving, coming = self._policy._compute_selected_eviction_and_replacement_indices(
                self._per_bucket - 1, scores
            )
            self._give(first + leaving, ids[new][coming], counts[new][coming], iteration)
            self.counts.evictions += leaving.numel()

    def _give(self, rows: Tensor, ids: Tensor, counts: Tensor, iteration: int) -> None:
        """Give rows [U] to ids [U]."""
        if not rows.numel():
            return

        before = self._row_ids[rows[self._counts[rows] > 0]]
        self._row_ids[rows] = ids
        self._counts[rows] = counts
        self._last_access_iter[rows] = iteration
        if isinstance(self._index, RowIndex):
            self._index.add(rows, self._row_ids, held=self._rows - int(self.open_slots()))
        elif self._index is not None:
            self._index.replace(before, ids, rows % self._per_bucket)

        self._reassigned = (
            rows if self._reassigned is None else torch.cat([self._reassigned, rows]).unique()
        )

    def _by_bucket(self, ids: Tensor, counts: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        """Ids, counts, buckets and others by bucket and falling count; ties keep their order."""
        order = counts.argsort(descending=True, stable=True)
        order = order[self._bucket(ids[order]).argsort(stable=True)]
        ids = ids[order]
        return (ids, counts[order], self._bucket(ids), *(other[order] for other in others))

    def _bucket(self, ids: Tensor) -> Tensor:
        """Bucket of each id, counted from this shard's first."""
        return (ids & (self._buckets - 1)) - self.first_row // self._per_bucket


class GrowingTogether:
    """Growing mappings on the CPU whose ids are looked up at once.

    Args:
        modules: Table name -> `GrowingManagedCollisionModule`.
    """

    observes = False  # before they are looked up

    def __init__(self, modules: Mapping[str, Any]) -> None:
        self._modules: list[GrowingManagedCollisionModule] = [*modules.values()]
        last = [module._per_bucket - 1 for module in self._modules]
        self._indices = IdIndices([module._rows for module in self._modules], last, are_mixed=True)
        for module, index in zip(self._modules, self._indices.tables, strict=True):
            module.index_by(index)

    @staticmethod
    def can_hold(modules: Mapping[str, nn.Module]) -> bool:
        """Whether these mappings can be looked up together instead of one by one."""
        return len({*modules.values()}) == len(modules) and all(
            type(each) is GrowingManagedCollisionModule
            and not each._forward_hooks
            and not each._forward_pre_hooks
            and has_index(vars(each)["_buffers"]["_row_ids"])
            for each in modules.values()
        )

    def holds(self, modules: Mapping[str, nn.Module]) -> bool:
        """Whether these are the mappings, and all use their part of the indices."""
        mine = zip(modules.values(), self._modules, self._indices.tables, strict=True)
        return all(module is one and one._index is index for module, one, index in mine)

    @torch.no_grad()
    def rows_of(self, ids: Tensor, counts: Sequence[int]) -> Tensor:
        """The row of each id [N]; the first ``counts[0]`` are of the first mapping, and so on."""
        ids = mix_bits(ids)
        sizes = list(counts)
        places, misses = self._indices.find(ids, sizes)
        learning = [module for module in self._modules if module.training]

        for module in learning:
            module._current_iter_tensor += 1

        if learning:
            gave = [
                module._observe(*found)
                for module, *found in self._by_table(ids, places, misses, sizes)
                if module.training
            ]
            if any(gave):
                places, misses = self._indices.find(ids, sizes)

        for module, lookups, absent in zip(self._modules, sizes, misses, strict=True):
            module.counts.add(lookups, absent)

        if not learning and all(one._max_rows == one._per_bucket for one in self._modules):
            return places

        return torch.cat(
            [
                each._rows_in_table(*found)
                for each, *found in self._by_table(ids, places, misses, sizes)
            ]
        )

    def _by_table(self, ids: Tensor, places: Tensor, misses: list[int], sizes: list[int]) -> Any:
        """Each mapping, its ids [N], their places, and how many are absent."""
        return zip(self._modules, ids.split(sizes), places.split(sizes), misses, strict=True)


def _check_buckets(max_rows: int, buckets: int, rows: tuple[int, int] | None) -> None:
    if buckets < 1 or buckets & (buckets - 1) or max_rows % buckets or max_rows < 2 * buckets:
        raise ValueError(
            f"buckets={buckets} of a table of max_rows={max_rows}: take a power of two that "
            "divides max_rows and leaves at least 2 rows in each, one of which is shared by ids "
            "without a row"
        )

    if rows is not None and (rows[0] % (max_rows // buckets) or rows[1] % (max_rows // buckets)):
        raise ValueError(
            f"rows {rows[0]} to {rows[1]} cut a bucket of {max_rows // buckets} rows: give the "
            "mapping as many buckets as there are ranks, or a power of two times as many"
        )
