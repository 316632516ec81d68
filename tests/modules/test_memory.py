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
