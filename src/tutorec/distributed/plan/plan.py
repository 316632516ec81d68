"""Sharding plans: the sharding type of each table and the ranks of its shards.

A plan is plain data. It can be printed, compared, saved and reused; it does not refer to a process
or a device that must exist. `plan/geometry.py` computes the shards; the planner or the user chooses
among them.

Corresponds to TorchRec's ``torchrec.distributed.types``.
"""

from __future__ import annotations

import enum
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from html import escape
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharding_spec.api import EnumerableShardingSpec, ShardingSpec

from tutorec._text import TextTable
from tutorec._whole_file import whole_file
from tutorec.distributed.core.cache_params import CacheParams, KeyValueParams
from tutorec.distributed.plan.diff import PlanDiff, plan_diff
from tutorec.distributed.plan.json import StoredShard, StoredTable, fingerprint, from_text, to_text
from tutorec.types import DataType

_HTML_ROWS = 100


class PlacementRule(enum.Enum):
    """Where a planner may place the shards of a table; L ranks are a host.

    - ``ANY_RANK``: each on any rank (table-wise, column-wise).
    - ``ONE_HOST``: each on any rank of one host (table-column-wise).
    - ``ROWS_ON_HOST``: shard i on local rank i of one host (table-row-wise); P = L.
    - ``ROW_BLOCKS_ON_HOSTS``: blocks of L shards, each as in ``ROWS_ON_HOST`` (grid); hosts may
      repeat.
    - ``EVERY_RANK``: shard r on rank r (row-wise, data-parallel); P = W.
    """

    ANY_RANK = "any"
    ONE_HOST = "host"
    ROWS_ON_HOST = "host_rows"
    ROW_BLOCKS_ON_HOSTS = "hosts_rows"
    EVERY_RANK = "all"


class ShardingType(enum.Enum):
    """How a table is divided among the ranks; `SHARDING_TRAITS` describes each type.

    Example:
        >>> ShardingType("table_wise") is ShardingType.TABLE_WISE
        True
        >>> SHARDING_TRAITS[ShardingType.GRID_SHARD].splits_columns
        True
    """

    DATA_PARALLEL = "data_parallel"
    TABLE_WISE = "table_wise"
    COLUMN_WISE = "column_wise"
    ROW_WISE = "row_wise"
    TABLE_ROW_WISE = "table_row_wise"
    TABLE_COLUMN_WISE = "table_column_wise"
    GRID_SHARD = "grid_shard"


@dataclass(frozen=True)
class ShardingTraits:
    """What a sharding type does to a table; lookups, planner and simulator ask here.

    Args:
        placement: Where a planner may place the shards.
        splits_columns: Whether there are several column shards.
        splits_rows: Whether the rows of a bag may be on several ranks, each of which pools a part.
        splits_rows_in_host: Whether these ranks are one host, whose sums then cross hosts.
        only_if_requested: Whether a planner takes the type only where a constraint names it.
    """

    placement: PlacementRule
    splits_columns: bool = False
    splits_rows: bool = False
    splits_rows_in_host: bool = False
    only_if_requested: bool = False


# In the order in which a planner prefers types of equal cost.
SHARDING_TRAITS: dict[ShardingType, ShardingTraits] = {
    ShardingType.TABLE_WISE: ShardingTraits(PlacementRule.ANY_RANK),
    ShardingType.ROW_WISE: ShardingTraits(PlacementRule.EVERY_RANK, splits_rows=True),
    ShardingType.COLUMN_WISE: ShardingTraits(PlacementRule.ANY_RANK, splits_columns=True),
    ShardingType.TABLE_ROW_WISE: ShardingTraits(
        PlacementRule.ROWS_ON_HOST, splits_rows=True, splits_rows_in_host=True
    ),
    ShardingType.TABLE_COLUMN_WISE: ShardingTraits(PlacementRule.ONE_HOST, splits_columns=True),
    ShardingType.GRID_SHARD: ShardingTraits(
        PlacementRule.ROW_BLOCKS_ON_HOSTS,
        splits_columns=True,
        splits_rows=True,
        splits_rows_in_host=True,
        only_if_requested=True,
    ),
    ShardingType.DATA_PARALLEL: ShardingTraits(PlacementRule.EVERY_RANK),
}


class EmbeddingComputeKernel(enum.Enum):
    """How the rows of a shard are stored and updated.

    ``FUSED`` updates rows during backward without a gradient tensor; ``DENSE`` fills ``.grad``.
    ``FUSED_UVM`` and ``FUSED_UVM_CACHING`` are fused kernels for tables larger than memory: rows
    are in a file, and with ``FUSED_UVM_CACHING`` some are cached in memory, see `CacheParams`. The
    older names ``batched_fused`` and ``batched_dense`` are accepted. The other members are
    TorchRec's; they are not implemented, and planner and sharder refuse them.

    Example:
        >>> EmbeddingComputeKernel("batched_fused").value
        'fused'
    """

    DENSE = "dense"
    FUSED = "fused"
    FUSED_UVM = "fused_uvm"
    FUSED_UVM_CACHING = "fused_uvm_caching"
    KEY_VALUE = "key_value"
    QUANT = "quant"
    QUANT_UVM = "quant_uvm"
    QUANT_UVM_CACHING = "quant_uvm_caching"
    CUSTOMIZED_KERNEL = "customized_kernel"
    SSD_VIRTUAL_TABLE = "ssd_virtual_table"
    DRAM_VIRTUAL_TABLE = "dram_virtual_table"
    DRAM_SSD_VIRTUAL_TABLE = "dram_ssd_virtual_table"
    FUSED_TRITON = "fused_triton"

    @classmethod
    def _missing_(cls, value: object) -> EmbeddingComputeKernel | None:
        if isinstance(value, str) and value.startswith("batched_"):
            plain_name = value.removeprefix("batched_")
            return next((kernel for kernel in cls if kernel.value == plain_name), None)
        return None


class BoundsCheckMode(enum.IntEnum):
    """What a lookup does with an id outside its table; fbgemm's names and values.

    It is accepted wherever TorchRec takes it, without effect: an id outside its table is always an
    error that names the table, the feature and the sample (``FATAL``). In fbgemm ``WARNING`` and
    ``IGNORE`` read row 0 instead. ``tutorec.validation(False)`` turns the check off.

    Example:
        >>> BoundsCheckMode.FATAL.value
        0
    """

    FATAL = 0
    WARNING = 1
    IGNORE = 2
    NONE = 3
    V2_IGNORE = 4
    V2_WARNING = 5
    V2_FATAL = 6


@dataclass(repr=False)
class ParameterSharding:
    """How one table is sharded.

    Args:
        sharding_type: A ``ShardingType`` value, e.g. ``"table_wise"``.
        compute_kernel: An ``EmbeddingComputeKernel`` value, e.g. ``"fused"``.
        ranks: The rank of each shard, in shard order.
        sharding_spec: The shards: offsets ``[row, column]``, sizes ``[R, D]``, placement
            ``"rank:0/cpu"``. None for ``data_parallel``.
        cache_params: The cache, for the kernel ``"fused_uvm_caching"``.
        enforce_hbm: TorchRec's; has no effect.
        stochastic_rounding: TorchRec's; has no effect: ``fused_params`` of the sharder have it.
        bounds_check_mode: Has no effect, see `BoundsCheckMode`.
        output_dtype: ``DataType.FP32``; the sharder refuses others.
        key_value_params: For kernels that are not implemented.
        shape: ``(R, D)`` of the table for which the entry was made, if known; it is compared with
            the module's table. It is not printed, and equality of entries ignores it.
        source: The file that the entry was read from, for messages; not printed and ignored by
            equality.

    Example:
        >>> ParameterSharding("table_wise", "fused", ranks=[1]).ranks
        [1]
    """

    sharding_type: str
    compute_kernel: str
    ranks: list[int] | None = None
    sharding_spec: ShardingSpec | None = None
    cache_params: CacheParams | None = None
    enforce_hbm: bool | None = None
    stochastic_rounding: bool | None = None
    bounds_check_mode: BoundsCheckMode | None = None
    output_dtype: DataType | None = None
    key_value_params: KeyValueParams | None = None
    shape: tuple[int, int] | None = field(default=None, repr=False, compare=False)
    source: str = field(default="", repr=False, compare=False)

    def __repr__(self) -> str:
        # Of the optional fields, print those that are set.
        names = [attribute.name for attribute in fields(self) if attribute.repr]
        names = names[:4] + [name for name in names[4:] if getattr(self, name) is not None]
        return (
            f"ParameterSharding({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"
        )

    def shards(self) -> list[ShardMetadata]:
        """The shards; empty if the plan lists none."""
        return (
            list(self.sharding_spec.shards)
            if isinstance(self.sharding_spec, EnumerableShardingSpec)
            else []
        )

    def table_shape(self) -> tuple[int, int] | None:
        """``(R, D)`` of the table: as stored, or from the extent of the shards; None if unknown."""
        if self.shape is not None or not self.shards():
            return self.shape
        ends = [
            (row + rows, column + columns)
            for (row, column), (rows, columns) in (
                (s.shard_offsets, s.shard_sizes) for s in self.shards()
            )
        ]

        return max(row for row, _ in ends), max(column for _, column in ends)

    def _stored(self) -> StoredTable:
        shards = [
            StoredShard(
                list(s.shard_offsets),
                list(s.shard_sizes),
                str(s.placement) if s.placement else None,
            )
            for s in self.shards()
        ]

        return StoredTable(
            self.sharding_type,
            self.compute_kernel,
            list(self.ranks) if self.ranks is not None else None,
            shards if self.sharding_spec is not None else None,
            self.table_shape(),
            self.cache_params and self.cache_params._stored(),
        )

    @classmethod
    def _from_stored(cls, table: str, stored: StoredTable, source: str) -> ParameterSharding:
        for enum_, text in (
            (ShardingType, stored.sharding_type),
            (EmbeddingComputeKernel, stored.compute_kernel),
        ):
            try:
                enum_(text)
            except ValueError:
                names = ", ".join(member.value for member in enum_)
                raise ValueError(
                    f"{source}: table {table!r} has the unknown {enum_.__name__} {text!r}: {names}"
                ) from None

        try:
            shards = [ShardMetadata(s.offsets, s.sizes, s.placement) for s in stored.shards or ()]
            for shard in shards:
                if shard.placement is None or shard.placement.rank() is None:
                    raise ValueError(f"{str(shard.placement)!r} names no rank: 'rank:0/cpu' does")
            spec = EnumerableShardingSpec(shards) if stored.shards is not None else None
        except (ValueError, RuntimeError) as error:
            raise ValueError(
                f"{source}: a shard of table {table!r} cannot be placed: {error}"
            ) from None

        cache = stored.cache and CacheParams._from_stored(stored.cache)
        return cls(
            stored.sharding_type,
            stored.compute_kernel,
            stored.ranks,
            spec,
            cache,
            shape=stored.shape,
            source=source,
        )


class ModuleShardingPlan:
    """Plan of one module; its form depends on the sharder."""


class EmbeddingModuleShardingPlan(ModuleShardingPlan, dict[str, ParameterSharding]):
    """The plan of one collection of tables: table name -> `ParameterSharding`.

    Example:
        >>> from tutorec.distributed.plan.geometry import table_wise_sharding
        >>> print(
        ...     EmbeddingModuleShardingPlan(
        ...         item=table_wise_sharding((8, 4), rank=0, device_type="cpu")
        ...     )
        ... )
        ... # doctest: +NORMALIZE_WHITESPACE
        <BLANKLINE>
        <BLANKLINE>
        param | sharding type | compute kernel | ranks
        ----- | ------------- | -------------- | -----
        item  | table_wise    | fused          | [0]
        <BLANKLINE>
        param | shard offsets | shard sizes | placement
        ----- | ------------- | ----------- | ----------
        item  | [0, 0]        | [8, 4]      | rank:0/cpu
    """

    def __str__(self) -> str:
        return "".join(f"\n\n{_as_text(rows) if rows[1:] else chr(10)}" for rows in self._rows())

    def _repr_html_(self) -> str:
        """The two printed tables as HTML, for a notebook."""
        return "".join(_as_html(rows) for rows in self._rows() if rows[1:])

    def _rows(self) -> tuple[list[list[str]], list[list[str]]]:
        """Cells of the two printed tables, of tables and of shards, each with its header."""
        tables = [["param", "sharding type", "compute kernel", "ranks"]]
        shards = [["param", "shard offsets", "shard sizes", "placement"]]

        for name, sharding in self.items():
            tables.append(
                [name, sharding.sharding_type, sharding.compute_kernel, str(sharding.ranks)]
            )
            for shard in sharding.shards():
                shards.append(
                    [name, str(shard.shard_offsets), str(shard.shard_sizes), str(shard.placement)]
                )
        return tables, shards


@dataclass
class ShardingPlan:
    """A plan for a whole model: module path -> plan of the module.

    The model itself has the path ``""``. `save` and `load` store a plan as a JSON file, with a
    fingerprint of its tables. Sharding and `check_fingerprint` refuse a plan that was made for
    other tables.

    Example:
        >>> from tutorec.distributed.plan.geometry import table_wise_sharding
        >>> item = table_wise_sharding((8, 4), rank=0, device_type="cpu")
        >>> plan = ShardingPlan({"": EmbeddingModuleShardingPlan(item=item)})
        >>> ShardingPlan.from_json(plan.to_json()) == plan
        True
        >>> plan.get_plan_for_module("sparse") is None
        True
    """

    plan: dict[str, EmbeddingModuleShardingPlan] = field(default_factory=dict)

    def get_plan_for_module(self, module_path: str) -> EmbeddingModuleShardingPlan | None:
        """The plan of the module at ``module_path``, or None."""
        return self.plan.get(module_path)

    def to_json(self) -> str:
        """The plan as a JSON document, see ``plan/json.py``."""
        return to_text(self._stored())

    @classmethod
    def from_json(cls, text: str, source: str = "the document") -> ShardingPlan:
        """Read a plan from a JSON document.

        Args:
            text: The result of `to_json`.
            source: Name of the document, for messages.

        Raises:
            ValueError: The document is damaged, is not a plan, or has an unknown sharding type or
                kernel.
        """
        return cls(
            {
                path: EmbeddingModuleShardingPlan(
                    {
                        name: ParameterSharding._from_stored(name, stored, source)
                        for name, stored in of.items()
                    }
                )
                for path, of in from_text(text, source).items()
            }
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan to a file atomically. Several ranks may write the same file."""
        with whole_file(path) as draft:
            draft.write_text(self.to_json(), encoding="utf-8")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> ShardingPlan:
        """Read a plan from a file.

        Raises:
            FileNotFoundError: There is no such file.
            ValueError: The file is damaged, is not a plan, or has an unknown sharding type or
                kernel; the message names the file.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{os.fspath(path)} is not a whole JSON document: {error}; save the plan again"
            ) from None
        return cls.from_json(text, source=os.fspath(path))

    def fingerprint(self) -> str:
        """Digest of the plan's tables: module, name, rows and columns of each."""
        return fingerprint(self._stored())

    def check_fingerprint(self, model: nn.Module) -> None:
        """Check that the plan was made for the tables of a model, whatever their placement.

        Args:
            model: Sharded or unsharded; collections that the plan does not name are ignored.

        Raises:
            ValueError: A module or table is missing, or has another shape.

        Example:
            >>> plan = ShardingPlan({"sparse": EmbeddingModuleShardingPlan()})
            >>> plan.check_fingerprint(nn.Module())
            Traceback (most recent call last):
                ...
            ValueError: the plan is for other tables: the model has no module 'sparse'; ...
        """
        differences = []
        for path, module_plan in self.plan.items():
            try:
                tables = _shapes_of(model.get_submodule(path))
            except AttributeError:
                differences.append(f"the model has no module {path!r}")
                continue

            planned = {name: sharding.table_shape() for name, sharding in module_plan.items()}
            differences += [
                f"module {path!r} has no table {name!r}" for name in planned if name not in tables
            ]
            differences += [
                f"the plan has no table {name!r} of module {path!r}"
                for name in tables
                if name not in planned
            ]
            differences += [
                f"table {name!r} is {shape[0]} x {shape[1]} in the plan and {tables[name][0]} x "
                f"{tables[name][1]} in the model"
                for name, shape in planned.items()
                if name in tables and shape is not None and shape != tables[name]
            ]

        if differences:
            source = next(
                (s.source for of in self.plan.values() for s in of.values() if s.source), "the plan"
            )
            raise ValueError(
                f"{source} is for other tables: {'; '.join(differences)}; plan this model"
            )

    def diff(self, other: ShardingPlan) -> PlanDiff:
        """Compare with another plan: which tables differ, and how many bytes would have to be sent.

        Example:
            >>> len(ShardingPlan().diff(ShardingPlan()))
            0
        """
        return plan_diff(self._stored(), other._stored())

    def _repr_html_(self) -> str:
        """The plan for a notebook."""
        return "".join(
            f"<p>module: <code>{escape(path)}</code></p>{module_plan._repr_html_()}"
            for path, module_plan in self.plan.items()
        )

    def _stored(self) -> dict[str, dict[str, StoredTable]]:
        return {
            path: {name: s._stored() for name, s in of.items()} for path, of in self.plan.items()
        }

    def __str__(self) -> str:
        return "\n\n".join(
            f"module: {path}{module_plan}" for path, module_plan in self.plan.items()
        )


def _shapes_of(collection: Any) -> dict[str, tuple[int, int]]:
    """Table name -> ``(R, D)`` of a collection, sharded or not."""
    for name in ("embedding_bag_configs", "embedding_configs"):
        configs = getattr(collection, name, None)
        if callable(configs):
            tables: Any = configs()
            return {config.name: (config.num_embeddings, config.embedding_dim) for config in tables}

    # Another class: its tables are ``<path>.<table>.weight``.
    return {
        name.split(".")[-2]: (weight.shape[0], weight.shape[1])
        for name, weight in collection.named_parameters()
        if "." in name and weight.dim() == 2
    }


def _as_text(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells as a text table; the first row is the header."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    head = " | ".join(f"{cell:^{width}}" for cell, width in zip(rows[0], widths, strict=True))
    rule = " | ".join("-" * width for width in widths)

    body = [
        " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        for row in rows[1:]
    ]
    return "\n".join([head, rule, *body])


def _as_html(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells as an HTML table, cut after a maximum number of rows."""
    head = rows[0]
    printed = rows[1 : _HTML_ROWS + 1]
    more = len(rows) - 1 - _HTML_ROWS
    rest = f"<p>and {more:,} more: <code>print</code> shows all</p>" if more > 0 else ""
    return TextTable(head, printed).html() + rest
