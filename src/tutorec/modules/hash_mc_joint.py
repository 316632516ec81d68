"""Hash mappings of many tables as one table of slots, so that one call remaps all ids.

A call for the few hundred ids of one table costs more than the lookup of their rows. So the tensors
of the mappings are put one behind the other; what a mapping holds under its own names are views of
them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from tutorec._kernels.hash_slots import Eviction, Probing, claim_slots, find_slots
from tutorec.modules.hash_mc_evictions import HashZchSingleTtlScorer
from tutorec.sparse.hashing import bucket_of


class JointMappings:
    """Hash mappings of several tables with the same settings, all buckets of each.

    Args:
        mappings: Table name -> ``HashZchManagedCollisionModule``, of each of T tables.
    """

    observes = False  # before they are looked up

    def __init__(self, mappings: Mapping[str, Any]) -> None:
        self._names, self._mappings = [*mappings], [*mappings.values()]
        starts = [*accumulate((mapping.output_size() for mapping in self._mappings), initial=0)]
        numbers, sizes, offsets = [], [], []
        for start, mapping in zip(starts, self._mappings, strict=False):
            bounds, config = mapping._output_segments, mapping._eviction_config
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
        ids, first = ids.to(self._identities.device, torch.int64), self._mappings[0]
        if bool((ids == -1).any()):  # refused by the mapping of its table
            parts = zip(self._names, self._mappings, ids.split(list(counts)), strict=True)
            for name, mapping, part in parts:
                mapping._refuse(name, part, None)
        repeats = torch.tensor(counts, device=ids.device)
        of_ids = partial(torch.repeat_interleave, repeats=repeats, output_size=ids.numel())
        if self._have_buckets:
            starts, buckets, widths, firsts = (of_ids(each) for each in self._numbers[:4])
            bucket = firsts + bucket_of(ids, widths, buckets)
            sizes, offsets = self._buckets.index_select(1, bucket)
        else:
            sizes, offsets = (of_ids(each) for each in self._buckets)
            starts = offsets
        probing = Probing(first.max_probe, 0, fallback=True)
        if not first.training:
            return find_slots(ids, self._identities, sizes, offsets, probing) - starts
        eviction = None
        if self._scores is not None:
            now = HashZchSingleTtlScorer(first._eviction_config).gen_threshold()
            eviction = Eviction(
                self._scores, of_ids(self._numbers[4] + now).int(), now, first.eviction_flag == 1
            )
        claims = claim_slots(ids, self._identities, sizes, offsets, probing, eviction)
        without = (
            torch.searchsorted(claims.shared, repeats.cumsum(0))
            .diff(prepend=repeats.new_zeros(1))
            .tolist()
        )
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
    return settings, module.training, has_scores, module._eviction_policy_name, module.device


def _put_together(tensors: Sequence[Tensor]) -> Tensor:
    """One tensor with the rows of all, which become views of it."""
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
