"""Multi-probe hashing: each id gets its own row near its hash, until it expires.

An id may have one of ``max_probe`` rows, those that follow its hash. A new id takes an empty one,
or one whose id has not been used for longer than its time to live. So ids share a row only if all
of these are in use.

Rows are split into buckets, and the value of an id determines its bucket. A rank has whole buckets;
the same table on any number of ranks, and in a served model, gives an id the same row.
"""

# No import of annotations: TorchScript reads them from the functions.

import math
from collections.abc import Hashable, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.jit import is_scripting  # pyright: ignore[reportPrivateImportUsage]

from tutorec._kernels.hash_slots import (
    Eviction,
    Probing,
    claim_slots,
    find_slots,
    murmur_hash,
    shared_slots,
)
from tutorec._validation import validation_enabled
from tutorec.modules.hash_mc_evictions import (
    HashZchEvictionConfig,
    HashZchEvictionModule,
    HashZchEvictionPolicyName,
    get_kernel_from_policy,
)
from tutorec.modules.hash_mc_metrics import ScalarLogger
from tutorec.modules.mc_base import validate_loaded_state
from tutorec.modules.mc_index import IndexedMapping, Lookup
from tutorec.sparse.jagged import JaggedTensor, jagged_from_parts
from tutorec.sparse.layout import offsets_of_lengths

__all__ = ["HashZchManagedCollisionModule", "TrainInputMapper"]


class TrainInputMapper(nn.Module):
    """The bucket of each id: how many rows it has, and where they begin.

    With ``input_hash_size`` H and K buckets, bucket k has the ids from ``k * ceil(H / K)`` on; with
    H = 0, and of ids not below H, it has those whose remainder modulo K is k. Ranks that share rows
    distribute ids by the same rule.

    Args:
        input_hash_size: H; 0 where ids have no upper bound.
        total_num_buckets: K, of all ranks.
        size_per_rank: Rows of each bucket [K].
        train_rank_offsets: The first row of each bucket [K].
        inference_dispatch_div_train_world_size: Whether an id is replaced by its number inside its
            bucket.
        name: The table.

    Example:
        >>> import torch
        >>> mapper = TrainInputMapper(0, 2, torch.tensor([5, 5]), torch.tensor([0, 5]))
        >>> [part.tolist() for part in mapper(torch.tensor([4, 7]))]
        [[4, 7], [5, 5], [0, 5]]

    Source:
        TorchRec's ``torchrec.modules.hash_mc_modules.TrainInputMapper``.
    """

    _zch_size_per_training_rank: Tensor
    _train_rank_offsets: Tensor

    def __init__(
        self,
        input_hash_size: int,
        total_num_buckets: int,
        size_per_rank: Tensor,
        train_rank_offsets: Tensor,
        inference_dispatch_div_train_world_size: bool = False,
        name: str | None = None,
    ) -> None:
        super().__init__()
        self._input_hash_size = input_hash_size
        self._buckets = total_num_buckets
        self._inference_dispatch_div_train_world_size = inference_dispatch_div_train_world_size
        self._name = name
        self.register_buffer("_zch_size_per_training_rank", size_per_rank, persistent=False)
        self.register_buffer("_train_rank_offsets", train_rank_offsets, persistent=False)

    def forward(
        self, values: Tensor, output_offset: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Ids [N] -> ids, each one's rows of its bucket and first row from ``output_offset``."""
        buckets = values % self._buckets
        inside = values // self._buckets
        if self._input_hash_size > 0:
            width = (self._input_hash_size + self._buckets - 1) // self._buckets
            within = (values >= 0) & (values < width * self._buckets)
            buckets = torch.where(within, values // width, buckets)
            inside = torch.where(within, values % width, inside)

        sizes = self._zch_size_per_training_rank.to(values.device).index_select(0, buckets)
        offsets = self._train_rank_offsets.to(values.device).index_select(0, buckets)
        if output_offset is not None:
            offsets = offsets - output_offset

        return inside if self._inference_dispatch_div_train_world_size else values, sizes, offsets


class HashZchManagedCollisionModule(IndexedMapping):
    """A mapping of raw ids to rows by multi-probe hashing, with eviction: TorchRec's MPZCH.

    In training mode a batch's new ids are given rows, and every use of an id is recorded; in
    evaluation mode nothing changes. An id without a row of its own shares the row at its hash. The
    result of a batch does not depend on the order of its ids, and two runs give the same rows, on
    the CPU and on CUDA.

    Ids are found by probing rows one after the other. In evaluation on the CPU a collection looks
    them up in an index, of at most 36 bytes for each row, once as many ids as rows were probed
    without a change of the mapping.

    State:

    - ``_hash_zch_identities``, int64 [R, 1], a parameter: the id of each row, -1 without.
    - ``_hash_zch_metadata``, int32 [R, 1], with eviction only: the score with which it was last
      used, -1 without.
    - ``_hash_zch_runtime_meta``, int64 [R, ...], a parameter, on demand: how often it was used, or
      a caller's numbers.
    - ``_hash_zch_bucket``, int64 [1, 1]: K.

    Args:
        zch_size: R, rows on this rank.
        device: Where the mapping is held.
        total_num_buckets: K, into how many buckets the rows of all ranks are split. Whole buckets
            can be moved to another number of ranks; with more of them each is smaller, and fuller
            when another is not.
        max_probe: How many rows an id may have.
        input_hash_size: Ids are below this; 0 without a bound.
        output_segments: The first row of each bucket and the end of the last [K + 1]; by default
            all are equal.
        is_inference: Whether the mapping is only read.
        name: The table.
        tb_logging_frequency: Batches between reports of a ``ScalarLogger``; 0 for none.
        eviction_policy_name: How ids are evicted; None: never.
        eviction_config: Times to live.
        inference_dispatch_div_train_world_size: Whether an id is replaced by its number inside its
            bucket.
        start_bucket: The first bucket of this rank.
        end_bucket: The bucket after the last one of this rank.
        opt_in_prob: Percentage with which a new id is given a row, once for each batch that it is
            in; -1: always.
        percent_reserved_slots: Percentage of the rows of a bucket, at its end, that ids without a
            row share.
        disable_fallback: Whether an id without a row is taken out of the batch, and does not share
            one.
        track_id_freq: Whether uses of ids are counted.
        read_only_suffix: Features whose name ends so are looked up only.
        enable_per_feature_lookups: Whether a collection passes features one by one, so that names
            are known.
        no_bag: With ``disable_fallback``: whether an id without a row stays in its place, with row
            0.
        write_runtime_meta_dim: Columns of numbers that a caller keeps for each id.
        persist_hash_zch_bucket: Whether K is saved.

    Raises:
        ValueError: Rows are not a multiple of the buckets, percentages do not fit, or an id is -1.

    Example:
        >>> import torch
        >>> mapping = HashZchManagedCollisionModule(4, torch.device("cpu"), total_num_buckets=1)
        >>> batch = {"item": JaggedTensor(torch.tensor([70, 8, 70]), lengths=torch.tensor([3]))}
        >>> rows = mapping(batch)["item"].values()
        >>> rows[0] == rows[2], rows[0] == rows[1], mapping.open_slots()
        (tensor(True), tensor(False), tensor([2]))

    Source:
        TorchRec's ``torchrec.modules.hash_mc_modules.HashZchManagedCollisionModule``.
    """

    IDENTITY_BUFFER: str = "_hash_zch_identities"
    METADATA_BUFFER: str = "_hash_zch_metadata"
    BUCKET_BUFFER: str = "_hash_zch_bucket"
    RUNTIME_META_BUFFER: str = "_hash_zch_runtime_meta"

    __jit_unused_properties__ = (
        "device",
        "max_probe",
        "disable_fallback",
        "eviction_flag",
        "is_sharded",
    )

    _hash_zch_metadata: Tensor | None
    _output_global_offset_tensor: Tensor | None
    _hash_zch_bucket: Tensor
    _hash_zch_runtime_meta: Tensor | None
    index_bytes = 0  # training needs none
    absent_row = -1

    def __init__(
        self,
        zch_size: int,
        device: torch.device,
        total_num_buckets: int,
        max_probe: int = 128,
        input_hash_size: int = 0,
        output_segments: list[int] | None = None,
        is_inference: bool = False,
        name: str | None = None,
        tb_logging_frequency: int = 0,
        eviction_policy_name: HashZchEvictionPolicyName | None = None,
        eviction_config: HashZchEvictionConfig | None = None,
        inference_dispatch_div_train_world_size: bool = False,
        start_bucket: int = 0,
        end_bucket: int | None = None,
        opt_in_prob: int = -1,
        percent_reserved_slots: float = 0,
        disable_fallback: bool = False,
        track_id_freq: bool = False,
        read_only_suffix: str = "_readonly",
        enable_per_feature_lookups: bool = False,
        no_bag: bool = False,
        write_runtime_meta_dim: int = 0,
        persist_hash_zch_bucket: bool = True,
    ) -> None:
        options = dict(locals())
        del options["self"], options["__class__"]
        segments = output_segments or _equal_buckets(zch_size, total_num_buckets)
        super().__init__(device, segments, True, read_only_suffix, enable_per_feature_lookups)
        self._options = options
        self._rows = zch_size
        self._max_probe = max_probe
        self._buckets = total_num_buckets
        self._input_hash_size = input_hash_size
        self._name = name
        self._start_bucket = start_bucket
        self._end_bucket = end_bucket or total_num_buckets
        self._disable_fallback = disable_fallback
        self._no_bag = no_bag
        self._eviction_policy_name_copy = eviction_policy_name
        self._eviction_config = eviction_config
        self._opt_in_prob = opt_in_prob
        self._percent_reserved_slots = percent_reserved_slots
        self._track_id_freq = track_id_freq
        self._write_runtime_meta_dim = write_runtime_meta_dim
        self._reserved = max(self.get_reserved_slots_per_bucket(), 0)
        self._check()

        host = torch.device("cpu") if device.type == "meta" else device
        bounds = torch.tensor(segments, dtype=torch.int64, device=host)
        by_number = inference_dispatch_div_train_world_size
        self.input_mapper = TrainInputMapper(
            input_hash_size, total_num_buckets, bounds.diff(), bounds[:-1].clone(), by_number, name
        )

        # One bucket needs no mapper, unless ids are replaced by their numbers in the bucket.
        self._has_many_buckets = self._end_bucket - start_bucket > 1 or by_number
        self.first_row = segments[start_bucket]
        self._output_global_offset_tensor = (
            bounds[start_bucket : start_bucket + 1] if self.first_row else None
        )
        self.wants_feature_lengths = (
            eviction_policy_name is HashZchEvictionPolicyName.PER_FEATURE_TTL_EVICTION
        )
        self._build_state(persist_hash_zch_bucket)

        has_own_rules = disable_fallback or self._reserved or self.is_sharded or by_number
        self._may_use_index = not has_own_rules and not tb_logging_frequency
        self._probed_ids = 0

        self._scalar_logger = None
        is_logged = tb_logging_frequency > 0 and not is_inference and device.type != "meta"
        if is_logged and name is not None:
            self._scalar_logger = ScalarLogger(
                name,
                zch_size,
                tb_logging_frequency,
                start_bucket,
                self._end_bucket - start_bucket,
                self.get_reserved_slots_per_bucket(),
                device,
                disable_fallback,
            )

        self.reset_training_mode()
        if is_inference:
            self.reset_inference_mode()

    @torch.jit.unused
    def _build_state(self, persists_bucket: bool) -> None:
        """The tensors of a mapping without ids."""
        rows = self._rows
        device = self._device
        identities = torch.full([rows, 1], -1, dtype=torch.int64, device=device)
        self._hash_zch_identities = nn.Parameter(identities, requires_grad=False)
        evicts = self._eviction_policy_name_copy is not None
        scores = torch.full([rows, 1], -1, dtype=torch.int32, device=device) if evicts else None
        self.register_buffer(self.METADATA_BUFFER, scores)
        self._hash_zch_runtime_meta = None
        if self._track_id_freq or self._write_runtime_meta_dim > 0:
            numbers = torch.zeros(
                [rows, self._write_runtime_meta_dim or 1], dtype=torch.int64, device=device
            )
            self._hash_zch_runtime_meta = nn.Parameter(numbers, requires_grad=False)

        self.register_buffer(
            self.BUCKET_BUFFER, torch.tensor([[self._buckets]]), persistent=persists_bucket
        )
        self.register_load_state_dict_pre_hook(_leave_out_scores)
        self.register_load_state_dict_post_hook(validate_loaded_state)

    def forward(
        self, features: dict[str, JaggedTensor], mutate_miss_lengths: bool = True
    ) -> dict[str, JaggedTensor]:
        """Raw ids -> rows; new ids are given one in training mode, when they are remapped."""
        return self.remap(features, mutate_miss_lengths)

    def remap(
        self,
        features: dict[str, JaggedTensor],
        mutate_miss_lengths: bool = True,
        write_weights: Tensor | None = None,
    ) -> dict[str, JaggedTensor]:
        """Raw ids -> rows.

        Args:
            features: Lists of ids by feature, or by table.
            mutate_miss_lengths: Whether lists get shorter when ids are taken out of them.
            write_weights: A caller's numbers for the ids, of one feature, int64 [N] or [N, D].

        Raises:
            ValueError: An id is -1, which marks an empty row.
        """
        remapped: dict[str, JaggedTensor] = {}
        for name, feature in features.items():
            ids = feature.values().to(self._hash_zch_identities.device).long()
            ids, sizes, offsets = self._map_to_buckets(ids)
            probing = Probing(self._max_probe, self._reserved, not self._disable_fallback)
            rows = ids
            if is_scripting():
                rows = find_slots(ids, self._hash_zch_identities, sizes, offsets, probing)
            else:
                self._refuse(name, ids, offsets)
                if self.training and not self.is_read_only(name):
                    rows = self._learn(feature, ids, sizes, offsets, probing, write_weights)
                else:
                    rows = find_slots(ids, self._hash_zch_identities, sizes, offsets, probing)
                    self._probed_ids += ids.numel()
                    self._log(ids, rows, self._hash_zch_identities.data, None, None)

            lengths = feature.lengths_or_none()
            ends = feature.offsets_or_none()
            weights = feature.weights_or_none()
            if self._disable_fallback:
                hits = rows != -1
                if self._no_bag:
                    rows = rows.clamp(min=0)
                else:
                    rows = rows[hits]
                    if weights is not None and weights.shape[0] == hits.shape[0]:
                        weights = weights[hits]

                    if mutate_miss_lengths:
                        lengths = _compute_lengths_from_hits(feature.lengths(), hits)
                        ends = None

            if self.first_row > 0:
                rows = rows + self.first_row

            remapped[name] = jagged_from_parts(
                rows.to(feature.values().device), weights, lengths, ends
            )

        if not is_scripting():
            self._report_log()

        return remapped

    def profile(self, features: dict[str, JaggedTensor]) -> dict[str, JaggedTensor]:
        """Nothing: `remap` gives new ids their rows."""
        return features

    def _map_to_buckets(self, ids: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Ids, and of each the size and first row of its bucket, or None with one bucket [N]."""
        if not self._has_many_buckets:
            return ids, None, None
        return self.input_mapper(ids, self._output_global_offset_tensor)

    def joint_settings(self) -> Hashable | None:
        """Whether a collection may look ids up in the index."""
        if type(self) is not HashZchManagedCollisionModule or not self._may_use_index:
            return None
        return None if self.training or self._probed_ids < self._rows else ()

    def stored_ids(self) -> Tensor:
        """The id of each row [R, 1], -1 without."""
        return self._hash_zch_identities

    def indexed_rows(self) -> tuple[Tensor, Tensor]:
        """The ids that probing finds [U], and their rows [U]."""
        table = self._hash_zch_identities.detach()
        rows = (table[:, 0] != -1).nonzero().view(-1)
        ids, sizes, offsets = self._map_to_buckets(table[rows, 0])
        probing = Probing(self._max_probe, reserved=0, fallback=False)
        rows = rows[find_slots(ids, table, sizes, offsets, probing) == rows]

        return table[rows, 0], rows

    def count(self, lookups: int, misses: Tensor | int) -> None:
        """Nothing: batches are counted in training only, where ids are probed."""

    def needs_table_rows(self) -> bool:
        """Ids that the index does not have share the row at their hash."""
        return True

    def table_rows(self, lookup: Lookup) -> Tensor:
        """The row of each id [N]; ids that are in the index have their own."""
        return self.joint_table_rows([self], [lookup])

    @staticmethod
    def joint_table_rows(modules: Sequence[Any], lookups: Sequence[Lookup]) -> Tensor:
        """``table_rows`` of several mappings [N], by numpy, which computes a few ids sooner."""
        rows = torch.cat([lookup.rows for lookup in lookups])
        absent = np.flatnonzero(rows.numpy() < 0)
        absent_ids = torch.cat([lookup.ids for lookup in lookups]).numpy()[absent]
        if bool((absent_ids == -1).any()):
            for module, lookup in zip(modules, lookups, strict=True):
                module._refuse(lookup.table, lookup.ids, None)

        counts = [int(lookup.misses) for lookup in lookups]
        sizes: Any = np.repeat([module._rows for module in modules], counts)
        offsets: Any = np.zeros_like(sizes)
        if any(module._has_many_buckets for module in modules):
            tables = zip(modules, torch.from_numpy(absent_ids).split(counts), strict=True)
            buckets = [
                module.input_mapper(table_ids, module._output_global_offset_tensor)
                for module, table_ids in tables
            ]
            absent_ids, sizes, offsets = (
                torch.cat(parts).numpy() for parts in zip(*buckets, strict=True)
            )

        hashes: Any = murmur_hash(cast(Any, absent_ids))
        rows.numpy()[absent] = shared_slots(hashes, sizes, offsets, 0)
        return rows

    @torch.jit.unused
    def is_read_only(self, name: str) -> bool:
        """Whether ids of a feature, or of all a table's features, are remapped, not observed."""
        return name.lower().endswith(self._read_only_suffix)

    def open_slots(self) -> Tensor:
        """Rows that no id has [1]."""
        return (self._hash_zch_identities == -1).sum().view(1)

    @property
    def device(self) -> torch.device:
        """Where the mapping is held."""
        return self._hash_zch_identities.device

    @property
    def max_probe(self) -> int:
        """How many rows an id may have."""
        return self._max_probe

    @property
    def disable_fallback(self) -> bool:
        """Whether an id without a row is taken out of the batch."""
        return self._disable_fallback

    @property
    def eviction_flag(self) -> int:
        """Fbgemm's number of the eviction policy."""
        return get_kernel_from_policy(self._eviction_policy_name)

    @property
    def is_sharded(self) -> bool:
        """Whether other ranks hold buckets, too."""
        return self._end_bucket - self._start_bucket < self._buckets

    def get_reserved_slots_per_bucket(self) -> int:
        """Rows at each bucket's end that ids without their own row share; -1: all ids opt in."""
        if self._opt_in_prob == -1:
            return -1
        buckets = self._end_bucket - self._start_bucket
        return math.floor(self._rows * self._percent_reserved_slots / 100 / buckets)

    def get_indices_of_reserved_slots_per_bucket(self) -> Tensor | None:
        """These rows of all buckets of this rank [U], or None."""
        if self._opt_in_prob == -1:
            return None

        first = self._output_segments[self._start_bucket]
        ends = self._output_segments[self._start_bucket + 1 : self._end_bucket + 1]
        rows = torch.tensor(ends, device=self.device).unsqueeze(1) - first

        return (rows + torch.arange(-self._reserved, 0, device=self.device)).flatten()

    def rebuild_with_output_id_range(
        self,
        output_id_range: tuple[int, int],
        output_segments: list[int] | None = None,
        device: torch.device | None = None,
    ) -> "HashZchManagedCollisionModule":
        """A new mapping onto the buckets of rows ``output_id_range``: that of one shard."""
        first, end = output_id_range
        if not {first, end} <= set(self._output_segments):
            raise ValueError(
                f"table {self._name!r}: rows {first} to {end} of a shard are not whole buckets; "
                f"these begin at rows {self._output_segments}: choose total_num_buckets as a "
                "multiple of the number of ranks"
            )

        options = {
            **self._options,
            "zch_size": end - first,
            "device": device or self.device,
            "output_segments": self._output_segments,
            "is_inference": self._is_inference,
            "start_bucket": self._output_segments.index(first),
            "end_bucket": self._output_segments.index(end),
        }
        return type(self)(**options)

    def validate_state(self) -> None:
        """Check that a loaded state has as many buckets; else ids would not be found."""
        self._probed_ids = 0
        buckets = self._hash_zch_bucket
        if not buckets.is_meta and int(buckets) != self._buckets:
            raise ValueError(
                f"table {self._name!r}: the state was made with total_num_buckets={int(buckets)}, "
                f"and this module has {self._buckets}; build it with the same number"
            )

    def reset_inference_mode(self) -> None:
        """Only read from now on, without the scores."""
        self.reset_intrainer_bulk_eval_mode()
        self._hash_zch_metadata = None

    def reset_intrainer_bulk_eval_mode(self) -> None:
        """Only read, until ``reset_training_mode``."""
        self.eval()
        self._is_inference = True
        self._reassigned_rows = None
        self._eviction_policy_name = self._eviction_module = None

    def reset_training_mode(self) -> None:
        """Learn from batches again."""
        self._is_inference = False
        self.train()
        policy = self._eviction_policy_name = self._eviction_policy_name_copy
        if policy is not None and self._hash_zch_metadata is None:
            raise ValueError(
                f"table {self._name!r}: reset_inference_mode() has dropped the scores that "
                f"{policy.value} needs; build the module again, and load its state"
            )

        self._eviction_module = None
        if policy is not None:
            self._eviction_module = HashZchEvictionModule(
                policy, self._device, self._eviction_config
            )

    def lookup_runtime_meta(self, features: Tensor, remapped_ids: Tensor) -> Tensor:
        """Values kept for ids [N] with rows [N]; 0 for ids that share a row, -1 if none kept."""
        if self._hash_zch_runtime_meta is None:
            return torch.full_like(remapped_ids, -1)
        owned = self._hash_zch_identities[remapped_ids] == features.unsqueeze(1)
        return (self._hash_zch_runtime_meta[remapped_ids] * owned).flatten()

    def lookup_custom_runtime_meta(self, remapped_ids: Tensor) -> Tensor:
        """The numbers that are kept for the ids of rows [N] -> [N, D]."""
        assert self._hash_zch_runtime_meta is not None, "the options make room for numbers"
        return self._hash_zch_runtime_meta[remapped_ids]

    def update_runtime_meta(self, raw_ids: Tensor, remapped_ids: Tensor, weights: Tensor) -> None:
        """Store 8-byte values [N] or [N, D] for ids [N] with rows [N], except shared rows."""
        assert self._hash_zch_runtime_meta is not None, "the options make room for numbers"
        owned = self._owned(raw_ids, remapped_ids)
        numbers = weights.view(weights.shape[0], -1).view(torch.int64)
        self._hash_zch_runtime_meta.data[remapped_ids[owned]] = numbers[owned]

    def _owned(self, ids: Tensor, rows: Tensor) -> Tensor:
        """Which ids have the row for themselves, bool [N]."""
        return self._hash_zch_identities[rows.clamp(min=0), 0] == ids

    @torch.jit.unused
    def _learn(
        self,
        feature: JaggedTensor,
        ids: Tensor,
        sizes: Tensor | None,
        offsets: Tensor | None,
        probing: Probing,
        write_weights: Tensor | None,
    ) -> Tensor:
        """The rows of a batch's ids; new ids are given one."""
        eviction = None
        opted_in = None
        self._probed_ids = 0
        table = self._hash_zch_identities.detach()
        if self._eviction_module is not None and self._hash_zch_metadata is not None:
            scores, threshold = self._eviction_module(feature)
            eviction = Eviction(self._hash_zch_metadata, scores, threshold, self.eviction_flag == 1)

        if 0 < self._opt_in_prob < 100:
            opted_in = torch.rand(ids.shape, device=ids.device) * 100 < self._opt_in_prob

        before = table
        scores_before = self._hash_zch_metadata
        if self._scalar_logger is not None:
            before = table.clone()
            scores_before = None if scores_before is None else scores_before.clone()

        claims = claim_slots(ids, table, sizes, offsets, probing, eviction, opted_in)
        if claims.evicted.numel() > 0:
            self._reassign(claims.evicted.unique())

        numbers = self._hash_zch_runtime_meta
        if numbers is not None:
            numbers.data[claims.evicted] = 0
            if self._track_id_freq:
                rows = claims.slots[self._owned(ids, claims.slots)]
                numbers.data[:, 0].index_add_(0, rows, torch.ones_like(rows))

            if write_weights is not None:
                self.update_runtime_meta(ids, claims.slots, write_weights)

        self.counts.add(ids.numel(), claims.shared.numel())
        self.counts.evictions += claims.evicted.numel()
        self._log(ids, claims.slots, before, scores_before, claims.evicted)

        return claims.slots

    @torch.jit.unused
    def _log(
        self,
        ids: Tensor,
        rows: Tensor,
        before: Tensor,
        scores_before: Tensor | None,
        evicted: Tensor | None,
    ) -> None:
        if self._scalar_logger is not None:
            hits = rows != -1
            table = self._hash_zch_identities.data
            self._scalar_logger.update(
                before, table, ids, rows[hits], hits, evicted, scores_before, self._eviction_config
            )

    @torch.jit.unused
    def _report_log(self) -> None:
        if self._scalar_logger is not None:
            self._scalar_logger(
                "train" if self.training else "eval", self._hash_zch_identities.data
            )

    @torch.jit.unused
    def _refuse(self, name: str, ids: Tensor, offsets: Tensor | None) -> None:
        if not validation_enabled() or ids.is_meta or ids.numel() == 0:
            return

        if bool((ids == -1).any()):
            raise ValueError(
                f"{name!r}: an id is -1, which marks a row that no id has; leave missing ids "
                "out of their lists"
            )

        if (
            offsets is not None
            and self.is_sharded
            and not 0 <= int(offsets.min()) <= int(offsets.max()) < self._rows
        ):
            raise ValueError(
                f"{name!r}: an id belongs to no bucket from {self._start_bucket} to "
                f"{self._end_bucket - 1}, those of this rank; deal ids out by the buckets of "
                "TrainInputMapper"
            )

    @torch.jit.unused
    def _check(self) -> None:
        where = f"table {self._name!r}"
        if not 0 <= self._percent_reserved_slots < 100:
            raise ValueError(
                f"{where}: percent_reserved_slots={self._percent_reserved_slots} is not from 0 "
                "to below 100"
            )

        if self._opt_in_prob != -1 and not (0 < self._opt_in_prob <= 100 and self._reserved > 0):
            raise ValueError(
                f"{where}: opt_in_prob={self._opt_in_prob} with {self._reserved} reserved rows in "
                "each bucket; it is -1, or a percentage from 1 to 100 with percent_reserved_slots "
                "that reserve a row or more"
            )

        if self._track_id_freq and self._write_runtime_meta_dim > 0:
            raise _TwoUsesError(
                f"{where}: track_id_freq and write_runtime_meta_dim both need the numbers of "
                "an id; choose one"
            )


class _TwoUsesError(ValueError, AssertionError):
    """Two options need the numbers of ids; TorchRec raises an AssertionError."""


def _equal_buckets(rows: int, buckets: int) -> list[int]:
    """The first row of each of so many buckets, and the end of the last."""
    if rows % buckets != 0:
        raise ValueError(
            f"{rows} rows are not a multiple of total_num_buckets={buckets}; choose such a number, "
            "or pass output_segments"
        )
    return [*range(0, rows + 1, rows // buckets)]


def _compute_lengths_from_hits(lengths: Tensor, hit_indices: Tensor) -> Tensor:
    """The lengths [B] of lists of which only the hits, bool [N], are left."""
    bounds = offsets_of_lengths(lengths).long()
    return offsets_of_lengths(hit_indices.to(lengths.dtype))[bounds].diff()


def _leave_out_scores(
    module: HashZchManagedCollisionModule, state: dict[str, Tensor], prefix: str, *_: object
) -> None:
    """A mapping that is only read does without the scores of a stored one."""
    if module._hash_zch_metadata is None:
        state.pop(prefix + module.METADATA_BUFFER, None)
