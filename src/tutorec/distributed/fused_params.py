"""What a caller says about the fused optimizer, in its several spellings -> one `OptimizerSpec`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tutorec._kernels.tbe import OptimizerKind, OptimizerSpec
from tutorec.optim.rowwise_adagrad import RowWiseAdagrad

# Names as in EmbOptimType, fbgemm's enum of the same values, and OptimizerSpec. All updates here are exact: ids that
# occur twice in a batch are summed before the one update of their row.
_KINDS: dict[str, OptimizerKind] = {
    "sgd": "sgd",
    "exact_sgd": "sgd",
    "rowwise_adagrad": "rowwise_adagrad",
    "row_wise_adagrad": "rowwise_adagrad",
    "exact_row_wise_adagrad": "rowwise_adagrad",
}
# Optimizers in backward that have a fused form: their defaults, and arguments that leave it as it is.
_IN_BACKWARD: dict[type[torch.optim.Optimizer], tuple[dict[str, Any], dict[str, Any]]] = {
    torch.optim.SGD: (
        {"optimizer": "exact_sgd", "lr": 1e-3},
        {"momentum": 0, "dampening": 0, "nesterov": False, "maximize": False},
    ),
    RowWiseAdagrad: (
        {"optimizer": "exact_row_wise_adagrad", "lr": 1e-2, "eps": 1e-10},
        {"lr_decay": 0, "initial_accumulator_value": 0, "maximize": False},
    ),
}
_KEYS = ("optimizer", "learning_rate", "lr", "eps", "weight_decay")


def optimizer_spec(fused_params: Mapping[str, Any] | None) -> OptimizerSpec:
    """The optimizer that ``fused_params`` describe; SGD with a learning rate of 0.01 where they say nothing.

    Args:
        fused_params: ``optimizer`` (`EmbOptimType`, fbgemm's member, or its value as text), ``learning_rate`` or
            ``lr``, ``eps``, ``weight_decay``.

    Raises:
        ValueError: An unknown key, an optimizer that does not run, a negative learning rate.

    Example:
        >>> optimizer_spec({"optimizer": "exact_row_wise_adagrad", "learning_rate": 0.02, "eps": 0.002})
        OptimizerSpec(kind='rowwise_adagrad', learning_rate=0.02, eps=0.002, weight_decay=0.0)
    """
    given = dict(fused_params or {})
    unknown = sorted(str(key) for key in given if key not in _KEYS)
    if unknown:
        raise ValueError(f"fused_params has unknown keys {unknown}: known are {', '.join(_KEYS)}")
    if "lr" in given:
        if "learning_rate" in given:
            raise ValueError(
                f"fused_params names the learning rate twice: learning_rate={given['learning_rate']} "
                f"and lr={given['lr']}; keep one"
            )
        given["learning_rate"] = given.pop("lr")
    kind = _kind(given.pop("optimizer", "exact_sgd"))
    return OptimizerSpec(kind, **{name: float(number) for name, number in given.items()})


def optimizer_spec_of_parameter(name: str, parameter: torch.Tensor) -> OptimizerSpec | None:
    """The optimizer that ``apply_optimizer_in_backward`` has left on an unsharded table, or None.

    Args:
        name: Of the table, for messages.
        parameter: Its weights.

    Raises:
        ValueError: Several optimizers, one that does not run fused, or arguments that it does not take.
    """
    classes = getattr(parameter, "_optimizer_classes", ())
    if not classes:
        return None
    if len(classes) > 1:
        names = [optimizer.__name__ for optimizer in classes]
        raise ValueError(f"table {name!r} has {len(classes)} optimizers in backward, {names}: apply one")
    (optimizer,), (arguments,) = classes, getattr(parameter, "_optimizer_kwargs", ({},))
    if optimizer not in _IN_BACKWARD:
        raise ValueError(
            f"table {name!r}: {optimizer.__name__} in backward has no fused form for sharded tables; "
            "use torch.optim.SGD or tutorec.optim.RowWiseAdagrad"
        )
    defaults, without_effect = _IN_BACKWARD[optimizer]
    given = {
        key: value
        for key, value in arguments.items()
        if not (key in without_effect and value == without_effect[key]) and key not in ("foreach", "fused")
    }
    return optimizer_spec({**defaults, **given})


def _kind(optimizer: Any) -> OptimizerKind:
    # fbgemm's enum is recognised by its values, so that it need not be imported.
    value = getattr(optimizer, "value", optimizer)
    kind = _KINDS.get(value) if isinstance(value, str) else None
    if kind is None:
        raise ValueError(
            f"fused_params names the optimizer {value!r}, which does not run fused here: use one of "
            "'exact_sgd', 'exact_row_wise_adagrad' (EmbOptimType.EXACT_SGD, EmbOptimType.EXACT_ROWWISE_ADAGRAD)"
        )
    return kind
