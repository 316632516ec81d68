"""What is left for tables: by the part, by the bytes, by what the rest of the model needs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

from tutorec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from tutorec.distributed.planner.options import ParameterConstraints
from tutorec.distributed.planner.storage_reservations import (
    FixedAbsoluteStorageReservation,
    FixedPercentageStorageReservation,
    HeuristicalStorageReservation,
)
from tutorec.distributed.planner.topology import CustomTopologyData, Storage, Topology
from tutorec.distributed.planner.types import StorageReservation
from tutorec.errors import PlannerError, PlannerErrorType
from tutorec.modules.embedding_configs import EmbeddingBagConfig
from tutorec.modules.embedding_modules import EmbeddingBagCollection

SHARDERS: list[Any] = [EmbeddingBagCollectionSharder()]


class Model(nn.Module):
    """10 x 3 dense numbers, 7 numbers of a buffer, and a table."""

    def __init__(self, device: str) -> None:
        super().__init__()
        table = EmbeddingBagConfig(1000, 64, "item", feature_names=["now", "seen"])
        self.bags = EmbeddingBagCollection([table], device=torch.device(device))
        self.dense = nn.Linear(10, 3, bias=False, device=device)
        self.register_buffer("mean", torch.zeros(7, device=device))


def left(
    reservation: StorageReservation, topology: Topology, batch_size: int = 4, **constraint: Any
) -> list[Storage]:
    constraints = {"item": ParameterConstraints(**constraint)} if constraint else None
    reserved = reservation.reserve(topology, batch_size, Model("meta"), SHARDERS, constraints)
    return [device.storage for device in reserved.devices]


def test_percentage_keeps_a_part_of_each_device():
    topology = Topology(
        2, "cuda", custom_topology_data=CustomTopologyData({"hbm_cap": [1000, 2000]}, 2)
    )
    assert [storage.hbm for storage in left(FixedPercentageStorageReservation(0.25), topology)] == [
        750,
        1500,
    ]


def test_percentage_keeps_host_memory_on_the_cpu():
    topology = Topology(1, "cpu", ddr_cap=1000)
    assert left(FixedPercentageStorageReservation(0.25), topology)[0].ddr == 750


def test_bytes_are_kept_and_never_more_than_there_are():
    topology = Topology(
        2, "cuda", custom_topology_data=CustomTopologyData({"hbm_cap": [100, 2000]}, 2)
    )
    assert [storage.hbm for storage in left(FixedAbsoluteStorageReservation(300), topology)] == [
        0,
        1700,
    ]
    assert (
        FixedAbsoluteStorageReservation.from_gb(2)
        .reserve(Topology(1, "cpu", ddr_cap=3 * 1024**3), 1, nn.Module(), [])
        .devices[0]
        .storage.ddr
        == 1024**3
    )


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_heuristic_keeps_dense_parameters_buffers_and_batches(device: str):
    topology = Topology(1, "cuda", hbm_cap=10_000)
    reservation = HeuristicalStorageReservation(percentage=0.1)
    reserved = reservation.reserve(topology, 4, Model(device), SHARDERS)
    # 6 x 30 numbers of 4 bytes, 7 of a buffer; two features of 4 ids, of 8 bytes in 20 copies.
    dense, batches = 6 * 30 * 4 + 7 * 4, 2 * 4 * 8 * 20
    assert reserved.devices[0].storage.hbm == 9000 - dense - batches
    assert (reservation.dense_storage, reservation.kjt_storage) == (
        Storage(dense, 0),
        Storage(batches, 0),
    )
    assert reservation.last_reserved_topology is reserved


def test_heuristic_counts_ids_as_the_constraints_say():
    topology = Topology(1, "cpu", ddr_cap=100_000)
    free = HeuristicalStorageReservation(0.0, dense_tensor_estimate=0)
    assert left(free, topology, pooling_factors=[1.0, 9.0])[0].ddr == 100_000 - (4 + 36) * 160
    assert (
        left(free, topology, pooling_factors=[1.0, 9.0], batch_sizes=[2, 1])[0].ddr
        == 100_000 - (2 + 9) * 160
    )


def test_estimate_of_the_dense_part_takes_the_place_of_what_is_computed():
    topology = Topology(1, "cuda", hbm_cap=10_000)
    reservation = HeuristicalStorageReservation(0.0, dense_tensor_estimate=50)
    assert left(reservation, topology)[0].hbm == 10_000 - 50 - 1280
    assert (
        left(HeuristicalStorageReservation(0.0, dense_tensor_estimate=0), topology)[0].hbm
        == 10_000 - 1280
    )


def test_topology_that_is_given_stays_as_it_is():
    topology = Topology(1, "cuda", hbm_cap=10_000)
    for reservation in (
        FixedPercentageStorageReservation(0.5),
        FixedAbsoluteStorageReservation(7),
        HeuristicalStorageReservation(0.1),
    ):
        assert left(reservation, topology)[0].hbm < 10_000
        assert topology.devices[0].storage.hbm == 10_000


@example(hbm=0, percentage=0.9999999999999999, batch_size=1, multiplier=6.0)
@given(
    hbm=st.integers(0, 20_000),
    percentage=st.floats(0, 1),
    batch_size=st.integers(1, 200),
    multiplier=st.sampled_from([0.0, 1.0, 6.0]),
)
def test_less_than_nothing_left_is_an_error(
    hbm: int, percentage: float, batch_size: int, multiplier: float
):
    def reserve(hbm: int, percentage: float, batch_size: int) -> int:
        reservation = HeuristicalStorageReservation(percentage, multiplier)
        return left(reservation, Topology(1, "cuda", hbm_cap=hbm), batch_size)[0].hbm

    needs = HeuristicalStorageReservation(0.0, multiplier)
    left(needs, Topology(1, "cuda", hbm_cap=10**9), batch_size)
    assert needs.dense_storage is not None
    assert needs.kjt_storage is not None
    if int((1 - percentage) * hbm) >= needs.dense_storage.hbm + needs.kjt_storage.hbm:
        assert reserve(hbm, percentage, batch_size) >= 0
        return
    with pytest.raises(PlannerError) as caught:
        reserve(hbm, percentage, batch_size)
    assert caught.value.error_type is PlannerErrorType.INSUFFICIENT_STORAGE
    message = str(caught.value)
    assert "rank 0" in message
    assert f"{hbm:,} bytes of HBM" in message


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FixedPercentageStorageReservation(1.5), "percentage=1.5"),
        (lambda: FixedPercentageStorageReservation(float("nan")), "percentage=nan"),
        (lambda: HeuristicalStorageReservation(-0.1), "percentage=-0.1"),
        (
            lambda: HeuristicalStorageReservation(0.1, parameter_multiplier=-1),
            "parameter_multiplier=-1",
        ),
        (
            lambda: HeuristicalStorageReservation(0.1, dense_tensor_estimate=-1),
            "dense_tensor_estimate=-1",
        ),
        (lambda: FixedAbsoluteStorageReservation(-1), "hbm_reserved_bytes=-1"),
    ],
)
def test_amounts_that_cannot_be_are_errors(make: Any, message: str):
    with pytest.raises(PlannerError, match=message):
        make()
