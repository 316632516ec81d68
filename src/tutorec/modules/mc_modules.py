"""Managed collisions: raw ids become rows of a table, by a mapping that is kept, instead of a hash that merges ids."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.jit import is_scripting  # pyright: ignore[reportPrivateImportUsage]

from tutorec._text import TextTable
from tutorec.modules.embedding_configs import BaseEmbeddingConfig
from tutorec.modules.embedding_tables import checked_tables
from tutorec.modules.mc_evictions import DistanceLFU_EvictionPolicy as DistanceLFU_EvictionPolicy
from tutorec.modules.mc_evictions import LFU_EvictionPolicy as LFU_EvictionPolicy
from tutorec.modules.mc_evictions import LRU_EvictionPolicy as LRU_EvictionPolicy
from tutorec.modules.mc_evictions import MCHEvictionPolicy
from tutorec.modules.mc_evictions import MCHEvictionPolicyMetadataInfo as MCHEvictionPolicyMetadataInfo
from tutorec.modules.mc_evictions import average_threshold_filter as average_threshold_filter
from tutorec.modules.mc_evictions import dynamic_threshold_filter as dynamic_threshold_filter
from tutorec.modules.mc_evictions import probabilistic_threshold_filter as probabilistic_threshold_filter
from tutorec.modules.mc_report import CollisionCounts, TableCollisions, collision_table
from tutorec.sparse.jagged import JaggedTensor, jagged_from_parts
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor
from tutorec.sparse.tensor_dict import maybe_td_to_kjt

_MOST_SHARDS = 1024
_NO_ID = torch.iinfo(torch.int64).max


@torch.fx.wrap
def apply_mc_method_to_jt_dict(
    mc_module: nn.Module, method: str, features_dict: dict[str, JaggedTensor]
) -> dict[str, JaggedTensor]:
    """A method of a managed collision module, called with lists by table; one call in a traced graph.

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


class ManagedCollisionModule(nn.Module):
    """The mapping of one table: raw ids to the R rows of the table. The base class of all such mappings.

    Ids come as a dictionary with one entry, table name -> lists of ids of all features of the table. ``forward`` is
    ``preprocess``, then ``profile`` (in training mode: observe the ids and change the mapping), then ``remap``. After a
    forward ``evict`` says which rows have another id than before; who holds the rows resets them.

    Args:
        device: Where the state of the mapping is held.
        output_segments: Boundaries of the rows at which the state may be split: S + 1 numbers for S segments.
        skip_state_validation: Whether the mapping keeps no record of its segments; it cannot be sharded again then.
        read_only_suffix: End of the names of features that are remapped and not observed.
        enable_per_feature_lookups: Whether a sharded module passes features one by one, not one list for each table.

    Attributes:
        counts: Lookups, those of ids with a row, and evictions; what ``report()`` of a collection shows.
        wants_feature_lengths: Whether the lists that a collection passes carry, in place of weights, the number of ids
            of each feature of the table.

    Raises:
        ValueError: More than 1,024 segments.

    Source:
        TorchRec's ``torchrec.modules.mc_modules.ManagedCollisionModule``.
    """

    wants_feature_lengths = False

    _output_segments_tensor: Tensor
    _current_iter_tensor: Tensor

    def __init__(
        self,
        device: torch.device,
        output_segments: list[int],
        skip_state_validation: bool = False,
        read_only_suffix: str = "_readonly",
        enable_per_feature_lookups: bool = False,
    ) -> None:
        super().__init__()
        self.counts = CollisionCounts()
        self._device = device
        self._read_only_suffix = read_only_suffix
        self._enable_per_feature_lookups = enable_per_feature_lookups
        if skip_state_validation:
            return
        unused = _MOST_SHARDS + 1 - len(output_segments)
        if unused < 0:
            raise ValueError(
                f"{type(self).__name__}: {len(output_segments) - 1} output segments, and there may be {_MOST_SHARDS}"
            )
        segments = torch.tensor([*output_segments, *[-1] * unused], dtype=torch.int64, device=device)
        self.register_buffer("_output_segments_tensor", segments)
        self.register_buffer("_current_iter_tensor", torch.zeros(1, dtype=torch.int64, device=device))
        self.register_load_state_dict_post_hook(_validate_loaded_state)

    @property
    def device(self) -> torch.device:
        """Where the state of the mapping is held."""
        return self._device

    @property
    def readable_suffix(self) -> str:
        """End of the names of features that are remapped and not observed."""
        return self._read_only_suffix

    @abstractmethod
    def preprocess(self, features: dict[str, JaggedTensor]) -> dict[str, JaggedTensor]:
        """Raw ids -> the ids that are mapped, such as their hashes."""

    @abstractmethod
    def profile(self, features: dict[str, JaggedTensor]) -> dict[str, JaggedTensor]:
        """Observe a batch in training mode, and change the mapping when that is due; returns the ids unchanged."""

    @abstractmethod
    def remap(
        self,
        features: dict[str, JaggedTensor],
        mutate_miss_lengths: bool = True,
        write_weights: Tensor | None = None,
    ) -> dict[str, JaggedTensor]:
        """Preprocessed ids -> rows."""

    @abstractmethod
    def forward(self, features: dict[str, JaggedTensor], mutate_miss_lengths: bool = True) -> dict[str, JaggedTensor]:
        """Raw ids -> rows. ``mutate_miss_lengths``: ids without a row may be taken out of their lists."""

    @abstractmethod
    def evict(self) -> Tensor | None:
        """Rows [U] that have been given to another id since the last call, or None; they are to be reset."""

    @abstractmethod
    def output_size(self) -> int:
        """R, rows."""

    @abstractmethod
    def input_size(self) -> int:
        """Raw ids, after ``preprocess``, are below this."""

    @abstractmethod
    def buckets(self) -> int:
        """Into how many equal parts the rows can be split between ranks."""

    @abstractmethod
    def validate_state(self) -> None:
        """Check the state that was loaded: it must be possible to build this part of the rows from stored segments."""

    @abstractmethod
    def open_slots(self) -> Tensor:
        """Rows that no id has [1]."""

    def report(self, table: str = "") -> TableCollisions:
        """What has happened to the ids of the table so far. A sync point."""
        return TableCollisions.of(table, self.output_size(), int(self.open_slots()), self.counts)

    @abstractmethod
    def rebuild_with_output_id_range(
        self, output_id_range: tuple[int, int], output_segments: list[int], device: torch.device | None = None
    ) -> ManagedCollisionModule:
        """A new mapping onto rows ``output_id_range[0]`` up to, not including, ``output_id_range[1]``: one shard's."""


def _validate_loaded_state(module: nn.Module, _keys: object) -> None:
    cast(ManagedCollisionModule, module).validate_state()


class MCHManagedCollisionModule(ManagedCollisionModule):
    """Ids that a policy chooses have rows of their own; all other ids share the last row.

    Every ``eviction_interval`` iterations in training mode the ids seen since the last time compete with those that
    have a row; the highest scores get the R - 1 rows. An id that keeps a row keeps the same one. Between two such
    iterations, and in eval mode, the mapping does not change.

    The state: ``_mch_sorted_raw_ids`` [R], the ids that have a row, rising, and the largest int64 for each open row;
    ``_mch_remapped_ids_mapping`` [R], their rows; and the policy's metadata of each, ``_mch_counts`` and the like [R].
    Ids seen since the last competition are not part of the stored state.

    Args:
        zch_size: R, rows.
        device: Where the mapping is held.
        eviction_policy: Who gets a row.
        eviction_interval: Iterations between two competitions.
        input_hash_size: Ids, after ``input_hash_func``, are below this.
        input_hash_func: ``(ids [N], input_hash_size) -> ids [N]``, called first.
        mch_size: Has no effect, as in TorchRec 1.8.0.
        mch_hash_func: Has no effect.
        name: Of the table.
        output_global_offset: Number of the first row, where this is one shard of a table.
        output_segments: As of `ManagedCollisionModule`; by default all rows are one segment.
        buckets: Into how many equal parts the rows can be split between ranks.

    Raises:
        ValueError: No rows, no interval, or state that was stored in other segments.

    Example:
        >>> mapping = MCHManagedCollisionModule(3, torch.device("cpu"), LFU_EvictionPolicy(), eviction_interval=1)
        >>> ids = JaggedTensor(torch.tensor([10**12, 77, 10**12, 5, 77]), lengths=torch.tensor([5]))
        >>> mapping({"item": ids})["item"].values()  # 5 was seen once, the others twice
        tensor([1, 0, 1, 2, 0])

    Source:
        TorchRec's ``torchrec.modules.mc_modules.MCHManagedCollisionModule``.
    """

    _mch_sorted_raw_ids: Tensor
    _mch_remapped_ids_mapping: Tensor

    def __init__(
        self,
        zch_size: int,
        device: torch.device,
        eviction_policy: MCHEvictionPolicy,
        eviction_interval: int,
        input_hash_size: int = 2**63 - 1,
        input_hash_func: Callable[[Tensor, int], Tensor] | None = None,
        mch_size: int | None = None,
        mch_hash_func: Callable[[Tensor, int], Tensor] | None = None,
        name: str | None = None,
        output_global_offset: int = 0,
        output_segments: list[int] | None = None,
        buckets: int = 1,
    ) -> None:
        if zch_size <= 0 or eviction_interval <= 0:
            raise ValueError(
                f"MCHManagedCollisionModule {name or ''}: zch_size={zch_size}, eviction_interval={eviction_interval}; "
                "both must be above 0"
            )
        rows = range(output_global_offset, output_global_offset + zch_size)
        segments = [rows.start, rows.stop] if output_segments is None else output_segments
        super().__init__(device, segments)
        if mch_size is not None or mch_hash_func is not None:
            warnings.warn("MCHManagedCollisionModule: mch_size and mch_hash_func have no effect", stacklevel=2)
        self._name, self._zch_size, self._rows, self._output_segments = name, zch_size, rows, segments
        self._eviction_policy, self._eviction_interval = eviction_policy, eviction_interval
        self._input_hash_size, self._input_hash_func, self._buckets = input_hash_size, input_hash_func, buckets
        self.register_buffer("_mch_sorted_raw_ids", torch.full((zch_size,), _NO_ID, device=device))
        self.register_buffer("_mch_remapped_ids_mapping", torch.arange(rows.start, rows.stop, device=device))
        for info in eviction_policy.metadata_info:
            if info.is_mch_metadata:
                buffer = torch.zeros(zch_size, dtype=torch.int64, device=device)
                self.register_buffer(f"_mch_{info.metadata_name}", buffer)
        self._current_iter = -1
        self._history: list[tuple[Tensor, dict[str, Tensor]]] = []
        self._evicted_rows: Tensor | None = None

    def preprocess(self, features: dict[str, JaggedTensor]) -> dict[str, JaggedTensor]:
        """Raw ids -> what ``input_hash_func`` makes of them."""
        if self._input_hash_func is None:
            return features
        hashed = self._input_hash_func
        return {key: _with_values(ids, hashed(ids.values(), self._input_hash_size)) for key, ids in features.items()}

    @torch.no_grad()
    def profile(self, features: dict[str, JaggedTensor]) -> dict[str, JaggedTensor]:
        """In training mode record the ids, and let them compete where that is due."""
        if not self.training:
            return features
        if self._current_iter < 0:
            self._current_iter = int(self._current_iter_tensor)
        self._current_iter += 1
        self._current_iter_tensor += 1
        policy = self._eviction_policy
        recorded = [info.metadata_name for info in policy.metadata_info if info.is_history_metadata]
        for lists in features.values():
            ids = lists.values().to(torch.int64, copy=True)
            metadata = {name: torch.empty_like(ids) for name in recorded}
            policy.record_history_metadata(self._current_iter, ids, metadata)
            self._history.append((ids, metadata))
        if self._current_iter % self._eviction_interval == 0:
            self._compete()
        return features

    def remap(
        self,
        features: dict[str, JaggedTensor],
        mutate_miss_lengths: bool = True,
        write_weights: Tensor | None = None,
    ) -> dict[str, JaggedTensor]:
        """Ids -> rows; the last row for an id that has none."""
        return {key: _with_values(ids, self._rows_of(ids.values())) for key, ids in features.items()}

    def forward(self, features: dict[str, JaggedTensor], mutate_miss_lengths: bool = True) -> dict[str, JaggedTensor]:
        """Raw ids -> rows."""
        return self.remap(self.profile(self.preprocess(features)), mutate_miss_lengths)

    def evict(self) -> Tensor | None:
        """Rows [U] that have been given to an id since the last call, or None."""
        rows, self._evicted_rows = self._evicted_rows, None
        return rows

    def output_size(self) -> int:
        """R, rows."""
        return self._zch_size

    def input_size(self) -> int:
        """Ids, after ``input_hash_func``, are below this."""
        return self._input_hash_size

    def buckets(self) -> int:
        """Into how many equal parts the rows can be split between ranks."""
        return self._buckets

    def open_slots(self) -> Tensor:
        """Rows that no id has, without the one that ids without a row share [1]."""
        return (self._mch_sorted_raw_ids[:-1] == _NO_ID).sum().view(1)

    def reset_inference_mode(self) -> None:
        """Forget which rows were given to another id."""
        self._evicted_rows = None

    def validate_state(self) -> None:
        """Check that stored segments have boundaries where these rows begin and end, and take the state up."""
        stored = self._output_segments_tensor.tolist()
        if not {self._rows.start, self._rows.stop} <= set(stored):
            raise ValueError(
                f"MCHManagedCollisionModule {self._name or ''}: rows {self._rows.start} to {self._rows.stop} cannot be "
                f"built from the stored segments {[boundary for boundary in stored if boundary >= 0]}"
            )
        self._output_segments_tensor[: len(self._output_segments)] = torch.tensor(self._output_segments)
        self._output_segments_tensor[len(self._output_segments) :] = -1
        self._current_iter, self._history = -1, []
        self._sort()

    def rebuild_with_output_id_range(
        self, output_id_range: tuple[int, int], output_segments: list[int], device: torch.device | None = None
    ) -> MCHManagedCollisionModule:
        """A new mapping onto the rows of one shard."""
        return type(self)(
            zch_size=output_id_range[1] - output_id_range[0],
            device=device or self.device,
            eviction_policy=self._eviction_policy,
            eviction_interval=self._eviction_interval,
            input_hash_size=self._input_hash_size,
            input_hash_func=self._input_hash_func,
            name=self._name,
            output_global_offset=output_id_range[0],
            output_segments=output_segments,
            buckets=len(output_segments) - 1,
        )

    def _metadata(self) -> dict[str, Tensor]:
        """The policy's metadata of the id of each row [R], in the order of the ids."""
        infos = self._eviction_policy.metadata_info
        return {
            info.metadata_name: getattr(self, f"_mch_{info.metadata_name}") for info in infos if info.is_mch_metadata
        }

    def _find(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Position of each id among those with a row [N], and whether it is there [N]."""
        position = torch.searchsorted(self._mch_sorted_raw_ids[:-1], ids)
        return position, self._mch_sorted_raw_ids[position] == ids

    @torch.no_grad()
    def _rows_of(self, ids: Tensor) -> Tensor:
        position, has_row = self._find(ids.long())
        self.counts.add_lookups(has_row)
        return torch.where(has_row, self._mch_remapped_ids_mapping[position], self._rows.stop - 1).to(ids.dtype)

    def _compete(self) -> None:
        """Let the recorded ids compete with those that have a row."""
        history, self._history = self._history, []
        policy, metadata = self._eviction_policy, {}
        for name in history[0][1]:
            metadata[name] = torch.cat([recorded[name] for _, recorded in history])
        ids, inverse, counts = torch.unique(
            torch.cat([ids for ids, _ in history]), return_inverse=True, return_counts=True
        )
        admitted = None
        if policy._threshold_filtering_func is not None:
            admitted = policy._threshold_filtering_func(counts)[0]
        seen = policy.coalesce_history_metadata(self._current_iter, metadata, counts, inverse, threshold_mask=admitted)
        if admitted is not None:
            ids, counts = ids[admitted], counts[admitted]
        order = torch.argsort(counts, descending=True, stable=True)
        ids, counts = ids[order], counts[order]
        position, has_row = self._find(ids)
        left, came = policy.update_metadata_and_generate_eviction_scores(
            self._current_iter, self._zch_size, order, counts, has_row, position[has_row], self._metadata(), seen
        )
        self.counts.evictions = self.counts.evictions + (self._mch_sorted_raw_ids[left] != _NO_ID).sum()
        self._mch_sorted_raw_ids[left] = ids[~has_row][came]
        given = self._mch_remapped_ids_mapping[left]
        self._evicted_rows = given if self._evicted_rows is None else torch.cat([self._evicted_rows, given]).unique()
        self._sort()

    def _sort(self) -> None:
        """Put the ids in order again, and all that belongs to them."""
        order = torch.argsort(self._mch_sorted_raw_ids, stable=True)
        for buffer in (self._mch_sorted_raw_ids, self._mch_remapped_ids_mapping, *self._metadata().values()):
            buffer.copy_(buffer[order])


def _with_values(lists: JaggedTensor, values: Tensor) -> JaggedTensor:
    """The same lists with other ids."""
    return jagged_from_parts(values, lists.weights_or_none(), lists.lengths_or_none(), lists.offsets_or_none())


class ManagedCollisionCollection(nn.Module):
    """The mappings of several tables: a batch of raw ids in, the same batch with rows of the tables out.

    Args:
        managed_collision_modules: Table name -> mapping.
        embedding_configs: What each table is; every table has a mapping.
        need_preprocess: Whether a sharded collection calls ``preprocess`` before it sends ids to their ranks.

    Raises:
        ValueError: A table has no mapping, a mapping no table, a mapping other rows than its table, or one feature is
            looked up in two tables, each of which would have to give its ids other rows.

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
        configs = checked_tables("ManagedCollisionCollection", embedding_configs, BaseEmbeddingConfig, trained=False)
        _check_modules(managed_collision_modules, configs)
        self._managed_collision_modules = nn.ModuleDict(
            {config.name: managed_collision_modules[config.name] for config in configs}
        )
        self._embedding_configs = configs
        self.need_preprocess = need_preprocess
        self._table_to_features = {config.name: config.feature_names for config in configs}
        self._feature_to_table = {feature: config.name for config in configs for feature in config.feature_names}
        self._table_feature_splits = [len(config.feature_names) for config in configs]
        self._feature_names = [*self._feature_to_table]

    def forward(self, features: KeyedJaggedTensor, mutate_miss_lengths: bool = True) -> KeyedJaggedTensor:
        """Replace raw ids by rows.

        Args:
            features: The batch; features that no table has are left out.
            mutate_miss_lengths: Whether ids without a row may be taken out of their lists.

        Returns:
            The batch, features in the order of the tables; lengths and weights as they were.

        Raises:
            KeyError: The batch lacks a feature.
        """
        if is_scripting():
            return self._in_graph(features, mutate_miss_lengths)
        else:
            return self._eager(features, mutate_miss_lengths)

    def _in_graph(self, features: KeyedJaggedTensor, mutate_miss_lengths: bool) -> KeyedJaggedTensor:
        """The same under TorchScript, in a batch of equally many samples for each feature."""
        features = features.permute([features.keys().index(name) for name in self._feature_names])
        parts = features.split(self._table_feature_splits)
        values: list[Tensor] = []
        lengths: list[Tensor] = []
        weights: list[Tensor] = []
        for place, (table, module) in enumerate(self._managed_collision_modules.items()):
            given = JaggedTensor(parts[place].values(), parts[place].weights_or_none(), parts[place].lengths(), None)
            lists = module({table: given}, mutate_miss_lengths)[table]
            values.append(lists.values())
            lengths.append(lists.lengths())
            left = lists.weights_or_none()
            if left is not None:
                weights.append(left)
        joined = torch.cat(weights) if len(weights) > 0 else None
        return KeyedJaggedTensor(
            features.keys(), torch.cat(values), joined, torch.cat(lengths), None, features.stride()
        )

    @torch.jit.unused
    def _eager(self, features: KeyedJaggedTensor, mutate_miss_lengths: bool) -> KeyedJaggedTensor:
        features = self._in_order(maybe_td_to_kjt(features, self._feature_names))
        parts, remapped = features.split(self._table_feature_splits), list[JaggedTensor]()
        for (table, module), part in zip(self._modules_by_table(), parts, strict=True):
            beside = torch.tensor(part.length_per_key()) if module.wants_feature_lengths else part.weights_or_none()
            lists = jagged_from_parts(part.values(), beside, part.lengths(), None)
            remapped.append(module({table: lists}, mutate_miss_lengths=mutate_miss_lengths)[table])
        values = torch.cat([lists.values() for lists in remapped])
        if all(lists.lengths() is part.lengths() for lists, part in zip(remapped, parts, strict=True)):
            offsets, inverse = features.offsets_or_none(), features.inverse_indices_or_none()
            return features._with_tensors(values, features.weights_or_none(), features.lengths(), offsets, inverse)
        weights = features.weights_or_none()
        return KeyedJaggedTensor(
            features.keys(),
            values,
            None if weights is None else torch.cat([lists.weights() for lists in remapped]),
            torch.cat([lists.lengths() for lists in remapped]),
            stride_per_key_per_rank=features.stride_per_key_per_rank() if features.variable_stride_per_key() else None,
            stride=None if features.variable_stride_per_key() else features.stride(),
            inverse_indices=features.inverse_indices_or_none(),
        )

    def embedding_configs(self) -> Sequence[BaseEmbeddingConfig]:
        """What each table is, in order."""
        return self._embedding_configs

    def table_to_number_buckets(self) -> dict[str, int]:
        """Table name -> into how many equal parts its rows can be split between ranks."""
        return {table: module.buckets() for table, module in self._modules_by_table()}

    def evict(self) -> dict[str, Tensor | None]:
        """Table name -> rows [U] that have been given to another id since the last call, or None."""
        return {table: module.evict() for table, module in self._modules_by_table()}

    def open_slots(self) -> dict[str, Tensor]:
        """Table name -> rows that no id has [1]."""
        return {table: module.open_slots() for table, module in self._modules_by_table()}

    def report(self) -> TextTable:
        """Per table: rows in use, lookups, the share of ids with a row, ids that share one, evictions. A sync point."""
        return collision_table([module.report(table) for table, module in self._modules_by_table()])

    def lookup_runtime_meta(self, features: KeyedJaggedTensor, remapped_ids: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """What hash mappings hold beside their ids, one number for each id of the batch, as values of the batch."""
        asked = zip(self._parts(features), self._parts(remapped_ids), self._modules_by_table(), strict=True)
        numbers = [
            cast(Callable[..., Tensor], module.lookup_runtime_meta)(ids.values(), rows.values()).reshape(-1)
            for ids, rows, (_, module) in asked
        ]
        inverse, weights = features.inverse_indices_or_none(), features.weights_or_none()
        return features._with_tensors(torch.cat(numbers), weights, features.lengths(), None, inverse)

    def lookup_custom_runtime_meta(self, remapped_ids: KeyedJaggedTensor) -> Tensor:
        """What hash mappings hold beside their ids, for each row of the batch [N, ...]."""
        asked = zip(self._parts(remapped_ids), self._modules_by_table(), strict=True)
        return torch.cat(
            [cast(Callable[..., Tensor], one.lookup_custom_runtime_meta)(rows.values()) for rows, (_, one) in asked]
        )

    def _parts(self, features: KeyedJaggedTensor) -> list[KeyedJaggedTensor]:
        return features.split(self._table_feature_splits)

    def _modules_by_table(self) -> Iterator[tuple[str, ManagedCollisionModule]]:
        return cast(Iterator[tuple[str, ManagedCollisionModule]], iter(self._managed_collision_modules.items()))

    def _in_order(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """The batch with the features of the tables, in their order."""
        if features.keys() == self._feature_names:
            return features
        places = features.index_per_key()
        missing = [name for name in self._feature_names if name not in places]
        if missing:
            raise KeyError(f"the batch lacks the features {missing}; it has {features.keys()}")
        ordered = features.permute([places[name] for name in self._feature_names])
        ordered._inverse_indices = features.inverse_indices_or_none()
        return ordered


def _check_modules(modules: dict[str, ManagedCollisionModule], configs: Sequence[BaseEmbeddingConfig]) -> None:
    """Check that tables and mappings belong together."""
    owner, names = "ManagedCollisionCollection", [config.name for config in configs]
    if set(names) != set(modules):
        raise ValueError(f"{owner}: tables {names} and managed collision modules {[*modules]}; each table needs one")
    tables: dict[str, str] = {}
    for config in configs:
        rows = modules[config.name].output_size()
        if rows != config.num_embeddings:
            raise ValueError(
                f"{owner}: table {config.name!r} has {config.num_embeddings} rows, and its managed collision module "
                f"maps ids to {rows}; give both the same number"
            )
        for feature in config.feature_names:
            if (other := tables.setdefault(feature, config.name)) != config.name:
                raise ValueError(
                    f"{owner}: feature {feature!r} is looked up in tables {other!r} and {config.name!r}, which give an "
                    "id different rows; pass its ids under two names"
                )
