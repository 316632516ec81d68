"""The thresholds of the page on choosing are thresholds, and a simulation of whole steps agrees
with them.
"""

from __future__ import annotations

import sys

import pytest
from policy.tree import ROOT

sys.path.insert(0, str(ROOT / "book/_ext"))
import choosing

from tutorec.distributed.planner.topology import Topology
from tutorec.distributed.sharding_plan import (
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_wise,
)
from tutorec.distributed.simulate import Load, simulate
from tutorec.modules.embedding_configs import EmbeddingBagConfig
from tutorec.modules.embedding_modules import EmbeddingBagCollection

EIGHT = Topology.preset("8xH100")


def busy_ms(word, rows: int, bag: int, tables: int = 8) -> float:
    """Milliseconds of a simulated step of equal tables, dealt in turn, without the latency of its
    exchanges.
    """
    configs = [
        EmbeddingBagConfig(
            num_embeddings=rows, embedding_dim=64, name=f"t{n}", feature_names=[f"f{n}"]
        )
        for n in range(tables)
    ]
    model = EmbeddingBagCollection(tables=configs, device="meta")
    words = {config.name: word(n) for n, config in enumerate(configs)}
    plan = construct_module_sharding_plan(
        model, words, world_size=8, local_size=8, device_type="cuda"
    )
    step = simulate(plan, EIGHT, model, Load(4096, bag))
    return step.step_ms - EIGHT.latency_ms * len(step.exchanges)


def test_first_is_the_smallest_number_from_which_on_something_holds():
    assert choosing.first(lambda n: n >= 7, 100) == 7
    assert choosing.first(lambda n: True, 100) == 1
    assert choosing.first(lambda n: n == 100, 100) == 100
    assert choosing.first(lambda n: False, 100) is None


def test_copies_lose_from_the_threshold_on_in_a_simulated_step_too():
    rows = choosing.copies_lose(EIGHT, 4096)
    assert rows is not None
    whole = busy_ms(lambda n: table_wise(rank=n), rows, 1)
    assert busy_ms(lambda n: data_parallel(), int(rows * 0.8), 1) < whole
    assert busy_ms(lambda n: data_parallel(), int(rows * 1.25), 1) > whole


def test_a_cut_by_rows_pays_from_the_threshold_on_in_a_simulated_step_too():
    bag = choosing.rows_pay(choosing.RW, EIGHT)
    assert bag is not None
    for ids, pays in ((bag - 2, False), (bag + 2, True)):
        alone = busy_ms(lambda n: table_wise(rank=n), 10_000_000, ids, tables=1)
        assert (busy_ms(lambda n: row_wise(), 10_000_000, ids, tables=1) < alone / 2) is pays


def test_the_largest_table_fits_and_a_tenth_more_does_not():
    free = 0.85 * EIGHT.devices[0].storage.hbm
    held = choosing.largest(choosing.TW, EIGHT)
    assert 0.95 * free < held < free
    assert 7.9 < choosing.largest(choosing.TWRW, EIGHT) / held < 8.1


def test_hosts_matter_more_the_more_there_are():
    saved = [
        choosing.adding_inside_saves(Topology.preset(f"8xH100x{hosts}")) for hosts in (2, 8, 64)
    ]
    assert 1 < saved[0] < saved[1] < saved[2]


@pytest.mark.parametrize("name", choosing.HEADERS)
def test_every_table_has_a_line_for_each_machine_and_a_cell_for_each_column(name):
    rows = choosing.threshold_rows(name)
    assert len(rows) == (2 if name == "hosts" else len(choosing.MACHINES))
    assert all(len(row) == len(choosing.HEADERS[name]) for row in rows)
    assert all("None" not in cell and "nan" not in cell for row in rows for cell in row)


def test_what_the_page_says_of_its_numbers_in_words_holds():
    several, laptop = Topology.preset("8xH100x8"), Topology.preset("laptop")
    copies = [choosing.copies_lose(machine, 4096) or 0 for machine in (EIGHT, several)]
    assert 0.5 * 4096 < copies[0] < copies[1] < 4096
    assert choosing.rows_pay(choosing.RW, laptop) is None
    bags = [choosing.rows_beat_columns(machine) or 0 for machine in (laptop, several, EIGHT)]
    assert bags[0] < 10 < 100 < bags[1] < bags[2]
    assert choosing.adding_inside_saves(choosing.with_a_fast_network(several)) > 2
