"""Managed collisions: a stored mapping of raw ids to rows, not a hash that merges ids."""

# No import of annotations: TorchScript reads them from the functions.

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.jit import is_scripting  # pyright: ignore[reportPrivateImportUsage]

from tutorec.fx.utils import call_whole, is_fx_symbolic_tracing
from tutorec.modules.embedding_configs import BaseEmbeddingConfig, checked_tables
from tutorec.modules.mc_base import ManagedCollisionModule as ManagedCollisionModule
from tutorec.modules.mc_evictions import DistanceLFU_EvictionPolicy as DistanceLFU_EvictionPolicy
from tutorec.modules.mc_evictions import LFU_EvictionPolicy as LFU_EvictionPolicy
from tutorec.modules.mc_evictions import LRU_EvictionPolicy as LRU_EvictionPolicy
from tutorec.modules.mc_evictions import MCHEvictionPolicy as MCHEvictionPolicy
from tutorec.modules.mc_evictions import (
    MCHEvictionPolicyMetadataInfo as MCHEvictionPolicyMetadataInfo,
)
from tutorec.modules.mc_evictions import average_threshold_filter as average_threshold_filter
from tutorec.modules.mc_evictions import dynamic_threshold_filter as dynamic_threshold_filter
from tutorec.modules.mc_evictions import (
    probabilistic_threshold_filter as probabilistic_threshold_filter,
)
from tutorec.modules.mc_index import JointLookup, joint_lookup
from tutorec.modules.mc_report import CollisionReport
from tutorec.modules.mch_module import MCHManagedCollisionModule as MCHManagedCollisionModule
from tutorec.sparse.jagged import JaggedTensor, jagged_from_parts
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor
from tutorec.sparse.layout import segment_sums
from tutorec.sparse.refuse import refuse_batch
from tutorec.sparse.tensor_dict import maybe_td_to_kjt


@torch.fx.wrap
def apply_mc_method_to_jt_dict(
    mc_module: nn.Module, method: str, features_dict: dict[str, JaggedTensor]
) -> dict[str, JaggedTensor]:
    """A managed collision module's method on lists by table; one call in a traced graph.

    Args:
        mc_module: The module.
        method: The name of the method, such as ``"preprocess"``.
        features_dict: Lists by table.

    Returns:
        What the method returns: lists under the same names, in the same order.

    Source:
        TorchRec's ``torchrec.modules.mc_modules.apply_mc_method_to_jt_dict``.
    """
    return getattr(mc_module, method)(features_dict)


@torch.fx.wrap
def _joined(
    features: KeyedJaggedTensor,
    values: list[Tensor],
    weights: list[Tensor | None],
    lengths: list[Tensor],
) -> KeyedJaggedTensor:
    """The batch with the lists of each table in place of its own."""
    present: list[Tensor] = []
    for table_weights in weights:
        if table_weights is not None:
            present.append(table_weights)
    joined_weights = torch.cat(present) if len(present) > 0 else None

    return KeyedJaggedTensor(
        features.keys(),
        torch.cat(values),
        joined_weights,
        torch.cat(lengths),
        None,
        features.stride(),
    )


class ManagedCollisionCollection(nn.Module):
    """The mappings of several tables: a batch of raw ids in, the same batch of rows out.

    Args:
        managed_collision_modules: Table name -> mapping.
        embedding_configs: What each table is; every table has a mapping.
        need_preprocess: Whether a sharded collection calls ``preprocess`` before it sends ids to
            their ranks.

    Raises:
        ValueError: A table has no mapping, a mapping no table, a mapping other rows than its table,
            or one feature is looked up in two tables, each of which would have to give its ids
            other rows.

    Source:
        TorchRec's ``torchrec.modules.mc_modules.ManagedCollisionCollection``.
    """

    def __init__(
        self,
        managed_collision_modules: dict[str, ManagedCollisionModule],
        embedding_configs: Sequence[BaseEmbeddingConfig],
        need_preprocess: bool = True,
    ) -> None:
        super().__init__()
        configs = checked_tables(
            "ManagedCollisionCollection", embedding_configs, BaseEmbeddingConfig, trained=False
        )
        _check_modules(managed_collision_modules, configs)
        self._managed_collision_modules = nn.ModuleDict(
            {config.name: managed_collision_modules[config.name] for config in configs}
        )
        self._embedding_configs = configs
        self.need_preprocess = need_preprocess
        self._table_to_features = {config.name: config.feature_names for config in configs}
        self._feature_to_table = {
            feature: config.name for config in configs for feature in config.feature_names
        }
        self._table_feature_splits = [len(config.feature_names) for config in configs]
        self._feature_names = [*self._feature_to_table]
        modules = cast(Mapping[str, ManagedCollisionModule], self._managed_collision_modules)
        self._remapper = TableRemapper(modules, self._table_feature_splits)

    @property
    def is_traced_whole(self) -> bool:
        """Whether its call is one call in a traced graph: where it learns."""
        return self.training

    def forward(
        self, features: KeyedJaggedTensor, mutate_miss_lengths: bool = True
    ) -> KeyedJaggedTensor:
        """Replace raw ids by rows.

        Args:
            features: The batch; features that no table has are left out.
            mutate_miss_lengths: Whether ids without a row may be taken out of their lists.

        Returns:
            The batch, features in the order of the tables; lengths and weights as they were.

        Raises:
            KeyError: The batch lacks a feature.
            TypeError: ``features`` is not a KeyedJaggedTensor.
        """
        if is_scripting():
            return self._in_graph(features, mutate_miss_lengths)
        else:
            return self._eager(features, mutate_miss_lengths)

    def _in_graph(
        self, features: KeyedJaggedTensor, mutate_miss_lengths: bool
    ) -> KeyedJaggedTensor:
        """The same under TorchScript and torch.fx; each feature has equally many samples."""
        features = features.permute([features.keys().index(name) for name in self._feature_names])
        tables = features.split(self._table_feature_splits)
        values: list[Tensor] = []
        lengths: list[Tensor] = []
        weights: list[Tensor | None] = []
        for number, (table, module) in enumerate(self._managed_collision_modules.items()):
            raw_ids = JaggedTensor(
                tables[number].values(),
                tables[number].weights_or_none(),
                tables[number].lengths(),
                None,
            )
            if is_scripting():
                lists = module({table: raw_ids}, mutate_miss_lengths)[table]
            else:
                is_traced_whole = cast(ManagedCollisionModule, module).is_traced_whole
                call = partial(call_whole, module, features) if is_traced_whole else module
                lists = call({table: raw_ids}, mutate_miss_lengths)[table]

            values.append(lists.values())
            lengths.append(lists.lengths())
            weights.append(lists.weights_or_none())

        return _joined(features, values, weights, lengths)

    @torch.jit.unused
    def _eager(self, features: KeyedJaggedTensor, mutate_miss_lengths: bool) -> KeyedJaggedTensor:
        if is_fx_symbolic_tracing():
            if self.is_traced_whole:
                return call_whole(self, features, features, mutate_miss_lengths)
            return self._in_graph(features, mutate_miss_lengths)

        features = maybe_td_to_kjt(features, self._feature_names)
        if not hasattr(features, "stride_per_key"):
            refuse_batch("a ManagedCollisionCollection", features)

        return self._remapper.remap(self._in_order(features), mutate_miss_lengths)

    def embedding_configs(self) -> Sequence[BaseEmbeddingConfig]:
        """What each table is, in order."""
        return self._embedding_configs

    def table_to_number_buckets(self) -> dict[str, int]:
        """Table name -> into how many equal parts its rows can be split between ranks."""
        return {table: module.buckets() for table, module in self._modules_by_table()}

    def evict(self) -> dict[str, Tensor | None]:
        """Table name -> rows [U] that another id got since the last call, or None."""
        return {table: module.evict() for table, module in self._modules_by_table()}

    def open_slots(self) -> dict[str, Tensor]:
        """Table name -> rows that no id has [1]."""
        return {table: module.open_slots() for table, module in self._modules_by_table()}

    def report(self) -> CollisionReport:
        """Per table: rows in use, lookups, ids with and without a row, evictions. A sync point."""
        tables = [module.report(table) for table, module in self._modules_by_table()]
        return CollisionReport.of(tables)

    def lookup_runtime_meta(
        self, features: KeyedJaggedTensor, remapped_ids: KeyedJaggedTensor
    ) -> KeyedJaggedTensor:
        """The number that hash mappings store for each id, as values of the batch."""
        numbers: list[Tensor] = []
        for table_ids, table_rows, (_, module) in zip(
            self._per_table(features),
            self._per_table(remapped_ids),
            self._modules_by_table(),
            strict=True,
        ):
            look_up = cast(Callable[..., Tensor], module.lookup_runtime_meta)
            numbers.append(look_up(table_ids.values(), table_rows.values()).reshape(-1))

        return features._with_ids(torch.cat(numbers), features.weights_or_none())

    def lookup_custom_runtime_meta(self, remapped_ids: KeyedJaggedTensor) -> Tensor:
        """The numbers that hash mappings store for ids, for each row of the batch [N, ...]."""
        numbers: list[Tensor] = []
        tables = zip(self._per_table(remapped_ids), self._modules_by_table(), strict=True)
        for table_rows, (_, module) in tables:
            look_up = cast(Callable[..., Tensor], module.lookup_custom_runtime_meta)
            numbers.append(look_up(table_rows.values()))

        return torch.cat(numbers)

    def _per_table(self, features: KeyedJaggedTensor) -> list[KeyedJaggedTensor]:
        return features.split(self._table_feature_splits)

    def _modules_by_table(self) -> Iterator[tuple[str, ManagedCollisionModule]]:
        return cast(
            Iterator[tuple[str, ManagedCollisionModule]],
            iter(self._managed_collision_modules.items()),
        )

    def _in_order(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """The batch with the features of the tables, in their order."""
        if features.keys() == self._feature_names:
            return features

        index_per_key = features.index_per_key()
        missing = [name for name in self._feature_names if name not in index_per_key]
        if missing:
            raise KeyError(f"the batch lacks the features {missing}; it has {features.keys()}")

        ordered = features.permute([index_per_key[name] for name in self._feature_names])
        return ordered._with_inverse_indices(features.inverse_indices_or_none())


def _check_modules(
    modules: dict[str, ManagedCollisionModule], configs: Sequence[BaseEmbeddingConfig]
) -> None:
    """Check that tables and mappings belong together."""
    owner = "ManagedCollisionCollection"
    names = [config.name for config in configs]
    if set(names) != set(modules):
        raise ValueError(
            f"{owner}: tables {names} and managed collision modules {[*modules]}; each table "
            "needs one"
        )

    table_per_feature: dict[str, str] = {}
    for config in configs:
        rows = modules[config.name].output_size()
        if rows != config.num_embeddings:
            raise ValueError(
                f"{owner}: table {config.name!r} has {config.num_embeddings} rows, and its managed "
                f"collision module maps ids to {rows}; give both the same number"
            )

        for feature in config.feature_names:
            other = table_per_feature.setdefault(feature, config.name)
            if other != config.name:
                raise ValueError(
                    f"{owner}: feature {feature!r} is looked up in tables {other!r} and "
                    f"{config.name!r}, which give an id different rows; pass its ids under two "
                    "names"
                )


class TableRemapper:
    """Remaps the ids of several tables, in one lookup where their mappings allow it.

    Args:
        modules: Table name -> mapping; None for a table that has no ids here.
        features_per_table: How many features each table has.
        is_preprocessed: Whether the ids come as ``preprocess`` makes them.

    Attributes:
        tables: Their names.
    """

    def __init__(
        self,
        modules: Mapping[str, ManagedCollisionModule | None],
        features_per_table: list[int],
        is_preprocessed: bool = False,
    ) -> None:
        self.tables = [*modules]
        self._modules = modules
        self._features_per_table = features_per_table
        self._is_preprocessed = is_preprocessed
        self._joint_lookup: JointLookup | None = None

    def __getstate__(self) -> dict[str, Any]:
        """A copy builds its own indices."""
        return {**self.__dict__, "_joint_lookup": None}

    def remap(
        self, features: KeyedJaggedTensor, mutate_miss_lengths: bool = True
    ) -> KeyedJaggedTensor:
        """The batch with rows of the tables instead of ids; features are in the tables' order."""
        weights = features.weights_or_none()
        lookup = joint_lookup(self._modules, self._joint_lookup)
        if lookup is not None:
            self._joint_lookup = lookup
            ids = features.values()
            counts = segment_sums(features.length_per_key(), self._features_per_table)
            rows = lookup.rows(ids, counts, self._is_preprocessed)
            return features._with_ids(rows.to(ids.device), weights)

        remapped: list[JaggedTensor | KeyedJaggedTensor] = []
        batches = features.split(self._features_per_table)
        for (table, module), batch in zip(self._modules.items(), batches, strict=True):
            if module is None:
                remapped.append(batch)
                continue

            lists = _lists(table, module, batch)
            if self._is_preprocessed:
                lists = module.remap(module.profile(lists), mutate_miss_lengths)
            else:
                lists = module(lists, mutate_miss_lengths=mutate_miss_lengths)
            remapped += lists.values()

        values = torch.cat([lists.values() for lists in remapped])
        if values.numel() == features.values().numel():
            return features._with_ids(values, weights)

        is_variable = features.variable_stride_per_key()
        batch = KeyedJaggedTensor._from_parts(
            features.keys(),
            values,
            None if weights is None else torch.cat([lists.weights() for lists in remapped]),
            torch.cat([lists.lengths() for lists in remapped]),
            None,
            None if is_variable else features.stride(),
            None,
            features._layout._stride_per_key_per_rank if is_variable else None,
        )
        return batch._with_inverse_indices(features.inverse_indices_or_none())


def _lists(
    table: str, module: ManagedCollisionModule, features: KeyedJaggedTensor
) -> dict[str, JaggedTensor]:
    """The lists of a table, as its mapping takes them: of all features, or of each feature."""
    has_own_lists = module._enable_per_feature_lookups
    if has_own_lists and any(key.endswith(module.read_only_suffix) for key in features.keys()):
        return features.to_dict()

    weights = features.weights_or_none()
    if module.wants_feature_lengths:
        weights = torch.tensor(features.length_per_key())
    return {table: jagged_from_parts(features.values(), weights, features.lengths(), None)}
