"""EmbeddingCollection: tables side by side whose rows are returned one per id, for models that read sequences."""

from abc import ABC, abstractmethod
from typing import cast

import torch
from torch import Tensor, nn
from torch.jit import is_scripting  # pyright: ignore[reportPrivateImportUsage]

from tutorec._kernels.tbe_layout import PooledBatch
from tutorec.modules.embedding_configs import EmbeddingConfig
from tutorec.modules.embedding_rows import samples_of_lists
from tutorec.modules.embedding_tables import (
    checked_tables,
    draw_weights,
    empty_weight,
    get_embedding_names_by_table,
)
from tutorec.optim.updating_lookup import is_updated_in_backward, look_up
from tutorec.sparse.id_check import check_ids
from tutorec.sparse.jagged import JaggedTensor
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor
from tutorec.sparse.tensor_dict import maybe_td_to_kjt


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
        self._features_of_names = {
            name: feature
            for features, names in zip(self._feature_names, self._embedding_names_by_table, strict=True)
            for feature, name in zip(features, names, strict=True)
        }
        self._features = list(dict.fromkeys(self._features_of_names.values()))
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
        lists = features.to_dict()
        updated: dict[str, Tensor] = {}
        if not is_scripting():
            updated = self._updated_rows(features)
        results: dict[str, JaggedTensor] = {}
        for index, table in enumerate(self.embeddings.values()):
            names = self._embedding_names_by_table[index]
            for position, feature in enumerate(self._feature_names[index]):
                ids, name = lists[feature], names[position]
                rows = updated[name] if name in updated else table(ids.values()).float()
                indices = ids.values() if self._need_indices else None
                results[name] = JaggedTensor(rows, indices, ids.lengths(), None)
        if not is_scripting():
            results = samples_of_lists(results, features, self._features_of_names)
        return results

    @torch.jit.unused
    def _updated_rows(self, features: KeyedJaggedTensor) -> dict[str, Tensor]:
        """By name the results of the tables that backward updates: rows [N_f, D], every id a bag of its own."""
        if type(features) is not KeyedJaggedTensor:
            return {}
        weights = {
            name: table.weight
            for table, names in zip(self.embeddings.values(), self._embedding_names_by_table, strict=True)
            for name in names
            if _only_looks_up(table) and is_updated_in_backward(cast(Tensor, table.weight))
        }
        if not weights:
            return {}
        lists, batches = features.to_dict(), []
        for index, name in enumerate(weights):
            ids = lists[self._features_of_names[name]].values()
            batches.append(PooledBatch(ids, torch.arange(ids.numel() + 1, device=ids.device), None, False, (index,)))
        return dict(zip(weights, look_up(cast(list[Tensor], [*weights.values()]), batches), strict=True))

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
        weight = empty_weight(table, self._device)
        return nn.Embedding(weight.shape[0], weight.shape[1], _weight=weight)


def _only_looks_up(table: nn.Module) -> bool:
    """Whether a table is a plain one, without hooks: another one is to be called."""
    hooked = table._forward_hooks or table._forward_pre_hooks
    return type(table) is nn.Embedding and not hooked and table.max_norm is None and table.padding_idx is None
