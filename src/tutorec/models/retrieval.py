"""The highest-scoring items for a query: exact search in blocks, and its recall of clicks."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import add

import torch
import torch.distributed as dist
from torch import Tensor

from tutorec._check import require_int
from tutorec.datasets.utils import Batch, split_evenly
from tutorec.distributed import comm
from tutorec.distributed.core.agreement import check_agreement
from tutorec.distributed.core.env import ShardingEnv
from tutorec.models.two_tower import Towers, one_id_each
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor

_STAGE = "retrieval"
_BLOCK = 8192  # candidates that are scored at once


@dataclass(frozen=True)
class CandidateIndex:
    """Candidates that can be searched.

    Attributes:
        ids: [N], whatever names a candidate outside: any integers.
        vectors: [N, D].

    Raises:
        ValueError: there is not one vector for each id.
    """

    ids: Tensor
    vectors: Tensor

    def __post_init__(self) -> None:
        if self.ids.dim() != 1 or self.vectors.dim() != 2 or len(self.ids) != len(self.vectors):
            shapes = f"ids {list(self.ids.shape)} and vectors {list(self.vectors.shape)}"
            raise ValueError(f"CandidateIndex needs ids [N] and vectors [N, D], got {shapes}")

    def retrieve(self, queries: Tensor, k: int, block: int = _BLOCK) -> tuple[Tensor, Tensor]:
        """The k candidates with the largest inner product, for each query: exact, all N are scored.

        Candidates are scored in blocks and the best k so far are kept, so that Q x (block + k)
        scores are held and not Q x N. Which of several candidates with the very same score are
        given is not defined.

        Args:
            queries: [Q, D].
            k: how many, at most N.
            block: candidates that are scored at once.

        Returns:
            Ids [Q, k] and scores [Q, k], best first.

        Raises:
            ValueError: k is not a number from 1 to N, or ``block`` is less than 1.

        Example:
            >>> import torch
            >>> from tutorec.models.retrieval import CandidateIndex
            >>> index = CandidateIndex(
            ...     torch.tensor([70, 71, 72]), torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
            ... )
            >>> index.retrieve(torch.tensor([[2.0, 1.0]]), k=2)
            (tensor([[72, 70]]), tensor([[3., 2.]]))
        """
        require_int("retrieve: k", k, 1, len(self.ids))
        require_int("retrieve: block", block, 1)
        scores = queries.new_empty(len(queries), 0)
        rows = torch.empty(len(queries), 0, dtype=torch.long, device=queries.device)
        for first in range(0, len(self.ids), block):
            products = queries @ self.vectors[first : first + block].t()
            block_rows = torch.arange(
                first, first + products.shape[1], device=queries.device
            ).expand(len(queries), -1)
            scores = torch.cat([scores, products], dim=1)
            scores, best = scores.topk(min(k, scores.shape[1]), dim=1)
            rows = torch.cat([rows, block_rows], dim=1).gather(1, best)

        return self.ids.to(rows.device)[rows], scores


@torch.no_grad()
def build_index(
    model: Towers, ids: Tensor, batch_size: int = 4096, group: dist.ProcessGroup | None = None
) -> CandidateIndex:
    """Compute the candidates' vectors, each rank a part, and gather all N x D x 4 bytes on each.

    Every rank calls it with the same ids, at least one for each rank.

    Args:
        model: its candidates have one feature.
        ids: [N], of the candidates.
        batch_size: candidates that a rank looks up at once.
        group: the ranks; by default all of the default process group, or this process alone where
            there is none.

    Raises:
        AgreementError: ranks give different ids, or different batch sizes.
        ValueError: candidates have several features (call ``model.candidates`` with batches of all
            of them, and make a CandidateIndex of the result), or are fewer than the ranks.
    """
    if len(model.candidate_features) != 1:
        raise ValueError(
            f"build_index looks up one feature, and candidates have {model.candidate_features}"
        )

    group = group or comm.default_group()
    rank, world_size = (group.rank(), group.size()) if group is not None else (0, 1)
    if group is not None:
        digest = zlib.crc32(ids.detach().cpu().contiguous().numpy().tobytes())
        agreed = {
            "the ids of candidates": f"{len(ids)}, CRC-32 {digest:08x}",
            "batch_size": str(batch_size),
        }
        check_agreement("build_index", agreed, ShardingEnv.from_process_group(group))

    if len(ids) < world_size:
        raise ValueError(
            f"build_index: {len(ids)} ids for {world_size} rank(s); give at least one for each rank"
        )

    require_int("build_index: batch_size", batch_size, 1)
    row_ranges = split_evenly(0, len(ids), world_size)
    steps = -(-len(ids) // (world_size * batch_size))
    blocks = [_vectors(model, ids[slice(*rows)]) for rows in split_evenly(*row_ranges[rank], steps)]
    local = torch.cat(blocks)
    if group is None or world_size == 1:
        return CandidateIndex(ids, local)
    columns = local.shape[1]
    counts = [(stop - first) * columns for first, stop in row_ranges]
    gathered = comm.all_gather(local.reshape(-1), counts, group, _STAGE).wait()
    return CandidateIndex(ids, gathered.view(-1, columns))


@torch.no_grad()
def recall_at(
    ks: Sequence[int],
    batches: Iterable[Batch],
    retrieve: Callable[[Batch], Tensor],
    feature: str,
    group: dist.ProcessGroup | None = None,
) -> dict[int, float]:
    """Recall at k: the share of clicks among the first k retrieved items, over all ranks.

    Args:
        ks: numbers of items to look at.
        batches: this rank's clicks; see :func:`tutorec.models.two_tower.clicks_of`.
        retrieve: gives for a batch of B samples the ids [B, at least the largest k], best first.
        feature: the feature that holds the clicked item.
        group: the ranks; by default all of the default process group, or this process alone where
            there is none.

    Returns:
        k -> recall, the same on every rank.

    Raises:
        AgreementError: ranks differ in ``ks``.
        ValueError: there are no clicks, a k is not a number from 1, fewer items were retrieved than
            the largest k, or the feature does not name one item for each sample.

    Example:
        >>> import torch
        >>> from tutorec.datasets.random import shop
        >>> from tutorec.models.retrieval import recall_at
        >>> everything = torch.arange(200)
        >>> recall_at(
        ...     [200],
        ...     shop(rows=100).batches(50),
        ...     lambda batch: everything.expand(50, -1),
        ...     "item",
        ... )
        {200: 1.0}
    """
    group = group or comm.default_group()
    for k in ks:
        require_int("recall_at: k", k, 1)
    if group is not None:
        check_agreement("recall_at", {"ks": str(list(ks))}, ShardingEnv.from_process_group(group))
    counts = [0] * (len(ks) + 1)
    for batch in batches:
        targets = one_id_each(batch.sparse_features, feature)
        items = retrieve(batch)
        if items.dim() != 2 or len(items) != len(targets) or items.shape[1] < max(ks):
            raise ValueError(
                f"recall at {max(ks)} of {len(targets)} samples: {list(items.shape)} items "
                "were retrieved"
            )

        hits = items == targets.unsqueeze(1)
        batch_counts = [*(int(hits[:, :k].any(1).sum()) for k in ks), len(targets)]
        counts = [*map(add, counts, batch_counts)]

    if group is not None and group.size() > 1:
        counts = [*map(sum, zip(*comm.all_gather_ints(counts, group, _STAGE), strict=True))]
    if counts[-1] == 0:
        raise ValueError("recall_at: there are no clicks in the batches of any rank")
    return {k: counts[i] / counts[-1] for i, k in enumerate(ks)}


def _vectors(model: Towers, ids: Tensor) -> Tensor:
    """Candidates [N, D] of ids [N]."""
    device = next((parameter.device for parameter in model.parameters()), ids.device)
    ids = ids.to(device)
    lengths = torch.ones(len(ids), dtype=torch.int32, device=device)
    return model.candidates(
        KeyedJaggedTensor(model.candidate_features, ids, lengths=lengths)
    ).detach()
