"""Hash tables with linear probing in tensors: a batch of ids finds or claims its slots at once.

A table has R slots, one for each row; a slot stores one id, or -1 when it is empty. So the table is
the state of a mapping, which is saved, and not an index that is derived from it, as in
`tutorec._kernels.id_index`.

An id may be in any of ``max_probe`` slots: the first is its MurmurHash3 (Appleby,
https://github.com/aappleby/smhasher) modulo the size of its bucket, and the others follow it,
wrapping around from the end of the bucket to its start. Ids are looked up by fbgemm's operator
where fbgemm was chosen. Its operator for the CPU does not claim slots, and its CUDA kernel lets
threads race for them, so that two runs differ; here slots are claimed in plain torch everywhere, by
a rule that does not depend on the order of the batch.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.jit import is_scripting  # pyright: ignore[reportPrivateImportUsage]

from tutorec._kernels.backend import backend, fbgemm_module

__all__ = [
    "Claims",
    "Eviction",
    "Probing",
    "claim_slots",
    "find_slots",
    "find_slots_in_torch",
    "murmur_hash",
    "shared_slots",
]

_EMPTY = -1
_LEAST = -(2**31)
_MOST = 2**31 - 1
# Entries of the matrix (new ids, probed slots) that is computed in one step.
_STEP_ENTRIES = 2**20
# Probes that are tried first for a new id.
_FEW_PROBES = 16


class Probing(NamedTuple):
    """Which slots an id may have.

    Args:
        max_probe: How many slots are probed.
        reserved: Slots at the end of each bucket that are shared by ids without a slot of their
            own.
        fallback: Whether an id without a slot of its own gets a shared one: a reserved one, or the
            first that is probed where none is reserved. Otherwise it gets -1.
    """

    max_probe: int
    reserved: int
    fallback: bool


class Eviction(NamedTuple):
    """Which slots of other ids a new id may take.

    Args:
        ages: The score with which each slot was last used, int32 [R]; -1 in an empty slot.
        scores: The score of each id of the batch, int32 [N]; none is below the threshold.
        threshold: A slot may be taken when its score is below this.
        oldest_first: Whether a new id takes the slot with the lowest score that it may have, and
            only when it has probed no empty one; otherwise it takes the first slot that is empty or
            may be taken.
    """

    ages: Tensor
    scores: Tensor
    threshold: int
    oldest_first: bool


class Claims(NamedTuple):
    """The slots of a batch, after its new ids have claimed theirs.

    Args:
        slots: Of each id [N]; without one of its own a shared one, or -1 without a fallback.
        evicted: Slots whose id was replaced by another [U].
        shared: Positions in the batch of the ids without a slot of their own [C].
        inserted: How many new ids were given a slot.
    """

    slots: Tensor
    evicted: Tensor
    shared: Tensor
    inserted: int


def murmur_hash(ids: Tensor) -> Tensor:
    """MurmurHash3 of ids, int64 [N]: the unsigned bits of fbgemm's ``murmur_hash3(id, 0, 0)``.

    It and `shared_slots` take arrays of numpy as well, which computes a few ids sooner.

    Example:
        >>> import torch
        >>> [hex(number % 2**64) for number in murmur_hash(torch.tensor([0, 1])).tolist()]
        ['0xffd8b21eb0d00460', '0xd6290c3e64a73f15']
    """
    key = _rotated(ids * -8663945395140668459, 31) * 5545529020109919103
    low = _rotated(key, 27) * 5 + 0x52DCE729
    high = (low * 5 + 0x38495AB5) ^ 16
    low = (low ^ 16) + high
    high = _mixed(high + low)
    low = _mixed(low) + high

    return low ^ (high + low)


def _rotated(bits: Tensor, count: int) -> Tensor:
    return (bits << count) | ((bits >> (64 - count)) & ((1 << count) - 1))


def _mixed(bits: Tensor) -> Tensor:
    """The last step of MurmurHash3: ``fmix64``."""
    bits = (bits ^ ((bits >> 33) & 0x7FFFFFFF)) * -49064778989728563
    bits = (bits ^ ((bits >> 33) & 0x7FFFFFFF)) * -4265267296055464877
    return bits ^ ((bits >> 33) & 0x7FFFFFFF)


def _modulo(hashes: Tensor, sizes: Tensor) -> Tensor:
    """The remainder of unsigned numbers, which are twice their upper 63 bits and the last one."""
    upper = (hashes >> 1) & 0x7FFFFFFFFFFFFFFF
    return (upper % sizes * 2 + (hashes & 1)) % sizes


def shared_slots(hashes: Tensor, sizes: Tensor, offsets: Tensor, reserved: int) -> Tensor:
    """The slots of ids that have none of their own.

    Args:
        hashes: Their `murmur_hash`, int64 [N].
        sizes: Slots in the bucket of each [N].
        offsets: The first slot of that bucket [N].
        reserved: Of a `Probing`.
    """
    if reserved > 0:
        return sizes - reserved + _modulo(hashes, torch.full_like(sizes, reserved)) + offsets
    return _modulo(hashes, sizes) + offsets


def find_slots(
    ids: Tensor, identities: Tensor, sizes: Tensor | None, offsets: Tensor | None, probing: Probing
) -> Tensor:
    """The slot of each id, int64 [N]. Nothing is changed.

    Args:
        ids: int64 [N]; -1 means the first empty slot.
        identities: The id in each slot, int64 [R, 1].
        sizes: Slots in the bucket of each id [N]; None where all R slots are one bucket.
        offsets: The first slot of that bucket [N]; given where sizes are.
        probing: Which slots an id may have.

    Returns:
        The first probed slot that holds the id, else a shared slot, or -1 without a fallback.

    Example:
        >>> import torch
        >>> identities = torch.tensor([[7], [-1], [5], [-1]])
        >>> find_slots(
        ...     torch.tensor([5, 7, 6]), identities, None, None, Probing(4, 0, False)
        ... ).tolist()
        [2, 0, -1]

    Source:
        fbgemm's ``zero_collision_hash(readonly=True)``, which is called where fbgemm was chosen.
    """
    if not is_scripting():
        operator = _operator(identities)
        if operator is not None:
            # The percentage of new ids to insert is said with the reserved slots and read by nobody
            # here, where none is inserted; fbgemm 1.3 refuses 100.
            rest = () if probing.reserved == 0 else (None, -1, 0, 99, probing.reserved)
            head = (ids.contiguous(), identities, probing.max_probe, True, -1, True, sizes, offsets)
            return operator(*head, None, False, not probing.fallback, False, *rest)[0]

    return find_slots_in_torch(ids, identities, sizes, offsets, probing)


@torch.jit.unused
def _operator(identities: Tensor) -> Any:
    """Fbgemm's operator where it was chosen and has it, or None."""
    choice = backend()
    if not choice.serves(identities.device.type):
        return None

    if identities.is_cuda:
        fbgemm_module("fbgemm_gpu")

    if not hasattr(torch.ops.fbgemm, "zero_collision_hash"):  # a wheel before it
        return None

    return torch.ops.fbgemm.zero_collision_hash.default


def find_slots_in_torch(
    ids: Tensor, identities: Tensor, sizes: Tensor | None, offsets: Tensor | None, probing: Probing
) -> Tensor:
    """The same in plain torch: windows of 1, 2, 4, ... probes, of the ids that were in none before.

    Args:
        ids: int64 [N].
        identities: The id in each slot, int64 [R, 1].
        sizes: Slots in the bucket of each id [N], or None.
        offsets: The first slot of that bucket [N], or None.
        probing: Which slots an id may have.
    """
    ids_by_slot = identities.view(-1)
    hashes = murmur_hash(ids)
    if sizes is None or offsets is None:
        sizes = torch.full_like(ids, ids_by_slot.shape[0])
        offsets = torch.zeros_like(ids)

    block = sizes - probing.reserved
    first = _modulo(hashes, block)
    slots = torch.full_like(ids, -1)
    if probing.fallback:
        slots = shared_slots(hashes, sizes, offsets, probing.reserved)

    searched = torch.arange(ids.shape[0], device=ids.device)
    start = 0
    width = 1
    while start < probing.max_probe and searched.numel() > 0:
        steps = torch.arange(start, min(start + width, probing.max_probe), device=ids.device)
        window = (first[searched].unsqueeze(1) + steps) % block[searched].unsqueeze(1)
        window = window + offsets[searched].unsqueeze(1)
        hit, step = (ids_by_slot[window] == ids[searched].unsqueeze(1)).max(dim=1)
        slots[searched[hit]] = window[hit].gather(1, step[hit].unsqueeze(1)).squeeze(1)
        searched = searched[~hit]
        start += width
        width *= 2

    return slots


def claim_slots(
    ids: Tensor,
    identities: Tensor,
    sizes: Tensor | None,
    offsets: Tensor | None,
    probing: Probing,
    eviction: Eviction | None,
    opted_in: Tensor | None = None,
) -> Claims:
    """Find the slots of a batch's ids, and give new ids a slot.

    Ids that have a slot keep it, and its score becomes that of the batch where this is higher. Then
    it is as if the new ids of a bucket came one after the other, the smallest first, each taking
    the best slot that it may have. A slot that the batch has taken is not taken again in it. So the
    result does not depend on the order of the batch. An id may be in several buckets, and is
    another one in each.

    Args:
        ids: int64 [N], none of them -1.
        identities: The id in each slot, int64 [R, 1]; changed in place.
        sizes: Slots in the bucket of each id [N]; None where all R slots are one bucket.
        offsets: The first slot of that bucket [N]; given where sizes are.
        probing: Which slots an id may have.
        eviction: Which slots of other ids a new id may take, and scores, changed in place; None:
            empty slots only.
        opted_in: Which ids may be given a slot, bool [N]; an id that occurs twice may when
            either occurrence may.

    Returns:
        Slots, and how they came about.

    Example:
        >>> import torch
        >>> identities = torch.full([4, 1], -1)
        >>> claims = claim_slots(
        ...     torch.tensor([9, 8, 9]), identities, None, None, Probing(4, 0, True), None
        ... )
        >>> identities[claims.slots, 0].tolist(), claims.inserted
        ([9, 8, 9], 2)

    Source:
        fbgemm's ``zero_collision_hash(readonly=False)``.
    """
    slots = find_slots(ids, identities, sizes, offsets, probing._replace(fallback=False))
    missed = (slots == _EMPTY).nonzero().squeeze(1)
    if eviction is not None:
        _refresh(slots, eviction, anything_missed=missed.numel() > 0)

    if missed.numel() == 0:
        return Claims(slots, missed, missed, 0)

    if sizes is None or offsets is None:
        sizes = torch.full_like(ids, identities.shape[0])
        offsets = torch.zeros_like(ids)

    new = missed if opted_in is None else missed[opted_in[missed]]

    # An id of two buckets is two ids. They are ordered by id, so that the smallest is the first in
    # each bucket.
    rank = torch.unique(ids[new], return_inverse=True)[1]
    distinct, inverse = torch.unique(rank * identities.shape[0] + offsets[new], return_inverse=True)

    # A position in the batch of each distinct id; any of them if it occurs several times.
    position = torch.empty_like(distinct).scatter_(0, inverse, new)
    new_ids = ids[position]
    scores = None
    if eviction is not None:
        scores = torch.full_like(new_ids, _LEAST, dtype=torch.int32)
        scores.scatter_reduce_(0, inverse, eviction.scores[new], "amax")

    evicted = [missed[:0]]
    inserted = 0
    step = max(1, _STEP_ENTRIES // probing.max_probe)
    for first in range(0, new_ids.shape[0], step):
        step_ids = new_ids[first : first + step]
        in_batch = position[first : first + step]
        claimed = _insert(
            step_ids, sizes[in_batch], offsets[in_batch], identities, probing, eviction
        )
        has_slot = claimed != _EMPTY
        claimed = claimed[has_slot]
        inserted += claimed.numel()
        evicted.append(claimed[identities[claimed, 0] != _EMPTY])
        identities[claimed, 0] = step_ids[has_slot]
        if eviction is not None and scores is not None:
            step_scores = scores[first : first + step][has_slot]
            eviction.ages.view(-1).scatter_reduce_(0, claimed, step_scores, "amax")

    missed_ids = ids[missed]
    slots[missed] = find_slots(missed_ids, identities, sizes[missed], offsets[missed], probing)
    shared = missed[identities[slots[missed].clamp(min=0), 0] != missed_ids]
    return Claims(slots, torch.cat(evicted), shared, inserted)


def _refresh(slots: Tensor, eviction: Eviction, anything_missed: bool) -> None:
    """Raise the scores of the slots of known ids to those of the batch."""
    scores = eviction.scores
    if anything_missed:
        known = (slots != _EMPTY).nonzero().squeeze(1)
        slots = slots.index_select(0, known)
        scores = scores.index_select(0, known)
    eviction.ages.view(-1).scatter_reduce_(0, slots, scores, "amax")


def _insert(
    ids: Tensor,
    sizes: Tensor,
    offsets: Tensor,
    identities: Tensor,
    probing: Probing,
    eviction: Eviction | None,
) -> Tensor:
    """The slots of new ids [n], or -1. Few probes come first, as they nearly always suffice."""
    blocks = (sizes - probing.reserved).unsqueeze(1)
    firsts = _modulo(murmur_hash(ids).unsqueeze(1), blocks)
    width = min(_FEW_PROBES, probing.max_probe)
    while True:
        window = (firsts + torch.arange(width, device=ids.device)) % blocks + offsets.unsqueeze(1)
        complete = width == probing.max_probe
        slots = _assign(window, _costs(window, identities, eviction, complete))
        if complete or bool((slots != _EMPTY).all()):
            return slots

        width = probing.max_probe


def _costs(window: Tensor, identities: Tensor, eviction: Eviction | None, complete: bool) -> Tensor:
    """The cost of each probed slot [n, P] for an id; empty slots cost least."""
    probed = window.flatten()
    empty = identities.view(-1).index_select(0, probed) == _EMPTY
    costs = torch.where(empty, _LEAST, _MOST)
    if eviction is not None and (complete or not eviction.oldest_first):
        ages = eviction.ages.view(-1).index_select(0, probed)
        over = (ages < eviction.threshold) & ~empty
        costs = torch.where(over, ages if eviction.oldest_first else _LEAST, costs)

    return costs.view_as(window)


def _assign(window: Tensor, costs: Tensor) -> Tensor:
    """The slot of each row of candidates [n, P], or -1; rows choose one after the other.

    All rows propose to their cheapest slot at once, a slot accepts the first row that has proposed
    to it, and a row that loses its slot proposes to the next: deferred acceptance (Gale and
    Shapley, 1962). All slots prefer the same rows, so that there is one stable outcome, the one
    described.
    """
    choices = torch.zeros(window.shape[0], dtype=torch.int64, device=window.device)
    slots = torch.full_like(choices, _EMPTY)
    proposing = torch.arange(window.shape[0], device=window.device)
    while proposing.numel() > 0:
        cheapest, choice = costs[proposing].min(dim=1)
        has_choice = cheapest < _MOST
        proposing = proposing[has_choice]
        choice = choice[has_choice]
        choices[proposing] = choice
        slots[proposing] = window[proposing, choice]

        # The first row of each slot keeps it.
        placed = (slots != _EMPTY).nonzero().squeeze(1)
        distinct, inverse = torch.unique(slots[placed], return_inverse=True)
        winners = torch.full_like(distinct, window.shape[0])
        winners.scatter_reduce_(0, inverse, placed, "amin")
        proposing = placed[winners[inverse] != placed]
        costs[proposing, choices[proposing]] = _MOST
        slots[proposing] = _EMPTY

    return slots
