"""A process group that is destroyed ends, whatever was imported while it lived."""

from __future__ import annotations

import subprocess
import sys

from printed import own_lines

# The group's threads end with the last reference to it. A process of its own: imports happen once
# in each.
SCRIPT = """
import gc, os, sys, weakref
import torch, torch.distributed as dist

dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/rendezvous", rank=0, world_size=1)
if sys.argv[2] == "others":
    import torch.distributed.nn.functional
from tutorec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from tutorec.distributed import DistributedModelParallel

table = EmbeddingBagConfig(num_embeddings=10, embedding_dim=4, name="t", feature_names=["f"])
model = DistributedModelParallel(EmbeddingBagCollection(tables=[table]))
ids = KeyedJaggedTensor(keys=["f"], values=torch.tensor([1, 2, 3]), lengths=torch.tensor([2, 1]))
model(ids).wait().values().sum().backward()
model.state_dict()
group = weakref.ref(dist.group.WORLD)
del model
gc.collect()
dist.destroy_process_group()
names = [open(f"/proc/self/task/{task}/comm").read().strip() for task in os.listdir("/proc/self/task")]
print(group(), [name for name in names if "gloo" in name])
"""  # noqa: E501


def ended(folder, imported: str) -> str:
    words = [sys.executable, "-W", "ignore", "-c", SCRIPT, str(folder), imported]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return own_lines(done.stdout).strip()


def test_a_group_that_began_before_the_library_was_imported_ends(tmp_path):
    assert ended(tmp_path, "library") == "None []"


def test_a_group_that_torch_holds_by_a_default_argument_ends(tmp_path):
    assert ended(tmp_path, "others") == "None []"
