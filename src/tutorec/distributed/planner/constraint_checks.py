"""Whether what is laid down for tables can be meant: names that exist, numbers that make sense, and some effect."""

from __future__ import annotations

import difflib
import math
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import Enum
from numbers import Integral, Real
from typing import Any, TypeVar

from tutorec.distributed.plan import EmbeddingComputeKernel, ShardingType
from tutorec.distributed.planner.constants import DEVICES
from tutorec.distributed.planner.constraints import ParameterConstraints
from tutorec.errors import PlannerError, PlannerErrorType

_E = TypeVar("_E", bound=Enum)

# Fields of TorchRec's that ask for what no kernel of this edition does.
WITHOUT_EFFECT = {
    "enforce_hbm": "the rows of a cache, and their optimizer state, are always in the faster memory",
    "stochastic_rounding": "tables are trained in 32 bits",
    "bounds_check_mode": "ids are always checked: tutorec.validation(False) switches that off",
    "key_value_params": "there is no key-value store; the kernel fused_uvm keeps tables in files",
    "use_virtual_table": "there is no key-value store; the kernel fused_uvm keeps tables in files",
    "output_dtype": "rows are looked up as float32: get_qcomm_codecs_registry narrows them while they travel",
}
# A message names so many tables and counts the others.
_NAMED = 5


def members(kind: type[_E], values: Sequence[Any] | None, field: str, table: str) -> tuple[_E, ...]:
    """The members of an enumeration that a constraint names, by value or themselves; empty where it names none.

    Args:
        kind: `ShardingType` or `EmbeddingComputeKernel`.
        values: What the constraint lists.
        field: Where it lists them, for the message.
        table: For which table, likewise.

    Raises:
        PlannerError: There is no such member, or no list is given.

    Example:
        >>> members(ShardingType, ["row_wise", ShardingType.TABLE_WISE], "sharding_types", "item")
        (<ShardingType.ROW_WISE: 'row_wise'>, <ShardingType.TABLE_WISE: 'table_wise'>)
    """
    if isinstance(values, (str, Enum)) or not isinstance(values, (Iterable, type(None))):
        raise _bad(f"ParameterConstraints({field}={values!r}) of table {table!r} is no list: {field}=[{values!r}]")
    found = []
    for value in values or ():
        try:
            found.append(kind(value))
        except ValueError:
            known = [each.value for each in kind]
            near = difflib.get_close_matches(str(value), known, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise _bad(
                f"ParameterConstraints({field}=...) of table {table!r} names {value!r}, which is no "
                f"{kind.__name__}; {hint}there are {', '.join(known)}"
            ) from None
    return tuple(found)


def by_table(constraints: object) -> dict[str, ParameterConstraints]:
    """Constraints as a dict, checked to be some.

    Args:
        constraints: What a planner was given; None: nothing is laid down.

    Raises:
        PlannerError: It is no mapping from names of tables to `ParameterConstraints`.

    Example:
        >>> by_table({"item": "row_wise"})
        Traceback (most recent call last):
            ...
        tutorec.errors.PlannerError: the constraints of table 'item' are 'row_wise': give ParameterConstraints(...)
    """
    if constraints is None:
        return {}
    if not isinstance(constraints, Mapping):
        raise _bad(
            f"constraints are a {type(constraints).__name__}: give a dict, {{'table name': ParameterConstraints(...)}}"
        )
    for name, each in constraints.items():
        if not isinstance(each, ParameterConstraints):
            raise _bad(f"the constraints of table {name!r} are {each!r}: give ParameterConstraints(...)")
    return dict(constraints)


def check_names(constraints: Mapping[str, ParameterConstraints], tables: Collection[str]) -> None:
    """Check that each constraint is for a table that exists.

    Args:
        constraints: By table.
        tables: Names of the tables.

    Raises:
        PlannerError: One is not.

    Example:
        >>> check_names({"itme": ParameterConstraints()}, ["item", "user"])
        Traceback (most recent call last):
            ...
        tutorec.errors.PlannerError: constraints name table 'itme', which no module has; did you mean 'item'?
    """
    for name in constraints:
        if name in tables:
            continue
        near = difflib.get_close_matches(str(name), tables, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"the tables are {_listed([repr(each) for each in tables])}"
        if not tables:
            hint = "the sharders shard no table of this model: give one for the class of each collection"
        raise _bad(f"constraints name table {name!r}, which no {'sharded ' if not tables else ''}module has; {hint}")


def check_numbers(name: str, constraint: ParameterConstraints, world_size: int) -> None:
    """Check the numbers of one constraint.

    Args:
        name: Of the table.
        constraint: What is laid down for it.
        world_size: W.

    Raises:
        PlannerError: A number is no number, negative where it counts something, or names a rank that does not exist.

    Example:
        >>> check_numbers("item", ParameterConstraints(pin=[4]), world_size=4)
        Traceback (most recent call last):
            ...
        tutorec.errors.PlannerError: ParameterConstraints(pin=[4]) of table 'item' names rank 4; there are ranks 0 to 3
    """
    _check_words(name, constraint)
    least = constraint.min_partition
    if least is not None and (not _whole(least) or least < 1):
        raise _bad(
            f"ParameterConstraints(min_partition={least!r}) of table {name!r} is no number of columns: at least 1, "
            "and usually a multiple of 4"
        )
    for what, numbers, smallest in (
        ("pooling_factors", constraint.pooling_factors, 0),
        ("num_poolings", constraint.num_poolings, 0),
        ("batch_sizes", constraint.batch_sizes, 1),
    ):
        if numbers is None and what != "pooling_factors":
            continue
        if numbers is None or isinstance(numbers, (Real, str, Mapping)) or not len(numbers):
            raise _bad(f"ParameterConstraints({what}={numbers!r}) of table {name!r} lists no numbers, one per feature")
        wrong = [each for each in numbers if not isinstance(each, Real) or not smallest <= float(each) < math.inf]
        if wrong:
            raise _bad(
                f"ParameterConstraints({what}={list(numbers)}) of table {name!r} has {wrong[0]!r}, where a number of "
                f"at least {smallest} belongs"
            )
    if constraint.pin is not None:
        _check_pin(name, constraint.pin, world_size)


def _check_words(name: str, constraint: ParameterConstraints) -> None:
    word, group = constraint.colocate, constraint.device_group
    features, weighted = constraint.feature_names, constraint.is_weighted
    if features is not None and (
        isinstance(features, str)
        or not isinstance(features, Iterable)
        or not all(isinstance(each, str) for each in features)
    ):
        raise _bad(
            f"ParameterConstraints(feature_names={features!r}) of table {name!r} is no list of names: "
            "feature_names=['feature']"
        )
    if weighted not in (None, True, False):
        raise _bad(f"ParameterConstraints(is_weighted={weighted!r}) of table {name!r} is neither True nor False")
    if word is not None and not (isinstance(word, str) and word):
        raise _bad(f"ParameterConstraints(colocate={word!r}) of table {name!r} is no word: colocate='together'")
    if group is not None and group not in DEVICES:
        raise _bad(
            f"ParameterConstraints(device_group={group!r}) of table {name!r} is no kind of device: "
            f"one of {', '.join(DEVICES)}, or None"
        )


def _check_pin(name: str, pin: Sequence[int], world_size: int) -> None:
    if isinstance(pin, Integral):
        raise _bad(f"ParameterConstraints(pin={pin}) of table {name!r} is no list of ranks: pin=[{pin}]")
    ranks = list(pin)
    outside = [rank for rank in ranks if not _whole(rank) or not 0 <= rank < world_size]
    if outside:
        raise _bad(
            f"ParameterConstraints(pin={ranks}) of table {name!r} names rank {outside[0]!r}; there are ranks 0 to "
            f"{world_size - 1}"
        )
    if not ranks:
        raise _bad(f"ParameterConstraints(pin=[]) of table {name!r} leaves it no rank: name one, or pin=None for all")


def warn_without_effect(constraints: Mapping[str, ParameterConstraints]) -> None:
    """Warn of fields that nothing here looks at, and of tables that are to lie together with none other.

    Args:
        constraints: By table.

    Example:
        >>> warn_without_effect({"item": ParameterConstraints(sharding_types=["row_wise"])})
    """
    for field, reason in WITHOUT_EFFECT.items():
        given = [name for name, each in constraints.items() if getattr(each, field) not in (None, False)]
        warn_of(given, f"{field} has no effect: {reason}")
    words: dict[str, list[str]] = {}
    for name, each in constraints.items():
        if each.colocate is not None:
            words.setdefault(each.colocate, []).append(name)
    for word, names in words.items():
        if len(names) == 1:
            warn_of(names, f"colocate={word!r} has no effect: no other table has that word")


def warn_of(tables: Sequence[str], what: str) -> None:
    """One warning for all tables that it concerns, none where there are none.

    Args:
        tables: Names.
        what: Said of them.
    """
    if tables:
        names = _listed([repr(name) for name in tables])
        # The caller of a planner, past the enumerator.
        warnings.warn(f"constraints of table {names}: {what}", UserWarning, stacklevel=4)


def no_option(table: str, removed: Sequence[str], remedy: str) -> PlannerError:
    """The error for a table that its constraints leave no option.

    Args:
        table: Its name.
        removed: What was ruled out and why, a sentence each.
        remedy: What would leave it one.
    """
    lines = "".join(f"\n  {line}" for line in removed)
    return PlannerError(
        f"the constraints of table {table!r} leave no way to shard it: {remedy}{lines}",
        PlannerErrorType.STRICT_CONSTRAINTS,
    )


def asked(constraint: ParameterConstraints, name: str) -> tuple[tuple[ShardingType, ...], tuple[Any, ...]]:
    """The sharding types and the kernels that a constraint names; empty where it names none.

    Args:
        constraint: What is laid down for the table.
        name: Of the table.
    """
    return (
        members(ShardingType, constraint.sharding_types, "sharding_types", name),
        members(EmbeddingComputeKernel, constraint.compute_kernels, "compute_kernels", name),
    )


def _whole(number: object) -> bool:
    return isinstance(number, Integral) and not isinstance(number, bool)


def _listed(words: Sequence[str]) -> str:
    more = len(words) - _NAMED
    return ", ".join(words[:_NAMED]) + (f" and {more} more" if more > 0 else "")


def _bad(message: str) -> PlannerError:
    return PlannerError(message, PlannerErrorType.INPUT_VALIDATION)
