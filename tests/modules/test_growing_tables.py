"""Collections with growing tables: initial rows, memory in use, reports, and exports that a replica
follows.
"""

from __future__ import annotations

import pytest
import torch
from modules.test_growing import stream
from process_memory import bytes_of, measurable, peak_during, resident

from tutorec.modules.changed_rows import changed_rows
from tutorec.modules.embedding_collection import EmbeddingCollection
from tutorec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from tutorec.modules.embedding_modules import EmbeddingBagCollection
from tutorec.modules.growing import GrowingManagedCollisionModule
from tutorec.modules.mc_embedding_modules import (
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)
from tutorec.modules.mc_evictions import LFU_EvictionPolicy
from tutorec.modules.mc_modules import ManagedCollisionCollection, MCHManagedCollisionModule
from tutorec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from tutorec.optim.rowwise_adagrad import RowWiseAdagrad
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor

OPTIMIZERS = {"sgd": torch.optim.SGD, "rowwise_adagrad": RowWiseAdagrad, "adam": torch.optim.Adam}
STATE_BYTES = {"sgd": 0, "rowwise_adagrad": 4, "adam": 2 * 64 * 4}


def pooled_model(
    growing: GrowingManagedCollisionModule, columns: int = 8, optimizer: str = "rowwise_adagrad"
) -> ManagedCollisionEmbeddingBagCollection:
    """One growing table, trained in backward."""
    rows = growing.output_size()
    tables = [
        EmbeddingBagConfig(rows, columns, "t", feature_names=["item"], use_virtual_table=True)
    ]
    tables[0].weight_init_min, tables[0].weight_init_max = 0.5, 1.0
    collection = EmbeddingBagCollection(tables)
    apply_optimizer_in_backward(OPTIMIZERS[optimizer], collection.parameters(), {"lr": 0.1})
    return ManagedCollisionEmbeddingBagCollection(
        collection, ManagedCollisionCollection({"t": growing}, tables), True
    )


def train(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    pooled, rows = model(
        KeyedJaggedTensor(["item"], ids, lengths=torch.ones(len(ids), dtype=torch.int64))
    )
    (pooled.values() * torch.linspace(-1, 1, pooled.values().shape[1])).sum().backward()
    return rows.values()


def test_rows_get_initial_values_and_new_state_with_their_ids() -> None:
    model = pooled_model(GrowingManagedCollisionModule(8))
    weight = model._embedding_bag_collection.embedding_bags["t"].weight
    state = weight._in_backward_optimizers[0].state[weight]["sum"]
    train(model, torch.arange(100, 105))
    held = weight.detach().clone()
    assert bool((held[:5] != 0).all())
    assert not held[5:].any()
    train(model, torch.arange(200, 202))  # the table is full
    before, values = state.clone(), weight.detach().clone()
    rows = train(model, torch.tensor([300]))
    assert rows.tolist() == [4]  # of the least recently used the last
    gradient = torch.linspace(-1, 1, 8)
    # the sum of squares began anew
    torch.testing.assert_close(state[4], gradient.square().mean().view(1))
    others = torch.arange(8) != 4
    torch.testing.assert_close(state[others], before[others], rtol=0, atol=0)
    torch.testing.assert_close(weight[others], values[others], rtol=0, atol=0)
    initial = weight[4].detach() + 0.1 * gradient / gradient.square().mean().sqrt()
    assert 0.5 <= float(initial.min()) < float(initial.max()) <= 1.0


@pytest.mark.parametrize("max_rows", [4000, 128])
def test_a_replica_fed_with_increments_equals_the_table(max_rows: int) -> None:
    growing = GrowingManagedCollisionModule(max_rows, admit_after=2, buckets=4, eviction_interval=3)
    model = pooled_model(growing)
    weight = model._embedding_bag_collection.embedding_bags["t"].weight
    replica: dict[int, tuple[int | None, torch.Tensor]] = {}
    version, sizes = 0, []
    for number, ids in enumerate(stream(batches=30, size=64, ids=400)):
        train(model, ids)
        if number % 5 == 4:
            version, changes = changed_rows(model, version)
            rows, row_ids, values, shared = changes["t"]
            for row, id, value, is_shared in zip(
                rows.tolist(), row_ids.tolist(), values, shared.tolist(), strict=True
            ):
                replica[row] = None if is_shared else id, value
            sizes.append(len(rows))
            assert version == number + 1
    model.eval()
    used = [row for row, (id, _) in replica.items() if id is not None]
    assert len(used) == max_rows - 4 - int(growing.open_slots())
    ids = torch.tensor([replica[row][0] for row in used])
    batch = KeyedJaggedTensor(["item"], ids, lengths=torch.ones(len(ids), dtype=torch.int64))
    assert model(batch)[1].values().tolist() == used
    whole = torch.zeros_like(weight)
    whole[list(replica)] = torch.stack([value for _, value in replica.values()])
    torch.testing.assert_close(whole, weight.detach(), rtol=0, atol=0)
    assert max(sizes[1:]) < len(replica)
    assert len(changed_rows(model, version)[1]["t"].rows) == 0


def test_a_mapping_that_records_no_changes_is_refused() -> None:
    tables = [EmbeddingBagConfig(4, 2, "t", feature_names=["item"])]
    mapping = MCHManagedCollisionModule(
        4, torch.device("cpu"), LFU_EvictionPolicy(), eviction_interval=1
    )
    model = ManagedCollisionEmbeddingBagCollection(
        EmbeddingBagCollection(tables), ManagedCollisionCollection({"t": mapping}, tables)
    )
    with pytest.raises(ValueError, match="table 't' has a MCHManagedCollisionModule"):
        changed_rows(model)


def test_rows_that_are_not_pooled_grow_too() -> None:
    tables = [EmbeddingConfig(100, 4, "t", feature_names=["item"], use_virtual_table=True)]
    model = ManagedCollisionEmbeddingCollection(
        EmbeddingCollection(tables),
        ManagedCollisionCollection({"t": GrowingManagedCollisionModule(100)}, tables),
    )
    ids = torch.tensor([5, 10**15, 5])
    rows = model(KeyedJaggedTensor(["item"], ids, lengths=torch.tensor([3])))[0]["item"].values()
    torch.testing.assert_close(rows[0], rows[2])
    assert bool((rows != 0).all())
    assert bool((rows[0] != rows[1]).all())


def test_a_report_counts_rows_lookups_and_evictions() -> None:
    growing = GrowingManagedCollisionModule(8, admit_after=2)
    model = pooled_model(growing)
    for ids in (torch.arange(10), torch.arange(10), torch.arange(2)):
        train(model, ids)
    report = growing.report("t")
    assert (report.rows, report.occupied, report.lookups, report.collisions) == (8, 8, 22, 10 + 3)
    assert report.evictions == 0
    for _ in range(2):
        train(model, torch.arange(20, 23))
    assert growing.report("t").evictions == 3
    assert " 28 " in str(model._managed_collision_collection.report())


def peak_per_row(optimizer: str, rows: int) -> int:
    """Bytes that training takes for each row of a table that grows to so many, with room for 2
    million.
    """
    torch.set_num_threads(1)

    def grow(rows: int) -> list[torch.nn.Module]:
        model = pooled_model(
            GrowingManagedCollisionModule(2_000_000), columns=64, optimizer=optimizer
        )
        for ids in torch.randint(-(2**63), 2**63 - 1, (rows,)).split(1000):
            train(model, ids)
        return [model]

    kept = grow(2000)
    kept.clear()
    before = resident()
    return (peak_during(lambda: kept.extend(grow(rows))) - before) // rows


@pytest.mark.skipif(not measurable(), reason="reads and resets the peak in /proc, which Linux has")
@pytest.mark.parametrize("optimizer", ["rowwise_adagrad", "adam"])
def test_memory_follows_the_rows_in_use(optimizer: str) -> None:
    rows = 160_000  # a megabyte that something else takes is 6 bytes of a row
    peak = bytes_of(f"modules.test_growing_tables:peak_per_row({optimizer!r}, {rows})")
    assert peak <= 1.3 * (64 * 4 + STATE_BYTES[optimizer])
