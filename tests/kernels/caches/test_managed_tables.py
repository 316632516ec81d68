"""Tables in the memory of the host that a GPU looks up: what fbgemm is told, and what is read and
written when.

In CPU memory, with formulas and a cache of the tests in place of fbgemm's kernels.
"""

import copy
from collections.abc import Iterator
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from kernels import pretended_fbgemm
from kernels.caches.test_cached_tables import RULES, batch, group, step
from kernels.implementations import copy_numbers, needs_fbgemm
from torch.utils._pytree import tree_leaves

from tutorec._kernels import tbe_cuda
from tutorec._kernels.backend import fbgemm_module, use_backend
from tutorec._kernels.caches.managed_tables import ManagedCachingTableBatch, ManagedTableBatch
from tutorec._kernels.caches.row_cache import CacheSpec
from tutorec._kernels.specs import FBGEMM_KINDS, GroupSpec, OptimizerSpec, TableSpec
from tutorec._kernels.tbe import TableBatch
from tutorec._kernels.tbe_build import build_table_batch
from tutorec._kernels.wheels import BackendChoice

pytestmark = needs_fbgemm
CPU = torch.device("cpu")
CACHE = CacheSpec((15, 12, 3))
AHEAD = CacheSpec((15, 12, 3), prefetch_pipeline=True)


@pytest.fixture(autouse=True)
def cache_of_the_tests() -> Iterator[None]:
    with use_backend("fbgemm"), pretended_fbgemm.pretended_cache():
        yield


def pair(
    spec: GroupSpec, rule: OptimizerSpec, cache: CacheSpec | None
) -> tuple[TableBatch, TableBatch]:
    """The same tables, in the memory of the GPU and in that of the host."""
    plain = pretended_fbgemm.TablesInHostMemory(spec, rule, CPU)
    managed = ManagedTableBatch(spec, rule, CPU)
    if cache is not None:
        managed = ManagedCachingTableBatch(
            spec, rule, CPU, replace(cache, rows=cache.rows[: len(spec.tables)])
        )
    first = [torch.randn(table.rows, table.columns) for table in spec.tables]
    for tables in (plain, managed):
        copy_numbers(tables.table_weights(), first)
    return plain, managed


def assert_same(plain: TableBatch, managed: TableBatch) -> None:
    for read in ("table_weights", "optimizer_state", "table_states"):
        of_plain, of_managed = (tree_leaves(getattr(tables, read)()) for tables in (plain, managed))
        assert len(of_plain) == len(of_managed)
        assert all(torch.equal(one, other) for one, other in zip(of_plain, of_managed, strict=True))


@pytest.mark.parametrize("cache", [None, CACHE, AHEAD], ids=["no cache", "cache", "pipeline"])
@pytest.mark.parametrize("pooling", ["sum", "mean", "none"])
@pytest.mark.parametrize(
    "rule",
    [rule for rule in RULES if rule.kind in FBGEMM_KINDS["cuda"]],
    ids=lambda rule: rule.kind,
)
def test_training_equals_that_of_tables_on_the_gpu(rule, pooling, cache):
    plain, managed = pair(group(pooling), rule, cache)
    for seed in range(6):
        given = batch(seed, weighted=False, pooling=pooling)
        assert torch.equal(step(plain, given), step(managed, given))
        with torch.no_grad():
            assert torch.equal(plain(*given), managed(*given))
    assert_same(plain, managed)
    other = copy.deepcopy(managed)
    given = batch(7, weighted=False, pooling=pooling)
    assert torch.equal(step(plain, given), step(other, given))
    assert_same(plain, other)


@pytest.mark.parametrize("cache", [None, CACHE], ids=["no cache", "cache"])
def test_the_gradient_of_weights_reads_rows_as_they_are(cache):
    plain, managed = pair(group(weighted=True), RULES[1], cache)
    for seed in range(4):
        values, offsets, weights = batch(seed, True, "sum")
        assert weights is not None
        own = [weights.clone().requires_grad_() for _ in range(2)]
        for tables, one in zip((plain, managed), own, strict=True):
            step(tables, (values, offsets, one))
        assert torch.equal(own[0].grad, own[1].grad)
    assert_same(plain, managed)


@pytest.mark.parametrize("cache", [CACHE, AHEAD], ids=["cache", "pipeline"])
def test_what_is_loaded_is_seen_and_the_rest_stays(cache):
    plain, managed = pair(group(), RULES[2], cache)
    for seed in range(1, 9, 2):
        given = batch(seed, False, "sum")
        assert torch.equal(step(plain, given), step(managed, given))
        for tables in (plain, managed):
            tables.table_weights()[0][:25] = float(seed)  # in the cache, some of them
        assert torch.equal(step(plain, given), step(managed, given))
    assert_same(plain, managed)


def test_rows_written_over_newer_ones_in_the_cache_are_refused():
    _, managed = pair(group(), RULES[2], CACHE)
    weights = managed.table_weights()[0]
    step(managed, batch(1, False, "sum"))
    weights[3] = 1.0
    with pytest.raises(ValueError, match=r"tables \['user', 'item', 'shop'\].*call flush\(\)"):
        managed(*batch(1, False, "sum"))


def test_a_flush_between_forward_and_backward_leaves_the_update_in_the_cache():
    plain, managed = pair(group(), RULES[2], CACHE)
    given = batch(1, False, "sum")
    for tables in (plain, managed):
        pooled = tables(*given)
        tables.flush()
        pooled.sum().backward()
    weights = managed._tables[0]
    assert managed._is_ahead  # type: ignore[attr-defined]
    assert not torch.equal(weights, plain.table_weights()[0])
    assert_same(plain, managed)


@pytest.mark.parametrize("between", ["lookup", "evaluation", "writing"])
def test_a_backward_after_the_next_lookup_is_refused(between):
    _, managed = pair(group(), RULES[1], CACHE)
    pooled = managed(*batch(1, False, "sum"))
    if between == "writing":
        managed.table_weights()[0].zero_()
    with torch.set_grad_enabled(between == "lookup"):
        managed(*batch(3, False, "sum"))
    with pytest.raises(RuntimeError, match=r"'user', 'item', 'shop'.*backward.*'fused_uvm'"):
        pooled.sum().backward()


@pytest.mark.parametrize("pooling", ["sum", "none"])
def test_prefetching_changes_no_bit_and_fills_the_cache_once(pooling):
    plain, managed = pair(group(pooling), RULES[1], AHEAD)
    batches = [batch(seed, False, pooling) for seed in range(12)]
    module = managed._fbgemm  # type: ignore[attr-defined]
    for number, given in enumerate(batches):
        managed.prefetch(*given[:2])
        if number >= 2:
            filled = module.timestep
            assert torch.equal(step(plain, batches[number - 2]), step(managed, batches[number - 2]))
            assert module.timestep == filled, "the lookup uses what was prefetched"
    assert_same(plain, managed)


def test_another_batch_than_the_prefetched_one_finds_its_rows():
    plain, managed = pair(group(), RULES[3], AHEAD)
    given, other = batch(1, False, "sum"), batch(3, False, "sum")
    for tables in (plain, managed):
        step(tables, given)
    managed.prefetch(*given[:2])
    assert torch.equal(step(plain, other), step(managed, other))
    managed.prefetch(*given[:2])
    for tables in (plain, managed):
        tables.table_weights()[0].mul_(2)
    assert torch.equal(step(plain, given), step(managed, given))
    assert_same(plain, managed)


def test_different_numbers_of_steps_are_refused():
    _, managed = pair(group(), RULES[3], CACHE)
    step(managed, batch(1, False, "sum"))
    managed.optimizer_state()[1]["step"].fill_(7)
    with pytest.raises(
        ValueError, match=r"'user', 'item', 'shop'.*\[1.0, 7.0, 1.0\] steps.*'fused_uvm'"
    ):
        managed(*batch(3, False, "sum"))


def test_without_a_pipeline_nothing_is_prefetched():
    _, managed = pair(group(), RULES[1], CACHE)
    before = managed._fbgemm.timestep  # type: ignore[attr-defined]
    managed.prefetch(*batch(1, False, "sum")[:2])
    assert managed._fbgemm.timestep == before  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", FBGEMM_KINDS["cuda"])
def test_fbgemm_is_told_of_places_and_cache(kind):
    fbgemm = fbgemm_module(tbe_cuda._TRAINING)
    cache = CacheSpec((15, 100, 3), "lfu", reserved_memory=2e9)
    built = fbgemm.SplitTableBatchedEmbeddingBagsCodegen
    for given, location in ((None, "MANAGED"), (cache, "MANAGED_CACHING")):
        # The method, for the class itself looks up its own name in the module up to fbgemm 1.3.
        with patch.object(built, "__init__", autospec=True, side_effect=built.__init__) as called:
            _, managed = pair(group(), OptimizerSpec(kind), given)
        words = called.call_args.kwargs
        places = {(str(spec[2].name), str(spec[3].name)) for spec in called.call_args.args[1]}
        assert places == {(location, "CUDA")}
        assert managed.kernel == f"{'managed' if given is None else 'cached'} fbgemm.{kind}"
        assert managed._flat.data_ptr() == managed._fbgemm.weights_uvm.data_ptr()  # type: ignore[attr-defined]
        if given is None:
            assert not any(name.startswith("cache_") for name in words)
            continue
        assert words["cache_algorithm"] is fbgemm.CacheAlgorithm.LFU
        assert words["cache_load_factor"] == (15 + 40 + 3) / (50 + 40 + 7)
        assert (words["cache_reserved_memory"], words["cache_precision"]) == (
            2e9,
            fbgemm.SparseType.FP32,
        )
        assert words["prefetch_pipeline"] is False


@pytest.mark.parametrize(
    ("wheel", "columns", "reason"),
    [(False, 8, r"fbgemm"), (True, 4096, r"none for sgd on such rows")],
)
def test_without_the_kernels_slower_memory_of_cuda_is_refused(wheel, columns, reason):
    spec = GroupSpec((TableSpec("item", 10, columns),), (0,))
    message = (
        r"'item'.* cannot be stored in slower memory on cuda: .*wheel, "
        rf"fbgemm-gpu.*{reason}.*kernel 'fused'"
    )
    with (
        patch.object(BackendChoice, "serves", lambda choice, device: wheel or device == "cpu"),
        pytest.raises(ValueError, match=message),
    ):
        build_table_batch(
            spec, optimizer=RULES[0], device=torch.device("cuda"), cache=CacheSpec((5,))
        )
