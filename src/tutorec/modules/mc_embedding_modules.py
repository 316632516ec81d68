"""Collections of tables behind managed collisions: raw ids in, rows or pooled rows out."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from tutorec.fx.utils import call_whole, is_fx_symbolic_tracing
from tutorec.modules.embedding_collection import EmbeddingCollection
from tutorec.modules.embedding_configs import (
    BaseEmbeddingConfig,
    EmbeddingBagConfig,
    EmbeddingConfig,
)
from tutorec.modules.embedding_modules import EmbeddingBagCollection
from tutorec.modules.mc_modules import ManagedCollisionCollection
from tutorec.optim.row_reset import reset_optimizer_rows
from tutorec.sparse.jagged import JaggedTensor
from tutorec.sparse.keyed import KeyedTensor
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor


@torch.no_grad()
def evict(evictions: dict[str, Tensor | None], ebc: nn.Module, in_place: bool = False) -> None:
    """Reset rows that belong to another id now: new initial values, no optimizer state.

    Args:
        evictions: Table name -> rows [U], or None.
        ebc: The collection that holds the tables.
        in_place: Whether the change is hidden from autograd, so that a backward that needs the old
            values uses the new ones instead of raising an error.

    Source:
        TorchRec's ``torchrec.modules.mc_embedding_modules.evict``, which does nothing.
    """
    configs, tables = _tables_of(ebc)
    for config in configs:
        rows = evictions.get(config.name)
        weight = cast(Tensor, tables[config.name].weight)
        if rows is not None and rows.numel() and not weight.is_meta:
            reset_rows(config, weight, rows, in_place)


@torch.no_grad()
def reset_rows(
    config: BaseEmbeddingConfig, weight: Tensor, rows: Tensor, in_place: bool = False
) -> None:
    """Draw the initial values of rows of one table again, and let its optimizers forget the rows.

    Args:
        config: The table.
        weight: ``[R, D]``, all its rows, or those of one shard.
        rows: ``[U]``.
        in_place: As of `evict`.
    """
    initial = weight.new_empty(rows.numel(), weight.shape[1])
    config.init_weight(initial)
    (weight.data if in_place else weight)[rows] = initial
    reset_optimizer_rows(weight, rows, in_place)


def _tables_of(collection: nn.Module) -> tuple[list[BaseEmbeddingConfig], nn.ModuleDict]:
    if isinstance(collection, EmbeddingBagCollection):
        return [*collection.embedding_bag_configs()], collection.embedding_bags

    if not isinstance(collection, EmbeddingCollection):
        raise TypeError(
            f"the rows of a {type(collection).__name__} are not trained and cannot be reset; "
            "call eval() first"
        )

    return [*collection.embedding_configs()], collection.embeddings


@torch.fx.wrap
def return_remapped_lengths_as_mask(features: KeyedJaggedTensor) -> Tensor:
    """Which lists of a batch have ids [F * B]; one call in a traced graph.

    Source:
        TorchRec's ``torchrec.modules.mc_embedding_modules.return_remapped_lengths_as_mask``.
    """
    return features.lengths().bool()


@torch.fx.wrap
def return_custom_metadata(runtime_meta: Tensor) -> Tensor:
    """What hash mappings hold for ids [N, ...], as it is; one call in a traced graph.

    Source:
        TorchRec's ``torchrec.modules.mc_embedding_modules.return_custom_metadata``.
    """
    return runtime_meta


class BaseManagedCollisionEmbeddingCollection(nn.Module):
    """Tables and the mappings of raw ids to their rows. The base class of both collections.

    In training mode a forward observes the batch, updates the mappings, and then looks up the whole
    batch by the new mappings. Rows that the change gave to other ids are reset
    before that: their values are drawn again and the state of optimizers is that of a new row. In
    eval mode nothing changes.

    Args:
        embedding_module: The tables.
        managed_collision_collection: The mappings, one for each table.
        return_remapped_features: Whether ``forward`` returns the rows that were looked up, beside
            the result.
        allow_in_place_embed_weight_update: Whether rows may be reset between a forward and its
            backward even if that backward needs the old values; else it is an error of autograd.

    Raises:
        ValueError: Tables and mappings were made from different configs.

    Source:
        TorchRec's
        ``torchrec.modules.mc_embedding_modules.BaseManagedCollisionEmbeddingCollection``.
    """

    def __init__(
        self,
        embedding_module: EmbeddingBagCollection | EmbeddingCollection,
        managed_collision_collection: ManagedCollisionCollection,
        return_remapped_features: bool = False,
        allow_in_place_embed_weight_update: bool = False,
    ) -> None:
        super().__init__()
        configs = _tables_of(embedding_module)[0]
        mapped = list(managed_collision_collection.embedding_configs())
        if configs != mapped:
            raise ValueError(
                f"{type(self).__name__}: the configs of the tables "
                f"{[config.name for config in configs]} and of the mappings "
                f"{[config.name for config in mapped]} differ; build both from one list"
            )

        self._managed_collision_collection = managed_collision_collection
        self._return_remapped_features = return_remapped_features
        self._allow_in_place_embed_weight_update = allow_in_place_embed_weight_update
        self._embedding_module = embedding_module

    @property
    def is_traced_whole(self) -> bool:
        """Whether its call is one call in a traced graph: where its mappings learn."""
        return self.training

    def forward(
        self, features: KeyedJaggedTensor, mutate_miss_lengths: bool = True
    ) -> tuple[KeyedTensor | dict[str, JaggedTensor], KeyedJaggedTensor | None]:
        """Look raw ids up.

        Args:
            features: The batch, of raw ids.
            mutate_miss_lengths: Whether ids without a row may be taken out of their lists.

        Returns:
            What the collection of tables returns, and the batch of rows or None.
        """
        if self.is_traced_whole and is_fx_symbolic_tracing():
            return call_whole(self, features, features, mutate_miss_lengths)

        mapping = self._managed_collision_collection
        remapped = mapping(features, mutate_miss_lengths=mutate_miss_lengths)
        evictions = mapping.evict()
        if any(rows is not None for rows in evictions.values()):
            evict(evictions, self._embedding_module, self._allow_in_place_embed_weight_update)

        embedded = self._embedding_module(remapped)

        return embedded, remapped if self._return_remapped_features else None

    def lookup_remapped_lengths_mask(self, features: KeyedJaggedTensor) -> Tensor:
        """Which lists of the batch have ids after remapping [F * B]."""
        return return_remapped_lengths_as_mask(
            self._managed_collision_collection(features, mutate_miss_lengths=True)
        )

    def lookup_remapped_lengths_mask_and_runtime_meta(
        self, features: KeyedJaggedTensor
    ) -> tuple[Tensor, Tensor]:
        """Lists that have ids after remapping [F * B], and values of hash mappings [N, ...]."""
        remapped = self._managed_collision_collection(features, mutate_miss_lengths=True)
        meta = self._managed_collision_collection.lookup_custom_runtime_meta(remapped)
        return return_remapped_lengths_as_mask(remapped), return_custom_metadata(meta)


class ManagedCollisionEmbeddingCollection(BaseManagedCollisionEmbeddingCollection):
    """An `EmbeddingCollection` whose ids are raw ids: one row for each of them.

    Args:
        embedding_collection: The tables.
        managed_collision_collection: The mappings, one for each table.
        return_remapped_features: As of `BaseManagedCollisionEmbeddingCollection`.
        allow_in_place_embed_weight_update: As there.

    Source:
        TorchRec's ``torchrec.modules.mc_embedding_modules.ManagedCollisionEmbeddingCollection``.
    """

    def __init__(
        self,
        embedding_collection: EmbeddingCollection,
        managed_collision_collection: ManagedCollisionCollection,
        return_remapped_features: bool = False,
        allow_in_place_embed_weight_update: bool = False,
    ) -> None:
        super().__init__(
            embedding_collection,
            managed_collision_collection,
            return_remapped_features,
            allow_in_place_embed_weight_update,
        )

    def embedding_configs(self) -> list[EmbeddingConfig]:
        """What each table is."""
        return self._embedding_collection.embedding_configs()

    @property
    def _embedding_collection(self) -> EmbeddingCollection:
        return cast(EmbeddingCollection, self._embedding_module)


class ManagedCollisionEmbeddingBagCollection(BaseManagedCollisionEmbeddingCollection):
    """An `EmbeddingBagCollection` whose ids are raw ids: one pooled row for each bag.

    Args:
        embedding_bag_collection: The tables.
        managed_collision_collection: The mappings, one for each table.
        return_remapped_features: As of `BaseManagedCollisionEmbeddingCollection`.
        allow_in_place_embed_weight_update: As there.

    Example:
        >>> from tutorec.modules.embedding_configs import EmbeddingBagConfig
        >>> from tutorec.modules.mc_modules import LFU_EvictionPolicy, MCHManagedCollisionModule
        >>> tables = [
        ...     EmbeddingBagConfig(
        ...         num_embeddings=4, embedding_dim=2, name="t", feature_names=["item"]
        ...     )
        ... ]
        >>> mapping = MCHManagedCollisionModule(
        ...     4, torch.device("cpu"), LFU_EvictionPolicy(), eviction_interval=1
        ... )
        >>> model = ManagedCollisionEmbeddingBagCollection(
        ...     EmbeddingBagCollection(tables),
        ...     ManagedCollisionCollection({"t": mapping}, tables),
        ...     True,
        ... )
        >>> raw = KeyedJaggedTensor(
        ...     ["item"], torch.tensor([10**12, 77, 10**12]), lengths=torch.tensor([2, 1])
        ... )
        >>> pooled, rows = model(raw)
        >>> pooled.values().shape, rows.values()
        (torch.Size([2, 2]), tensor([1, 2, 1]))

    Source:
        TorchRec's ``torchrec.modules.mc_embedding_modules.ManagedCollisionEmbeddingBagCollection``.
    """

    def __init__(
        self,
        embedding_bag_collection: EmbeddingBagCollection,
        managed_collision_collection: ManagedCollisionCollection,
        return_remapped_features: bool = False,
        allow_in_place_embed_weight_update: bool = False,
    ) -> None:
        super().__init__(
            embedding_bag_collection,
            managed_collision_collection,
            return_remapped_features,
            allow_in_place_embed_weight_update,
        )

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """What each table is."""
        return self._embedding_bag_collection.embedding_bag_configs()

    def is_weighted(self) -> bool:
        """Whether each id carries a weight."""
        return self._embedding_bag_collection.is_weighted()

    @property
    def _embedding_bag_collection(self) -> EmbeddingBagCollection:
        return cast(EmbeddingBagCollection, self._embedding_module)
