"""Collections of tables that take raw ids, built from the configs of the tables alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from tutorec.modules.embedding_collection import EmbeddingCollection
from tutorec.modules.embedding_configs import (
    BaseEmbeddingConfig,
    EmbeddingBagConfig,
    EmbeddingConfig,
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


def _check_method(zch_method: str) -> None:
    if zch_method not in ("mpzch", "sort_zch"):
        raise NotImplementedError(
            f"zch_method={zch_method!r} is not supported; use 'mpzch' or 'sort_zch'"
        )


def _build_mappings(
    owner: str,
    tables: Sequence[BaseEmbeddingConfig],
    input_hash_size: int,
    device: torch.device,
    eviction_interval: int,
    zch_method: str,
    buckets: int,
    max_probe: int | None,
) -> ManagedCollisionCollection:
    """The mappings of the tables of an adapter."""
    configs = checked_tables(owner, tables, BaseEmbeddingConfig)
    mappings: dict[str, ManagedCollisionModule] = {}
    for config in configs:
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
                max_probe=min(max_probe or rows, rows // buckets),
                input_hash_size=input_hash_size,
                is_inference=False,
                eviction_policy_name=HashZchEvictionPolicyName.SINGLE_TTL_EVICTION,
                eviction_config=HashZchEvictionConfig(
                    config.feature_names, single_ttl=eviction_interval
                ),
            )

    return ManagedCollisionCollection(mappings, configs)


class McEmbeddingCollectionAdapter(nn.Module):
    """An `EmbeddingCollection` of raw ids, called and answering like a plain one.

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

    Source:
        TorchRec's ``torchrec.modules.mc_adapter.McEmbeddingCollectionAdapter``.
    """

    remapped_ids: KeyedJaggedTensor | None = None

    def __init__(
        self,
        tables: list[EmbeddingConfig],
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
        _check_method(zch_method)

        collection = EmbeddingCollection(tables, device=device)
        mappings = _build_mappings(
            type(self).__name__,
            tables,
            input_hash_size,
            device,
            eviction_interval,
            zch_method,
            mpzch_num_buckets or world_size,
            mpzch_max_probe,
        )

        self.mc_embedding_collection = ManagedCollisionEmbeddingCollection(
            collection,
            mappings,
            allow_in_place_embed_weight_update=allow_in_place_embed_weight_update,
        )

    def forward(self, input: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Rows of raw ids, by feature."""
        rows, self.remapped_ids = self.mc_embedding_collection(input)
        return rows

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """The weights of the tables."""
        return self.mc_embedding_collection._embedding_module.parameters(recurse)

    def embedding_bag_configs(self) -> list[EmbeddingConfig]:
        """What each table is, in order."""
        return self.mc_embedding_collection._embedding_collection.embedding_configs()


class McEmbeddingBagCollectionAdapter(nn.Module):
    """An `EmbeddingBagCollection` of raw ids, called and answering like a plain one.

    Args:
        tables: What each table is.
        input_hash_size: As of `McEmbeddingCollectionAdapter`.
        device: As there.
        world_size: As there.
        eviction_interval: As there.
        allow_in_place_embed_weight_update: As there.
        zch_method: As there.
        mpzch_num_buckets: As there.
        mpzch_max_probe: As there.

    Raises:
        NotImplementedError: Another method.

    Example:
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

    def __init__(
        self,
        tables: list[EmbeddingBagConfig],
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
        _check_method(zch_method)

        collection = EmbeddingBagCollection(tables, device=device)
        mappings = _build_mappings(
            type(self).__name__,
            tables,
            input_hash_size,
            device,
            eviction_interval,
            zch_method,
            mpzch_num_buckets or world_size,
            mpzch_max_probe,
        )

        self.mc_embedding_bag_collection = ManagedCollisionEmbeddingBagCollection(
            collection,
            mappings,
            allow_in_place_embed_weight_update=allow_in_place_embed_weight_update,
        )

    def forward(self, input_kjt: KeyedJaggedTensor) -> KeyedTensor:
        """Pooled rows of raw ids."""
        return self.mc_embedding_bag_collection(input_kjt)[0]

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """The weights of the tables."""
        return self.mc_embedding_bag_collection._embedding_module.parameters(recurse)

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """What each table is, in order."""
        return self.mc_embedding_bag_collection._embedding_bag_collection.embedding_bag_configs()
