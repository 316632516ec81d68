"""An `EmbeddingBagCollection` whose tables lie on several ranks: same input, same output, same names.

One batch goes ``input_dist`` -> ``compute`` -> ``output_dist``; what happens inside each is the business of the
sharding types that the plan chose (``sharding/``). Here is what they have in common: the caller's order of keys, the
checks, and the weights, which are those of the module that was sharded.
"""

from __future__ import annotations

import logging
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tutorec.awaitable import Awaitable, LazyAwaitable, NoWait
from tutorec.distributed.agreement import check_agreement
from tutorec.distributed.env import ShardingEnv
from tutorec.distributed.fused_params import optimizer_spec
from tutorec.distributed.layout import ColumnOrder, FeatureOrder
from tutorec.distributed.lookup.grouped import SUPPORTED_KERNELS, GroupedPooledEmbeddingsLookup
from tutorec.distributed.plan import ParameterSharding, ShardingType
from tutorec.distributed.sharded_module import ShardedModule
from tutorec.distributed.sharding.base import FeatureArrival, PooledEmbeddingDist, SparseFeaturesDist
from tutorec.distributed.sharding.registry import POOLED_SHARDINGS
from tutorec.distributed.state_dict import local_state, sharded_state
from tutorec.distributed.tables import PlacedTable, PlacementRules, check_plan_covers, place_table
from tutorec.modules.embedding_configs import EmbeddingBagConfig
from tutorec.modules.embedding_modules import EmbeddingBagCollection, get_embedding_names_by_table
from tutorec.optim.fused import FusedOptimizerModule
from tutorec.optim.keyed import CombinedOptimizer
from tutorec.sparse.id_check import check_ids
from tutorec.sparse.keyed import KeyedTensor
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor

_logger = logging.getLogger(__name__)
_noticed: set[str] = set()


@dataclass
class EmbeddingBagCollectionContext:
    """What the moves of one batch tell each other.

    Args:
        batch_size_per_rank: For each sharding of the module, B of each rank whose samples have arrived here.
        batch_size: B, my samples.
    """

    batch_size_per_rank: list[list[int]] = field(default_factory=list)
    batch_size: int = 0


class EmbeddingBagCollectionAwaitable(LazyAwaitable[KeyedTensor]):
    """Pooled rows on their way home; ``wait()`` gives the `KeyedTensor`, in the caller's order of keys.

    Args:
        arriving: One promise ``[B, D of the sharding]`` for each sharding.
        columns: From the order in which columns arrive to the caller's.
        keys: The caller's.
    """

    def __init__(self, arriving: Sequence[Awaitable[torch.Tensor]], columns: ColumnOrder, keys: list[str]) -> None:
        super().__init__()
        self._arriving = arriving
        self._columns = columns
        self._output_keys = keys

    def _wait_impl(self) -> KeyedTensor:
        parts = [part.wait() for part in self._arriving]
        pooled = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        return KeyedTensor(self._output_keys, self._columns.length_per_key, self._columns.arrange(pooled))


class ShardedEmbeddingBagCollection(
    ShardedModule[EmbeddingBagCollectionContext, list[KeyedJaggedTensor], list[torch.Tensor], KeyedTensor],
    FusedOptimizerModule,
):
    """An `EmbeddingBagCollection` over the ranks of a process group.

    In: my samples, ``KeyedJaggedTensor``; ranks may bring different numbers of samples. Out: ``KeyedTensor [B, D]`` for
    my samples, lazily. Parameters have the names of the unsharded module, and a rank has those of its own tables. To
    build one is a collective: every rank does it with the same tables and the same plan, which is checked.

    Args:
        module: The unsharded collection; its weights are copied, and drawn here where it is on the meta device.
        table_name_to_parameter_sharding: The plan of this module.
        env: The ranks.
        fused_params: What the fused optimizer is, see `fused_params.optimizer_spec`.
        device: Where this rank's tables are to live, by default the CPU.

    Raises:
        ValueError: The plan does not fit the module or the world.
        AgreementError: Ranks differ, or another rank failed.

    Source:
        TorchRec's ``torchrec.distributed.embeddingbag.ShardedEmbeddingBagCollection``.
    """

    def __init__(
        self,
        module: EmbeddingBagCollection,
        table_name_to_parameter_sharding: Mapping[str, ParameterSharding],
        env: ShardingEnv,
        fused_params: Mapping[str, Any] | None = None,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self._env = env
        self._configs = module.embedding_bag_configs()
        self._is_weighted = module.is_weighted()
        self._device = _usable_device(device, table_name_to_parameter_sharding)
        tables = self._tables = self._agreed_tables(module, table_name_to_parameter_sharding, fused_params)
        by_type: dict[ShardingType, list[PlacedTable]] = {}
        for table in tables:
            by_type.setdefault(table.sharding_type, []).append(table)
        self._shardings = [POOLED_SHARDINGS[kind](members, env) for kind, members in by_type.items()]
        weights = _initial_weights(module, tables, env.rank, self._device)
        self._lookups: list[GroupedPooledEmbeddingsLookup] = [
            sharding.create_lookup(weights, self._device) for sharding in self._shardings
        ]
        self._input_dists: list[SparseFeaturesDist] = []
        self._output_dists: list[PooledEmbeddingDist] = [sharding.create_output_dist() for sharding in self._shardings]
        self._dists_are_built = False
        self._prepare_orders(tables)
        self.embedding_bags = nn.ModuleDict({table.name: nn.Module() for table in tables})
        for lookup in self._lookups:
            for name, rows in lookup.named_weights():
                self.embedding_bags[name].register_parameter("weight", rows)
        self._optimizer = CombinedOptimizer(
            [("", optimizer) for lookup in self._lookups for optimizer in lookup.fused_optimizers()]
        )

        self.register_state_dict_post_hook(_store_sharded)
        self.register_load_state_dict_pre_hook(_load_sharded)

    # --- one batch

    def create_context(self) -> EmbeddingBagCollectionContext:
        """The context of one batch."""
        return EmbeddingBagCollectionContext()

    def input_dist(
        self, ctx: EmbeddingBagCollectionContext, features: KeyedJaggedTensor
    ) -> Awaitable[Awaitable[list[KeyedJaggedTensor]]]:
        """My samples, every feature -> every sample, my features; one batch for each sharding.

        Raises:
            KeyError: A feature is missing.
            ValueError: An id is not a row of its table, or weights are missing.
        """
        arranged = self._arranged(features) if self._dists_are_built else self._first_arranged(features)
        ctx.batch_size = features.stride()
        parts = [arranged] if len(self._input_dists) == 1 else arranged.split(self._features_per_sharding)
        return _SizesOnTheWay(ctx, [dist(part) for dist, part in zip(self._input_dists, parts, strict=True)])

    def compute(self, ctx: EmbeddingBagCollectionContext, dist_input: list[KeyedJaggedTensor]) -> list[torch.Tensor]:
        """Every sample, my features -> every sample, my columns."""
        return [lookup(features) for lookup, features in zip(self._lookups, dist_input, strict=True)]

    def output_dist(
        self, ctx: EmbeddingBagCollectionContext, output: list[torch.Tensor]
    ) -> EmbeddingBagCollectionAwaitable:
        """Every sample, my columns -> my samples, every column."""
        moves = zip(self._output_dists, output, ctx.batch_size_per_rank, strict=True)
        arriving: list[Awaitable[torch.Tensor]] = [dist(pooled, samples) for dist, pooled, samples in moves]
        if not arriving:
            arriving.append(NoWait(torch.empty(ctx.batch_size, 0, device=self._device)))
        return EmbeddingBagCollectionAwaitable(arriving, self._columns, self._output_keys)

    # --- what it shares with the unsharded module

    @property
    def fused_optimizer(self) -> CombinedOptimizer:
        """What updates this rank's tables during backward, one optimizer for each group of tables."""
        return self._optimizer

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """What each table is, those of other ranks included."""
        return self._configs

    def is_weighted(self) -> bool:
        """Whether each id carries a weight."""
        return self._is_weighted

    def extra_repr(self) -> str:
        """Lookups and dists, which are plain lists so that their parameters are not counted twice."""
        lines: list[str] = []
        for title, parts in (
            ("lookups", self._lookups),
            ("_input_dists", self._input_dists),
            ("_output_dists", self._output_dists),
        ):
            if parts:
                lines += [f"({title}): ", *(repr(part).replace("\n", "\n  ") for part in parts)]
        return "\n ".join(lines)

    def _apply(self, fn: Any, recurse: bool = True) -> ShardedEmbeddingBagCollection:
        """Move the rows (``.to``); parameters and optimizer state follow."""
        for lookup in self._lookups:
            lookup._apply(fn)
        super()._apply(fn, recurse)
        for lookup in self._lookups:
            lookup.rebind()
        return self

    # --- set-up

    def _agreed_tables(
        self,
        module: EmbeddingBagCollection,
        plan: Mapping[str, ParameterSharding],
        fused_params: Mapping[str, Any] | None,
    ) -> list[PlacedTable]:
        """The plan, read and checked here and against the other ranks."""
        tables: list[PlacedTable] = []
        problem: Exception | None = None
        rules = PlacementRules(
            self._env.world_size, self._is_weighted, tuple(POOLED_SHARDINGS), SUPPORTED_KERNELS, fused_params
        )
        names = [config.name for config in self._configs]
        try:
            check_plan_covers(names, plan)
            for config, keys in zip(self._configs, get_embedding_names_by_table(self._configs), strict=True):
                weight = module.embedding_bags[config.name].get_parameter("weight")
                tables.append(place_table(config, keys, weight, plan[config.name], rules))
        except (ValueError, KeyError, TypeError) as error:
            problem = error
        facts = {"tables": ", ".join(names)}
        facts |= {f"table {t.name!r}: {fact}": value for t in tables for fact, value in t.describe().items()}
        check_agreement("sharding an EmbeddingBagCollection", facts, self._env, problem)
        return tables

    def _prepare_orders(self, tables: Sequence[PlacedTable]) -> None:
        """What depends on names only: the way in, the way home, and which ids are rows of which table."""
        tables_of: dict[str, list[str]] = {}
        for table in tables:
            for feature in table.features:
                tables_of.setdefault(feature, []).append(table.name)
        self._features_per_sharding = [len(sharding.feature_names()) for sharding in self._shardings]
        self._features = FeatureOrder([f for sharding in self._shardings for f in sharding.feature_names()], tables_of)
        self._output_keys = [key for table in tables for key in table.output_keys]
        self._columns = ColumnOrder(
            [key for sharding in self._shardings for key in sharding.output_keys()],
            [columns for sharding in self._shardings for columns in sharding.output_columns()],
            wanted=self._output_keys,
        )
        self._feature_rows = [(feature, table.name, table.rows) for table in tables for feature in table.features]

    def _first_arranged(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """The first batch: ranks tell each other whether theirs is in order, and the dists are built."""
        arranged: KeyedJaggedTensor | None = None
        problem: Exception | None = None
        try:
            arranged = self._arranged(features)
        except (ValueError, KeyError, TypeError) as error:
            problem = error
        check_agreement("the first batch", {"weighted": str(self._is_weighted)}, self._env, problem)
        assert arranged is not None, "check_agreement raises where this rank has a problem"
        self._input_dists = [sharding.create_input_dist() for sharding in self._shardings]
        for dist in self._output_dists:
            dist.build()
        self._dists_are_built = True
        return arranged

    def _arranged(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """The batch, checked, in the order in which it travels."""
        if not isinstance(features, KeyedJaggedTensor):
            raise TypeError(f"a ShardedEmbeddingBagCollection takes a KeyedJaggedTensor, got {type(features).__name__}")
        arranged = self._features.arrange(features)
        check_ids(features, self._feature_rows)
        weights = arranged.weights_or_none()
        if not self._is_weighted:
            return arranged if weights is None else _without_weights(arranged)
        if weights is None:
            raise ValueError(
                "the collection is weighted (is_weighted=True), and the batch has no weights: "
                "build it with weights=, one per id"
            )
        if weights.requires_grad and self._env.world_size > 1:
            raise ValueError(
                "weights of the batch require a gradient, which does not travel back between ranks: "
                "detach them, weights.detach()"
            )
        return arranged


def _store_sharded(module: Any, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
    """Name every table in the state dict, as a ShardedTensor. Without a process group the rows stay plain tensors."""
    if module._env.process_group is None:
        return
    stem = f"{prefix}embedding_bags."
    local = {t.name: state_dict[key] for t in module._tables if (key := f"{stem}{t.name}.weight") in state_dict}
    for name, value in sharded_state(module._tables, local, module._env, module._device).items():
        state_dict[f"{stem}{name}.weight"] = value


def _load_sharded(
    module: Any,
    state_dict: dict[str, Any],
    prefix: str,
    *_: Any,
) -> None:
    """Leave in the state dict what this rank holds."""
    stem = f"{prefix}embedding_bags."
    keys = {table.name: f"{stem}{table.name}.weight" for table in module._tables}
    loaded = {name: state_dict.pop(key) for name, key in keys.items() if key in state_dict}
    for name, rows in local_state(module._tables, loaded, module._env.rank).items():
        state_dict[keys[name]] = rows


class _SizesOnTheWay(Awaitable[Awaitable[list[KeyedJaggedTensor]]]):
    """The first round of every sharding; to wait for it is to issue the second."""

    def __init__(self, ctx: EmbeddingBagCollectionContext, sizes: Sequence[Awaitable[FeatureArrival]]) -> None:
        self._ctx = ctx
        self._sizes = sizes

    def _wait_impl(self) -> Awaitable[list[KeyedJaggedTensor]]:
        arrivals = [sizes.wait() for sizes in self._sizes]
        self._ctx.batch_size_per_rank = [arrival.batch_size_per_rank for arrival in arrivals]
        return _FeaturesOnTheWay(arrivals)


class _FeaturesOnTheWay(Awaitable[list[KeyedJaggedTensor]]):
    def __init__(self, arrivals: Sequence[FeatureArrival]) -> None:
        self._arrivals = arrivals

    def _wait_impl(self) -> list[KeyedJaggedTensor]:
        return [arrival.wait() for arrival in self._arrivals]


class EmbeddingBagCollectionSharder:
    """Shards an `EmbeddingBagCollection`.

    Args:
        fused_params: The optimizer that runs inside backward: ``optimizer``, ``learning_rate``, ``eps``. SGD with a
            rate of 0.01 by default.

    Raises:
        ValueError: ``fused_params`` make no sense.

    Example:
        >>> from tutorec.distributed.plan import EmbeddingModuleShardingPlan
        >>> from tutorec.distributed.shard_geometry import table_wise_sharding
        >>> tables = [EmbeddingBagConfig(num_embeddings=8, embedding_dim=4, name="products", feature_names=["item"])]
        >>> plan = EmbeddingModuleShardingPlan(products=table_wise_sharding((8, 4), rank=0, device_type="cpu"))
        >>> sharder = EmbeddingBagCollectionSharder(fused_params={"learning_rate": 0.02})
        >>> sharded = sharder.shard(EmbeddingBagCollection(tables), plan, ShardingEnv.from_local(1, 0))
        >>> sharded(KeyedJaggedTensor(["item"], torch.tensor([3, 1]), lengths=torch.tensor([1, 1]))).keys()
        ['item']

    Source:
        TorchRec's ``torchrec.distributed.embeddingbag.EmbeddingBagCollectionSharder``.
    """

    def __init__(self, fused_params: Mapping[str, Any] | None = None) -> None:
        optimizer_spec(fused_params)
        self.fused_params: dict[str, Any] | None = dict(fused_params) if fused_params is not None else None

    @property
    def module_type(self) -> type[EmbeddingBagCollection]:
        """The class of modules that it shards."""
        return EmbeddingBagCollection

    def shard(
        self,
        module: EmbeddingBagCollection,
        params: Mapping[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedEmbeddingBagCollection:
        """The sharded module; every rank calls it. ``module_fqn`` is TorchRec's and has no effect."""
        if not isinstance(module, EmbeddingBagCollection):
            raise TypeError(f"this sharder shards an EmbeddingBagCollection, got a {type(module).__name__}")
        return ShardedEmbeddingBagCollection(module, params, env, self.fused_params, device)

    def shardable_parameters(self, module: EmbeddingBagCollection) -> dict[str, nn.Parameter]:
        """Table name -> weights ``[R, D]``."""
        return {name: bag.get_parameter("weight") for name, bag in module.embedding_bags.items()}

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """`ShardingType` values that it can build, on any device."""
        return [sharding_type.value for sharding_type in POOLED_SHARDINGS]

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        """`EmbeddingComputeKernel` values that it can build, on any device."""
        return [kernel.value for kernel in SUPPORTED_KERNELS]


def _usable_device(device: torch.device | None, plan: Mapping[str, ParameterSharding]) -> torch.device:
    """The device, or the CPU with one notice where CUDA is asked for and not there."""
    wanted = torch.device(device) if device is not None else torch.device("cpu")
    if wanted.type == "cuda" and not torch.cuda.is_available():
        _notice("CUDA is not available here: tables that were to live on cuda are placed on cpu")
        return torch.device("cpu")
    entries = plan.values() if isinstance(plan, Mapping) else ()
    shards = [shard for sharding in entries for shard in sharding.shards()]
    if wanted.type == "cpu" and any("cuda" in str(shard.placement) for shard in shards):
        _notice("the sharding plan was made for cuda: its tables are placed on cpu, on the same ranks")
    return wanted


def _notice(text: str) -> None:
    """Say something once in the life of the process."""
    if text not in _noticed:
        _noticed.add(text)
        _logger.warning(text)


def _initial_weights(
    module: EmbeddingBagCollection, tables: Sequence[PlacedTable], rank: int, device: torch.device
) -> dict[str, torch.Tensor]:
    """Table name -> rows of the shard on ``rank``: the module's, or newly drawn where the module is on meta.

    What is drawn depends on torch's seed and the table's name, not on the plan: a table starts with the same numbers
    wherever it lies.
    """
    weights: dict[str, torch.Tensor] = {}
    on_meta = [module.embedding_bags[table.name].get_parameter("weight").is_meta for table in tables]
    seed = int(torch.randint(2**31, ())) if any(on_meta) else 0
    for config, table, is_meta in zip(module.embedding_bag_configs(), tables, on_meta, strict=True):
        for piece in table.pieces:
            if piece.rank != rank:
                continue
            rows = module.embedding_bags[table.name].get_parameter("weight").detach()
            if is_meta:
                rows = torch.empty(table.rows, table.columns, dtype=table.dtype, device=device)
                with torch.random.fork_rng():
                    torch.manual_seed(seed + zlib.crc32(table.name.encode()))
                    config.init_weight(rows)
            row, column = piece.row_offset, piece.column_offset
            weights[table.name] = rows[row : row + piece.rows, column : column + piece.columns]
    return weights


def _without_weights(batch: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """The batch less its weights: a collection that is not weighted does not send them."""
    return KeyedJaggedTensor._from_parts(
        batch.keys(),
        batch.values(),
        None,
        batch.lengths_or_none(),
        batch.offsets_or_none(),
        batch.stride(),
        batch.length_per_key_or_none(),
    )
