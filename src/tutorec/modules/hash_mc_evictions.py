"""Eviction of a hash mapping: each use of an id stores the hour at which the id expires.

The row of an expired id may be assigned to a new id. A further use of an id extends its hour.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from enum import Enum, unique

import torch
from torch import Tensor, nn

from tutorec.sparse.jagged import JaggedTensor

__all__ = [
    "HashZchEvictionConfig",
    "HashZchEvictionModule",
    "HashZchEvictionPolicyName",
    "HashZchEvictionScorer",
    "HashZchOptEvictionModule",
    "HashZchPerFeatureTtlScorer",
    "HashZchSingleTtlScorer",
    "HashZchThresholdEvictionModule",
    "get_eviction_module",
    "get_eviction_scorer",
    "get_kernel_from_policy",
]

_HOUR = 3600


@unique
class HashZchEvictionPolicyName(Enum):
    """How a hash mapping chooses the ids that it evicts.

    ========================  ===============================================================
    SINGLE_TTL_EVICTION       The first probed slot that is empty or whose time to live is
                              over.
    PER_FEATURE_TTL_EVICTION  The same, with a time to live for each feature.
    LRU_EVICTION              An empty slot, else that of the least recently used id, to the
                              hour, whose time to live is over; with a time to live of 0
                              hours, any that was not used in this hour.
    ========================  ===============================================================

    Source:
        TorchRec's ``torchrec.modules.hash_mc_evictions.HashZchEvictionPolicyName``.
    """

    SINGLE_TTL_EVICTION = "SINGLE_TTL_EVICTION"
    PER_FEATURE_TTL_EVICTION = "PER_FEATURE_TTL_EVICTION"
    LRU_EVICTION = "LRU_EVICTION"


@dataclass
class HashZchEvictionConfig:
    """Times to live, in hours after an id was last used in training.

    Attributes:
        features: The features of the table, in order.
        single_ttl: For all features.
        per_feature_ttl: For each feature.
    """

    features: list[str]
    single_ttl: int | None = None
    per_feature_ttl: list[int] | None = None


def get_kernel_from_policy(policy_name: HashZchEvictionPolicyName | None) -> int:
    """Fbgemm's number of a policy: 1 evicts the lowest score, 0 the first that it may."""
    return int(policy_name is HashZchEvictionPolicyName.LRU_EVICTION)


class HashZchEvictionScorer:
    """Scores of ids, and the threshold below which a slot may be reassigned; never evicts.

    Args:
        config: Times to live.
    """

    def __init__(self, config: HashZchEvictionConfig) -> None:
        self._config = config

    def gen_score(self, feature: JaggedTensor, device: torch.device | None = None) -> Tensor:
        """The score of each id of a batch, int32 [N]."""
        return torch.empty(0, device=device)

    def gen_threshold(self) -> int:
        """A slot with a score below this may be given to another id."""
        return -1


class HashZchSingleTtlScorer(HashZchEvictionScorer):
    """The hour at which ids expire: the current hour (since 1970) plus ``single_ttl``.

    Example:
        >>> import torch
        >>> scorer = HashZchSingleTtlScorer(HashZchEvictionConfig(["user"], single_ttl=24))
        >>> scores = scorer.gen_score(
        ...     JaggedTensor(torch.tensor([5, 7]), lengths=torch.tensor([2]))
        ... )
        >>> (scores - scorer.gen_threshold()).tolist()
        [24, 24]
    """

    def gen_score(self, feature: JaggedTensor, device: torch.device | None = None) -> Tensor:
        """The score of each id of a batch, int32 [N]."""
        ttl = self._config.single_ttl
        if ttl is None:
            raise ValueError(
                f"features {self._config.features}: this eviction policy needs "
                "HashZchEvictionConfig(single_ttl=hours)"
            )

        return torch.full_like(
            feature.values(), ttl + self.gen_threshold(), dtype=torch.int32, device=device
        )

    def gen_threshold(self) -> int:
        """The current hour."""
        return int(time.time() / _HOUR)


class HashZchPerFeatureTtlScorer(HashZchEvictionScorer):
    """The hour at which ids expire, with a time to live for each feature.

    The scored lists have, in place of weights, the number of their ids of each feature.

    Raises:
        ValueError: There is not one time to live for each feature.
    """

    def __init__(self, config: HashZchEvictionConfig) -> None:
        super().__init__(config)
        ttls = config.per_feature_ttl or []
        if len(ttls) != len(config.features):
            raise ValueError(
                f"per_feature_ttl has {len(ttls)} times to live for the {len(config.features)} "
                f"features {config.features}; give one for each"
            )

        self._per_feature_ttl = torch.tensor(ttls, dtype=torch.int32)

    def gen_score(self, feature: JaggedTensor, device: torch.device | None = None) -> Tensor:
        """The score of each id of a batch, int32 [N]."""
        counts = feature.weights().to(self._per_feature_ttl.device)
        scores = self._per_feature_ttl.repeat_interleave(counts) + self.gen_threshold()
        return scores.to(feature.values().device if device is None else device)

    gen_threshold = HashZchSingleTtlScorer.gen_threshold


def get_eviction_scorer(
    policy_name: HashZchEvictionPolicyName, config: HashZchEvictionConfig
) -> HashZchEvictionScorer:
    """The scorer of a policy."""
    if policy_name is HashZchEvictionPolicyName.PER_FEATURE_TTL_EVICTION:
        return HashZchPerFeatureTtlScorer(config)
    return HashZchSingleTtlScorer(config)


class HashZchThresholdEvictionModule(nn.Module):
    """Scores and threshold of the policies that evict below a threshold, which are all.

    Args:
        policy_name: The policy.
        config: Times to live.
    """

    def __init__(
        self, policy_name: HashZchEvictionPolicyName, config: HashZchEvictionConfig
    ) -> None:
        super().__init__()
        self._policy_name = policy_name
        self._config = config
        self._eviction_scorer = get_eviction_scorer(policy_name, config)

    @torch.jit.unused
    def forward(self, feature: JaggedTensor, device: torch.device) -> tuple[Tensor, int]:
        """The score of each id, int32 [N], and the threshold."""
        scorer = self._eviction_scorer
        return scorer.gen_score(feature, device), scorer.gen_threshold()


class HashZchOptEvictionModule(nn.Module):
    """No scores, for a policy without a threshold.

    Args:
        policy_name: The policy.
    """

    def __init__(self, policy_name: HashZchEvictionPolicyName) -> None:
        super().__init__()
        self._policy_name = policy_name

    @torch.jit.unused
    def forward(self, feature: JaggedTensor, device: torch.device) -> tuple[None, int]:
        """None, and -1."""
        return None, -1


def get_eviction_module(
    policy_name: HashZchEvictionPolicyName, config: HashZchEvictionConfig | None
) -> nn.Module:
    """The module of a policy.

    Raises:
        ValueError: There is no config.
    """
    if not isinstance(policy_name, HashZchEvictionPolicyName):
        return HashZchOptEvictionModule(policy_name)

    if config is None:
        raise ValueError(
            f"eviction policy {policy_name.value} needs a HashZchEvictionConfig with its times "
            "to live"
        )

    return HashZchThresholdEvictionModule(policy_name, config)


class HashZchEvictionModule(nn.Module):
    """The scores of the ids of a batch, and the eviction threshold, for a hash mapping.

    Args:
        policy_name: The policy.
        device: The device of the scores.
        config: Times to live.
    """

    def __init__(
        self,
        policy_name: HashZchEvictionPolicyName,
        device: torch.device,
        config: HashZchEvictionConfig | None,
    ) -> None:
        super().__init__()
        self._policy_name = policy_name
        self._device = device
        self._eviction_module = get_eviction_module(policy_name, config)

    @torch.jit.unused
    def forward(self, feature: JaggedTensor) -> tuple[Tensor | None, int]:
        """The score of each id, int32 [N], and the threshold; None and -1 without a threshold."""
        return self._eviction_module(feature, self._device)
