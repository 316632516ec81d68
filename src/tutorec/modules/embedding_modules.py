"""EmbeddingBagCollection: tables side by side, looked up and pooled for one batch."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from tutorec.modules.embedding_configs import BaseEmbeddingConfig, EmbeddingBagConfig, PoolingType
from tutorec.sparse.id_check import check_ids
from tutorec.sparse.keyed import KeyedTensor
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor
from tutorec.types import data_type_to_dtype


def get_embedding_names_by_table(tables: Sequence[BaseEmbeddingConfig]) -> list[list[str]]:
    """The names of the results, table by table: the feature, or ``feature@table`` where several tables share it.

    Args:
        tables: The tables, in order.

    Returns:
        For each table the name of each feature's result.

    Example:
        >>> one = EmbeddingBagConfig(10, 4, "t1", feature_names=["item", "user"])
        >>> two = EmbeddingBagConfig(10, 4, "t2", feature_names=["item"])
        >>> get_embedding_names_by_table([one, two])
        [['item@t1', 'user'], ['item@t2']]
    """
    features = [feature for table in tables for feature in table.feature_names]
    shared = {feature for feature in features if features.count(feature) > 1}
    return [
        [f"{feature}@{table.name}" if feature in shared else feature for feature in table.feature_names]
        for table in tables
    ]


class EmbeddingBagCollection(nn.Module):
    """Embedding tables side by side: ids in, one pooled row per feature and sample out.

    In: a batch of F features and B samples, ``KeyedJaggedTensor``. Out: ``KeyedTensor`` with values ``[B, D]``, where
    D is the sum of the columns over all features of all tables. This is the module of one process; its tables are
    plain ``nn.EmbeddingBag``. Sharding replaces it by one that holds a part of the tables on each rank.

    Args:
        tables: What each table is. Names are distinct; one feature may be looked up in several tables.
        is_weighted: Whether each id carries a weight that multiplies its row.
        device: Where the tables live; ``meta`` allocates nothing.

    Raises:
        ValueError: Two tables have one name, a table has no name, or its pooling or number format cannot be had.

    Example:
        >>> import torch
        >>> tables = [EmbeddingBagConfig(num_embeddings=10, embedding_dim=4, name="item_table", feature_names=["item"])]
        >>> ebc = EmbeddingBagCollection(tables)
        >>> batch = KeyedJaggedTensor(["item"], torch.tensor([3, 1, 3]), lengths=torch.tensor([2, 0, 1]))
        >>> pooled = ebc(batch)
        >>> pooled.keys(), pooled.values().shape
        (['item'], torch.Size([3, 4]))
        >>> torch.equal(pooled["item"][0], ebc.embedding_bags["item_table"].weight[[3, 1]].sum(0))
        True

    See Also:
        TorchRec's ``torchrec.modules.embedding_modules.EmbeddingBagCollection``.
    """

    def __init__(
        self, tables: list[EmbeddingBagConfig], is_weighted: bool = False, device: torch.device | None = None
    ) -> None:
        super().__init__()
        _check_tables(tables, is_weighted)
        self._embedding_bag_configs = tables
        self._is_weighted = is_weighted
        self._device = torch.device(device) if device is not None else torch.device("cpu")
        self.embedding_bags = nn.ModuleDict({table.name: self._build(table) for table in tables})
        self._feature_names = [table.feature_names for table in tables]
        self._feature_rows = [
            (name, table.name, table.num_embeddings) for table in tables for name in table.feature_names
        ]
        self._embedding_names = [name for names in get_embedding_names_by_table(tables) for name in names]
        self._length_per_name = [table.embedding_dim for table in tables for _ in table.feature_names]
        self.reset_parameters()

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Look every feature's bags up in its tables and pool each bag to one row.

        Args:
            features: F features, B samples; a bag is one feature's ids of one sample.

        Returns:
            The pooled rows side by side, ``[B, D]``, one key per feature and table.
        """
        check_ids(features, self._feature_rows, self._is_weighted)
        bags = features.to_dict()
        pooled: list[Tensor] = []
        for table, names in zip(self.embedding_bags.values(), self._feature_names, strict=True):
            for name in names:
                bag = bags[name]
                weights = bag.weights() if self._is_weighted else None
                pooled.append(table(bag.values(), bag.offsets(), weights).float())
        values = torch.cat(pooled, dim=1) if pooled else torch.empty(features.stride(), 0, device=self._device)
        return KeyedTensor(self._embedding_names, self._length_per_name, values)

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """What each table is, in order."""
        return self._embedding_bag_configs

    def is_weighted(self) -> bool:
        """Whether each id carries a weight."""
        return self._is_weighted

    @property
    def device(self) -> torch.device:
        """Where the tables were made."""
        return self._device

    def reset_parameters(self) -> None:
        """Draw initial values again; on the meta device there is nothing to fill."""
        with torch.no_grad():
            for config, table in zip(self._embedding_bag_configs, self.embedding_bags.values(), strict=True):
                weight = table.get_parameter("weight")
                if not weight.is_meta:
                    config.init_weight(weight)

    def _build(self, table: EmbeddingBagConfig) -> nn.EmbeddingBag:
        """One table as a module, its weight not yet drawn."""
        shape = (table.num_embeddings, table.embedding_dim)
        weight = torch.empty(shape, device=self._device, dtype=data_type_to_dtype(table.data_type))
        mode = table.pooling.value.lower()
        return nn.EmbeddingBag(*shape, _weight=weight, mode=mode, include_last_offset=True)


def _check_tables(tables: Sequence[EmbeddingBagConfig], is_weighted: bool) -> None:
    """Check what one table's config cannot know: names, pooling and format as this collection supports them."""
    names = [table.name for table in tables]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ValueError(
            f"tables {repeated} are named more than once in {names}; a name is a table's key in state_dict"
        )
    for table in tables:
        if not table.name or "." in table.name:
            raise ValueError(f"table name {table.name!r} must not be empty or contain a dot; it becomes part of a path")
        if hasattr(nn.ModuleDict, table.name) or table.name == "training":
            raise ValueError(
                f"table name {table.name!r} is taken by an attribute of torch.nn.ModuleDict, which holds the tables; "
                f"call it {table.name + '_table'!r}"
            )
        if table.pooling is PoolingType.NONE:
            raise ValueError(f"table {table.name!r}: a bag is pooled by SUM or MEAN; EmbeddingCollection returns rows")
        if is_weighted and table.pooling is PoolingType.MEAN:
            raise ValueError(f"table {table.name!r}: weights go with SUM, not MEAN; divide the weights by their sum")
        if not data_type_to_dtype(table.data_type).is_floating_point:
            raise ValueError(
                f"table {table.name!r}: data_type {table.data_type} cannot be trained; use FP32, FP16 or BF16 here, "
                "and quantize the finished collection"
            )
