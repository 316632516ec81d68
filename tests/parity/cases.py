"""What both libraries compute, written once: each case takes the library's root name and returns plain values.

`python tests/parity/cases.py tutorec` prints the results of every case as JSON. Inputs are written out or follow from a
formula, so that no generator stands between the two runs.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

Case = Callable[[str], Any]
CASES: dict[str, Case] = {}


def case(function: Case) -> Case:
    """Register a case under its function's name."""
    CASES[function.__name__] = function
    return function


def of(root: str, path: str) -> Any:
    """The module of this path in the library with this root."""
    return importlib.import_module(f"{root}.{path}")


def numbers(tensor: Any) -> Any:
    return tensor.detach().double().tolist() if tensor.is_floating_point() else tensor.tolist()


def jagged(root: str, weighted: bool = False) -> Any:
    """Two features, three samples: an empty bag, a repeated id, ids that both tables have."""
    import torch

    return of(root, "sparse.jagged_tensor").KeyedJaggedTensor.from_lengths_sync(
        keys=["item", "user"],
        values=torch.tensor([7, 8, 7, 4, 5, 1, 1]),
        lengths=torch.tensor([2, 0, 1, 1, 1, 2]),
        weights=torch.tensor([0.5, 1.0, 2.0, 1.5, 1.0, 0.25, 3.0]) if weighted else None,
    )


def filled(rows: int, columns: int, first: float = 0.0) -> Any:
    """Row r, column d holds first + r + d / 10."""
    import torch

    return first + torch.arange(rows, dtype=torch.float32)[:, None] + torch.arange(columns) / 10


def collection(root: str, pooling: str = "SUM", weighted: bool = False) -> Any:
    """Two tables with known rows."""
    import torch

    configs, modules = of(root, "modules.embedding_configs"), of(root, "modules.embedding_modules")
    pool = getattr(configs.PoolingType, pooling)
    tables = [
        configs.EmbeddingBagConfig(
            name="t_item", embedding_dim=4, num_embeddings=10, feature_names=["item"], pooling=pool
        ),
        configs.EmbeddingBagConfig(
            name="t_user", embedding_dim=8, num_embeddings=6, feature_names=["user"], pooling=pool
        ),
    ]
    made = modules.EmbeddingBagCollection(tables=tables, is_weighted=weighted, device=torch.device("cpu"))
    with torch.no_grad():
        for index, bag in enumerate(made.embedding_bags.values()):
            bag.weight.copy_(filled(*bag.weight.shape, first=index))
    return made


@case
def jagged_tensor_lists(root: str) -> Any:
    import torch

    jt = of(root, "sparse.jagged_tensor").JaggedTensor(
        values=torch.tensor([1.0, 2.0, 3.0]), lengths=torch.tensor([2, 0, 1])
    )
    return {"dense": [x.tolist() for x in jt.to_dense()], "offsets": jt.offsets().tolist(), "text": str(jt)}


@case
def jagged_tensor_padded(root: str) -> Any:
    import torch

    jt = of(root, "sparse.jagged_tensor").JaggedTensor(
        values=torch.tensor([1.0, 2.0, 3.0]), lengths=torch.tensor([2, 0, 1])
    )
    return [jt.to_padded_dense().tolist(), jt.to_padded_dense(desired_length=3, padding_value=9.0).tolist()]


@case
def keyed_jagged_parts(root: str) -> Any:
    kjt = jagged(root, weighted=True)
    return {
        "stride": kjt.stride(),
        "length_per_key": kjt.length_per_key(),
        "offset_per_key": kjt.offset_per_key(),
        "offsets": kjt.offsets().tolist(),
        "features": {
            k: [v.values().tolist(), v.lengths().tolist(), v.weights().tolist()] for k, v in kjt.to_dict().items()
        },
        "text": str(jagged(root)),
    }


@case
def keyed_jagged_split_and_permute(root: str) -> Any:
    kjt = jagged(root, weighted=True)
    parts = [*kjt.split([1, 1]), kjt.permute([1, 0]), kjt.permute([1, 0, 1])]
    return [[p.keys(), p.values().tolist(), p.lengths().tolist(), numbers(p.weights())] for p in parts]


@case
def keyed_jagged_concat(root: str) -> Any:
    import torch

    made = of(root, "sparse.jagged_tensor").KeyedJaggedTensor
    more = made.from_lengths_sync(keys=["shop"], values=torch.tensor([3, 3]), lengths=torch.tensor([0, 1, 1]))
    both = made.concat([jagged(root), more])
    return [both.keys(), both.values().tolist(), both.lengths().tolist(), both.stride()]


@case
def keyed_tensor_regrouped(root: str) -> Any:
    keyed = of(root, "sparse.jagged_tensor").KeyedTensor
    a = keyed.from_tensor_list(["x", "y"], [filled(2, 3), filled(2, 2, 5)])
    b = keyed.from_tensor_list(["z"], [filled(2, 1, 9)])
    groups = keyed.regroup([a, b], [["z", "x"], ["y"]])
    return {"y": numbers(a["y"]), "lengths": a.length_per_key(), "groups": [numbers(g) for g in groups]}


@case
def pooled_sum(root: str) -> Any:
    out = collection(root)(jagged(root))
    return [out.keys(), out.length_per_key(), numbers(out.values())]


@case
def pooled_mean(root: str) -> Any:
    return numbers(collection(root, "MEAN")(jagged(root)).values())


@case
def pooled_weighted(root: str) -> Any:
    return numbers(collection(root, weighted=True)(jagged(root, weighted=True)).values())


@case
def names_of_shared_features(root: str) -> Any:
    configs, modules = of(root, "modules.embedding_configs"), of(root, "modules.embedding_modules")
    tables = [
        configs.EmbeddingBagConfig(name=name, embedding_dim=4, num_embeddings=10, feature_names=features)
        for name, features in (("a", ["item", "user"]), ("b", ["item"]))
    ]
    made = modules.EmbeddingBagCollection(tables=tables)
    return [modules.get_embedding_names_by_table(tables), sorted(made.state_dict()), str(made.embedding_bags)]


@case
def click_model(root: str) -> Any:
    import torch

    model = of(root, "models.dlrm").DLRM(
        embedding_bag_collection=same_width(root),
        dense_in_features=3,
        dense_arch_layer_sizes=[5, 4],
        over_arch_layer_sizes=[3, 1],
    )
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            parameter.copy_(torch.sin(torch.arange(parameter.numel()) + index).view_as(parameter) + 0.2)
    return [numbers(model(filled(3, 3), jagged(root))), sorted(model.state_dict())]


def same_width(root: str) -> Any:
    import torch

    configs, modules = of(root, "modules.embedding_configs"), of(root, "modules.embedding_modules")
    tables = [
        configs.EmbeddingBagConfig(name=f"t_{f}", embedding_dim=4, num_embeddings=10, feature_names=[f])
        for f in ("item", "user")
    ]
    return modules.EmbeddingBagCollection(tables=tables, device=torch.device("cpu"))


def hand_written_plan(root: str, module: Any) -> Any:
    """Both tables on rank 0, fused kernel, one process on the CPU."""
    plans = of(root, "distributed.sharding_plan")
    sharder = of(root, "distributed.embeddingbag").EmbeddingBagCollectionSharder()
    per_table = {
        "t_item": plans.table_wise(rank=0, compute_kernel="fused"),
        "t_user": plans.table_wise(rank=0, compute_kernel="fused"),
    }
    return plans.construct_module_sharding_plan(
        module, per_table, sharder, local_size=1, world_size=1, device_type="cpu"
    )


@case
def printed_plan(root: str) -> Any:
    return str(hand_written_plan(root, collection(root)))


def fused_steps(root: str, optimizer: str, steps: int = 3) -> Any:
    """Weights of both tables after steps on one sharded rank; a pooled number's gradient is its column's number."""
    import torch

    sharders, types = of(root, "distributed.embeddingbag"), of(root, "distributed.types")
    module = collection(root)
    start = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    fused = {"optimizer": exact_optimizer(root, optimizer), "learning_rate": 0.1, "eps": 1e-8}
    sharder = sharders.EmbeddingBagCollectionSharder(fused_params=fused)
    environment = types.ShardingEnv.from_process_group(torch.distributed.group.WORLD)
    sharded = sharder.shard(module, hand_written_plan(root, module), environment, torch.device("cpu"))
    for name, tensor in sharded.state_dict().items():
        on_this_rank(tensor).copy_(start[name])
    for _ in range(steps):
        values = sharded(jagged(root)).values()
        (values * torch.arange(1, values.shape[1] + 1)).sum().backward()
    tables = {name: numbers(on_this_rank(t)) for name, t in sorted(sharded.state_dict().items())}
    return {"tables": tables, "learning_rate": sharded.fused_optimizer.param_groups[0]["lr"]}


def on_this_rank(tensor: Any) -> Any:
    """The rows that this rank holds: of a ShardedTensor its one shard, of a plain tensor itself."""
    return tensor.local_shards()[0].tensor if hasattr(tensor, "local_shards") else tensor.detach()


def exact_optimizer(root: str, name: str) -> Any:
    """fbgemm's member where torchrec asks for it; tutorec's own has the same names and values."""
    if root == "tutorec":
        return of(root, "optim").EmbOptimType[name]
    return getattr(importlib.import_module("fbgemm_gpu.split_embedding_configs").EmbOptimType, name)


@case
def fused_sgd(root: str) -> Any:
    return fused_steps(root, "EXACT_SGD")


@case
def fused_rowwise_adagrad(root: str) -> Any:
    return fused_steps(root, "EXACT_ROWWISE_ADAGRAD")


def results(root: str) -> dict[str, Any]:
    """The results of every case, or the error's text under `error`."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=0, world_size=1)
        found = {}
        for name, run in CASES.items():
            try:
                found[name] = run(root)
            except Exception as error:
                found[name] = {"error": f"{type(error).__name__}: {error}"}
        dist.destroy_process_group()
    return found


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    os.environ.setdefault("LOCAL_WORLD_SIZE", "1")
    print(json.dumps(results(sys.argv[1])))
