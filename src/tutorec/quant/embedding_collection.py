"""Quantized `EmbeddingCollection`: a row per id, not pooled."""

from typing import Any, Self

import torch
from torch import Tensor, nn

from tutorec._kernels.packed_layout import ROW_ALIGNMENT, RowAlignment
from tutorec._kernels.specs import PoolingKind
from tutorec.modules.embedding_collection import EmbeddingCollectionInterface
from tutorec.modules.embedding_configs import (
    EmbeddingConfig,
    checked_tables,
    get_embedding_names_by_table,
)
from tutorec.modules.embedding_rows import samples_of_lists
from tutorec.modules.mc_modules import ManagedCollisionCollection
from tutorec.quant.behind_mappings import mappings_for, quantized_behind_mappings
from tutorec.quant.feature_order import features_in_order
from tutorec.quant.packed_tables import Packed, PackedTables
from tutorec.quant.table_formats import output_type
from tutorec.sparse.id_check import check_ids
from tutorec.sparse.jagged import JaggedTensor, jagged_from_parts
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor
from tutorec.sparse.tensor_dict import maybe_td_to_kjt

# No `from __future__ import annotations` here: TorchScript reads the annotations of a traced graph
# as types. An imported function is a leaf of a traced graph only if the calling module wraps it.
torch.fx.wrap("features_in_order")


class EmbeddingCollection(PackedTables, EmbeddingCollectionInterface):
    """Quantized tables without pooling: a row per id, no gradients.

    The input is a batch of F features and B samples. The output has, for each feature (and table,
    if several share the feature), a ``JaggedTensor`` with values ``[N_f, D]`` and the lengths
    ``[B]`` of the batch, under the names of the float collection. A table [R, D] is a uint8 buffer
    ``embeddings.<table>.weight`` [R, row_bytes].

    Args:
        tables: Configuration of each table; ``data_type`` is the format of its packed rows. Tables
            may have different widths and formats.
        device: Device of the tables; on ``meta`` nothing is allocated.
        need_indices: Whether results carry their ids, as weights.
        output_dtype: Dtype of the rows: float32, float16 or bfloat16.
        table_name_to_quantized_weights: For each table the payload [R, bytes] and scale and bias
            [R, 4] (None for float formats), both uint8. Zeros by default.
        register_tbes: Whether the operators are submodules ``tbes``, called as modules.
        quant_state_dict_split_scale_bias: Whether scale and bias are separate buffers,
            ``weight_qscale`` and ``weight_qbias`` [R, 2].
        row_alignment: Row sizes are multiples of this many bytes; or ``"fast"`` or ``"small"`` as
            in ``tutorec.quantize``.

    Raises:
        KeyError: Packed rows are given, but not for every table.
        TypeError: A table is not an ``EmbeddingConfig``.
        ValueError: Two tables have the same name, a number format is not supported, or packed rows
            have a wrong shape.

    Example:
        >>> import torch
        >>> from tutorec.modules.embedding_configs import QuantConfig
        >>> from tutorec.modules.embedding_collection import (
        ...     EmbeddingCollection as FloatEmbeddingCollection,
        ... )
        >>> ec = FloatEmbeddingCollection(
        ...     [EmbeddingConfig(10, 4, "item_table", feature_names=["item"])]
        ... )
        >>> ec.qconfig = QuantConfig(activation=torch.float, weight=torch.quint4x2)
        >>> quantized = EmbeddingCollection.from_float(ec)
        >>> batch = KeyedJaggedTensor(
        ...     ["item"], torch.tensor([3, 1, 3]), lengths=torch.tensor([2, 0, 1])
        ... )
        >>> rows = quantized(batch)["item"]
        >>> rows.values().shape, rows.lengths().tolist()
        (torch.Size([3, 4]), [2, 0, 1])

    See Also:
        TorchRec's ``torchrec.quant.embedding_modules.EmbeddingCollection``, whose tables have one
        width.
    """

    _holder = "embeddings"
    _configs = "embedding_configs"
    _flag = "need_indices"

    def __init__(
        self,
        tables: list[EmbeddingConfig],
        device: torch.device,
        need_indices: bool = False,
        output_dtype: torch.dtype = torch.float,
        table_name_to_quantized_weights: Packed | None = None,
        register_tbes: bool = False,
        quant_state_dict_split_scale_bias: bool = False,
        row_alignment: RowAlignment = ROW_ALIGNMENT,
    ) -> None:
        super().__init__()
        tables = checked_tables(
            "quantized EmbeddingCollection", tables, EmbeddingConfig, trained=False
        )
        self._embedding_configs = tables
        self._need_indices = need_indices
        self._output_dtype = output_type(output_dtype)
        self.register_tbes = register_tbes
        self.row_alignment = row_alignment

        self.embeddings = nn.ModuleDict()
        unpooled: list[PoolingKind] = ["none"] * len(tables)
        self._hold(tables, unpooled, quant_state_dict_split_scale_bias, torch.device(device))
        self._embedding_names_by_table = get_embedding_names_by_table(tables)
        named = dict(
            zip((table.name for table in tables), self._embedding_names_by_table, strict=True)
        )

        # Results in the order in which the operators give rows.
        self._names = [
            name
            for _, table_names in self._operators
            for table in table_names
            for name in named[table]
        ]
        self._embedding_names = [name for names in self._embedding_names_by_table for name in names]
        self._features_of_names = dict(zip(self._names, self._features, strict=True))
        self._fill(table_name_to_quantized_weights)

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Look every id up in the tables of its feature.

        Args:
            features: F features, B samples; or a TensorDict, as ``tutorec.sparse.tensor_dict``
                takes it.

        Returns:
            The rows ``[N_f, D]`` of each feature and table, by name.
        """
        traced = isinstance(features, torch.fx.Proxy)
        if not traced and type(features) is not KeyedJaggedTensor:
            features = maybe_td_to_kjt(features, list(dict.fromkeys(self._features)))
        features = check_ids(features, self._feature_rows, tables=self)
        ordered = features_in_order(features, self._features)
        rows = self._looked_up(ordered)
        lists = ordered.to_dict() if traced else features.to_dict()

        outputs: dict[str, JaggedTensor] = {}
        for name in self._embedding_names:
            ids = lists[self._features_of_names[name]]
            indices = ids.values() if self._need_indices else None
            outputs[name] = jagged_from_parts(
                rows[name], indices, ids.lengths(), None if traced else ids.offsets()
            )
        return outputs if traced else samples_of_lists(outputs, features, self._features_of_names)

    def _looked_up(self, features: KeyedJaggedTensor) -> dict[str, Tensor]:
        """The rows of each result, for a batch with its features in operator order."""
        several = len(self._operators) > 1
        batches = features.split(self._feature_splits) if several else [features]

        rows: dict[str, Tensor] = {}
        start = 0
        for index, (operator, _) in enumerate(self._operators):
            batch = batches[index]
            count = self._feature_splits[index]
            sizes = batch.length_per_key()
            call = operator if self.register_tbes else operator.forward
            feature_rows = call(batch.values(), _bounds(batch), None).split_with_sizes(sizes)
            for position in range(count):
                rows[self._names[start + position]] = feature_rows[position]
            start += count
        return rows

    def _get_name(self) -> str:
        return "QuantizedEmbeddingCollection"


class QuantManagedCollisionEmbeddingCollection(EmbeddingCollection):
    """A quantized `EmbeddingCollection` of raw ids, for inference: the mappings do not change.

    Args:
        tables: As of `EmbeddingCollection`, and so are the next seven.
        device: As there.
        need_indices: As there.
        output_dtype: As there.
        table_name_to_quantized_weights: As there.
        register_tbes: As there.
        quant_state_dict_split_scale_bias: As there.
        row_alignment: As there.
        managed_collision_collection: The mappings of raw ids to rows.
        return_remapped_features: No effect, as in TorchRec: the rows that were looked up are always
            returned.

    Raises:
        ValueError: The mappings are missing or of other tables, or as of `EmbeddingCollection`.

    Source:
        TorchRec's ``torchrec.quant.embedding_modules.QuantManagedCollisionEmbeddingCollection``.
    """

    def __init__(
        self,
        tables: list[EmbeddingConfig],
        device: torch.device,
        need_indices: bool = False,
        output_dtype: torch.dtype = torch.float,
        table_name_to_quantized_weights: Packed | None = None,
        register_tbes: bool = False,
        quant_state_dict_split_scale_bias: bool = False,
        row_alignment: RowAlignment = ROW_ALIGNMENT,
        managed_collision_collection: ManagedCollisionCollection | None = None,
        return_remapped_features: bool = False,
    ) -> None:
        super().__init__(
            tables,
            device,
            need_indices,
            output_dtype,
            table_name_to_quantized_weights,
            register_tbes,
            quant_state_dict_split_scale_bias,
            row_alignment,
        )

        self._managed_collision_collection = mappings_for(tables, managed_collision_collection)

    @classmethod
    def from_float(  # pyright: ignore[reportIncompatibleMethodOverride]
        cls, module: Any, return_remapped_features: bool = False
    ) -> Self:
        """The quantized form of a `ManagedCollisionEmbeddingCollection`, which stays as it is."""
        return quantized_behind_mappings(cls, module)

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, features: KeyedJaggedTensor
    ) -> tuple[dict[str, JaggedTensor], KeyedJaggedTensor]:
        """Raw ids -> rows by feature, and the batch of rows that were looked up."""
        remapped = self._managed_collision_collection(features)
        return super().forward(remapped), remapped

    def _get_name(self) -> str:
        return "QuantManagedCollisionEmbeddingCollection"


def _bounds(features: KeyedJaggedTensor) -> Tensor:
    """The operator's offsets: of all bags [F*B+1], or of the features only [F+1].

    A variable batch has no regular offsets per bag; unpooled rows do not need them.
    """
    if isinstance(features, torch.fx.Proxy) or not features.variable_stride_per_key():
        return features.offsets()
    return torch.tensor(features.offset_per_key(), device=features.device())
