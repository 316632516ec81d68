"""The base class of mappings of raw ids to the rows of a table."""

# No import of annotations: TorchScript reads them from the functions.

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import ClassVar, cast

import torch
from torch import Tensor, nn

from tutorec._kernels.memory import copy_written_rows, unwritten_zeros
from tutorec._loaded import check_loaded
from tutorec.modules.mc_report import CollisionCounts, TableCollisions
from tutorec.sparse.jagged import JaggedTensor, jagged_from_parts

_MOST_SHARDS = 1024


class ManagedCollisionModule(nn.Module):
    """The mapping of one table from raw ids to its R rows. The base class of all such mappings.

    Ids come as a dictionary with one entry, table name -> lists of ids of all features of the
    table. ``forward`` is ``preprocess``, then ``profile`` (in training mode: observe the ids and
    change the mapping), then ``remap``. After a forward ``evict`` returns the rows that have
    another id than before; the owner of the table resets them.

    Args:
        device: Where the state of the mapping is held.
        output_segments: Boundaries of the rows at which the state may be split: S + 1 numbers for S
            segments.
        skip_state_validation: Whether the mapping keeps no record of its segments; it cannot be
            sharded again then.
        read_only_suffix: End of the names of features that are remapped and not observed.
        enable_per_feature_lookups: Whether a collection passes features one by one where a name
            ends with the suffix, not one list for each table.

    Attributes:
        counts: Lookups, lookups of ids with a row, and evictions, for ``report()`` of a collection.
        first_row: The first row of this shard.
        wants_feature_lengths: Whether the lists that a collection passes have, in place of weights,
            the number of ids of each feature of the table.
        row_ids: Name of the state that holds the id of each row, if any row of a shard may be given
            to any of its ids; None if the hash of an id determines which rows it may have.
        once_per_table: Names of states that are not kept for each row.
        index_bytes: Bytes of an index of the ids, which is not part of the state, for each row at
            most.

    Raises:
        ValueError: More than 1,024 segments.

    Source:
        TorchRec's ``torchrec.modules.mc_modules.ManagedCollisionModule``.
    """

    first_row: int = 0
    wants_feature_lengths = False
    row_ids: ClassVar[str | None] = None
    index_bytes: ClassVar[int] = 0
    once_per_table: ClassVar[tuple[str, ...]] = (
        "_output_segments_tensor",
        "_current_iter_tensor",
        "_hash_zch_bucket",
    )

    _buckets: int
    _output_segments_tensor: Tensor
    _current_iter_tensor: Tensor
    _reassigned_rows: Tensor | None = None

    def __init__(
        self,
        device: torch.device,
        output_segments: list[int],
        skip_state_validation: bool = False,
        read_only_suffix: str = "_readonly",
        enable_per_feature_lookups: bool = False,
    ) -> None:
        super().__init__()
        self.counts = CollisionCounts()
        self._device = device
        self._output_segments = output_segments
        self._read_only_suffix = read_only_suffix
        self._enable_per_feature_lookups = enable_per_feature_lookups
        if skip_state_validation:
            return

        if len(output_segments) > _MOST_SHARDS + 1:
            raise ValueError(
                f"{type(self).__name__}: {len(output_segments) - 1} output segments, and there "
                f"may be {_MOST_SHARDS}"
            )

        segments = torch.empty(_MOST_SHARDS + 1, dtype=torch.int64, device=device)
        self.register_buffer("_output_segments_tensor", segments)
        self._store_segments()
        self.register_buffer(
            "_current_iter_tensor", torch.zeros(1, dtype=torch.int64, device=device)
        )
        self.register_load_state_dict_pre_hook(check_loaded)
        self.register_load_state_dict_post_hook(validate_loaded_state)

    @property
    def device(self) -> torch.device:
        """Where the state of the mapping is held."""
        return self._device

    @property
    def is_traced_whole(self) -> bool:
        """Whether its call is one call in a traced graph."""
        return True

    @property
    def read_only_suffix(self) -> str:
        """End of the names of features that are remapped and not observed."""
        return self._read_only_suffix

    @property
    def readable_suffix(self) -> str:
        """The same; its name before TorchRec 1.9."""
        return self._read_only_suffix

    def preprocess(self, features: dict[str, JaggedTensor]) -> dict[str, JaggedTensor]:
        """Raw ids -> the ids that are mapped, such as their hashes; here the raw ids."""
        return features

    def profile(self, features: dict[str, JaggedTensor]) -> dict[str, JaggedTensor]:
        """In training mode observe a batch and update the mapping; ids do not change."""
        return features

    def remap(
        self,
        features: dict[str, JaggedTensor],
        mutate_miss_lengths: bool = True,
        write_weights: Tensor | None = None,
    ) -> dict[str, JaggedTensor]:
        """Preprocessed ids -> rows; an id without one shares a row, so that lengths stay."""
        return with_values(features, self._rows_of)

    @abstractmethod
    def _rows_of(self, ids: Tensor) -> Tensor:
        """The row of each preprocessed id [N]; not needed where ``remap`` is overridden."""

    def forward(
        self, features: dict[str, JaggedTensor], mutate_miss_lengths: bool = True
    ) -> dict[str, JaggedTensor]:
        """Raw ids -> rows. ``mutate_miss_lengths``: ids without a row may leave their lists."""
        return self.remap(self.profile(self.preprocess(features)), mutate_miss_lengths)

    def evict(self) -> Tensor | None:
        """Rows [U] that got an id since the last call, or None; they are to be reset."""
        rows = self._reassigned_rows
        self._reassigned_rows = None
        return None if rows is None else rows + self.first_row

    @abstractmethod
    def output_size(self) -> int:
        """R, rows."""

    @abstractmethod
    def input_size(self) -> int:
        """Raw ids, after ``preprocess``, are below this."""

    def buckets(self) -> int:
        """Into how many equal parts the rows of all ranks can be split between ranks."""
        return self._buckets

    @abstractmethod
    def validate_state(self) -> None:
        """Check the loaded state: these rows must be a union of stored segments."""

    @abstractmethod
    def open_slots(self) -> Tensor:
        """Rows that no id has [1]."""

    def _store_segments(self) -> None:
        """Put the segments of this mapping into its state."""
        boundaries = torch.tensor(self._output_segments)
        self._output_segments_tensor.fill_(-1)[: len(boundaries)] = boundaries

    def _reassign(self, rows: Tensor) -> None:
        """Remember rows of this shard [U] that have got another id, for ``evict``."""
        earlier = self._reassigned_rows
        self._reassigned_rows = rows if earlier is None else torch.cat([earlier, rows]).unique()

    def row_states(self) -> dict[str, Tensor]:
        """The states that are kept for each row ``[R, ...]``."""
        return {
            name: value
            for name, value in self.state_dict().items()
            if name not in self.once_per_table
        }

    def row_bytes(self) -> int:
        """Bytes per row when all rows have an id: state and index; the planner counts them."""
        return self.index_bytes + sum(state[:1].nbytes for state in self.row_states().values())

    def report(self, table: str = "") -> TableCollisions:
        """What has happened to the ids of the table so far. A sync point."""
        rows = self.output_size()
        occupied = rows - int(self.open_slots())
        counts = self.counts
        return TableCollisions(
            table, rows, occupied, counts.lookups, int(counts.collisions), int(counts.evictions)
        )

    def state_by_row(self, first: int = 0, end: int | None = None) -> dict[str, Tensor]:
        """A copy of the state of rows from ``first`` to before ``end``, in their order."""
        state: dict[str, Tensor] = {}
        for name, value in self.state_dict().items():
            if name == "_output_segments_tensor":
                continue

            rows = value if name in self.once_per_table else value[first:end]
            state[name] = unwritten_zeros(rows.shape, rows.dtype, rows.device)
            copy_written_rows(state[name], rows)

        return state

    @torch.no_grad()
    def load_state_by_row(self, state: Mapping[str, Tensor]) -> None:
        """Load what `state_by_row` of a mapping onto the same rows returned.

        Raises:
            ValueError: It does not fit, as one that was built with another number of buckets.
        """
        own = self.state_dict()
        for name, value in state.items():
            copy_written_rows(own[name], value)

        self.validate_state()

    @abstractmethod
    def rebuild_with_output_id_range(
        self,
        output_id_range: tuple[int, int],
        output_segments: list[int],
        device: torch.device | None = None,
    ) -> "ManagedCollisionModule":
        """A new mapping, without ids, onto the half-open range of rows of one shard."""

    def shard(
        self, first: int, end: int, output_segments: list[int], device: torch.device
    ) -> "ManagedCollisionModule":
        """The mapping of rows from ``first`` to before ``end`` and their ids; from meta no ids."""
        shard = self.rebuild_with_output_id_range((first, end), output_segments, device)
        if "meta" not in (self.device.type, device.type):
            shard.load_state_by_row(self.state_by_row(first, end))

        return shard

    def on(self, device: torch.device) -> "ManagedCollisionModule":
        """This mapping, or a copy of it on another device; from meta one without ids."""
        if self.device == device:
            return self

        return self.shard(0, self.output_size(), self._output_segments, device)


def with_values(
    features: dict[str, JaggedTensor], change: Callable[[Tensor], Tensor]
) -> dict[str, JaggedTensor]:
    """The same lists of other ids: what ``change`` makes of all ids of each [N]."""
    return {
        name: jagged_from_parts(
            change(lists.values()),
            lists.weights_or_none(),
            lists.lengths_or_none(),
            lists.offsets_or_none(),
        )
        for name, lists in features.items()
    }


def validate_loaded_state(module: nn.Module, _keys: object) -> None:
    """A hook that is called after a state was loaded."""
    cast(ManagedCollisionModule, module).validate_state()
