"""Hash mappings of many tables as one table of slots, so that one call remaps all ids.

A call for the few hundred ids of one table costs more than the lookup of their rows. So the tensors
of the mappings are concatenated, and the tensors of each mapping become views of the result.

In evaluation on the CPU known ids are looked up in an index, of at most 36 bytes for each row. It
is built after as many ids as rows were looked up, and dropped when a mapping changes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from tutorec._kernels.hash_slots import (
    Eviction,
    Probing,
    claim_slots,
    find_slots,
    murmur_hash,
    shared_slots,
)
from tutorec._kernels.id_index import IdIndices, has_index
from tutorec.modules.hash_mc_evictions import HashZchSingleTtlScorer
from tutorec.sparse.hashing import bucket_of


class JointHashLookup:
    """Hash mappings of several tables with the same settings, all buckets of each.

    Args:
        mappings: Table name -> ``HashZchManagedCollisionModule``, of each of T tables.
    """

    observes = False  # the mappings are not given the ids one by one

    def __init__(self, mappings: Mapping[str, Any]) -> None:
        self._names = [*mappings]
        self._mappings = [*mappings.values()]
        first_rows = list[int]()
        bucket_counts = list[int]()
        bucket_widths = list[int]()
        first_buckets = list[int]()
        ttls = list[int]()
        sizes = list[int]()
        offsets = list[int]()
        rows = 0

        for mapping in self._mappings:
            config = mapping._eviction_config
            segments = mapping._output_segments
            first_rows.append(rows)
            bucket_counts.append(mapping.buckets())
            bucket_widths.append(-(-mapping.input_size() // mapping.buckets()))
            first_buckets.append(len(sizes))
            ttls.append(config.single_ttl if config else 0)
            sizes += [end - first for first, end in pairwise(segments)]
            offsets += [rows + first for first in segments[:-1]]
            rows += mapping.output_size()

        device = self._mappings[0].device
        # Of each table [T]: first row, buckets, raw ids of a bucket, number of the first bucket,
        # hours to live.
        self._numbers = torch.tensor(
            [first_rows, bucket_counts, bucket_widths, first_buckets, ttls], device=device
        )
        # Of each bucket of all tables: rows, first row.
        self._buckets = torch.tensor([sizes, offsets], device=device)
        self._have_buckets = len(sizes) > len(first_rows)

        self._identities = _concatenate(
            [mapping._hash_zch_identities for mapping in self._mappings]
        )
        self._scores: Tensor | None = None
        if self._mappings[0]._hash_zch_metadata is not None:
            self._scores = _concatenate([mapping._hash_zch_metadata for mapping in self._mappings])

        self._addresses = [_addresses(mapping) for mapping in self._mappings]
        self._lookups = 0
        self._version = list[int]()
        self._indices: IdIndices | None = None

    @staticmethod
    def can_serve(modules: Mapping[str, nn.Module]) -> bool:
        """Whether these mappings can be remapped in one call instead of one by one."""
        settings = {_shared_settings(name, module) for name, module in modules.items()}
        return len(settings) == 1 and None not in settings

    def serves(self, modules: Mapping[str, nn.Module]) -> bool:
        """Whether these are the mappings, and their tensors still the views."""
        tables = zip(modules.values(), self._mappings, self._addresses, strict=True)
        return all(
            module is mapping and _addresses(mapping) == addresses
            for module, mapping, addresses in tables
        )

    def rows(self, ids: Tensor, counts: Sequence[int]) -> Tensor:
        """The row of each raw id [N]; the first ``counts[0]`` are of the first table, and so on.

        In training mode new ids are given rows, as the mapping of each table would give them.
        """
        ids = ids.to(self._identities.device, torch.int64)
        if self._mappings[0].training:
            return self._claim(ids, counts)
        return self._find(ids, counts)

    def _claim(self, ids: Tensor, counts: Sequence[int]) -> Tensor:
        """Rows [N]; new ids are given one."""
        first_mapping = self._mappings[0]
        table, sizes, offsets, first_rows = self._buckets_per_id(ids, counts)
        probing = Probing(first_mapping.max_probe, 0, fallback=True)
        eviction = None
        if self._scores is not None:
            now = HashZchSingleTtlScorer(first_mapping._eviction_config).gen_threshold()
            scores = (self._numbers[4] + now).index_select(0, table).int()
            oldest_first = first_mapping.eviction_flag == 1
            eviction = Eviction(self._scores, scores, now, oldest_first)

        claims = claim_slots(ids, self._identities, sizes, offsets, probing, eviction)
        misses = table[claims.shared].bincount(minlength=len(counts)).tolist()
        evicted = claims.evicted.sort().values
        begins = torch.searchsorted(evicted, self._numbers[0]).tolist()
        ends = [*begins[1:], evicted.numel()]
        for number, mapping in enumerate(self._mappings):
            mapping.counts.add(counts[number], misses[number])
            mapping_evicted = evicted[begins[number] : ends[number]]
            mapping.counts.evictions += mapping_evicted.numel()
            if mapping_evicted.numel() > 0:
                mapping._evicted_indices.append(mapping_evicted - self._numbers[0, number])

        return claims.slots - first_rows

    def _find(self, ids: Tensor, counts: Sequence[int]) -> Tensor:
        """Rows [N], by an index once as many ids as slots were looked up since a change."""
        if not has_index(self._identities):
            return self._probe(ids, counts)

        tensors = [
            vars(mapping)["_parameters"]["_hash_zch_identities"] for mapping in self._mappings
        ]
        version = [tensor._version for tensor in (self._identities, *tensors)]
        if version != self._version:
            self._version = version
            self._lookups = 0
            self._indices = None

        self._lookups += ids.numel()
        if self._indices is None and self._lookups < len(self._identities):
            return self._probe(ids, counts)

        if self._indices is None:
            self._indices = self._build_indices()
        rows, misses = self._indices.find(ids, counts)

        # Ids without a row of their own share the row at their hash.
        absent = np.flatnonzero(rows.numpy() < 0)
        absent_ids = ids.index_select(0, torch.from_numpy(absent))
        _, sizes, offsets, first_rows = self._buckets_per_id(absent_ids, misses)
        hashes: Any = murmur_hash(cast(Any, absent_ids.numpy()))
        slots: Any = shared_slots(
            hashes, cast(Any, sizes.numpy()), cast(Any, offsets.numpy()), reserved=0
        )
        rows.numpy()[absent] = slots - first_rows.numpy()
        return rows

    def _build_indices(self) -> IdIndices:
        """The index of the ids that are found in their slots."""
        sizes = [mapping.output_size() for mapping in self._mappings]
        indices = IdIndices(sizes, [-1] * len(sizes))
        tables = self._identities.view(-1).split(sizes)
        for number, (identities, index) in enumerate(zip(tables, indices.tables, strict=True)):
            slots = (identities != -1).nonzero().view(-1)
            counts = [0] * len(sizes)
            counts[number] = len(slots)
            slots = slots[self._probe(identities[slots], counts) == slots]
            index.fill(identities[slots], slots)

        return indices

    def _probe(self, ids: Tensor, counts: Sequence[int]) -> Tensor:
        """Rows [N], slot by slot; nothing is changed."""
        _, sizes, offsets, first_rows = self._buckets_per_id(ids, counts)
        probing = Probing(self._mappings[0].max_probe, 0, fallback=True)
        return find_slots(ids, self._identities, sizes, offsets, probing) - first_rows

    def _buckets_per_id(self, ids: Tensor, counts: Sequence[int]) -> tuple[Tensor, ...]:
        """Of each id [N] the table, the size and first slot of its bucket, its table's first."""
        if bool((ids == -1).any()):  # refused by the mapping of its table
            tables = zip(self._names, self._mappings, ids.split(list(counts)), strict=True)
            for name, mapping, table_ids in tables:
                mapping._refuse(name, table_ids, None)

        table = torch.from_numpy(np.arange(len(counts)).repeat(counts)).to(ids.device)
        if not self._have_buckets:
            sizes = self._buckets[0].index_select(0, table)
            offsets = self._buckets[1].index_select(0, table)
            return table, sizes, offsets, offsets

        first_rows, buckets, widths, first_buckets, _ = self._numbers.index_select(1, table)
        bucket = first_buckets + bucket_of(ids, widths, buckets)
        sizes, offsets = self._buckets.index_select(1, bucket)
        return table, sizes, offsets, first_rows


def _shared_settings(name: str, module: Any) -> tuple[Any, ...] | None:
    """What mappings that are remapped in one call have in common; None if remapped alone."""
    settings = getattr(module, "joint_settings", None)
    if (
        settings is None
        or module._forward_hooks
        or module._forward_pre_hooks
        or module.is_read_only(name)
    ):
        return None

    has_scores = module._buffers["_hash_zch_metadata"] is not None
    device = module._parameters["_hash_zch_identities"].device
    return settings, module.training, has_scores, module._eviction_policy_name, device


def _concatenate(tensors: Sequence[Tensor]) -> Tensor:
    """One tensor with the rows of all, which become views of it."""
    with torch.inference_mode(tensors[0].is_inference()):  # whatever the mode of the first batch
        joined = torch.cat([tensor.data for tensor in tensors])

    sizes = [tensor.shape[0] for tensor in tensors]
    for tensor, view in zip(tensors, joined.split(sizes), strict=True):
        tensor.data = view

    return joined


def _addresses(mapping: Any) -> tuple[int, int]:
    """Addresses of a mapping's tensors, from its dictionaries, which is faster than attributes."""
    scores = mapping._buffers["_hash_zch_metadata"]
    ids = mapping._parameters["_hash_zch_identities"]
    return ids.data_ptr(), 0 if scores is None else scores.data_ptr()
