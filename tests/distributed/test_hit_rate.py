"""Predicted hit rates, against those of the library's cache on ids of a known law."""

from __future__ import annotations

from itertools import product
from math import ceil
from typing import Any

import pytest
import torch
from pairwise import pairwise_cover

from tutorec._kernels.caches.row_cache import RowCache
from tutorec.datasets.ids import power_law_ids
from tutorec.distributed.core.cache_params import CacheParams
from tutorec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from tutorec.distributed.hit_rate import RowPopularity, hit_rate
from tutorec.distributed.planner.enumerators import EmbeddingEnumerator
from tutorec.distributed.planner.options import ParameterConstraints
from tutorec.distributed.planner.topology import Topology
from tutorec.modules.embedding_configs import EmbeddingBagConfig
from tutorec.modules.embedding_modules import EmbeddingBagCollection

ROWS, IDS = 3_000, 150
FULL = pytest.mark.full


def measured(
    exponent: float, slots: int, algorithm, admitted: float | None = None, ids: int = IDS
) -> float:
    """The hit rate of a settled cache."""
    draw = torch.Generator().manual_seed(7)
    dealt_out = torch.randperm(ROWS, generator=draw)
    cache = RowCache([ROWS], [slots], algorithm, admitted)
    for number in range(700):
        if number == 400:
            cache.counts.__init__()
        cache.place(dealt_out[power_law_ids(ids, ROWS, exponent, draw)])
    return cache.counts.hit_rate


# Exponents of the law, slots (a batch has 56 to 123 rows), and what the cache does.
MATRIX = (
    [0.8, 1.05, 1.3],
    [10, 30, 60, 100, 150, 300, 900],
    [("lru", None), ("lru", 1), ("lfu", None)],
)


def caches() -> list[Any]:
    """Each two values of two parameters meet by default; `pytest -m full` runs the product."""
    cover = pairwise_cover(MATRIX)
    return [
        pytest.param(exponent, slots, *rule, marks=() if (exponent, slots, rule) in cover else FULL)
        for exponent, slots, rule in product(*MATRIX)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("exponent", "slots", "algorithm", "admitted"), caches())
def test_predicted_and_measured_hit_rates_agree_within_two_points(
    exponent, slots, algorithm, admitted
):
    law = torch.arange(1, ROWS + 1, dtype=torch.float64) ** -exponent
    predicted = hit_rate(law, slots, algorithm, ids=IDS, admitted=admitted)
    assert predicted == pytest.approx(measured(exponent, slots, algorithm, admitted), abs=0.02)


def test_one_id_at_a_time_is_ches_approximation():
    law = torch.arange(1, 101, dtype=torch.float64) ** -1.0
    law /= law.sum()
    age = 40.0
    in_memory = 1 - torch.exp(-law * age)
    slots = round(float(in_memory.sum()))
    assert hit_rate(law, slots, "lru", admitted=1) == pytest.approx(
        float((law * in_memory).sum()), abs=0.01
    )


@pytest.mark.parametrize("algorithm", ["lru", "lfu"])
def test_ends_of_the_scale(algorithm):
    law = torch.tensor([3, 0, 1, 0])
    assert hit_rate(law, 4, algorithm) == 1.0
    assert hit_rate(law, 2, algorithm) == pytest.approx(1.0, abs=0.2)
    assert hit_rate(law * 10, 1, algorithm) == pytest.approx(hit_rate(law, 1, algorithm))


def test_rows_that_nobody_looks_up_are_refused():
    with pytest.raises(ValueError, match="or all 0; sum 0"):
        hit_rate(torch.zeros(4), 2)
    with pytest.raises(ValueError, match="must not be negative"):
        hit_rate(torch.tensor([2.0, -1.0]), 1)


def test_popularity_tells_the_planner_what_a_cache_misses():
    popularity = RowPopularity.power_law(1000, 1.05, ids=100)
    assert 0 < popularity.cacheability < 0.5
    assert popularity.expected_lookups < 100
    wanted = ParameterConstraints(
        compute_kernels=["fused_uvm_caching"], cache_params=CacheParams(stats=popularity)
    )
    ebc = EmbeddingBagCollection(
        [EmbeddingBagConfig(1000, 16, "item", feature_names=["item"])], device=torch.device("meta")
    )
    options = EmbeddingEnumerator(Topology(2, "cpu"), constraints={"item": wanted}).enumerate(
        ebc, [EmbeddingBagCollectionSharder()]
    )
    factors = {option.cache_params.load_factor for option in options if option.cache_params}
    assert len(factors) > 3
    misses = [popularity.expected_miss_rate(factor) for factor in sorted(factors)]
    assert misses == sorted(misses, reverse=True)
    assert all(miss < 1 - factor for miss, factor in zip(misses, sorted(factors), strict=True))


def test_miss_rates_are_of_the_distinct_rows_of_a_batch():
    popularity = RowPopularity.power_law(1000, 1.05, ids=100)
    distinct = popularity.expected_lookups
    assert distinct == pytest.approx(100 * (1 - popularity.hit_rate(0.0)))
    assert [popularity.expected_miss_rate(factor) for factor in (0.0, 1.0)] == [1.0, 0.0]
    missed = popularity.expected_miss_rate(0.1) * distinct
    assert missed == pytest.approx(100 * (1 - popularity.hit_rate(0.1)))


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("algorithm", ["lru", "lfu"])
def test_the_planner_charges_the_rows_that_a_row_wise_shard_reads_and_writes(algorithm, known):
    samples, exponent, factor, half = 400, 1.05 if known else 0.0, 0.3, ROWS // 2
    stats = RowPopularity.power_law(ROWS, exponent, 2 * samples, algorithm) if known else None
    wanted = ParameterConstraints(
        sharding_types=["row_wise"],
        compute_kernels=["fused_uvm_caching"],
        cache_params=CacheParams(load_factor=factor, stats=stats),
    )
    table = EmbeddingBagConfig(ROWS, 16, "item", feature_names=["item"])
    topology = Topology(2, "cpu")
    [option] = EmbeddingEnumerator(
        topology, batch_size=samples, constraints={"item": wanted}
    ).enumerate(
        EmbeddingBagCollection([table], device=torch.device("meta")),
        [EmbeddingBagCollectionSharder({"optimizer": "exact_row_wise_adagrad"})],
    )
    perf = option.shards[0].perf
    assert perf is not None
    charged = perf.prefetch_compute * topology.ssd_mem_bw

    draw = torch.Generator().manual_seed(7)
    dealt_out = torch.randperm(ROWS, generator=draw)
    cache = RowCache([half], [ceil(factor * half)], algorithm)
    for number in range(700):
        if number == 400:
            cache.counts.__init__()
        ids = dealt_out[power_law_ids(2 * samples, ROWS, exponent, draw)]
        _, _, in_file = cache.place(ids[ids < half])
        cache.change(in_file)
    moved = (cache.counts.read + cache.counts.written) / 300 * (4 * 16 + 4)
    assert charged == pytest.approx(moved, rel=0.06)


@pytest.mark.parametrize("algorithm", ["lru", "lfu"])
def test_rows_in_groups_are_rows_one_by_one(algorithm):
    law = torch.arange(1, 5001, dtype=torch.float64) ** -1.05
    for factor in (0.01, 0.1, 0.5):
        one_by_one = hit_rate(law, round(5000 * factor), algorithm, ids=IDS)
        in_groups = RowPopularity.power_law(5000, 1.05, IDS, algorithm)
        assert in_groups.hit_rate(factor) == pytest.approx(one_by_one, abs=1e-3)
