"""Collections with a fused optimizer: backward updates the rows of the batch.

A fused collection is an `EmbeddingBagCollection` or `EmbeddingCollection` whose constructor calls
`apply_optimizer_in_backward` on its tables. Sharding uses that optimizer, as for any table.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tutorec.modules.embedding_collection import EmbeddingCollection
from tutorec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from tutorec.modules.embedding_modules import EmbeddingBagCollection
from tutorec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from tutorec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from tutorec.optim.optimizers import PartialRowWiseAdam
from tutorec.optim.rowwise_adagrad import RowWiseAdagrad

_ADAGRADS = (torch.optim.Adagrad, RowWiseAdagrad)
_FUSED = (torch.optim.SGD, *_ADAGRADS, torch.optim.Adam, torch.optim.AdamW, PartialRowWiseAdam)


class _Fused(nn.Module):
    """Common base of both fused collections."""

    def _fuse(
        self, optimizer_type: type[torch.optim.Optimizer], kwargs: dict[str, Any], location: Any
    ) -> None:
        """Attach an optimizer to every table."""
        name = type(self).__name__
        if optimizer_type not in _FUSED:
            raise ValueError(
                f"{name}: cannot fuse optimizer_type={optimizer_type!r}; use one of "
                f"{', '.join(optimizer.__name__ for optimizer in _FUSED)}"
            )
        if "MANAGED" in getattr(location, "name", ""):
            raise NotImplementedError(
                f"{name}: location={location.name}, and tables of one process live on their "
                "device; for rows in slower memory shard the collection with the compute kernel "
                "'fused_uvm_caching', in one process with env=ShardingEnv.from_local(1, 0)"
            )

        self._optimizer_type = optimizer_type
        self._optimizer_kwargs = kwargs
        apply_optimizer_in_backward(
            optimizer_type, self.parameters(), _under_torchs_names(optimizer_type, kwargs)
        )

    def optimizer_type(self) -> type[torch.optim.Optimizer]:
        """The class of the optimizer."""
        return self._optimizer_type

    def optimizer_kwargs(self) -> dict[str, Any]:
        """The arguments of the optimizer, as given."""
        return self._optimizer_kwargs

    def fused_optimizer(self) -> CombinedOptimizer:
        """The optimizers of all tables as one, to change rates and to save and load state."""
        return CombinedOptimizer(
            [
                KeyedOptimizerWrapper(
                    {name: table},
                    lambda _, table=table: table._in_backward_optimizers[0],  # pyright: ignore[reportAttributeAccessIssue]
                )
                for name, table in self.named_parameters()
            ]
        )


def _under_torchs_names(
    kind: type[torch.optim.Optimizer], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """The arguments under torch's names, with the default rate and eps of fused kernels."""
    arguments = {
        "lr": kwargs.get("learning_rate", 0.01),
        **({"eps": 1e-8} if kind in _ADAGRADS else {}),
        **kwargs,
    }
    arguments.pop("learning_rate", None)

    if "beta1" in arguments or "beta2" in arguments:
        arguments["betas"] = (arguments.pop("beta1", 0.9), arguments.pop("beta2", 0.999))
    return arguments


class FusedEmbeddingBagCollection(_Fused, EmbeddingBagCollection):
    """An `EmbeddingBagCollection` whose tables are updated by backward.

    Args:
        tables: Configuration of each table.
        optimizer_type: ``torch.optim.SGD``, ``Adagrad``, ``Adam``, ``AdamW``, `RowWiseAdagrad` or
            `PartialRowWiseAdam`.
        optimizer_kwargs: Its arguments; fbgemm's names (``learning_rate``, ``beta1``, ``beta2``)
            are accepted.
        is_weighted: Whether each id carries a weight that multiplies its row.
        device: Device of the tables.
        location: fbgemm's ``EmbeddingLocation``; managed memory is supported for sharded tables
            only.

    Raises:
        NotImplementedError: Managed memory is requested.
        ValueError: The optimizer has no fused form, or a table is invalid.

    Example:
        >>> import torch
        >>> from tutorec.sparse.keyed_jagged import KeyedJaggedTensor
        >>> tables = [
        ...     EmbeddingBagConfig(
        ...         num_embeddings=10, embedding_dim=4, name="t", feature_names=["item"]
        ...     )
        ... ]
        >>> ebc = FusedEmbeddingBagCollection(tables, torch.optim.SGD, {"lr": 0.5})
        >>> _ = ebc.embedding_bags["t"].weight.detach().zero_()
        >>> ebc(
        ...     KeyedJaggedTensor(["item"], torch.tensor([3]), lengths=torch.tensor([1]))
        ... ).values().sum().backward()
        >>> ebc.embedding_bags["t"].weight[3].tolist()
        [-0.5, -0.5, -0.5, -0.5]

    Source:
        TorchRec's ``torchrec.modules.fused_embedding_modules.FusedEmbeddingBagCollection``.
    """

    def __init__(
        self,
        tables: list[EmbeddingBagConfig],
        optimizer_type: type[torch.optim.Optimizer],
        optimizer_kwargs: dict[str, Any],
        is_weighted: bool = False,
        device: torch.device | None = None,
        location: Any = None,
    ) -> None:
        EmbeddingBagCollection.__init__(self, tables, is_weighted, device)
        self._fuse(optimizer_type, optimizer_kwargs, location)


class FusedEmbeddingCollection(_Fused, EmbeddingCollection):
    """An `EmbeddingCollection` whose tables are updated by backward; also supported on the CPU.

    Args:
        tables: Configuration of each table.
        optimizer_type: As in `FusedEmbeddingBagCollection`.
        optimizer_kwargs: As in `FusedEmbeddingBagCollection`.
        device: Device of the tables.
        need_indices: Whether results carry their ids, as weights.
        location: As in `FusedEmbeddingBagCollection`.

    Raises:
        NotImplementedError: Managed memory is requested.
        ValueError: The optimizer has no fused form, or a table is invalid.

    Source:
        TorchRec's ``torchrec.modules.fused_embedding_modules.FusedEmbeddingCollection``.
    """

    def __init__(
        self,
        tables: list[EmbeddingConfig],
        optimizer_type: type[torch.optim.Optimizer],
        optimizer_kwargs: dict[str, Any],
        device: torch.device | None = None,
        need_indices: bool = False,
        location: Any = None,
    ) -> None:
        EmbeddingCollection.__init__(self, tables, device, need_indices)
        self._fuse(optimizer_type, optimizer_kwargs, location)


def fuse_embedding_optimizer(
    model: nn.Module,
    optimizer_type: type[torch.optim.Optimizer],
    optimizer_kwargs: dict[str, Any],
    device: torch.device | None = None,
    location: Any = None,
) -> nn.Module:
    """Replace every collection of a model by its fused form, with the same weights.

    TorchRec initializes the weights again.

    Args:
        model: The model; collections inside it are replaced in place.
        optimizer_type: As in `FusedEmbeddingBagCollection`.
        optimizer_kwargs: As in `FusedEmbeddingBagCollection`.
        device: Device of the tables; by default unchanged.
        location: As in `FusedEmbeddingBagCollection`.

    Returns:
        The model; if it is a collection itself, its fused form.

    Example:
        >>> import torch
        >>> tables = [
        ...     EmbeddingBagConfig(
        ...         num_embeddings=10, embedding_dim=4, name="t", feature_names=["item"]
        ...     )
        ... ]
        >>> model = torch.nn.Sequential(EmbeddingBagCollection(tables))
        >>> type(fuse_embedding_optimizer(model, torch.optim.SGD, {"lr": 0.1})[0]).__name__
        'FusedEmbeddingBagCollection'

    Source:
        TorchRec's ``torchrec.modules.fused_embedding_modules.fuse_embedding_optimizer``.
    """
    optimizer = optimizer_type, optimizer_kwargs
    if type(model) is EmbeddingBagCollection:
        options = model.is_weighted(), device or model.device, location
        fused = FusedEmbeddingBagCollection(model.embedding_bag_configs(), *optimizer, *options)
    elif type(model) is EmbeddingCollection:
        options = device or model.device, model.need_indices(), location
        fused = FusedEmbeddingCollection(model.embedding_configs(), *optimizer, *options)
    else:
        for name, child in model.named_children():
            setattr(model, name, fuse_embedding_optimizer(child, *optimizer, device, location))
        return model

    with torch.no_grad():
        for weight, source in zip(fused.parameters(), model.parameters(), strict=True):
            if not source.is_meta:
                weight.copy_(source)
    return fused
