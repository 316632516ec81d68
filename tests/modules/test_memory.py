"""A training step of an unsharded collection needs little more memory than its tables."""

import subprocess
import sys

import pytest

_STEP = """
import resource, sys
import torch
torch.set_num_threads(1)
from tutorec.modules.embedding_configs import EmbeddingBagConfig
from tutorec.modules.embedding_modules import EmbeddingBagCollection
from tutorec.optim import RowWiseAdagrad, apply_optimizer_in_backward
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor

TABLES, COLUMNS, SAMPLES = 8, 64, 256

def train(rows):
    keys = [f"f{i}" for i in range(TABLES)]
    ebc = EmbeddingBagCollection([EmbeddingBagConfig(rows, COLUMNS, "t" + key, feature_names=[key]) for key in keys])
    apply_optimizer_in_backward(RowWiseAdagrad, ebc.parameters(), {"lr": 0.1})
    for _ in range(3):
        ids = torch.randint(0, rows, (TABLES * SAMPLES * 10,))
        lengths = torch.full((TABLES * SAMPLES,), 10)
        ebc(KeyedJaggedTensor(keys, ids, lengths=lengths)).values().sum().backward()

train(100)
rows = 100_000
weights = TABLES * rows * COLUMNS * 4
soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
with open("/proc/self/status") as status:
    used = next(int(line.split()[1]) for line in status if line.startswith("VmData")) * 1024
resource.setrlimit(resource.RLIMIT_DATA, (used + int(float(sys.argv[1]) * weights), hard))
train(rows)
"""  # noqa: E501


def trains_within(share: float, kind: str) -> subprocess.CompletedProcess[str]:
    """Train 200 MiB of tables where a process may have ``share`` times the weights more memory than
    before.
    """
    environment = {"TUTOREC_BACKEND": kind, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    return subprocess.run(
        [sys.executable, "-c", _STEP, str(share)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="reads /proc and needs RLIMIT_DATA of Linux"
)
@pytest.mark.parametrize("kind", ["auto", "torch"])
def test_a_step_with_rowwise_adagrad_needs_a_tenth_more_than_the_weights(kind: str) -> None:
    done = trains_within(1.10, kind)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="reads /proc and needs RLIMIT_DATA of Linux"
)
def test_the_limit_of_memory_is_one() -> None:
    assert "alloc" in trains_within(0.98, "auto").stderr.lower()


_TOO_LARGE = """
import resource, torch
from tutorec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig
from tutorec.distributed.embedding import EmbeddingCollectionSharder
from tutorec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from tutorec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from tutorec.distributed.sharding_plan import (
    construct_module_sharding_plan, data_parallel, row_wise, table_wise,
)
from tutorec.distributed.types import ShardingEnv

BAGS = EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingBagCollectionSharder
ROWS = EmbeddingCollection, EmbeddingConfig, EmbeddingCollectionSharder
META, ENV = torch.device("meta"), ShardingEnv(1, 0, None)

def tables(kind, device=None, rows=1_000_000):
    small = kind[1](10, 64, "small", feature_names=["g"])
    return kind[0]([small, kind[1](rows, 64, "item", feature_names=["f"])], device=device)

def shard(kind, entry, optimizer, rows=1_000_000):
    model = tables(kind, META, rows)
    entries = {"small": entry, "item": entry}
    plan = construct_module_sharding_plan(
        model, entries, local_size=1, world_size=1, device_type="cpu"
    )
    kind[2]({"optimizer": optimizer, "learning_rate": 0.1}).shard(model, plan, ENV)

def as_advised():
    model = torch.nn.Sequential(tables(BAGS, META))
    constraints = {"item": ParameterConstraints(compute_kernels=["fused_uvm_caching"])}
    sharder = BAGS[2]({"optimizer": "exact_sgd", "learning_rate": 0.1, "cache_load_factor": 0.1})
    planner = EmbeddingShardingPlanner(Topology(1, "cpu"), constraints=constraints)
    plan = planner.plan(model, [sharder])
    sharder.shard(model[0], plan.plan["0"], ENV)

shard(BAGS, table_wise(0), "exact_adagrad", 100)
with open("/proc/self/status") as status:
    used = next(int(line.split()[1]) for line in status if line.startswith("VmData")) * 1024
resource.setrlimit(resource.RLIMIT_DATA, (used + 150 * 2**20,) * 2)
for make in (
    lambda: tables(BAGS),
    lambda: tables(ROWS),
    lambda: shard(BAGS, table_wise(0), "exact_sgd"),
    lambda: shard(BAGS, table_wise(0), "exact_adagrad"),
    lambda: shard(BAGS, table_wise(0, compute_kernel="dense"), "exact_sgd"),
    lambda: shard(BAGS, data_parallel(), "exact_sgd"),
    lambda: shard(ROWS, row_wise(), "exact_row_wise_adagrad"),
    as_advised,
):
    try:
        make()
        print("built")
    except RuntimeError as error:
        print(error)
"""


@pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="reads /proc and needs RLIMIT_DATA of Linux"
)
def test_a_table_that_does_not_fit_is_named_with_what_helps() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _TOO_LARGE],
        env={"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    *errors, built = done.stdout.splitlines()
    for error, size in zip(errors, [256] * 2 + [256, 512, 256, 256, 260], strict=True):
        assert "not enough memory for table 'item': 1,000,000 rows of 64 columns need " in error
        assert f"need {size},000,000 bytes" in error
        assert "ParameterConstraints(compute_kernels=['fused_uvm_caching'])" in error
    assert built == "built"
