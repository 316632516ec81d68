"""Metrics of a model in training, over batches, windows and ranks.

Each module has one metric, under TorchRec's name. For labels and scores that are all here,
`tutorec.models.metrics` has AUC and normalized entropy as functions.
"""

__all__: list[str] = []
