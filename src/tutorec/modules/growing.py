"""Growing tables: admitted ids get rows in order; at the cap they compete for assigned rows."""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from tutorec._kernels.id_index import search_sorted_ids
from tutorec._kernels.memory import unwritten_zeros
from tutorec.modules.frequency import MOST_COUNTED, FrequencySketch
from tutorec.modules.mc_base import with_values
from tutorec.modules.mc_evictions import LRU_EvictionPolicy, MCHEvictionPolicy
from tutorec.modules.mc_index import IndexedMapping, Lookup
from tutorec.sparse.hashing import mix_bits, unmix_bits
from tutorec.sparse.jagged import JaggedTensor


class GrowingManagedCollisionModule(IndexedMapping):
    """Gives each id a row once it has appeared often enough; memory follows the rows in use.

    Rows are assigned in order, so that a table of ``max_rows`` rows, built with
    ``use_virtual_table=True``, takes memory for the assigned rows only. On a GPU it takes memory
    for all rows from the start. An id without a row reads and trains a row that such ids share. In
    training mode a batch is counted, ids are admitted, then all of its ids are remapped; in eval
    mode nothing changes.

    - Admission: an id gets a row at its ``admit_after``-th appearance, by the estimate of a
      `FrequencySketch`. The ids of a batch are admitted by falling estimate, then by rising mixed
      bits.
    - At the cap admitted ids wait for the next iteration that is a multiple of
      ``eviction_interval``. There they and the ids with rows compete by the scores of the policy;
      at equal scores an id keeps its row.
    - An id belongs to one of ``buckets`` equal ranges of rows, by its mixed bits. Row-wise sharding
      gives each rank whole buckets, so that an id has one owner, and neither growth nor eviction
      moves a row between ranks. Of each bucket the last row is the shared one.

    ``evict()`` returns the rows that got an id, for the first time or another one: the owner of the
    table initializes them before they are looked up.

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

    are_ids_mixed = True

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
        self._max_rows = max_rows
        self._buckets = buckets
        self._per_bucket = per_bucket
        self.absent_row = per_bucket - 1
        self._policy = eviction_policy or LRU_EvictionPolicy()
        self._interval = eviction_interval
        self._admit_after = admit_after
        self._sketch_width = sketch_width
        self.first_row, last = output_id_range or (0, max_rows)
        self._rows = last - self.first_row

        for name in ("_row_ids", "_counts", "_last_access_iter"):
            self.register_buffer(name, unwritten_zeros(self._rows, torch.int64, device))

        used = torch.zeros(self._rows // per_bucket, dtype=torch.int64, device=device)
        self.register_buffer("_used", used, persistent=False)
        self._sketch = FrequencySketch(sketch_width, device)
        self._waiting: list[Tensor] = []
        self._sorted_rows: tuple[Tensor, Tensor] | None = None

    def preprocess(self, features: dict[str, JaggedTensor]) -> dict[str, JaggedTensor]:
        """Mix the bits of the ids, reversibly."""
        return with_values(features, self.hash_ids)

    def hash_ids(self, ids: Tensor) -> Tensor:
        """Mix the bits of the ids, reversibly."""
        return mix_bits(ids)

    def changed_since(self, version: int) -> tuple[int, Tensor, Tensor, Tensor]:
        """Rows that training may have changed since a version: looked up, or assigned to an id.

        Args:
            version: As an earlier call returned it; 0 for everything.

        Returns:
            The version now, local rows [U], their ids [U], and whether a row is a shared one,
            without an id [U].
        """
        rows = (self._last_access_iter > version).nonzero().view(-1)
        shared = rows % self._per_bucket == self._per_bucket - 1
        return int(self._current_iter_tensor), rows, unmix_bits(self._row_ids[rows]), shared

    def open_slots(self) -> Tensor:
        """Rows that no id has [1]."""
        return (self._per_bucket - 1 - self._used).sum().view(1)

    def validate_state(self) -> None:
        """Check that the loaded ids have rows of their buckets; they are indexed when looked up."""
        self._store_segments()
        rows = self._counts.nonzero().view(-1)
        buckets = rows // self._per_bucket
        self._used.copy_(buckets.bincount(minlength=len(self._used)))

        # A bucket assigns its rows in order, so that those with an id are its first.
        is_misplaced = self._bucket(self._row_ids[rows]) != buckets
        is_misplaced |= rows % self._per_bucket >= self._used[buckets]
        if bool(is_misplaced.any()):
            raise ValueError(
                f"the loaded state gives ids rows of other buckets than the {self._buckets} of "
                "this mapping: make it with as many buckets as the mapping that was stored"
            )

        self._waiting = []
        self._reassigned_rows = None
        self._sorted_rows = None

    def rebuild_with_output_id_range(
        self,
        output_id_range: tuple[int, int],
        output_segments: list[int],
        device: torch.device | None = None,
    ) -> GrowingManagedCollisionModule:
        """A new mapping onto the rows of one shard."""
        return GrowingManagedCollisionModule(
            self._max_rows,
            device or self.device,
            self._policy,
            self._interval,
            self._admit_after,
            self._buckets,
            self._sketch_width,
            output_id_range,
        )

    def joint_settings(self) -> Hashable | None:
        """All mappings of this class can be looked up in one call."""
        return () if type(self) is GrowingManagedCollisionModule else None

    def stored_ids(self) -> Tensor:
        """The mixed id of each row [R]."""
        return self._row_ids

    def indexed_rows(self) -> tuple[Tensor, Tensor]:
        """The ids that have a row [U], and the position of each row in its bucket [U].

        In each bucket the first rows are assigned first, so that an index of few ids is small.
        """
        rows = self._assigned_rows()
        return self._row_ids[rows], rows % self._per_bucket

    def search(self, ids: Tensor) -> Tensor:
        """The position of each id's row in its bucket [N]: a binary search."""
        if self._sorted_rows is None or self._sorted_rows[0].device != ids.device:
            sorted_ids, order = self._row_ids[self._assigned_rows()].sort()
            self._sorted_rows = sorted_ids, self._assigned_rows()[order] % self._per_bucket

        sorted_ids, positions = self._sorted_rows
        if sorted_ids.numel() == 0:
            return torch.full_like(ids, self.absent_row)
        return search_sorted_ids(sorted_ids, positions, ids, self.absent_row)

    def needs_table_rows(self) -> bool:
        """Whether positions in buckets are not rows, or the use of shared rows is recorded."""
        return self.training or self._max_rows != self._per_bucket

    def _assigned_rows(self) -> Tensor:
        """Rows that have an id [U]."""
        ranges: list[Tensor] = []
        for bucket, used in enumerate(self._used.tolist()):
            first = bucket * self._per_bucket
            ranges.append(torch.arange(first, first + used))

        return torch.cat(ranges).to(self._row_ids.device)

    def _shard_rows(self, lookup: Lookup) -> Tensor:
        """Rows of this shard [N]."""
        if self._rows == self._per_bucket:
            return lookup.rows
        return self._bucket(lookup.ids) * self._per_bucket + lookup.rows

    def table_rows(self, lookup: Lookup) -> Tensor:
        """The row of each id in the whole table [N]; the shared one of its bucket without one."""
        rows = self._shard_rows(lookup)
        if self.training and lookup.misses:  # these train the shared rows
            shared = rows[lookup.rows == self.absent_row]
            self._last_access_iter[shared] = self._current_iter_tensor

        return rows + self.first_row if self.first_row else rows

    def observe(self, lookup: Lookup, iteration: int) -> bool:
        """Count the ids of a batch, and admit new ones; returns whether ids were given rows."""
        rows = self._shard_rows(lookup)
        has_row = lookup.rows != self.absent_row
        if lookup.misses:
            rows = rows[has_row]
        self._counts.index_add_(0, rows, torch.ones_like(rows))
        self._last_access_iter.index_fill_(0, rows, iteration)

        if not lookup.misses:
            return False

        new_ids, counts = lookup.ids[~has_row].unique(return_counts=True)
        estimates = self._sketch.add(new_ids, counts).long()
        admitted = estimates >= self._admit_after
        if not admitted.any():
            return False

        self._admit(new_ids[admitted], estimates[admitted], iteration)
        return True

    def compete(self, iteration: int) -> bool:
        """Every ``eviction_interval`` iterations, let the waiting ids compete for rows."""
        if not self._waiting or iteration % self._interval:
            return False
        self._evict(iteration)
        return True

    def _admit(self, ids: Tensor, counts: Tensor, iteration: int) -> None:
        """Give unassigned rows to new ids [U], in order; in a full bucket, ids wait."""
        ids, counts, buckets = self._by_bucket(ids, counts)

        # The k-th new id of a bucket gets the k-th unassigned row of it.
        first_in_bucket = torch.searchsorted(
            buckets, torch.arange(len(self._used), device=ids.device)
        )
        position = self._used[buckets] + torch.arange(len(ids), device=ids.device)
        position -= first_in_bucket[buckets]
        fits = position < self._per_bucket - 1
        self._used += buckets[fits].bincount(minlength=len(self._used))
        rows = buckets * self._per_bucket + position
        self._assign(rows[fits], ids[fits], counts[fits], iteration)

        if not fits.all():
            iterations = torch.full_like(ids, iteration)
            self._waiting.append(torch.stack([ids, counts, iterations])[:, ~fits])

    def _evict(self, iteration: int) -> None:
        """Let the waiting ids compete with the ids that have the rows of their buckets."""
        waiting_ids, waiting_counts, waiting_iterations = torch.cat(self._waiting, dim=1)
        self._waiting = []
        ids, inverse = waiting_ids.unique(return_inverse=True)
        zeros = torch.zeros_like(ids)
        counts = zeros.scatter_reduce(0, inverse, waiting_counts, "amax")
        last_access = zeros.scatter_reduce(0, inverse, waiting_iterations, "amax")
        ids, counts, buckets, last_access = self._by_bucket(ids, counts, last_access)

        for bucket in buckets.unique().tolist():
            first = bucket * self._per_bucket
            rows = slice(first, first + self._per_bucket - 1)
            in_bucket = buckets == bucket
            metadata = {
                "counts": torch.cat([self._counts[rows], counts[in_bucket]]),
                "last_access_iter": torch.cat(
                    [self._last_access_iter[rows], last_access[in_bucket]]
                ),
            }
            scores = self._policy.eviction_scores(iteration, metadata)
            evicted, selected = self._policy._compute_selected_eviction_and_replacement_indices(
                self._per_bucket - 1, scores
            )
            self._assign(
                first + evicted, ids[in_bucket][selected], counts[in_bucket][selected], iteration
            )
            self.counts.evictions += evicted.numel()

    def _assign(self, rows: Tensor, ids: Tensor, counts: Tensor, iteration: int) -> None:
        """Give rows [U] to ids [U]."""
        if not rows.numel():
            return

        evicted_ids = self._row_ids[rows[self._counts[rows] > 0]]
        self._row_ids[rows] = ids
        self._counts[rows] = counts
        self._last_access_iter[rows] = iteration
        self._sorted_rows = None
        self._reassign(rows)
        self.update_index(evicted_ids, ids, rows % self._per_bucket)

    def _by_bucket(self, ids: Tensor, counts: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        """Ids, counts, buckets and others by bucket and falling count; ties keep their order."""
        order = counts.argsort(descending=True, stable=True)
        order = order[self._bucket(ids[order]).argsort(stable=True)]
        ids = ids[order]
        return (ids, counts[order], self._bucket(ids), *(other[order] for other in others))

    def _bucket(self, ids: Tensor) -> Tensor:
        """Bucket of each id, counted from this shard's first."""
        return (ids & (self._buckets - 1)) - self.first_row // self._per_bucket


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
