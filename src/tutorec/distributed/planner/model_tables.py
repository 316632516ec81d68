"""The tables of a model, as the planner meets them: who holds each, who would shard it, and what is known of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tutorec._kernels.optimizer_spec import OptimizerSpec
from tutorec.distributed.fused_params import optimizer_spec, optimizer_spec_of_parameter
from tutorec.distributed.planner.constraints import ParameterConstraints
from tutorec.distributed.planner.input_checks import bad_input, whole
from tutorec.distributed.planner.options import ShardingOption, TableFacts
from tutorec.distributed.sharded_module import ModuleSharder


@dataclass(frozen=True, eq=False)
class ModelTable:
    """A table of a model.

    Args:
        facts: What is known of it, as numbers.
        tensor: Its weight ``[R, D]``.
        module: ``(path, module)`` of its collection.
        sharder: Who would shard the collection.
        constraint: What is laid down for it; `ParameterConstraints` without content where nothing is.
        names_optimizer: Whether it, or its sharder, says what is to update it.
    """

    facts: TableFacts
    tensor: torch.Tensor
    module: tuple[str, nn.Module]
    sharder: ModuleSharder[Any]
    constraint: ParameterConstraints
    names_optimizer: bool

    @property
    def input_lengths(self) -> list[float]:
        """Pooling factor of each feature."""
        return _per_feature(self.facts.name, "pooling_factors", self.constraint.pooling_factors, self.facts.features)

    @property
    def num_poolings(self) -> list[float] | None:
        """Bags of a sample for each feature, where that is laid down."""
        given = self.constraint.num_poolings
        return None if given is None else _per_feature(self.facts.name, "num_poolings", given, self.facts.features)


def shardable_modules(
    module: nn.Module, sharders: Sequence[ModuleSharder[Any]], breadth_first: bool = False
) -> Iterator[tuple[str, nn.Module, ModuleSharder[Any]]]:
    """Path, module and sharder of each collection of a model; what lies inside one is not looked at.

    Args:
        module: The model, or a collection itself.
        sharders: One for each class; of two for the same class the last counts.
        breadth_first: Outer modules before inner ones; by default in the order in which the model prints them.

    Example:
        >>> from tutorec.modules.embedding_configs import EmbeddingBagConfig
        >>> from tutorec.modules.embedding_modules import EmbeddingBagCollection
        >>> list(shardable_modules(nn.Sequential(EmbeddingBagCollection([EmbeddingBagConfig(8, 4, "item")])), []))
        []
    """
    by_type = {sharder.module_type: sharder for sharder in sharders}
    waiting = [("", module)]
    while waiting:
        path, part = waiting.pop(0)
        sharder = by_type.get(type(part))
        if sharder is not None:
            yield path, part, sharder
            continue
        children = [(f"{path}.{name}" if path else name, child) for name, child in part.named_children()]
        waiting = [*waiting, *children] if breadth_first else [*children, *waiting]


def model_tables(
    module: nn.Module,
    sharders: Sequence[ModuleSharder[Any]],
    batch_size: int,
    constraints: Mapping[str, ParameterConstraints] | None = None,
    breadth_first: bool = False,
) -> list[ModelTable]:
    """Every table that a sharder of ours can shard, in the order of the model.

    Args:
        module: The model, or a collection itself; it may be on the meta device.
        sharders: One for each class of collections.
        batch_size: B of a rank.
        constraints: Of the tables, by name.
        breadth_first: See `shardable_modules`.

    Raises:
        PlannerError: A constraint does not fit its table's features, or the batch size is not positive.
        ValueError: A table's optimizer in backward has no fused form.

    Example:
        >>> from tutorec.distributed.embeddingbag import EmbeddingBagCollectionSharder
        >>> from tutorec.modules.embedding_configs import EmbeddingBagConfig
        >>> from tutorec.modules.embedding_modules import EmbeddingBagCollection
        >>> ebc = EmbeddingBagCollection([EmbeddingBagConfig(8, 4, "products", feature_names=["item", "seen"])])
        >>> words = {"products": ParameterConstraints(pooling_factors=[1.0, 3.0])}
        >>> [table] = model_tables(ebc, [EmbeddingBagCollectionSharder()], batch_size=2, constraints=words)
        >>> table.facts.samples, table.facts.ids
        ((2.0, 2.0), (2.0, 6.0))
    """
    batch_size = whole("batch_size", batch_size, 1, "give the samples of a rank's batch, as batch_size=512")
    return [
        table
        for path, part, sharder in shardable_modules(module, sharders, breadth_first)
        for table in _tables_of(path, part, sharder, batch_size, constraints or {})
    ]


def _tables_of(
    path: str,
    module: nn.Module,
    sharder: ModuleSharder[Any],
    batch_size: int,
    constraints: Mapping[str, ParameterConstraints],
) -> Iterator[ModelTable]:
    """The tables of one collection."""
    configs, pooled = _configs_of(module)
    says_weighted: Any = getattr(module, "is_weighted", None)
    weighted = bool(says_weighted()) if callable(says_weighted) else False
    fused_params = getattr(sharder, "fused_params", None)
    shared_optimizer = _optimizer_of(fused_params)
    row_bytes, gradient_bytes = _wire_bytes(sharder, pooled is not False)
    packed_table: Any = getattr(module, "packed_table", None)
    for name, tensor in sharder.shardable_parameters(module).items():
        constraint = constraints.get(name) or ParameterConstraints()
        features = _features_of(name, configs.get(name), constraint)
        lengths = _per_feature(name, "pooling_factors", constraint.pooling_factors, features)
        bags = _per_feature(name, "num_poolings", constraint.num_poolings or [1.0], features)
        sizes = _per_feature(name, "batch_sizes", constraint.batch_sizes or [batch_size], features)
        samples = tuple(float(size * count) for size, count in zip(sizes, bags, strict=True))
        own_optimizer = optimizer_spec_of_parameter(name, tensor)
        packed: Any = packed_table(name) if callable(packed_table) else None
        facts = TableFacts(
            path=path,
            name=name,
            rows=tensor.shape[0],
            columns=tensor.shape[1],
            element_bytes=tensor.element_size(),
            features=features,
            pooled=ShardingOption.module_pooled(module, name) if pooled is None else pooled,
            weighted=weighted or constraint.is_weighted,
            samples=samples,
            ids=tuple(length * count for length, count in zip(lengths, samples, strict=True)),
            optimizer=own_optimizer or shared_optimizer,
            row_wire_bytes=row_bytes,
            gradient_wire_bytes=gradient_bytes,
            packed=packed,
        )
        named = own_optimizer is not None or bool(fused_params)
        yield ModelTable(facts, tensor, (path, module), sharder, constraint, named)


def _configs_of(module: nn.Module) -> tuple[dict[str, Any], bool | None]:
    """Table name -> its configuration, and whether bags are pooled; nothing of a module that does not say."""
    for attribute, pooled in (("embedding_bag_configs", True), ("embedding_configs", False)):
        ask: Any = getattr(module, attribute, None)
        if callable(ask):
            configs: Any = ask()
            return {config.name: config for config in configs}, pooled
    return {}, None


def _features_of(name: str, config: Any, constraint: ParameterConstraints) -> tuple[str, ...]:
    """The features that read a table: as its configuration says, or else its constraint, or else numbered ones."""
    given = tuple(constraint.feature_names or ())
    if config is not None:
        known = tuple(config.feature_names)
        surplus = [feature for feature in given if feature not in known]
        if surplus:
            raise bad_input(
                f"ParameterConstraints(feature_names={list(given)}) of table {name!r} names {surplus}, which do not "
                f"read it: its features are {list(known)}"
            )
        return known
    return given or tuple(f"{name}[{index}]" for index in range(len(constraint.pooling_factors)))


def _per_feature(name: str, what: str, numbers: Sequence[float], features: Sequence[str]) -> list[float]:
    """A number for each feature; one that stands alone holds for all."""
    if len(numbers) == 1:
        return [numbers[0]] * len(features)
    if len(numbers) != len(features):
        raise bad_input(
            f"ParameterConstraints({what}={list(numbers)}) of table {name!r} lists {len(numbers)} numbers, and "
            f"{len(features)} features read the table, {list(features)}: give one number for each, or one for all"
        )
    return list(numbers)


def _optimizer_of(fused_params: Mapping[str, Any] | None) -> OptimizerSpec | None:
    """What a sharder's ``fused_params`` say; None where they are in a language of its own."""
    try:
        return optimizer_spec(fused_params)
    except ValueError:
        # Sharders of ours refuse such words when they are made: this one is not ours.
        return None


def _wire_bytes(sharder: ModuleSharder[Any], pooled: bool) -> tuple[int, int]:
    """Bytes of a number of a row, and of a gradient, as they travel."""
    move = "POOLED_EMBEDDINGS_ALL_TO_ALL" if pooled else "SEQUENCE_EMBEDDINGS_ALL_TO_ALL"
    codecs: Any = (getattr(sharder, "qcomm_codecs_registry", None) or {}).get(move)
    ways = (getattr(codecs, "forward", None), getattr(codecs, "backward", None))
    forward, backward = (4 if codec is None else codec.dtype.itemsize for codec in ways)
    return forward, backward
