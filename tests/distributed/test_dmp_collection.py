"""DMPCollection: replicas of sharded tables, each trained by its group of ranks, and their mean
every so many steps.

The definition is two models in two groups of two ranks, each a DistributedModelParallel as far as
tables go, whose weights and states are averaged by hand.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed.cases import KINDS, batch, collection, group, optimizer_words, tables, word
from torch import Tensor, nn

from tutorec.distributed.checkpoint import CheckpointManager, load_checkpoint, save_checkpoint
from tutorec.distributed.checkpoint.folder import Folder
from tutorec.distributed.core.env import ShardingEnv, sharding_groups
from tutorec.distributed.data_parallel import DataParallelWrapper, DefaultDataParallelWrapper
from tutorec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from tutorec.distributed.model_parallel import DistributedModelParallel, DMPCollection
from tutorec.distributed.plan.plan import ShardingPlan
from tutorec.distributed.planner.topology import Topology
from tutorec.distributed.replicas import REPLICA_STATES, REPLICA_WEIGHTS
from tutorec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from tutorec.distributed.simulate import simulate_sync
from tutorec.distributed.traffic import Traffic, count_traffic
from tutorec.errors import CheckpointError
from tutorec.optim.keyed import KeyedOptimizerWrapper
from tutorec.optim.optimizers import in_backward_optimizer_filter
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor
from tutorec.spmd import device

pytestmark = pytest.mark.world4

WORLD, GROUP, STEPS, EVERY = 4, 2, 6, 3
WIDTH = sum(config.embedding_dim * len(config.feature_names) for config in tables())
PATH = "sparse"


class Model(nn.Module):
    """Tables and a dense layer."""

    def __init__(self, seed: int = 0, shift: float = 0.0) -> None:
        super().__init__()
        self.sparse = collection()  # the same rows in each call
        with torch.no_grad():
            for rows in self.sparse.parameters():
                rows += shift
        torch.manual_seed(seed)
        self.over = nn.Linear(WIDTH, 1)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        return self.over(self.sparse(features).values()).square().mean()


class OverAllRanks(DataParallelWrapper):
    """Dense parts are averaged over all ranks, though tables are sharded over some of them."""

    def wrap(self, dmp: DistributedModelParallel, env: ShardingEnv, device: torch.device) -> None:
        DefaultDataParallelWrapper().wrap(dmp, ShardingEnv.from_process_group(group()), device)


def group_plan(model: Model, kind: str, kernel: str = "fused") -> ShardingPlan:
    """For the two ranks of a group, on one host."""
    configs = model.sparse.embedding_bag_configs()
    words = {
        config.name: word(kind, index, GROUP, GROUP, kernel) for index, config in enumerate(configs)
    }
    plan = construct_module_sharding_plan(model.sparse, words, local_size=GROUP, world_size=GROUP)
    return ShardingPlan({PATH: plan})


def alone() -> ShardingPlan:
    """For groups of one rank."""
    model = Model()
    words = {config.name: table_wise(rank=0) for config in model.sparse.embedding_bag_configs()}
    plan = construct_module_sharding_plan(model.sparse, words, local_size=1, world_size=1)
    return ShardingPlan({PATH: plan})


def sharder(optimizer: str, **words: Any) -> EmbeddingBagCollectionSharder:
    return EmbeddingBagCollectionSharder({**optimizer_words(optimizer), **words})


def replicated(
    optimizer: str, plan: ShardingPlan | None, seed: int = 0, **options: Any
) -> DMPCollection:
    """The model of a rank: weights that are not the first replica's are to be replaced by them."""
    inter_host = options.get("use_inter_host_allreduce", False)
    replica = next(
        replica
        for replica, members in enumerate(sharding_groups(WORLD, GROUP, inter_host))
        if dist.get_rank() in members
    )
    model = Model(seed, shift=replica)
    options = {"node_group_size": GROUP, **options}
    return DMPCollection(
        model, device(), plan, WORLD, GROUP, group(), sharders=[sharder(optimizer)], **options
    )


def dense_optimizer(model: nn.Module) -> KeyedOptimizerWrapper:
    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    return KeyedOptimizerWrapper(dense, lambda params: torch.optim.SGD(params, lr=0.1))


def step(model: nn.Module, optimizer: Any, rank: int, number: int) -> None:
    optimizer.zero_grad()
    model(batch(100 * number + rank, 3 + rank)).backward()
    optimizer.step()


def state_of(model: DistributedModelParallel) -> dict[str, Tensor]:
    """Weights and states on this rank, by name."""
    found = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for name, parameter in model.fused_optimizer.params.items():
        states = model.fused_optimizer.state[parameter]
        found |= {f"{name}: {key}": value.clone() for key, value in states.items()}
    return found


def by_sync(
    rank: int, world_size: int, optimizer: str, kind: str, inter_host: bool
) -> dict[str, Tensor]:
    # Only the first replica's tables count, and rank 0's dense layer.
    model = replicated(
        optimizer, group_plan(Model(), kind), seed=rank, use_inter_host_allreduce=inter_host
    )
    dense = dense_optimizer(model)
    for number in range(1, STEPS + 1):
        step(model, dense, rank, number)
        if number % EVERY == 0:
            model.sync()
    return state_of(model)


def by_hand(
    rank: int, world_size: int, optimizer: str, kind: str, inter_host: bool
) -> dict[str, Tensor]:
    sharding = sharding_groups(WORLD, GROUP, inter_host)
    groups = [dist.new_group(ranks) for ranks in sharding]
    mates = [dist.new_group(list(ranks)) for ranks in zip(*sharding, strict=True)]
    mine: Any = next(made for made, ranks in zip(groups, sharding, strict=True) if rank in ranks)
    mate: Any = next(
        made
        for made, ranks in zip(mates, zip(*sharding, strict=True), strict=True)
        if rank in ranks
    )
    model = DistributedModelParallel(
        Model(),
        env=ShardingEnv(GROUP, mine.rank(), mine, local_size=GROUP),
        plan=group_plan(Model(), kind),
        sharders=[sharder(optimizer)],
        data_parallel_wrapper=OverAllRanks(),
    )
    dense = dense_optimizer(model)
    for number in range(1, STEPS + 1):
        step(model, dense, rank, number)
        if number % EVERY == 0:
            tensors = [
                rows.detach() for name, rows in model.named_parameters() if name.startswith(PATH)
            ]
            for states in model.fused_optimizer.state.values():
                tensors += [state for state in states.values() if state.dim()]
            for tensor in tensors:
                total = tensor.contiguous()
                dist.all_reduce(total, group=mate)
                tensor.copy_(total / len(sharding))
    return state_of(model)


@pytest.mark.parametrize("inter_host", [False, True])
@pytest.mark.parametrize(
    ("optimizer", "kind"),
    [
        ("exact_row_wise_adagrad", "mixed"),
        *(("exact_row_wise_adagrad", kind) for kind in KINDS if kind != "data_parallel"),
        ("adam", "mixed"),
        ("exact_sgd", "mixed with copies"),
    ],
)
def test_it_equals_two_models_that_are_averaged_every_three_steps(
    ranks, optimizer, kind, inter_host
):
    found = ranks(WORLD).run(by_sync, optimizer, kind, inter_host)
    wanted = ranks(WORLD).run(by_hand, optimizer, kind, inter_host)
    for rank in range(WORLD):
        assert found[rank].keys() == wanted[rank].keys()
        for name, value in wanted[rank].items():
            assert torch.equal(found[rank][name], value), f"{name} on rank {rank}"
    # The last step was averaged: ranks with the same shards hold the same, and all have one dense
    # layer.
    for members in zip(*sharding_groups(WORLD, GROUP, inter_host), strict=True):
        assert all(
            torch.equal(found[members[0]][name], found[members[1]][name])
            for name in found[members[0]]
        )
    assert all(torch.equal(found[0]["over.weight"], each["over.weight"]) for each in found)


def in_files(rank: int, world_size: int) -> list[dict[str, Tensor]]:
    """The tables' weights and states after steps and syncs: in memory, and in files with a cache of
    a third.
    """
    found = []
    for kernel, cache in (("fused", {}), ("fused_uvm_caching", {"cache_load_factor": 0.3})):
        model = DMPCollection(
            Model(),
            device(),
            group_plan(Model(), "row_wise", kernel),
            WORLD,
            GROUP,
            group(),
            node_group_size=GROUP,
            sharders=[sharder("exact_row_wise_adagrad", **cache)],
        )
        dense = dense_optimizer(model)
        for number in range(1, STEPS + 1):
            step(model, dense, rank, number)
            if number % 2 == 0:
                model.sync()
        model.state_dict()  # brings what a cache holds into the parameters
        found.append(state_of(model))
    return found


def test_tables_in_files_are_averaged_like_those_in_memory(ranks):
    for in_memory, cached in ranks(WORLD).run(in_files):
        assert in_memory.keys() == cached.keys()
        assert all(torch.equal(in_memory[name], cached[name]) for name in in_memory)


def drift(rank: int, world_size: int) -> dict[str, list[bool]]:
    """Whether the weights and states are those of the other replica: at first, after steps, and
    after a sync.
    """
    model = replicated("exact_row_wise_adagrad", group_plan(Model(), "row_wise"), seed=rank)
    dense = dense_optimizer(model)
    mate: Any = model.device_mesh.get_group("replicate")

    def alike() -> list[bool]:
        said = []
        for value in (
            model.named_parameters(),
            model.fused_optimizer.state_dict()["state"].items(),
        ):
            flat = torch.cat([_local(each).reshape(-1) for _, each in value])
            others = [torch.empty_like(flat) for _ in range(mate.size())]
            dist.all_gather(others, flat, group=mate)
            said.append(all(torch.equal(flat, other) for other in others))
        return said

    found = {"begin": alike()}
    step(model, dense, rank, 1)
    found["trained"] = alike()
    model.sync(include_optimizer_state=False)
    found["weights"] = alike()
    model.sync()
    found["all"] = alike()
    return found


def _local(value: Any) -> Tensor:
    """What this rank has of a parameter, or of an optimizer's state by table."""
    if isinstance(value, dict):
        (kept,) = value.values()
        return torch.cat([shard.tensor for shard in kept.local_shards()])
    return value.detach()


def test_replicas_begin_alike_drift_apart_and_are_brought_together(ranks):
    for found in ranks(WORLD).run(drift):
        assert found == {
            "begin": [True, True],
            "trained": [False, False],
            "weights": [True, False],
            "all": [True, True],
        }


def sync_bytes(rank: int, world_size: int, optimizer: str, inter_host: bool) -> Traffic:
    model = replicated(
        optimizer, group_plan(Model(), "mixed with copies"), use_inter_host_allreduce=inter_host
    )
    step(model, dense_optimizer(model), rank, 1)
    with count_traffic() as traffic:
        model.sync()
    return traffic


@pytest.mark.parametrize("inter_host", [False, True])
@pytest.mark.parametrize("optimizer", ["exact_row_wise_adagrad", "adam", "exact_sgd"])
def test_bytes_of_a_sync_are_those_predicted_inside_hosts_and_across(ranks, optimizer, inter_host):
    counted = Traffic.merge(ranks(WORLD, hosts=2).run(sync_bytes, optimizer, inter_host))
    model = Model()
    predicted = simulate_sync(
        group_plan(model, "mixed with copies"),
        Topology.hosts(2, 2),
        model,
        GROUP,
        fused_params=optimizer_words(optimizer),
        use_inter_host_allreduce=inter_host,
    )
    for stage in (REPLICA_WEIGHTS, REPLICA_STATES):
        for crossing in (False, True):
            rows = counted.matrix(WORLD, stage, crossing=crossing)
            assert [sum(row) for row in rows] == predicted.sent(stage, crossing=crossing).tolist()
    assert counted.total() == predicted.total() > 0
    # Groups of every second rank average inside a host; groups of consecutive ranks average across.
    assert counted.total(crossing=not inter_host) == 0


def test_bytes_of_a_sync_of_four_replicas_are_those_predicted(ranks):
    """Of two replicas, each rank sends as many bytes by any exchange of all numbers."""

    def sync(rank: int, world_size: int) -> Traffic:
        model = DMPCollection(
            Model(), device(), alone(), WORLD, 1, group(), sharders=[sharder("adam")]
        )
        with count_traffic() as traffic:
            model.sync()
        return traffic

    counted = Traffic.merge(ranks(WORLD, hosts=2).run(sync))
    predicted = simulate_sync(
        alone(), Topology.hosts(2, 2), Model(), 1, fused_params=optimizer_words("adam")
    )
    for crossing in (False, True):
        rows = counted.matrix(WORLD, crossing=crossing)
        assert [sum(row) for row in rows] == predicted.sent(crossing=crossing).tolist()
    assert min(counted.total(crossing=crossing) for crossing in (False, True)) > 0


def test_a_table_larger_than_a_block_is_averaged_in_blocks_of_the_predicted_bytes(
    ranks, monkeypatch
):
    def large(rank: int, world_size: int) -> tuple[Traffic, float]:
        from unittest import mock

        from tutorec.distributed import replicas

        # Blocks of 16 numbers: a row of 8 columns twice.
        defaults = (16,)
        with mock.patch.object(replicas.sync_blocks, "__defaults__", defaults):
            model = replicated("exact_sgd", group_plan(Model(), "row_wise"))
            with torch.no_grad():
                for rows in model.fused_optimizer.params.values():
                    rows.fill_(float(rank))
            with count_traffic() as traffic:
                model.sync()
        return traffic, float(max(rows.max() for rows in model.fused_optimizer.params.values()))

    found = ranks(WORLD).run(large)
    assert [mean for _, mean in found] == [0.5, 0.5, 2.5, 2.5]
    issued = Traffic.merge(traffic for traffic, _ in found).issues[REPLICA_WEIGHTS]
    # Of 6 x 8, 4 x 4 and 5 x 6 numbers: two exchanges for each of 3 + 1 + 3 blocks, which may share
    # rows.
    assert issued == 2 * 7


def hooked(rank: int, world_size: int) -> tuple[bool, list[int]]:
    calls: list[int] = []
    plan = group_plan(Model(), "row_wise")
    models = [replicated("exact_row_wise_adagrad", plan) for _ in range(2)]
    mate: Any = models[1].device_mesh.get_group("replicate")

    def mean(tensors: list[Tensor]) -> None:
        calls.append(len(tensors))
        for tensor in tensors:
            total = tensor.contiguous()
            dist.all_reduce(total, group=mate)
            tensor.copy_(total / mate.size())

    models[1].set_all_reduce_hook(mean)
    for model in models:
        step(model, dense_optimizer(model), rank, 1)
        model.sync()
    ours, theirs = map(state_of, models)
    return all(torch.equal(ours[name], theirs[name]) for name in ours), calls


def test_a_reduction_of_ones_own_is_given_weights_and_then_states(ranks):
    assert ranks(WORLD).run(hooked) == [(True, [3, 3])] * WORLD


def mesh(rank: int, world_size: int, inter_host: bool) -> Any:
    model = replicated(
        "exact_sgd", group_plan(Model(), "row_wise"), use_inter_host_allreduce=inter_host
    )
    found = model.device_mesh
    of_mesh = [
        dist.get_process_group_ranks(found.get_group(name)) for name in ("replicate", "shard")
    ]
    return found.mesh.tolist(), found.mesh_dim_names, of_mesh, model.replica


def test_the_mesh_names_groups_and_replicas(ranks):
    near = ranks(WORLD).run(mesh, False)
    assert near[2] == ([[0, 2], [1, 3]], ("replicate", "shard"), [[2, 3], [0, 2]], 0)
    far = ranks(WORLD).run(mesh, True)
    assert far[2] == ([[0, 1], [2, 3]], ("replicate", "shard"), [[0, 2], [2, 3]], 1)


def planned(rank: int, world_size: int) -> tuple[Any, int]:
    model = replicated("exact_row_wise_adagrad", None, node_group_size=None)
    named = {name: entry.ranks for name, entry in model.plan.plan[PATH].items()}
    return named, model._env.local_size


def test_the_planner_is_asked_for_a_plan_of_one_group(ranks):
    found = ranks(WORLD, hosts=2).run(planned)
    assert all(each == found[0] for each in found)
    # Ranks 0 and 2 are a group: two hosts of one rank each.
    assert found[0][1] == 1
    assert all(set(ranks or [0]) <= {0, 1} for ranks in found[0][0].values())


def saved_and_loaded(rank: int, world_size: int, folder: str) -> dict[str, bool]:
    optimizer = "exact_row_wise_adagrad"
    model = replicated(optimizer, group_plan(Model(), "mixed"))
    dense = dense_optimizer(model)
    step(model, dense, rank, 1)
    save_checkpoint(Path(folder) / "one", model, dense, step=1)
    kept = state_of(model)
    # Training goes on, and the checkpoint brings it back, under the same plan and another one.
    step(model, dense, rank, 2)
    load_checkpoint(Path(folder) / "one", model, dense)
    back = state_of(model)
    other = replicated(
        optimizer, group_plan(Model(), "row_wise"), use_inter_host_allreduce=True, seed=9
    )
    load_checkpoint(Path(folder) / "one", other, dense_optimizer(other))
    save_checkpoint(Path(folder) / "two", other, dense_optimizer(other), step=1)
    return {"back": all(torch.equal(kept[name], back[name]) for name in kept)}


def of_one_process(folder: Path) -> tuple[Model, Any]:
    model = Model()
    return model, load_checkpoint(folder, model, optimizer_state=False)


def test_a_checkpoint_holds_the_mean_of_replicas_and_any_model_reads_it(ranks, tmp_path):
    assert ranks(WORLD).run(saved_and_loaded, str(tmp_path)) == [{"back": True}] * WORLD
    (first, info), (second, _) = of_one_process(tmp_path / "one"), of_one_process(tmp_path / "two")
    assert info.step == 1
    for (name, one), (_, two) in zip(
        first.named_parameters(), second.named_parameters(), strict=True
    ):
        assert torch.equal(one, two), name
    assert not torch.equal(first.over.weight, Model().over.weight)


def managed(
    rank: int, world_size: int, folder: str, asynchronous: bool
) -> tuple[bool, int | None, str]:
    """Save and go on, then load; and what every rank is told where the first replica
    cannot write.
    """
    model = replicated("exact_row_wise_adagrad", group_plan(Model(), "mixed"))
    dense = dense_optimizer(model)
    with CheckpointManager(folder, keep=1, asynchronous=asynchronous) as manager:
        for number in (1, 2):
            step(model, dense, rank, number)
            manager.save(model, dense, step=number)
        kept = state_of(model)
        step(model, dense, rank, 3)
        info = manager.load(model, dense)
        back = state_of(model)
        create = Folder.create
        if rank == 0:
            Folder.create = lambda folder, name: (_ for _ in ()).throw(
                OSError(28, "No space left on device")
            )
        try:
            manager.save(model, dense, step=3)
            manager.wait()
            said = "saved"
        except CheckpointError as error:
            said = str(error)
        Folder.create = create
    return all(torch.equal(kept[name], back[name]) for name in kept), info and info.step, said


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_manager_saves_the_first_replica_and_loads_all(ranks, tmp_path, asynchronous):
    for back, latest, said in ranks(WORLD).run(managed, str(tmp_path), asynchronous):
        assert (back, latest) == (True, 2)
        assert "step-3" in said and "failed on rank 0: OSError: [Errno 28] No space" in said
    assert [each.name for each in tmp_path.iterdir()] == ["step-2"]


def unsavable(rank: int, world_size: int, folder: str) -> str:
    model = replicated("exact_sgd", group_plan(Model(), "row_wise"))
    try:
        save_checkpoint(Path(folder) / "file" / "in", model)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "saved"


def test_a_checkpoint_that_the_first_replica_cannot_write_is_an_error_of_all(ranks, tmp_path):
    (tmp_path / "file").write_text("")
    found = ranks(WORLD).run(unsavable, str(tmp_path))
    assert all(each.startswith("CheckpointError: ") for each in found), found


def refused(rank: int, world_size: int, words: dict[str, Any]) -> str:
    words = {"world_size": WORLD, "sharding_group_size": GROUP, "kernel": "fused", **words}
    plan = group_plan(Model(), "row_wise", words["kernel"])
    if words.get("other_plan") == rank:
        plan = group_plan(Model(), "table_wise")
    try:
        model = DMPCollection(
            Model(),
            device(),
            plan,
            words["world_size"],
            words["sharding_group_size"],
            group(),
            node_group_size=None,
        )
        model.reduce_norm()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "built"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"world_size": 8}, "world_size=8, and global_pg has 4 ranks"),
        (
            {"sharding_group_size": 3},
            "4 ranks cannot be divided into groups of sharding_group_size=3: give one of",
        ),
        ({"other_plan": 3}, "the plan is"),
        ({"kernel": "dense"}, "the gradient of table 't0' differs between replicas"),
    ],
)
def test_what_cannot_be_is_refused_on_every_rank(ranks, words, said):
    found = ranks(WORLD).run(refused, words)
    assert all(said in each for each in found), found
    assert "built" in ranks(WORLD).run(refused, {})
