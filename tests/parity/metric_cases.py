"""Metrics while a model trains: lifetime and window after each of five batches."""

from __future__ import annotations

from typing import Any

from registry import case, of


def _batch(step: int) -> dict[str, Any]:
    """Two tasks, eight samples, no two equal predictions."""
    import torch

    number = torch.arange(16.0).view(2, 8) + 16 * step
    return {
        "predictions": 0.5 + 0.499 * torch.sin(7.1 * number),
        "labels": (torch.cos(3.3 * number) > 0.1).float(),
        "weights": 1.25 + torch.sin(number) if step != 1 else torch.zeros(2, 8),
        "num_candidates": torch.tensor([3, 0, 4, 1]),
    }


def _reports(root: str, module: str, **options: Any) -> list[Any]:
    kind = of(root, f"metrics.{module}")
    (name,) = [name for name in vars(kind) if name.lower() == f"{module}metriccomputation"]
    metric = getattr(kind, name)(my_rank=0, batch_size=8, n_tasks=2, window_size=20, **options)
    found = []
    for step in range(5):
        batch = _batch(step)
        if module != "gauc":
            del batch["num_candidates"]
        metric.update(**batch)
        reports = metric.compute()
        found.append({f"{r.metric_prefix}{r.name}": r.value.double().tolist() for r in reports})
    return found


@case
def normalized_entropies(root: str) -> Any:
    return _reports(root, "ne", include_logloss=True)


@case
def errors_of_predictions(root: str) -> Any:
    squared = _reports(root, "mse", include_r_squared=True)
    return [squared, _reports(root, "mae"), _reports(root, "accuracy", threshold=0.4)]


@case
def areas_under_curves(root: str) -> Any:
    return [_reports(root, "auc"), _reports(root, "gauc")]
