"""Hash mappings of many tables as one table of slots, so that one call remaps all ids.

A call for the few hundred ids of one table costs more than the lookup of their rows. So the tensors
of the mappings are put one behind the other; what a mapping holds under its own names are views of
them.

In evaluation on the CPU known ids are looked up in an index, of at most 36 bytes for each row. It
is made once as many ids as rows were looked up, and dropped when a mapping changes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

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


class JointMappings:
    """Hash mappings of several tables with the same settings, all buckets of each.

    Args:
        mappings: Table name -> ``HashZchManagedCollisionModule``, of each of T tables.
    """

    observes = False  # before they are looked up

    def __init__(self, mappings: Mapping[str, Any]) -> None:
        self._names = [*mappings]
        self._mappings = [*mappings.values()]
        starts = [*accumulate((mapping.output_size() for mapping in self._mappings), initial=0)]
        numbers = []
        sizes = []
        offsets = []

        for start, mapping in zip(starts, self._mappings, strict=False):
            bounds = mapping._output_segments
            config = mapping._eviction_config
            width = -(-mapping.input_size() // mapping.buckets())
            numbers.append(
                [start, mapping.buckets(), width, len(sizes), config.single_ttl if config else 0]
            )
            sizes += [end - first for first, end in pairwise(bounds)]
            offsets += [start + first for first in bounds[:-1]]

        device = self._mappings[0].device
        self._numbers = torch.tensor(numbers, device=device).T.contiguous()
        self._buckets = torch.tensor([sizes, offsets], device=device)
        self._have_buckets = len(sizes) > len(numbers)
        self._identities = _put_together(
            [mapping._hash_zch_identities for mapping in self._mappings]
        )
        self._scores = None
        if self._mappings[0]._hash_zch_metadata is not None:
            self._scores = _put_together([mapping._hash_zch_metadata for mapping in self._mappings])

        self._places = [_place(mapping) for mapping in self._mappings]
        self._looked_up = 0
        self._version = list[int]()
        self._indices: IdIndices | None = None

    @staticmethod
    def can_hold(modules: Mapping[str, nn.Module]) -> bool:
        """Whether these mappings can be remapped in one call instead of one by one."""
        kinds = {_kind(name, module) for name, module in modules.items()}
        return len(kinds) == 1 and None not in kinds

    def holds(self, modules: Mapping[str, nn.Module]) -> bool:
        """Whether these are the mappings, and their tensors still the views."""
        now = zip(modules.values(), self._mappings, self._places, strict=True)
        return all(module is mapping and _place(mapping) == place for module, mapping, place in now)

    def rows_of(self, ids: Tensor, counts: Sequence[int]) -> Tensor:
        """The row of each raw id [N]; the first ``counts[0]`` are of the first table, and so on.

        In training mode new ids are given rows, as the mapping of each table would give them.
        """
        ids = ids.to(self._identities.device, torch.int64)
        first = self._mappings[0]
        if not first.training:
            return self._find(ids, counts)

        table, sizes, offsets, starts = self._buckets_of(ids, counts)
        eviction = None
        probing = Probing(first.max_probe, 0, fallback=True)
        if self._scores is not None:
            now = HashZchSingleTtlScorer(first._eviction_config).gen_threshold()
            scores = (self._numbers[4] + now).index_select(0, table).int()
            eviction = Eviction(self._scores, scores, now, first.eviction_flag == 1)

        claims = claim_slots(ids, self._identities, sizes, offsets, probing, eviction)
        without = table[claims.shared].bincount(minlength=len(counts)).tolist()
        evicted = claims.evicted.sort().values
        begins = torch.searchsorted(evicted, self._numbers[0]).tolist()
        ends = [*begins[1:], evicted.numel()]

        for mapping, start, count, shared, begin, end in zip(
            self._mappings, self._numbers[0], counts, without, begins, ends, strict=True
        ):
            mapping.counts.add(count, shared)
            mapping.counts.evictions += end - begin
            if end > begin:
                mapping._evicted_indices.append(evicted[begin:end] - start)

        return claims.slots - starts

    def _find(self, ids: Tensor, counts: Sequence[int]) -> Tensor:
        """Rows [N], by an index once as many ids as slots were looked up since a change."""
        if not has_index(self._identities):
            return self._probe(ids, counts)

        held = [vars(mapping)["_parameters"]["_hash_zch_identities"] for mapping in self._mappings]
        version = [each._version for each in (self._identities, *held)]
        if version != self._version:
            self._version = version
            self._looked_up = 0
            self._indices = None

        self._looked_up += ids.numel()
        if self._indices is None and self._looked_up < len(self._identities):
            return self._probe(ids, counts)

        if self._indices is None:
            self._indices = self._indexed()

        rows, misses = self._indices.find(ids, counts)
        absent = np.flatnonzero(rows.numpy() < 0)
        ids = ids.index_select(0, torch.from_numpy(absent))
        _, sizes, offsets, starts = self._buckets_of(ids, misses)
        shared: list[Any] = [each.numpy() for each in (ids, sizes, offsets, starts)]
        slots = shared_slots(murmur_hash(shared[0]), shared[1], shared[2], 0)
        rows.numpy()[absent] = slots - shared[3]

        return rows

    def _indexed(self) -> IdIndices:
        """The index of the ids that are found in their slots."""
        tables = self._identities.view(-1).split([one.output_size() for one in self._mappings])
        indices = IdIndices([len(held) for held in tables], [-1] * len(tables))
        for number, (held, index) in enumerate(zip(tables, indices.tables, strict=True)):
            slots = (held != -1).nonzero().view(-1)
            counts = [len(slots) * (place == number) for place in range(len(tables))]
            slots = slots[self._probe(held[slots], counts) == slots]
            index.fill(held[slots], slots)

        return indices

    def _probe(self, ids: Tensor, counts: Sequence[int]) -> Tensor:
        """Rows [N], slot by slot; nothing is changed."""
        _, sizes, offsets, starts = self._buckets_of(ids, counts)
        probing = Probing(self._mappings[0].max_probe, 0, fallback=True)
        return find_slots(ids, self._identities, sizes, offsets, probing) - starts

    def _buckets_of(self, ids: Tensor, counts: Sequence[int]) -> tuple[Tensor, ...]:
        """Of each id [N] the table, the size and first slot of its bucket, its table's first."""
        if bool((ids == -1).any()):  # refused by the mapping of its table
            parts = zip(self._names, self._mappings, ids.split(list(counts)), strict=True)
            for name, mapping, part in parts:
                mapping._refuse(name, part, None)

        table = torch.from_numpy(np.arange(len(counts)).repeat(counts)).to(ids.device)
        if not self._have_buckets:
            sizes, offsets = (each.index_select(0, table) for each in self._buckets)
            return table, sizes, offsets, offsets

        starts, buckets, widths, firsts, _ = self._numbers.index_select(1, table)
        bucket = firsts + bucket_of(ids, widths, buckets)

        return table, *self._buckets.index_select(1, bucket), starts


def _kind(name: str, module: Any) -> tuple[Any, ...] | None:
    """What mappings that are remapped in one call share; None if remapped alone."""
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


def _put_together(tensors: Sequence[Tensor]) -> Tensor:
    """One tensor with the rows of all, which become views of it."""
    with torch.inference_mode(tensors[0].is_inference()):  # whatever the mode of the first batch
        joined = torch.cat([tensor.data for tensor in tensors])

    for tensor, part in zip(
        tensors, joined.split([tensor.shape[0] for tensor in tensors]), strict=True
    ):
        tensor.data = part

    return joined


def _place(mapping: Any) -> tuple[int, int]:
    """A mapping's tensors, read from its dictionaries, which is faster than attributes."""
    scores = mapping._buffers["_hash_zch_metadata"]
    ids = mapping._parameters["_hash_zch_identities"]
    return ids.data_ptr(), 0 if scores is None else scores.data_ptr()
