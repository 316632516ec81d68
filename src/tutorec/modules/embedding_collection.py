"""`EmbeddingCollection`: tables without pooling, for models of sequences."""

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn
from torch.jit import is_scripting  # pyright: ignore[reportPrivateImportUsage]

from tutorec._kernels.tbe_layout import PooledBatch
from tutorec._loaded import check_loaded
from tutorec.modules.embedding_configs import (
    EmbeddingConfig,
    checked_tables,
    common_width,
    draw_weights,
    empty_weight,
    get_embedding_names_by_table,
)
from tutorec.modules.embedding_rows import samples_of_lists
from tutorec.optim.updating_lookup import is_updated_in_backward, look_up
from tutorec.sparse.graph_ids import check_ids_in_graph, least_rows
from tutorec.sparse.id_check import check_ids
from tutorec.sparse.jagged import JaggedTensor
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor
from tutorec.sparse.tensor_dict import maybe_td_to_kjt


class EmbeddingCollectionInterface(nn.Module, ABC):
    """Interface of unsharded collections without pooling: float, quantized and fused.

    Source:
        TorchRec's ``torchrec.modules.embedding_modules.EmbeddingCollectionInterface``.
    """

    if TYPE_CHECKING:  # TorchScript compiles what it finds annotated
        _embedding_configs: list[EmbeddingConfig]
        _embedding_names_by_table: list[list[str]]
        _need_indices: bool

    @abstractmethod
    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Return the rows ``[N_f, D]`` of F features' ids, by name."""

    def embedding_configs(self) -> list[EmbeddingConfig]:
        """Configuration of each table, in order; ``data_type`` is the format of its rows."""
        return self._embedding_configs

    def embedding_names_by_table(self) -> list[list[str]]:
        """Names of the results, table by table."""
        return self._embedding_names_by_table

    def embedding_dim(self) -> int:
        """Number of columns D of every table; -1 without tables, an error if they differ."""
        return common_width(self._embedding_configs)

    def need_indices(self) -> bool:
        """Whether results carry their ids, as weights."""
        return self._need_indices


class EmbeddingCollection(EmbeddingCollectionInterface):
    """A collection of embedding tables without pooling: every id returns its row.

    The input is a ``KeyedJaggedTensor`` (or a TensorDict) of F features and B samples. The output
    has for each feature a ``JaggedTensor``: values ``[N_f, D]``, the rows of the feature's N_f ids
    in their order, and the lengths ``[B]`` of the batch. The module is unsharded; its tables are
    plain ``nn.Embedding``. Tables may have different widths, and 16-bit rows are returned as
    float32. For a batch with inverse indices, results are those of its B samples, not of the stored
    bags.

    Args:
        tables: Configuration of each table. Names must be distinct; a feature of several tables has
            a result for each, named ``feature@table``.
        device: Device of the tables, by default torch's default device; on ``meta`` nothing is
            allocated.
        need_indices: Whether results carry their ids, as weights.
        use_gather_select: TorchRec's; has no effect.
        use_gather_select_per_sharding: TorchRec's; has no effect.

    Raises:
        TypeError: A table is not an ``EmbeddingConfig``.
        ValueError: Two tables have the same name, a table has no name, or its number format is not
            supported.

    Example:
        >>> import torch
        >>> ec = EmbeddingCollection(
        ...     [EmbeddingConfig(10, 4, "item_table", feature_names=["item"])]
        ... )
        >>> batch = KeyedJaggedTensor(
        ...     ["item"], torch.tensor([3, 1, 3]), lengths=torch.tensor([2, 0, 1])
        ... )
        >>> rows = ec(batch)["item"]
        >>> rows.values().shape, rows.lengths().tolist()
        (torch.Size([3, 4]), [2, 0, 1])
        >>> torch.equal(rows.values(), ec.embeddings["item_table"].weight[[3, 1, 3]])
        True

    See Also:
        TorchRec's ``torchrec.modules.embedding_modules.EmbeddingCollection``, whose tables have one
        width; only its sharded collection supports inverse indices.
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
        self._use_sorted_select = False

        self._device = torch.device(device) if device is not None else torch.get_default_device()
        self.embeddings = nn.ModuleDict({table.name: self._build(table) for table in tables})
        self._feature_names = [table.feature_names for table in tables]
        self.register_load_state_dict_pre_hook(check_loaded)
        self._feature_rows = [
            (name, table.name, table.num_embeddings)
            for table in tables
            for name in table.feature_names
        ]
        self._names, self._least = least_rows(self._feature_rows)

        self._embedding_names_by_table = get_embedding_names_by_table(tables)
        self._features_of_names = {
            name: feature
            for features, names in zip(
                self._feature_names, self._embedding_names_by_table, strict=True
            )
            for feature, name in zip(features, names, strict=True)
        }
        self._features = list(dict.fromkeys(self._features_of_names.values()))
        self.reset_parameters()

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Look up every id in the tables of its feature.

        Args:
            features: F features, B samples; a TensorDict is accepted.

        Returns:
            The rows ``[N_f, D]`` of each feature and table, by name.
        """
        if not is_scripting():
            features = maybe_td_to_kjt(features, self._features)
            features = check_ids(features, self._feature_rows, tables=self)
        if is_scripting():
            check_ids_in_graph(features, self._names, self._least, self._feature_rows)
        lists = features.to_dict()
        updated: dict[str, Tensor] = {}
        if not is_scripting():
            updated = self._updated_rows(features)

        results: dict[str, JaggedTensor] = {}
        for index, table in enumerate(self.embeddings.values()):
            names = self._embedding_names_by_table[index]
            for position, feature in enumerate(self._feature_names[index]):
                ids = lists[feature]
                name = names[position]
                rows = updated[name] if name in updated else table(ids.values()).float()
                indices = ids.values() if self._need_indices else None
                results[name] = JaggedTensor(rows, indices, ids.lengths(), None)

        if not is_scripting():
            results = samples_of_lists(results, features, self._features_of_names)
        return results

    @torch.jit.unused
    def _updated_rows(self, features: KeyedJaggedTensor) -> dict[str, Tensor]:
        """By name, the rows [N_f, D] of tables that backward updates, looked up as bags of one."""
        if type(features) is not KeyedJaggedTensor:
            return {}

        weights = {
            name: table.weight
            for table, names in zip(
                self.embeddings.values(), self._embedding_names_by_table, strict=True
            )
            for name in names
            if _only_looks_up(table) and is_updated_in_backward(cast(Tensor, table.weight))
        }
        if not weights:
            return {}

        lists = features.to_dict()
        batches = []
        for index, name in enumerate(weights):
            ids = lists[self._features_of_names[name]].values()
            ends = torch.arange(ids.numel() + 1, device=ids.device)
            batches.append(PooledBatch(ids, ends, None, False, (index,)))
        rows = look_up(cast(list[Tensor], [*weights.values()]), batches)
        return dict(zip(weights, rows, strict=True))

    def use_gather_select(self) -> bool:
        """As given; has no effect."""
        return self._use_gather_select

    def use_gather_select_per_sharding(self) -> dict[str, bool] | None:
        """As given; has no effect."""
        return self._use_gather_select_per_sharding

    def use_sorted_select(self) -> bool:
        """As set; has no effect."""
        return self._use_sorted_select

    def set_use_sorted_select(self, use_sorted_select: bool) -> None:
        """TorchRec's; has no effect."""
        self._use_sorted_select = use_sorted_select

    @property
    def device(self) -> torch.device:
        """Device on which the tables were created."""
        return self._device

    def reset_parameters(self) -> None:
        """Initialize the weights."""
        draw_weights(self._embedding_configs, self.embeddings)

    def _build(self, table: EmbeddingConfig) -> nn.Embedding:
        """Create the module of a table, not yet initialized."""
        weight = empty_weight(table, self._device)
        return nn.Embedding(weight.shape[0], weight.shape[1], _weight=weight)


def _only_looks_up(table: nn.Module) -> bool:
    """Whether a table is a plain one without hooks, so that it need not be called."""
    hooked = table._forward_hooks or table._forward_pre_hooks
    return (
        type(table) is nn.Embedding
        and not hooked
        and table.max_norm is None
        and table.padding_idx is None
    )
