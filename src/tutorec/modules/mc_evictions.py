"""Who gets a row when ids outnumber rows: eviction policies and admission filters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

ThresholdFilter = Callable[[Tensor], tuple[Tensor, float | Tensor]]
_LARGEST = torch.iinfo(torch.int64).max


@torch.no_grad()
def dynamic_threshold_filter(
    id_counts: Tensor, threshold_skew_multiplier: float = 10.0
) -> tuple[Tensor, Tensor]:
    """Admit ids seen more than ``threshold_skew_multiplier`` times as often as the average.

    Args:
        id_counts: How often each id was seen [U].
        threshold_skew_multiplier: Times the mean of the counts.

    Returns:
        Whether each id may compete [U], and the threshold that its count exceeds.

    Example:
        >>> dynamic_threshold_filter(torch.tensor([5, 4, 3, 2, 1]), 0.75)[0].tolist()
        [True, True, True, False, False]

    Source:
        TorchRec's ``torchrec.modules.mc_modules.dynamic_threshold_filter``.
    """
    threshold = id_counts.sum().double() * threshold_skew_multiplier / id_counts.numel()
    return id_counts > threshold, threshold


@torch.no_grad()
def average_threshold_filter(id_counts: Tensor) -> tuple[Tensor, Tensor]:
    """Let ids compete that were seen more often than the average id.

    Args:
        id_counts: How often each id was seen [U].

    Returns:
        Whether each id may compete [U], and the mean count.

    Example:
        >>> average_threshold_filter(torch.tensor([5, 4, 3, 2, 1]))[0].tolist()
        [True, True, False, False, False]

    Source:
        TorchRec's ``torchrec.modules.mc_modules.average_threshold_filter``.
    """
    return dynamic_threshold_filter(id_counts, 1.0)


@torch.no_grad()
def probabilistic_threshold_filter(
    id_counts: Tensor, per_id_probability: float = 0.01
) -> tuple[Tensor, Tensor]:
    """Admit each occurrence of an id with the same probability, independently.

    An id that was seen c times competes with probability ``1 - (1 - per_id_probability) ** c``.

    Args:
        id_counts: How often each id was seen [U].
        per_id_probability: Of one occurrence.

    Returns:
        Whether each id may compete [U], and the random numbers that were compared with its
        probability [U].

    Example:
        >>> probabilistic_threshold_filter(torch.tensor([0, 3, 50]), 1.0)[0].tolist()
        [False, True, True]

    Source:
        TorchRec's ``torchrec.modules.mc_modules.probabilistic_threshold_filter``.
    """
    threshold = torch.rand(id_counts.shape, device=id_counts.device)
    return 1 - (1 - per_id_probability) ** id_counts.float() > threshold, threshold


class MCHEvictionPolicyMetadataInfo(NamedTuple):
    """A number that a policy keeps for each id.

    Args:
        metadata_name: Its name; the buffer of a mapping is ``_mch_<name>`` [R].
        is_mch_metadata: Whether it is kept for the id of each row.
        is_history_metadata: Whether it is recorded for each occurrence of an id between two
            evictions.
    """

    metadata_name: str
    is_mch_metadata: bool
    is_history_metadata: bool


_COUNTS = MCHEvictionPolicyMetadataInfo("counts", is_mch_metadata=True, is_history_metadata=False)
_LAST_ACCESS = MCHEvictionPolicyMetadataInfo(
    "last_access_iter", is_mch_metadata=True, is_history_metadata=True
)


class MCHEvictionPolicy:
    """The ids that have a table's rows: the highest scores among those with a row and new ones.

    At equal scores an id with a row keeps it, and among new ids the one comes first that was seen
    more often, then the smaller one. A policy of your own names the metadata that it needs and has
    ``eviction_scores``. Two kinds are known: ``counts``, the occurrences of an id since it got its
    row, and ``last_access_iter``, the last iteration that had the id. For other kinds it overrides
    the three methods that an eviction calls, as in TorchRec.

    Args:
        metadata_info: What is kept for each id.
        threshold_filtering_func: Counts of the ids since the last eviction [U] -> those that take
            part in this one (a mask or indices), and the threshold. Other ids are forgotten; one
            with a row keeps it and its old metadata.

    Source:
        TorchRec's ``torchrec.modules.mc_modules.MCHEvictionPolicy``.
    """

    def __init__(
        self,
        metadata_info: list[MCHEvictionPolicyMetadataInfo],
        threshold_filtering_func: ThresholdFilter | None = None,
    ) -> None:
        self._metadata_info = metadata_info
        self._threshold_filtering_func = threshold_filtering_func

    @property
    def metadata_info(self) -> list[MCHEvictionPolicyMetadataInfo]:
        """What is kept for each id."""
        return self._metadata_info

    def eviction_scores(self, current_iter: int, metadata: Mapping[str, Tensor]) -> Tensor:
        """The score of each id from its metadata; both [U]. The lowest scores are evicted."""
        raise NotImplementedError(f"{type(self).__name__} has no eviction_scores")

    def record_history_metadata(
        self, current_iter: int, incoming_ids: Tensor, history_metadata: dict[str, Tensor]
    ) -> None:
        """Fill in the metadata of each occurrence of a batch [N]."""
        for recorded in history_metadata.values():
            recorded.fill_(current_iter)

    def coalesce_history_metadata(
        self,
        current_iter: int,
        history_metadata: dict[str, Tensor],
        unique_ids_counts: Tensor,
        unique_inverse_mapping: Tensor,
        additional_ids: Tensor | None = None,
        threshold_mask: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """The metadata of each distinct admitted id [U], from that of its occurrences [N].

        Args:
            current_iter: The iteration.
            history_metadata: Of each occurrence since the last eviction [N].
            unique_ids_counts: Occurrences of each different id [V].
            unique_inverse_mapping: Which different id each occurrence is [N].
            additional_ids: Ids of this iteration that are at the end of ``unique_inverse_mapping``
                only.
            threshold_mask: Which of the V ids take part, a mask or indices; None for all.
        """
        coalesced = {}
        for name, recorded in history_metadata.items():
            if additional_ids is not None:
                recorded = torch.cat([recorded, torch.full_like(additional_ids, current_iter)])

            latest = recorded.new_zeros(unique_ids_counts.shape)
            latest.scatter_reduce_(0, unique_inverse_mapping, recorded, "amax", include_self=False)
            coalesced[name] = latest if threshold_mask is None else latest[threshold_mask]

        return coalesced

    def update_metadata_and_generate_eviction_scores(
        self,
        current_iter: int,
        mch_size: int,
        coalesced_history_argsort_mapping: Tensor,
        coalesced_history_sorted_unique_ids_counts: Tensor,
        coalesced_history_mch_matching_elements_mask: Tensor,
        coalesced_history_mch_matching_indices: Tensor,
        mch_metadata: dict[str, Tensor],
        coalesced_history_metadata: dict[str, Tensor],
    ) -> tuple[Tensor, Tensor]:
        """Update the metadata of rows, and choose the ids that lose and get a row.

        Args:
            current_iter: The iteration.
            mch_size: R, rows; the last one is that of all ids without a row, and is never given to
                one id.
            coalesced_history_argsort_mapping: The order of the seen ids by falling count [U].
            coalesced_history_sorted_unique_ids_counts: Their counts in that order [U].
            coalesced_history_mch_matching_elements_mask: Which of them, in that order, have a row
                [U].
            coalesced_history_mch_matching_indices: Position of those in the metadata of rows.
            mch_metadata: Of the id of each row [R]; changed in place.
            coalesced_history_metadata: Of the seen ids, in their old order [U].

        Returns:
            Positions in the metadata of rows whose ids leave, and which new ids, counted among
            those without a row, take their places; of equal length.
        """
        has_row = coalesced_history_mch_matching_elements_mask
        position = coalesced_history_mch_matching_indices
        merged = {}
        for name, row_metadata in mch_metadata.items():
            if name == "counts":
                seen = coalesced_history_sorted_unique_ids_counts
                shared_row_value = _LARGEST
                row_metadata[position] += seen[has_row]
            else:
                seen = coalesced_history_metadata[name][coalesced_history_argsort_mapping]
                shared_row_value = current_iter
                row_metadata[position] = seen[has_row]

            row_metadata[mch_size - 1] = shared_row_value
            merged[name] = torch.cat([row_metadata, seen[~has_row]])

        scores = self.eviction_scores(current_iter, merged)
        evicted, selected = self._compute_selected_eviction_and_replacement_indices(
            mch_size, scores
        )
        for name, row_metadata in mch_metadata.items():
            row_metadata[evicted] = merged[name][mch_size + selected]

        return evicted, selected

    def _compute_selected_eviction_and_replacement_indices(
        self, pivot: int, eviction_scores: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Which of the first ``pivot`` ids leave the top ``pivot`` scores, and which later enter.

        Both by falling score, the later ones counted from ``pivot``. At equal scores the earlier id
        is higher.
        """
        lowest = eviction_scores.kthvalue(eviction_scores.numel() - pivot + 1).values
        equal = eviction_scores == lowest
        stays = eviction_scores > lowest
        stays |= equal & (equal.cumsum(0) <= pivot - stays.sum())
        evicted = (~stays[:pivot]).nonzero().view(-1)
        selected = stays[pivot:].nonzero().view(-1)
        return (
            evicted[eviction_scores[evicted].argsort(descending=True, stable=True)],
            selected[eviction_scores[selected + pivot].argsort(descending=True, stable=True)],
        )


class LFU_EvictionPolicy(MCHEvictionPolicy):
    """Least frequently used: an id's score is the number of its occurrences.

    Args:
        threshold_filtering_func: Which ids may compete, from their counts; see `MCHEvictionPolicy`.

    Source:
        TorchRec's ``torchrec.modules.mc_modules.LFU_EvictionPolicy``.
    """

    def __init__(self, threshold_filtering_func: ThresholdFilter | None = None) -> None:
        super().__init__([_COUNTS], threshold_filtering_func)

    def eviction_scores(self, current_iter: int, metadata: Mapping[str, Tensor]) -> Tensor:
        """Occurrences since the id got its row [U]."""
        return metadata["counts"]


class LRU_EvictionPolicy(MCHEvictionPolicy):
    """Least recently used: a score falls with the iterations since the last occurrence.

    Args:
        decay_exponent: Of the age; it changes no order here, and is kept for the signature.
        threshold_filtering_func: Which ids may compete, from their counts; see `MCHEvictionPolicy`.

    Source:
        TorchRec's ``torchrec.modules.mc_modules.LRU_EvictionPolicy``.
    """

    def __init__(
        self, decay_exponent: float = 1.0, threshold_filtering_func: ThresholdFilter | None = None
    ) -> None:
        super().__init__([_LAST_ACCESS], threshold_filtering_func)
        self._decay_exponent = decay_exponent

    def eviction_scores(self, current_iter: int, metadata: Mapping[str, Tensor]) -> Tensor:
        """Minus the age to the power of ``decay_exponent`` [U]."""
        return -_age(current_iter, metadata, self._decay_exponent)


class DistanceLFU_EvictionPolicy(MCHEvictionPolicy):
    """Decaying frequency: the count divided by a power of the iterations since the last use.

    Args:
        decay_exponent: Of the age: 0 is LFU, a large one LRU.
        threshold_filtering_func: Which ids may compete, from their counts; see `MCHEvictionPolicy`.

    Source:
        TorchRec's ``torchrec.modules.mc_modules.DistanceLFU_EvictionPolicy``.
    """

    def __init__(
        self, decay_exponent: float = 1.0, threshold_filtering_func: ThresholdFilter | None = None
    ) -> None:
        super().__init__([_COUNTS, _LAST_ACCESS], threshold_filtering_func)
        self._decay_exponent = decay_exponent

    def eviction_scores(self, current_iter: int, metadata: Mapping[str, Tensor]) -> Tensor:
        """Count over age to the power of ``decay_exponent`` [U]."""
        return metadata["counts"] / _age(current_iter, metadata, self._decay_exponent)


def _age(current_iter: int, metadata: Mapping[str, Tensor], exponent: float) -> Tensor:
    """Iterations since each id's last occurrence, counted from 1, to a power [U]."""
    return (current_iter + 1 - metadata["last_access_iter"]).double() ** exponent
