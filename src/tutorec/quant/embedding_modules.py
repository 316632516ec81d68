"""Quantized `EmbeddingBagCollection`: pooled rows from packed tables."""

from typing import Any, Self, cast

import torch
from torch import Tensor, nn

from tutorec._kernels.packed_layout import ROW_ALIGNMENT, RowAlignment
from tutorec._kernels.specs import PoolingKind
from tutorec.modules.embedding_configs import (
    EmbeddingBagConfig,
    checked_tables,
    get_embedding_names_by_table,
    pooling_type_to_str,
)
from tutorec.modules.embedding_modules import EmbeddingBagCollectionInterface, check_pooling
from tutorec.modules.mc_modules import ManagedCollisionCollection
from tutorec.modules.pooled_lookup import join_samples
from tutorec.quant.behind_mappings import mappings_for, quantized_behind_mappings
from tutorec.quant.embedding_collection import EmbeddingCollection as EmbeddingCollection
from tutorec.quant.embedding_collection import (
    QuantManagedCollisionEmbeddingCollection as QuantManagedCollisionEmbeddingCollection,
)
from tutorec.quant.feature_order import features_in_order, with_equal_strides
from tutorec.quant.packed_tables import Packed, PackedTables
from tutorec.quant.preparing import for_each_module_of_type_do as for_each_module_of_type_do
from tutorec.quant.preparing import (
    quant_prep_customize_row_alignment as quant_prep_customize_row_alignment,
)
from tutorec.quant.preparing import (
    quant_prep_enable_quant_state_dict_split_scale_bias as quant_prep_enable_quant_state_dict_split_scale_bias,  # noqa: E501
)
from tutorec.quant.preparing import (
    quant_prep_enable_quant_state_dict_split_scale_bias_for_types as quant_prep_enable_quant_state_dict_split_scale_bias_for_types,  # noqa: E501
)
from tutorec.quant.preparing import (
    quant_prep_enable_register_tbes as quant_prep_enable_register_tbes,
)
from tutorec.quant.table_formats import output_type
from tutorec.sparse.id_check import check_ids
from tutorec.sparse.keyed import KeyedTensor
from tutorec.sparse.keyed_jagged import ComputeKJTToJTDict, KeyedJaggedTensor
from tutorec.sparse.tensor_dict import maybe_td_to_kjt

# No `from __future__ import annotations` here: TorchScript reads the annotations of a traced graph
# as types. An imported function is a leaf of a traced graph only if the calling module wraps it.
torch.fx.wrap("features_in_order")


class EmbeddingBagCollection(PackedTables, EmbeddingBagCollectionInterface):
    """Quantized tables with pooling: one pooled row per feature and sample, no gradients.

    The input is a batch of F features and B samples, the output a ``KeyedTensor`` ``[B, D]`` with
    the names and columns of the float collection from which ``from_float`` made it. A table [R, D]
    is a uint8 buffer ``embedding_bags.<table>.weight`` [R, row_bytes], see
    ``tutorec._kernels.packed_layout``.

    Args:
        tables: Configuration of each table; ``data_type`` is the format of its packed rows. Tables
            may have different formats.
        is_weighted: Whether each id carries a weight that multiplies its row.
        device: Device of the tables; on ``meta`` nothing is allocated.
        output_dtype: Dtype of the pooled rows: float32, float16 or bfloat16.
        table_name_to_quantized_weights: For each table the payload [R, bytes] and scale and bias
            [R, 4] (None for float formats), both uint8. Zeros by default.
        register_tbes: Whether the operators are submodules ``tbes``, called as modules.
        quant_state_dict_split_scale_bias: Whether scale and bias are separate buffers,
            ``weight_qscale`` and ``weight_qbias`` [R, 2].
        row_alignment: Row sizes are multiples of this many bytes; or ``"fast"`` or ``"small"`` as
            in ``tutorec.quantize``.

    Raises:
        KeyError: Packed rows are given, but not for every table.
        TypeError: A table is not an ``EmbeddingBagConfig``.
        ValueError: Two tables have the same name, a pooling or number format is not supported, or
            packed rows have a wrong shape.

    Example:
        >>> import torch
        >>> from tutorec.modules.embedding_configs import QuantConfig
        >>> from tutorec.modules.embedding_modules import (
        ...     EmbeddingBagCollection as FloatEmbeddingBagCollection,
        ... )
        >>> tables = [EmbeddingBagConfig(10, 4, "item_table", feature_names=["item"])]
        >>> ebc = FloatEmbeddingBagCollection(tables)
        >>> ebc.qconfig = QuantConfig(activation=torch.float, weight=torch.int8)
        >>> quantized = EmbeddingBagCollection.from_float(ebc)
        >>> quantized.embedding_bags["item_table"].weight.shape
        torch.Size([10, 16])
        >>> batch = KeyedJaggedTensor(
        ...     ["item"], torch.tensor([3, 1, 3]), lengths=torch.tensor([2, 0, 1])
        ... )
        >>> bool((quantized(batch).values() - ebc(batch).values()).abs().max() < 0.01)
        True

    See Also:
        TorchRec's ``torchrec.quant.embedding_modules.EmbeddingBagCollection``, which orders columns
        by pooling.
    """

    _holder = "embedding_bags"
    _configs = "embedding_bag_configs"
    _flag = "is_weighted"

    def __init__(
        self,
        tables: list[EmbeddingBagConfig],
        is_weighted: bool,
        device: torch.device,
        output_dtype: torch.dtype = torch.float,
        table_name_to_quantized_weights: Packed | None = None,
        register_tbes: bool = False,
        quant_state_dict_split_scale_bias: bool = False,
        row_alignment: RowAlignment = ROW_ALIGNMENT,
    ) -> None:
        super().__init__()
        tables = checked_tables(
            "quantized EmbeddingBagCollection", tables, EmbeddingBagConfig, trained=False
        )
        check_pooling(tables, is_weighted)
        self._embedding_bag_configs = tables
        self._is_weighted = is_weighted
        self._output_dtype = output_type(output_dtype)
        self.register_tbes = register_tbes
        self.row_alignment = row_alignment

        self._kjt_to_jt_dict = ComputeKJTToJTDict()
        self.embedding_bags = nn.ModuleDict()
        poolings: list[PoolingKind] = [
            cast(PoolingKind, pooling_type_to_str(table.pooling)) for table in tables
        ]
        self._hold(tables, poolings, quant_state_dict_split_scale_bias, torch.device(device))

        names = get_embedding_names_by_table(tables)
        self._result_features = [feature for feature, _, _ in self._feature_rows]
        self._embedding_names = [name for group in names for name in group]
        self._length_per_name = [
            table.embedding_dim for table in tables for _ in table.feature_names
        ]
        self._columns = self._columns_of(tables)
        self._fill(table_name_to_quantized_weights)

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Look up and pool every feature's bags in its tables.

        Args:
            features: F features, B samples; or a TensorDict, as ``tutorec.sparse.tensor_dict``
                takes it.

        Returns:
            The pooled rows ``[B, D]``, one key per feature and table.
        """
        traced = isinstance(features, torch.fx.Proxy)
        if not traced and type(features) is not KeyedJaggedTensor:
            features = maybe_td_to_kjt(features, list(dict.fromkeys(self._features)))
        features = check_ids(features, self._feature_rows, self._is_weighted, self)

        if not traced and (
            features.variable_stride_per_key() or features.inverse_indices_or_none() is not None
        ):
            return self._of_lists(features)
        return self._keyed(self._looked_up(features_in_order(features, self._features)))

    def _looked_up(self, features: KeyedJaggedTensor) -> Tensor:
        """Pooled rows of a batch with its features in operator order; columns in table order."""
        if not self._operators:
            return torch.empty(
                features.stride(), 0, dtype=self._output_dtype, device=features.device()
            )

        several = len(self._operators) > 1
        batches = features.split(self._feature_splits) if several else [features]
        pooled: list[Tensor] = []
        for index, (operator, _) in enumerate(self._operators):
            batch = batches[index]
            weights = batch.weights() if self._is_weighted else None
            call = operator if self.register_tbes else operator.forward
            pooled.append(call(batch.values(), batch.offsets(), weights))

        if not several:
            return pooled[0]
        return torch.cat(
            [pooled[index][:, start:stop] for index, start, stop in self._columns], dim=1
        )

    def _of_lists(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """The pooled rows of samples, for a batch with inverse indices."""
        strides = dict(zip(features.keys(), features.stride_per_key(), strict=True))
        pooled = self._looked_up(features_in_order(with_equal_strides(features), self._features))
        by_feature = pooled.split_with_sizes(self._length_per_name, 1)
        lists = [
            rows[: strides[name]]
            for name, rows in zip(self._result_features, by_feature, strict=True)
        ]

        inverse = features.inverse_indices_or_none()
        variable = features.variable_stride_per_key()
        return self._keyed(join_samples(self._result_features, lists, inverse, variable))

    def _keyed(self, pooled: Tensor) -> KeyedTensor:
        if type(pooled) is not Tensor:
            return KeyedTensor(self._embedding_names, self._length_per_name, pooled)
        return KeyedTensor._from_parts(self._embedding_names[:], self._length_per_name[:], pooled)

    def _get_name(self) -> str:
        return "QuantizedEmbeddingBagCollection"


class QuantManagedCollisionEmbeddingBagCollection(EmbeddingBagCollection):
    """A quantized `EmbeddingBagCollection` of raw ids, for inference: the mappings do not change.

    Args:
        tables: As of `EmbeddingBagCollection`, and so are the next seven.
        is_weighted: As there.
        device: As there.
        output_dtype: As there.
        table_name_to_quantized_weights: As there.
        register_tbes: As there.
        quant_state_dict_split_scale_bias: As there.
        row_alignment: As there.
        managed_collision_collection: The mappings of raw ids to rows.
        return_remapped_features: No effect, as in TorchRec: the rows that were looked up are always
            returned.

    Raises:
        ValueError: The mappings are missing or of other tables, or as of `EmbeddingBagCollection`.

    Source:
        TorchRec's ``torchrec.quant.embedding_modules.QuantManagedCollisionEmbeddingBagCollection``.
    """

    def __init__(
        self,
        tables: list[EmbeddingBagConfig],
        is_weighted: bool,
        device: torch.device,
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
            is_weighted,
            device,
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
        """A quantized `ManagedCollisionEmbeddingBagCollection`; its mappings stay unchanged."""
        return quantized_behind_mappings(cls, module)

    def forward(self, features: KeyedJaggedTensor) -> tuple[KeyedTensor, KeyedJaggedTensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Raw ids -> pooled rows [B, D], and the batch of rows that were looked up."""
        remapped = self._managed_collision_collection(features)
        return super().forward(remapped), remapped

    def _get_name(self) -> str:
        return "QuantManagedCollisionEmbeddingBagCollection"
