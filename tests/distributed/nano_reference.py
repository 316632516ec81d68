"""What nano, *TorchRec in 300 lines*, makes of the tables and batches of `cases`.

nano has SGD and row-wise Adagrad, sums, means and rows; other cases stay with `cases.Reference`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from distributed.cases import EPS, LEARNING_RATE, Reference, coefficients, column_slices, seed_of
from distributed.row_cases import RowsReference, loss, plain
from torch import Tensor

from tutorec import nano
from tutorec.modules.embedding_configs import PoolingType
from tutorec.sparse.jagged import JaggedTensor
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor

RULES: dict[str, Callable[..., None]] = {
    "exact_sgd": partial(nano.sgd, rate=LEARNING_RATE),
    "exact_row_wise_adagrad": partial(nano.rowwise_adagrad, rate=LEARNING_RATE, eps=EPS),
}
POOLINGS = {PoolingType.SUM: "sum", PoolingType.MEAN: "mean"}
# one after the other; all of them train the same weights
WAYS = (nano.TableWise(0), nano.RowWise(), nano.Replicated())


def slice_name(table: str, columns: slice) -> str:
    """nano's name for some columns of a table: they are a table of their own there."""
    return f"{table}[{columns.start}:{columns.stop}]"


@dataclass
class Sliced:
    """The tables of a reference, a table of nano for each slice of columns."""

    reference: Reference

    def slices(self) -> list[tuple[Any, int, slice]]:
        """Table, number of the slice, columns."""
        return [
            (config, number, columns)
            for index, config in enumerate(self.reference.configs())
            for number, columns in enumerate(
                column_slices(self.reference.kind, index, config.embedding_dim)
            )
        ]

    def tables(self) -> list[nano.Table]:
        """Each reads copies of the table's features, with names of their own."""
        return [
            nano.Table(
                name := slice_name(config.name, columns),
                config.num_embeddings,
                columns.stop - columns.start,
                tuple(f"{feature}@{name}" for feature in config.feature_names),
                POOLINGS[config.pooling] if hasattr(config, "pooling") else "none",
            )
            for config, _, columns in self.slices()
        ]

    def batch(self, features: KeyedJaggedTensor) -> nano.Batch:
        """The copies of the features."""
        of_features = features.to_dict()
        copies = {
            key: of_features[key.partition("@")[0]]
            for table in self.tables()
            for key in table.features
        }
        values = torch.cat([copy.values() for copy in copies.values()])
        lengths = torch.stack([copy.lengths() for copy in copies.values()])
        return nano.Batch([*copies], values, lengths)

    def outputs(self, rows: dict[str, Tensor]) -> list[tuple[str, str, Tensor]]:
        """Table, feature, and its rows with all columns, in the order of the tables."""
        return [
            (
                config.name,
                feature,
                torch.cat(
                    [
                        rows[f"{feature}@{slice_name(config.name, columns)}"]
                        for columns in column_slices(
                            self.reference.kind, index, config.embedding_dim
                        )
                    ],
                    dim=1,
                ),
            )
            for index, config in enumerate(self.reference.configs())
            for feature in config.feature_names
        ]

    def start(self) -> dict[str, nano.Rows]:
        """Weights and state of now."""
        start = {}
        for config, number, columns in self.slices():
            weight = self.reference.weights()[config.name].detach()[:, columns]
            states = self.reference.states.get(config.name, {})
            state = states["momentum1"][number] if states else torch.zeros(len(weight))
            whole = state[:, None].expand_as(weight)
            start[slice_name(config.name, columns)] = nano.Rows(weight, whole)
        return start

    @torch.no_grad()
    def keep(self, saved: dict[str, nano.Rows]) -> None:
        """Make what nano has trained the weights and state of the reference."""
        for config, number, columns in self.slices():
            rows = saved[slice_name(config.name, columns)]
            self.reference.weights()[config.name][:, columns] = rows.weight
            states = self.reference.states.setdefault(config.name, {})
            if self.reference.optimizer != "exact_sgd":
                count = len({part for table, part, _ in self.slices() if table is config})
                state = states.setdefault("momentum1", torch.zeros(count, len(rows.weight)))
                state[number] = rows.state[:, 0]

    def train(
        self,
        batches: Sequence[KeyedJaggedTensor],
        run: Callable[[int, list[tuple[str, str, Tensor]]], tuple[Tensor, Any]],
    ) -> list[Any]:
        """One step of nano on as many ranks; ``run`` gives a rank's loss, and what is returned."""
        tables = self.tables()
        plan = {table.name: WAYS[index % len(WAYS)] for index, table in enumerate(tables)}
        start = self.start()
        rule = RULES[self.reference.optimizer]

        def on_rank(group: nano.Group) -> tuple[Any, dict[str, nano.Rows]]:
            collection = nano.Collection(group, tables, plan, start, rule)
            rows = collection(self.batch(batches[group.rank]))
            total, result = run(group.rank, self.outputs(rows))
            total.backward()
            return result, collection.save()

        of_ranks = nano.run_ranks(len(batches), on_rank)
        self.keep(of_ranks[0][1])
        return [result for result, _ in of_ranks]


class NanoReference(Reference):
    """Pooled tables."""

    def step(self, batches: list[KeyedJaggedTensor], step: int) -> list[Tensor]:
        """One step on the global batch; returns each rank's outputs."""

        def run(rank: int, outputs: list[tuple[str, str, Tensor]]) -> tuple[Tensor, Tensor]:
            out = torch.cat([rows for *_, rows in outputs], dim=1)
            return (out * coefficients(out, seed_of(rank, step))).sum(), out.detach()

        return Sliced(self).train(batches, run)


class NanoRowsReference(RowsReference):
    """Tables whose rows are not pooled."""

    def rows_step(self, batches: list[KeyedJaggedTensor], step: int) -> list[dict[str, Any]]:
        """One step on the global batch; returns each rank's results."""

        def run(rank: int, outputs: list[tuple[str, str, Tensor]]) -> tuple[Tensor, Any]:
            readers = [feature for _, feature, _ in outputs]
            bags = batches[rank].to_dict()
            results = {
                f"{feature}@{table}" if readers.count(feature) > 1 else feature: JaggedTensor(
                    rows,
                    lengths=bags[feature].lengths(),
                    weights=bags[feature].values(),  # need_indices: the ids
                )
                for table, feature, rows in outputs
            }
            return loss(results, seed_of(rank, step)), plain(results)

        return Sliced(self).train(batches, run)
