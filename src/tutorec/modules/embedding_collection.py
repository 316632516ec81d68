"""EmbeddingCollection: tables side by side whose rows are returned one per id, for models that read sequences."""

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn
from torch.jit import is_scripting, is_tracing  # pyright: ignore[reportPrivateImportUsage]
from torch.nn import functional as F

from tutorec._kernels.separate_rows import take_rows
from tutorec.modules.embedding_configs import EmbeddingConfig
from tutorec.modules.embedding_rows import (
    ResultOrder,
    order_of_results,
    plain_weights,
    rows_in_one_call,
    samples_of_lists,
)
from tutorec.modules.embedding_tables import checked_tables, draw_weights, get_embedding_names_by_table
from tutorec.optim.updating_lookup import Bags, look_up, updates_in_backward
from tutorec.sparse.id_check import check_ids
from tutorec.sparse.jagged import JaggedTensor
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor
from tutorec.sparse.tensor_dict import maybe_td_to_kjt
from tutorec.types import data_type_to_dtype


class EmbeddingCollectionInterface(nn.Module, ABC):
    """What collections in one process have in common that return one row per id: with floats, quantized, or fused.

    Source:
        TorchRec's ``torchrec.modules.embedding_modules.EmbeddingCollectionInterface``.
    """

    @abstractmethod
    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Ids of F features to their rows, ``[N_f, D]`` by name."""

    @abstractmethod
    def embedding_configs(self) -> list[EmbeddingConfig]:
        """What each table is, in order."""

    @abstractmethod
    def need_indices(self) -> bool:
        """Whether the results carry the ids that they belong to, as weights."""

    @abstractmethod
    def embedding_dim(self) -> int:
        """Width D of every table."""

    @abstractmethod
    def embedding_names_by_table(self) -> list[list[str]]:
        """The names of the results, table by table."""


class EmbeddingCollection(EmbeddingCollectionInterface):
    """Embedding tables side by side: ids in, one row per id out, nothing pooled.

    In: a batch of F features and B samples, ``KeyedJaggedTensor`` (or a TensorDict). Out: for each feature a
    ``JaggedTensor`` with values ``[N_f, D]``, the rows of the feature's N_f ids in their order, and the lengths ``[B]``
    of the batch. This is the module of one process; its tables are plain ``nn.Embedding``. Tables may have different
    widths, and rows of 16 bits come out as float32. Where a batch has inverse indices, the results are those of its B
    samples, not of the lists that are stored.

    Args:
        tables: What each table is. Names are distinct; a feature of several tables gives a result for each, named
            ``feature@table``.
        device: Where the tables live, by default torch's default device; ``meta`` allocates nothing.
        need_indices: Whether the results carry the ids that they belong to, as weights.
        use_gather_select: Chooses among TorchRec's kernels; no effect here.
        use_gather_select_per_sharding: As above.

    Raises:
        TypeError: A table is no ``EmbeddingConfig``.
        ValueError: Two tables have one name, a table has no name, or its number format cannot be had.

    Example:
        >>> import torch
        >>> ec = EmbeddingCollection([EmbeddingConfig(10, 4, "item_table", feature_names=["item"])])
        >>> batch = KeyedJaggedTensor(["item"], torch.tensor([3, 1, 3]), lengths=torch.tensor([2, 0, 1]))
        >>> rows = ec(batch)["item"]
        >>> rows.values().shape, rows.lengths().tolist()
        (torch.Size([3, 4]), [2, 0, 1])
        >>> torch.equal(rows.values(), ec.embeddings["item_table"].weight[[3, 1, 3]])
        True

    See Also:
        TorchRec's ``torchrec.modules.embedding_modules.EmbeddingCollection``, whose tables have one width; of its two
        collections only the sharded one heeds inverse indices.
    """

    def __init__(
        self,
        tables: list[EmbeddingConfig],
        device: torch.device | None = None,
        need_indices: bool = False,
        use_gather_select: bool = False,
        use_gather_select_per_sharding: dict[str, bool] | None = None,
    ) -> None:
        super().__init__()
        tables = checked_tables("EmbeddingCollection", tables, EmbeddingConfig)
        self._embedding_configs = tables
        self._need_indices = need_indices
        self._use_gather_select = use_gather_select
        self._use_gather_select_per_sharding = use_gather_select_per_sharding
        self._device = torch.device(device) if device is not None else torch.get_default_device()
        self.embeddings = nn.ModuleDict({table.name: self._build(table) for table in tables})
        self._feature_names = [table.feature_names for table in tables]
        self._feature_rows = [
            (name, table.name, table.num_embeddings) for table in tables for name in table.feature_names
        ]
        self._embedding_names_by_table = get_embedding_names_by_table(tables)
        self._result_places = [
            (feature, index, name)
            for index, names in enumerate(self._embedding_names_by_table)
            for feature, name in zip(self._feature_names[index], names, strict=True)
        ]
        self._features = list(dict.fromkeys(feature for feature, _, _ in self._result_places))
        self._features_of_names = {name: feature for feature, _, name in self._result_places}
        self._last_keys: list[str] | None = None
        self._order = ResultOrder(None, (), ())
        self.reset_parameters()

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Look every id up in the tables of its feature.

        Args:
            features: F features, B samples; or a TensorDict, as ``tutorec.sparse.tensor_dict`` takes it.

        Returns:
            The rows ``[N_f, D]`` of each feature and table, by name.
        """
        if not is_scripting():
            features = maybe_td_to_kjt(features, self._features)
            check_ids(features, self._feature_rows, tables=self)
            results = self._eagerly(features)
            if results is not None:
                return results
        lists = features.to_dict()
        found: dict[str, JaggedTensor] = {}
        for index, table in enumerate(self.embeddings.values()):
            names = self._embedding_names_by_table[index]
            for position, feature in enumerate(self._feature_names[index]):
                ids = lists[feature]
                rows = table(ids.values()).float()
                indices = ids.values() if self._need_indices else None
                found[names[position]] = JaggedTensor(rows, indices, ids.lengths(), None)
        if not is_scripting():
            found = samples_of_lists(found, features, self._features_of_names)
        return found

    @torch.jit.unused
    def _eagerly(self, features: KeyedJaggedTensor) -> Any:
        """The results by the fastest road, or None where the tables are to be called one by one, as modules."""
        if type(features) is not KeyedJaggedTensor or torch.compiler.is_compiling() or is_tracing():
            return None
        weights = plain_weights(self.embeddings)
        if weights is None:
            return None
        if updates_in_backward(weights):
            rows = look_up([Bags(weights[table], ids) for table, ids in self._ids_of_results(features)])
            return self._results(features, rows)
        if torch.is_grad_enabled() and any(weight.requires_grad for weight in weights):
            rows = [F.embedding(ids, weights[table]).float() for table, ids in self._ids_of_results(features)]
            return self._results(features, rows)
        if not features.variable_stride_per_key():
            if features.keys() != self._last_keys:
                self._last_keys, self._order = features.keys(), order_of_results(features.keys(), self._result_places)
            results = rows_in_one_call(features, weights, self._order, self._need_indices)
            if results is not None:
                return results
        rows = [take_rows(weights[table], ids) for table, ids in self._ids_of_results(features)]
        return self._results(features, rows)

    @torch.jit.unused
    def _ids_of_results(self, features: KeyedJaggedTensor) -> list[tuple[int, Tensor]]:
        """For each result its table and its ids."""
        lists = features.to_dict()
        return [(table, lists[feature].values()) for feature, table, _ in self._result_places]

    @torch.jit.unused
    def _results(self, features: KeyedJaggedTensor, found: list[Tensor]) -> dict[str, JaggedTensor]:
        """The results from their rows."""
        lists = features.to_dict()
        results: dict[str, JaggedTensor] = {}
        for (feature, _, name), rows in zip(self._result_places, found, strict=True):
            ids = lists[feature]
            indices = ids.values() if self._need_indices else None
            results[name] = JaggedTensor._from_parts(rows, indices, ids.lengths(), ids.offsets())
        return samples_of_lists(results, features, self._features_of_names)

    def embedding_configs(self) -> list[EmbeddingConfig]:
        """What each table is, in order."""
        return self._embedding_configs

    def embedding_names_by_table(self) -> list[list[str]]:
        """The names of the results, table by table."""
        return self._embedding_names_by_table

    def embedding_dim(self) -> int:
        """Width D of every table; -1 without tables, an error where they differ: see ``embedding_configs()``."""
        widths = {table.name: table.embedding_dim for table in self._embedding_configs}
        if len(set(widths.values())) > 1:
            raise ValueError(f"the tables have no common embedding_dim: {widths}; ask embedding_configs() for each")
        return next(iter(widths.values()), -1)

    def need_indices(self) -> bool:
        """Whether the results carry the ids that they belong to, as weights."""
        return self._need_indices

    def use_gather_select(self) -> bool:
        """What was asked for; no effect here."""
        return self._use_gather_select

    def use_gather_select_per_sharding(self) -> dict[str, bool] | None:
        """What was asked for; no effect here."""
        return self._use_gather_select_per_sharding

    @property
    def device(self) -> torch.device:
        """Where the tables were made."""
        return self._device

    def reset_parameters(self) -> None:
        """Draw initial values again."""
        draw_weights(self._embedding_configs, self.embeddings)

    def _build(self, table: EmbeddingConfig) -> nn.Embedding:
        """One table as a module, its weight not yet drawn."""
        shape = (table.num_embeddings, table.embedding_dim)
        weight = torch.empty(shape, device=self._device, dtype=data_type_to_dtype(table.data_type))
        return nn.Embedding(*shape, _weight=weight)
