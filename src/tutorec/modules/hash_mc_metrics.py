"""Reports of a hash mapping in training: ids with a slot, new ones, collisions, evictions."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from tutorec.modules.hash_mc_evictions import HashZchEvictionConfig

__all__ = ["ConsoleScalarLoggerBackend", "ScalarLogger", "ScalarLoggerBackend"]


class ScalarLoggerBackend(ABC):
    """Where reports go; a subclass writes them to TensorBoard, a file, or elsewhere.

    Source:
        TorchRec's ``torchrec.modules.hash_mc_metrics.ScalarLoggerBackend``.
    """

    @abstractmethod
    def report(
        self, log_message: str, name: str, run_type: str, step: int, rate_metrics: dict[str, float]
    ) -> None:
        """Take one report.

        Args:
            log_message: All of it in one line.
            name: The table.
            run_type: ``"train"`` or ``"eval"``.
            step: Batches so far.
            rate_metrics: ``hit_rate``, ``insert_rate``, ``collision_rate``, ``eviction_rate``,
                ``opt_in_rate``, ``avg_eviction_age`` and ``table_usage_ratio``, to three digits.
        """


class ConsoleScalarLoggerBackend(ScalarLoggerBackend):
    """Reports as messages of Python's ``logging``, level INFO.

    Args:
        log_file_path: A file that gets them too, or ``""``.
    """

    def __init__(self, log_file_path: str = "") -> None:
        self._logger = logging.getLogger(__name__)
        if log_file_path:
            self._logger.addHandler(logging.FileHandler(log_file_path, mode="w"))

    def report(
        self, log_message: str, name: str, run_type: str, step: int, rate_metrics: dict[str, float]
    ) -> None:
        """Log the message."""
        self._logger.info(log_message)


class ScalarLogger(nn.Module):
    """Counts what a hash mapping does, and reports shares every ``frequency`` batches.

    Args:
        name: The table.
        zch_size: R, its rows on this rank.
        frequency: Batches between reports.
        start_bucket: The first bucket of this rank; only the rank of bucket 0 reports.
        num_buckets_per_rank: Buckets of this rank.
        num_reserved_slots_per_bucket: Slots at the end of each bucket for ids that are not opted
            in; -1 for none.
        device: Where the mapping is.
        disable_fallback: Whether ids without a slot have none.
        log_file_path: A file for reports.
        backend: Where reports go; by default ``logging``.

    Source:
        TorchRec's ``torchrec.modules.hash_mc_metrics.ScalarLogger``.
    """

    STEPS_BUFFER: str = "_scalar_logger_steps"
    SECONDS_IN_HOUR: int = 3600
    MAX_HOURS: int = 2**31 - 1

    _scalar_logger_steps: Tensor

    def __init__(
        self,
        name: str,
        zch_size: int,
        frequency: int,
        start_bucket: int,
        num_buckets_per_rank: int,
        num_reserved_slots_per_bucket: int,
        device: torch.device,
        disable_fallback: bool,
        log_file_path: str = "",
        backend: ScalarLoggerBackend | None = None,
    ) -> None:
        super().__init__()
        self.register_buffer(
            self.STEPS_BUFFER, torch.tensor(1, dtype=torch.int64), persistent=False
        )
        self._name = name
        self._zch_size = zch_size
        self._frequency = frequency
        self._start_bucket = start_bucket
        self._disable_fallback = disable_fallback
        bucket = zch_size // num_buckets_per_rank
        bounds = torch.arange(1, num_buckets_per_rank + 1, device=device) * bucket
        self._opt_in_ranges = bounds - max(num_reserved_slots_per_bucket, 0)
        self._reset_counts()
        self._backend = ConsoleScalarLoggerBackend(log_file_path) if backend is None else backend

    def should_report(self) -> bool:
        """Whether the next call reports."""
        has_interval_ended = int(self._scalar_logger_steps) % self._frequency == 0
        return self._start_bucket == 0 and self._total_cnt > 0 and has_interval_ended

    def _reset_counts(self) -> None:
        self._total_cnt = self._hit_cnt = self._insert_cnt = self._collision_cnt = 0
        self._eviction_cnt = self._opt_in_cnt = 0
        self._sum_eviction_age = 0.0

    @torch.jit.unused
    def update(
        self,
        identities_0: Tensor,
        identities_1: Tensor,
        values: Tensor,
        remapped_ids: Tensor,
        hit_indices: Tensor,
        evicted_emb_indices: Tensor | None,
        metadata: Tensor | None,
        eviction_config: HashZchEvictionConfig | None = None,
    ) -> None:
        """Count one batch.

        Args:
            identities_0: The id in each slot before the batch [R, 1].
            identities_1: After it.
            values: Ids [N].
            remapped_ids: The slot of each id that has one [H].
            hit_indices: Which ids have one, bool [N].
            evicted_emb_indices: Slots that were given to another id, or None.
            metadata: Scores before the batch [R, 1].
            eviction_config: Times to live.
        """
        before = identities_0[remapped_ids, 0]
        after = identities_1[remapped_ids, 0]
        with_slot = values[hit_indices] if remapped_ids.shape[0] != values.shape[0] else values
        hits = int((before == with_slot).sum())
        inserted = int((before == -1).sum()) - int((after == -1).sum())
        opt_in_ends = self._opt_in_ranges[with_slot % self._opt_in_ranges.shape[0]]

        self._total_cnt += values.numel()
        self._hit_cnt += hits
        self._insert_cnt += inserted
        self._collision_cnt += values.numel() - hits - inserted
        self._opt_in_cnt += int((remapped_ids < opt_in_ends).sum())

        if evicted_emb_indices is not None and evicted_emb_indices.numel() > 0:
            evicted = torch.unique(evicted_emb_indices)
            self._eviction_cnt += evicted.numel()
            ttl = eviction_config and eviction_config.single_ttl
            if ttl is not None and metadata is not None:
                now = int(time.time() / self.SECONDS_IN_HOUR)
                ages = now - (metadata[evicted, 0] - ttl)
                self._sum_eviction_age += float(ages.sum())

    @torch.jit.unused
    def forward(self, run_type: str, identities: Tensor) -> None:
        """Report at the end of an interval, and count the batch.

        Args:
            run_type: ``"train"`` or ``"eval"``.
            identities: The id in each slot [R, 1].
        """
        if self.should_report():
            self._report(run_type, identities)
        self._scalar_logger_steps += 1

    def _report(self, run_type: str, identities: Tensor) -> None:
        """Report the batches since the last report, and count again from 0."""
        counts = {
            "hit": self._hit_cnt,
            "insert": self._insert_cnt,
            "collision": self._collision_cnt,
            "eviction": self._eviction_cnt,
            "opt_in": self._opt_in_cnt,
        }
        total = self._total_cnt
        age = self._sum_eviction_age
        self._reset_counts()

        rates = {f"{event}_rate": round(count / total, 3) for event, count in counts.items()}
        rates["avg_eviction_age"] = round(age / max(counts["eviction"], 1), 3)
        used = int((identities[:, 0] != -1).sum())
        rates["table_usage_ratio"] = round(used / self._zch_size, 3)

        step = int(self._scalar_logger_steps)
        numbers = {"total": total, **counts, **rates}
        text = ", ".join(f"{name}={number}" for name, number in numbers.items())
        message = f"table {self._name}, {run_type}, batch {step}: {text}"
        self._backend.report(message, self._name, run_type, step, rates)
