"""Constraints of a table, which limit the planner's choice, and their checks.

Corresponds to TorchRec's ``torchrec.distributed.planner.types.ParameterConstraints``.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeVar

from tutorec._check import did_you_mean
from tutorec.distributed.core.cache_params import CacheParams
from tutorec.distributed.planner.constants import DEVICES, POOLING_FACTOR
from tutorec.errors import PlannerError, bad_input

_E = TypeVar("_E", bound=Enum)
_NAMED = 5  # tables named in a message; others are counted
_WITHOUT_EFFECT = {
    "enforce_hbm": (
        "the rows of a cache, and their optimizer state, are always in the faster memory"
    ),
    "stochastic_rounding": "tables are trained in 32 bits",
    "bounds_check_mode": "ids are always checked: tutorec.validation(False) switches that off",
    "key_value_params": "there is no key-value store; the kernel fused_uvm keeps tables in files",
    "use_virtual_table": "there is no key-value store; the kernel fused_uvm keeps tables in files",
    "output_dtype": (
        "rows are looked up as float32: get_qcomm_codecs_registry narrows them while they travel"
    ),
}


@dataclass
class ParameterConstraints:
    """Constraints of one table; passed to a planner as ``{table name: ParameterConstraints(...)}``.

    Args:
        sharding_types: Allowed `ShardingType` values; None for all.
        compute_kernels: Allowed `EmbeddingComputeKernel` values; None for all but those with files.
        min_partition: Minimum columns of a column shard; 128 by default.
        pooling_factors: Mean ids per bag, for each feature of the table. A single number applies to
            all features.
        num_poolings: Bags per sample, for each feature; 1 by default.
        batch_sizes: B per rank, for each feature; the planner's batch size by default.
        is_weighted: Whether ids carry weights.
        cache_params: The cache of the kernel ``fused_uvm_caching``, which it also allows. Without a
            ``load_factor`` the planner chooses one, from ``stats`` if given, else for uniform
            lookups.
        enforce_hbm: TorchRec's; has no effect: the cache and its optimizer state are always in the
            faster memory.
        stochastic_rounding: TorchRec's, for 16-bit tables.
        bounds_check_mode: TorchRec's; ids are always checked here.
        feature_names: Features that read the table; those of its configuration by default.
        output_dtype: Type of the looked-up rows; float32 by default.
        device_group: ``"cpu"`` or ``"cuda"``: a planner for another device ignores the table.
        key_value_params: TorchRec's, for tables on disk.
        use_virtual_table: TorchRec's, for tables on disk.
        pin: Ranks that may hold a shard of the table; None for all. Not in TorchRec.
        colocate: Tables with the same value are sharded in the same way on the same ranks. Not in
            TorchRec.

    Example:
        >>> ParameterConstraints(sharding_types=["row_wise"]).pooling_factors
        [1.0]

    Source:
        TorchRec's ``ParameterConstraints``.
    """

    sharding_types: list[str] | None = None
    compute_kernels: list[str] | None = None
    min_partition: int | None = None
    pooling_factors: list[float] = field(default_factory=lambda: [POOLING_FACTOR])
    num_poolings: list[float] | None = None
    batch_sizes: list[int] | None = None
    is_weighted: bool = False
    cache_params: CacheParams | None = None
    enforce_hbm: bool | None = None
    stochastic_rounding: bool | None = None
    bounds_check_mode: Any = None
    feature_names: list[str] | None = None
    output_dtype: Any = None
    device_group: str | None = None
    key_value_params: Any = None
    use_virtual_table: bool = False
    pin: Sequence[int] | None = None
    colocate: str | None = None

    def __hash__(self) -> int:
        # Hash by value, as in TorchRec, though lists have no hash. Equal constraints print alike.
        return hash(repr(self))


Constraints = Mapping[str, ParameterConstraints]  # table name -> its constraints


def members(kind: type[_E], values: Sequence[Any] | None, field: str, table: str) -> list[_E]:
    """The members of an enumeration that a constraint lists, as values or members.

    Args:
        kind: `ShardingType` or `EmbeddingComputeKernel`.
        values: The constraint's list; None for an empty one.
        field: Name of the constraint, for the message.
        table: Name of the table, for the message.

    Raises:
        PlannerError: There is no such member, or a single name is given instead of a list.

    Example:
        >>> from tutorec.distributed.plan.plan import ShardingType
        >>> members(
        ...     ShardingType, ["row_wise", ShardingType.TABLE_WISE], "sharding_types", "item"
        ... )
        [<ShardingType.ROW_WISE: 'row_wise'>, <ShardingType.TABLE_WISE: 'table_wise'>]
    """
    if isinstance(values, str):
        raise bad_input(
            f"ParameterConstraints({field}={values!r}) of table {table!r} is not a list: "
            f"{field}=[{values!r}]"
        )
    named = []
    for value in values or ():
        try:
            named.append(kind(value))
        except ValueError:
            known = [each.value for each in kind]
            raise bad_input(
                f"ParameterConstraints({field}=...) of table {table!r} names {value!r}, which "
                f"{kind.__name__} does not have{did_you_mean(value, known)} (there are "
                f"{', '.join(known)})"
            ) from None
    return named


def check_names(constraints: Constraints, tables: Collection[str]) -> None:
    """Check that each constraint is for a table that exists.

    Raises:
        PlannerError: A table does not exist.

    Example:
        >>> check_names({"itme": ParameterConstraints()}, ["item", "user"])
        Traceback (most recent call last):
            ...
        tutorec.errors.PlannerError: constraints name table 'itme', which no module has; ...
    """
    for name in constraints:
        if name in tables:
            continue
        if not tables:
            raise bad_input(
                f"constraints name table {name!r}, which no sharded module has; the sharders shard "
                "no table of this model: give one for the class of each collection"
            )
        hint = did_you_mean(name, tables) or f"; the tables are {_listed(tables)}"
        raise bad_input(f"constraints name table {name!r}, which no module has{hint}")


def check_numbers(name: str, constraint: ParameterConstraints, world_size: int) -> None:
    """Check the numbers of a table's constraints.

    Args:
        name: Name of the table.
        constraint: Its constraints.
        world_size: W.

    Raises:
        PlannerError: A number is out of range, or a rank does not exist.

    Example:
        >>> check_numbers("item", ParameterConstraints(pin=[4]), world_size=4)
        Traceback (most recent call last):
            ...
        tutorec.errors.PlannerError: ParameterConstraints(pin=[4]) of table 'item' names ...
    """

    def wrong(field: str, problem: str) -> PlannerError:
        return bad_input(
            f"ParameterConstraints({field}={getattr(constraint, field)!r}) of table {name!r} "
            f"{problem}"
        )

    if constraint.min_partition is not None and not constraint.min_partition >= 1:
        raise wrong(
            "min_partition", "is not a number of columns: at least 1, and usually a multiple of 4"
        )
    for counts, least in (("pooling_factors", 0), ("num_poolings", 0), ("batch_sizes", 1)):
        numbers = getattr(constraint, counts)
        for number in () if numbers is None else numbers:
            if isinstance(number, str) or not least <= number < math.inf:
                raise wrong(counts, f"has {number!r}, where a number of at least {least} belongs")
        if numbers is not None and not len(numbers):
            raise wrong(counts, "lists no numbers, one per feature")
    if isinstance(constraint.feature_names, str):
        raise wrong("feature_names", "is not a list of names: feature_names=['feature']")
    if constraint.device_group not in (None, *DEVICES):
        raise wrong("device_group", f"is not one of {', '.join(DEVICES)}, or None")
    pin = constraint.pin
    for rank in () if pin is None else pin:
        if rank not in range(world_size):
            raise wrong("pin", f"names rank {rank!r}; there are ranks 0 to {world_size - 1}")
    if pin is not None and not len(pin):
        raise wrong("pin", "leaves it no rank: name one, or pin=None for all")


def warn_without_effect(constraints: Constraints, effects: Mapping[str, Sequence[str]]) -> None:
    """Warn about constraints without effect, and about a ``colocate`` value of a single table.

    Args:
        constraints: Constraints of the tables.
        effects: Further reason -> tables without effect.

    Example:
        >>> warn_without_effect({"item": ParameterConstraints(sharding_types=["row_wise"])}, {})
    """
    for what, tables in effects.items():
        warn_of(tables, what)
    for unused, reason in _WITHOUT_EFFECT.items():
        given = [
            name for name, each in constraints.items() if getattr(each, unused) not in (None, False)
        ]
        warn_of(given, f"{unused} has no effect: {reason}")
    labels = Counter(each.colocate for each in constraints.values())
    for name, each in constraints.items():
        if each.colocate is not None and labels[each.colocate] == 1:
            warn_of(
                [name], f"colocate={each.colocate!r} has no effect: no other table has that word"
            )


def warn_of(tables: Sequence[str], what: str) -> None:
    """One warning for all tables concerned, none if there are none."""
    if tables:
        # The caller of a planner, beyond the enumerator.
        warnings.warn(f"constraints of table {_listed(tables)}: {what}", UserWarning, stacklevel=4)


def _listed(names: Collection[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(map(repr, list(names)[:_NAMED])) + (f" and {more} more" if more > 0 else "")
