"""A script with a group of NCCL alone: its tables are on the GPUs, and then, by mistake, on the
CPU.
"""

import os

import torch
import torch.distributed as dist

from tutorec.distributed.core.env import ShardingEnv
from tutorec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from tutorec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from tutorec.modules.embedding_configs import EmbeddingBagConfig
from tutorec.modules.embedding_modules import EmbeddingBagCollection
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor


def train(device: torch.device) -> str:
    """The loss before and after a step on the documents' batch."""
    configs = [
        EmbeddingBagConfig(4096, 64, name, feature_names=[name]) for name in ("item", "user")
    ]
    ebc = EmbeddingBagCollection(configs)
    plan = construct_module_sharding_plan(
        ebc, {"item": table_wise(rank=0), "user": table_wise(rank=1)}
    )
    fused = {"optimizer": "exact_row_wise_adagrad", "learning_rate": 0.02, "eps": 0.002}
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    sharded = EmbeddingBagCollectionSharder(fused).shard(ebc, plan, env, device)
    ids, lengths = torch.tensor([1, 2, 1, 5, 2, 3, 4, 1]), torch.tensor([3, 1, 2, 2])
    kjt = KeyedJaggedTensor(["item", "user"], ids, lengths=lengths).to(device)
    losses = []
    for _ in range(2):
        losses.append((1 - sharded(kjt).values()).sum())
        losses[-1].backward()
    return f"the loss fell by {(losses[0] - losses[1]).item():.2f}"


if __name__ == "__main__":
    own = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(own)
    dist.init_process_group("nccl")
    print(f"on the GPUs: {train(own)}", flush=True)
    try:
        print(f"on the CPU: {train(torch.device('cpu'))}", flush=True)
    except RuntimeError as error:
        print(f"on the CPU: {error}", flush=True)
    dist.destroy_process_group()
