"""Collections of tables that take raw ids, built from the configs of the tables alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import nn

from tutorec.modules.embedding_collection import EmbeddingCollection
from tutorec.modules.embedding_configs import (
    BaseEmbeddingConfig,
    checked_tables,
)
from tutorec.modules.embedding_modules import EmbeddingBagCollection
from tutorec.modules.hash_mc_evictions import HashZchEvictionConfig, HashZchEvictionPolicyName
from tutorec.modules.hash_mc_modules import HashZchManagedCollisionModule
from tutorec.modules.mc_base import ManagedCollisionModule
from tutorec.modules.mc_embedding_modules import (
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)
from tutorec.modules.mc_evictions import DistanceLFU_EvictionPolicy
from tutorec.modules.mc_modules import ManagedCollisionCollection
from tutorec.modules.mch_module import MCHManagedCollisionModule
from tutorec.sparse.jagged import JaggedTensor
from tutorec.sparse.keyed import KeyedTensor
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor


class _Adapter(nn.Module):
    """What both adapters have in common.

    Args:
        tables: What each table is.
        input_hash_size: Raw ids are below this.
        device: Where tables and mappings live; TorchRec leaves the tables on ``meta``.
        world_size: Ranks that are to share the tables.
        eviction_interval: Iterations between two competitions (``sort_zch``), or hours after which
            an id that does not come again loses its row (``mpzch``).
        allow_in_place_embed_weight_update: As of `ManagedCollisionEmbeddingCollection`.
        zch_method: ``"sort_zch"`` for `MCHManagedCollisionModule`, ``"mpzch"`` for
            `HashZchManagedCollisionModule`.
        mpzch_num_buckets: Into how many parts the rows can be split; None: one for each rank.
        mpzch_max_probe: Rows that are tried for an id; None: those of its part.

    Raises:
        NotImplementedError: Another method.
    """

    _collection_name: ClassVar[str]
    _tables_class: ClassVar[Any]
    _collection_class: ClassVar[Any]

    def __init__(
        self,
        tables: list[Any],
        input_hash_size: int,
        device: torch.device,
        world_size: int,
        eviction_interval: int = 1,
        allow_in_place_embed_weight_update: bool = False,
        zch_method: str = "",
        mpzch_num_buckets: int | None = 80,
        mpzch_max_probe: int | None = 100,
    ) -> None:
        super().__init__()
        if zch_method not in ("mpzch", "sort_zch"):
            raise NotImplementedError(
                f"zch_method={zch_method!r} is not supported; use 'mpzch' or 'sort_zch'"
            )

        collection = self._tables_class(tables, device=device)
        buckets = mpzch_num_buckets or world_size
        mappings: dict[str, ManagedCollisionModule] = {}
        for config in checked_tables(type(self).__name__, tables, BaseEmbeddingConfig):
            rows = config.num_embeddings
            if zch_method == "sort_zch":
                mappings[config.name] = MCHManagedCollisionModule(
                    rows, device, DistanceLFU_EvictionPolicy(), eviction_interval, input_hash_size
                )
            else:
                mappings[config.name] = HashZchManagedCollisionModule(
                    rows,
                    device,
                    total_num_buckets=buckets,
                    max_probe=min(mpzch_max_probe or rows, rows // buckets),
                    input_hash_size=input_hash_size,
                    eviction_policy_name=HashZchEvictionPolicyName.SINGLE_TTL_EVICTION,
                    eviction_config=HashZchEvictionConfig(
                        config.feature_names, single_ttl=eviction_interval
                    ),
                )

        remapped_collection = self._collection_class(
            collection,
            ManagedCollisionCollection(mappings, tables),
            allow_in_place_embed_weight_update=allow_in_place_embed_weight_update,
        )
        self.add_module(self._collection_name, remapped_collection)

    @property
    def _collection(self) -> Any:
        return self.get_submodule(self._collection_name)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """The weights of the tables."""
        return self._collection._embedding_module.parameters(recurse)

    def embedding_bag_configs(self) -> list[Any]:
        """What each table is, in order."""
        return [*self._collection._managed_collision_collection.embedding_configs()]


class McEmbeddingCollectionAdapter(_Adapter):
    """An `EmbeddingCollection` of raw ids, called and answering like a plain one.

    Its arguments are those of the adapter above.

    Source:
        TorchRec's ``torchrec.modules.mc_adapter.McEmbeddingCollectionAdapter``.
    """

    _collection_name = "mc_embedding_collection"
    _tables_class = EmbeddingCollection
    _collection_class = ManagedCollisionEmbeddingCollection
    remapped_ids: KeyedJaggedTensor | None = None

    def forward(self, input: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Rows of raw ids, by feature."""
        rows, self.remapped_ids = self._collection(input)
        return rows


class McEmbeddingBagCollectionAdapter(_Adapter):
    """An `EmbeddingBagCollection` of raw ids, called and answering like a plain one.

    Its arguments are those of the adapter above.

    Example:
        >>> from tutorec.modules.embedding_configs import EmbeddingBagConfig
        >>> tables = [
        ...     EmbeddingBagConfig(
        ...         num_embeddings=8, embedding_dim=4, name="t", feature_names=["item"]
        ...     )
        ... ]
        >>> cpu = torch.device("cpu")
        >>> model = McEmbeddingBagCollectionAdapter(
        ...     tables, 2**40, cpu, world_size=1, zch_method="sort_zch"
        ... )
        >>> model(
        ...     KeyedJaggedTensor(["item"], torch.tensor([10**12]), lengths=torch.tensor([1]))
        ... ).values().shape
        torch.Size([1, 4])

    Source:
        TorchRec's ``torchrec.modules.mc_adapter.McEmbeddingBagCollectionAdapter``.
    """

    _collection_name = "mc_embedding_bag_collection"
    _tables_class = EmbeddingBagCollection
    _collection_class = ManagedCollisionEmbeddingBagCollection

    def forward(self, input_kjt: KeyedJaggedTensor) -> KeyedTensor:
        """Pooled rows of raw ids."""
        return self._collection(input_kjt)[0]
