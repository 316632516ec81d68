"""`EmbeddingBagCollection`: tables with pooling."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn
from torch.jit import is_scripting  # pyright: ignore[reportPrivateImportUsage]

from tutorec._kernels.pooling import bag_weights
from tutorec._kernels.specs import PoolingKind, kernel_pooling
from tutorec._loaded import check_loaded
from tutorec.modules.embedding_collection import EmbeddingCollection as EmbeddingCollection
from tutorec.modules.embedding_collection import (
    EmbeddingCollectionInterface as EmbeddingCollectionInterface,
)
from tutorec.modules.embedding_configs import (
    EmbeddingBagConfig,
    PoolingType,
    checked_tables,
    draw_weights,
    empty_weight,
    pooling_type_to_str,
)
from tutorec.modules.embedding_configs import (
    get_embedding_names_by_table as get_embedding_names_by_table,
)
from tutorec.modules.pooled_lookup import PooledLookups, pool_at_once, side_by_side
from tutorec.modules.pooled_lookup import process_pooled_embeddings as process_pooled_embeddings
from tutorec.modules.pooled_lookup import reorder_inverse_indices as reorder_inverse_indices
from tutorec.sparse.id_check import check_ids
from tutorec.sparse.jagged import JaggedTensor
from tutorec.sparse.keyed import KeyedTensor
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor
from tutorec.sparse.tensor_dict import maybe_td_to_kjt


class EmbeddingBagCollectionInterface(nn.Module, ABC):
    """Interface of unsharded collections with pooling: float, quantized and fused.

    Source:
        TorchRec's ``torchrec.modules.embedding_modules.EmbeddingBagCollectionInterface``.
    """

    if TYPE_CHECKING:  # TorchScript compiles what it finds annotated
        _embedding_bag_configs: list[EmbeddingBagConfig]
        _is_weighted: bool

    @abstractmethod
    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Return the pooled rows ``[B, D]`` of F features and B samples."""

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """Configuration of each table, in order; ``data_type`` is the format of its rows."""
        return self._embedding_bag_configs

    def is_weighted(self) -> bool:
        """Whether each id carries a weight."""
        return self._is_weighted


class EmbeddingBagCollection(EmbeddingBagCollectionInterface):
    """A collection of embedding tables with pooling: one pooled row per feature and sample.

    The input is a ``KeyedJaggedTensor`` of F features and B samples. The output is a
    ``KeyedTensor`` ``[B, D]``, where D is the sum of the columns over all features of all tables.
    The module is unsharded; its tables are plain ``nn.EmbeddingBag``. Sharding replaces it by a
    module with shards on each rank.

    Args:
        tables: Configuration of each table. Names must be distinct; one feature may be looked up in
            several tables.
        is_weighted: Whether each id carries a weight that multiplies its row.
        device: Device of the tables; on ``meta`` nothing is allocated.

    Raises:
        ValueError: Two tables have the same name, a table has no name, or its pooling or number
            format is not supported.

    Example:
        >>> import torch
        >>> tables = [
        ...     EmbeddingBagConfig(
        ...         num_embeddings=10,
        ...         embedding_dim=4,
        ...         name="item_table",
        ...         feature_names=["item"],
        ...     )
        ... ]
        >>> ebc = EmbeddingBagCollection(tables)
        >>> batch = KeyedJaggedTensor(
        ...     ["item"], torch.tensor([3, 1, 3]), lengths=torch.tensor([2, 0, 1])
        ... )
        >>> pooled = ebc(batch)
        >>> pooled.keys(), pooled.values().shape
        (['item'], torch.Size([3, 4]))
        >>> torch.equal(
        ...     pooled["item"][0], ebc.embedding_bags["item_table"].weight[[3, 1]].sum(0)
        ... )
        True

    See Also:
        TorchRec's ``torchrec.modules.embedding_modules.EmbeddingBagCollection``.
    """

    def __init__(
        self,
        tables: list[EmbeddingBagConfig],
        is_weighted: bool = False,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        tables = checked_tables("EmbeddingBagCollection", tables, EmbeddingBagConfig)
        check_pooling(tables, is_weighted)
        self._embedding_bag_configs = tables
        self._is_weighted = is_weighted
        self._device = torch.device(device) if device is not None else torch.get_default_device()
        self.embedding_bags = nn.ModuleDict({table.name: self._build(table) for table in tables})

        self.register_load_state_dict_pre_hook(check_loaded)
        self._feature_rows = [
            (name, table.name, table.num_embeddings)
            for table in tables
            for name in table.feature_names
        ]
        self._feature_names = [table.feature_names for table in tables]
        self._poolings: list[str] = [_pooling(table) for table in tables]
        self._formats: list[str] = [table.data_type.value for table in tables]

        self._lookups = PooledLookups(
            features=tuple(name for table in tables for name in table.feature_names),
            tables=tuple(index for index, table in enumerate(tables) for _ in table.feature_names),
            poolings=tuple(_pooling(table) for table in tables for _ in table.feature_names),
            weighted=is_weighted,
        )
        self._embedding_names = [
            name for names in get_embedding_names_by_table(tables) for name in names
        ]
        self._length_per_name = [
            table.embedding_dim for table in tables for _ in table.feature_names
        ]
        self.reset_parameters()

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Look up and pool every feature's bags in its tables.

        Args:
            features: F features, B samples, or a TensorDict; a bag is a feature's ids of a sample.

        Returns:
            The pooled rows ``[B, D]``, one key per feature and table.
        """
        if not is_scripting():
            features = maybe_td_to_kjt(features, self._lookups.keys)
            features = check_ids(features, self._feature_rows, self._is_weighted, self)
            values = pool_at_once(features, self.embedding_bags, self._lookups)
            if values is not None:  # one call for all tables, if possible and faster
                return KeyedTensor(self._embedding_names, self._length_per_name, values)

        bags = features.to_dict()
        pooled: list[Tensor] = []
        for index, table in enumerate(self.embedding_bags.values()):
            for feature in self._feature_names[index]:
                bag = bags[feature]
                weights = self._weights_of(bag, index)
                pooled.append(table(bag.values(), bag.offsets(), weights).float())
        columns = self._side_by_side(features, pooled)
        return KeyedTensor(self._embedding_names, self._length_per_name, columns)

    @property
    def device(self) -> torch.device:
        """Device on which the tables were created."""
        return self._device

    def reset_parameters(self) -> None:
        """Initialize the weights."""
        draw_weights(self._embedding_bag_configs, self.embedding_bags)

    def _build(self, table: EmbeddingBagConfig) -> nn.EmbeddingBag:
        """Create the module of a table, not yet initialized."""
        weight = empty_weight(table, self._device)
        mode = kernel_pooling(_pooling(table), self._is_weighted)
        rows, columns = weight.shape
        return nn.EmbeddingBag(rows, columns, _weight=weight, mode=mode, include_last_offset=True)

    def _weights_of(self, bag: JaggedTensor, table: int) -> Tensor | None:
        """The factor of each id's row [N]: the caller's weights, and the divisor of SQRTN."""
        weights = bag_weights(
            self._poolings[table], bag.offsets(), bag.weights() if self._is_weighted else None
        )
        if weights is None:
            return None

        # TorchScript does not support a list of dtypes.
        if self._formats[table] == "FP16":
            return weights.half()
        return weights.to(torch.bfloat16) if self._formats[table] == "BF16" else weights.float()

    def _side_by_side(self, features: KeyedJaggedTensor, pooled: list[Tensor]) -> Tensor:
        """Concatenate the pooled rows of all results to [B, D]."""
        if is_scripting():
            return torch.cat(pooled, dim=1)
        return side_by_side(features, self._lookups, pooled)


def _pooling(table: EmbeddingBagConfig) -> PoolingKind:
    return cast(PoolingKind, pooling_type_to_str(table.pooling))


def check_pooling(tables: Sequence[EmbeddingBagConfig], is_weighted: bool) -> None:
    """Check that every table pools, and that its pooling supports weights.

    Args:
        tables: The tables.
        is_weighted: Whether each id carries a weight.

    Raises:
        ValueError: A table does not pool, or has MEAN pooling while ids carry weights.
    """
    for table in tables:
        if table.pooling is PoolingType.NONE:
            raise ValueError(
                f"table {table.name!r}: a bag is pooled by SUM, MEAN or SQRTN; "
                "EmbeddingCollection returns rows"
            )
        if is_weighted and table.pooling is PoolingType.MEAN:
            raise ValueError(
                f"table {table.name!r}: weights go with SUM, not MEAN; divide them by their sum"
            )
