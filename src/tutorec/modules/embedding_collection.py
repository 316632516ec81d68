"""EmbeddingCollection: tables side by side whose rows are returned one per id, for models that read sequences."""

from __future__ import annotations

import torch
from torch import nn

from tutorec.modules.embedding_configs import EmbeddingConfig
from tutorec.modules.embedding_tables import checked_tables, get_embedding_names_by_table
from tutorec.sparse.id_check import check_ids
from tutorec.sparse.jagged import JaggedTensor
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor
from tutorec.types import data_type_to_dtype


class EmbeddingCollection(nn.Module):
    """Embedding tables side by side: ids in, one row per id out, nothing pooled.

    In: a batch of F features and B samples, ``KeyedJaggedTensor`` (or a TensorDict). Out: for each feature a
    ``JaggedTensor`` with values ``[N_f, D]``, the rows of the feature's N_f ids in their order, and the lengths ``[B]``
    of the batch. This is the module of one process; its tables are plain ``nn.Embedding``. Tables may have different
    widths.

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
        TorchRec's ``torchrec.modules.embedding_modules.EmbeddingCollection``, whose tables have one width.
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
        self.reset_parameters()

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Look every id up in the tables of its feature.

        Args:
            features: F features, B samples.

        Returns:
            The rows ``[N_f, D]`` of each feature and table, by name.
        """
        check_ids(features, self._feature_rows)
        lists = features.to_dict()
        found: dict[str, JaggedTensor] = {}
        names = zip(self._feature_names, self._embedding_names_by_table, strict=True)
        for table, (feature_names, embedding_names) in zip(self.embeddings.values(), names, strict=True):
            for feature, name in zip(feature_names, embedding_names, strict=True):
                ids = lists[feature]
                rows = table(ids.values()).float()
                indices = ids.values() if self._need_indices else None
                found[name] = JaggedTensor(rows, indices, lengths=ids.lengths())
        return found

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
        """Draw initial values again; on the meta device there is nothing to fill."""
        with torch.no_grad():
            for config, table in zip(self._embedding_configs, self.embeddings.values(), strict=True):
                weight = table.get_parameter("weight")
                if not weight.is_meta:
                    config.init_weight(weight)

    def _build(self, table: EmbeddingConfig) -> nn.Embedding:
        """One table as a module, its weight not yet drawn."""
        shape = (table.num_embeddings, table.embedding_dim)
        weight = torch.empty(shape, device=self._device, dtype=data_type_to_dtype(table.data_type))
        return nn.Embedding(*shape, _weight=weight)
