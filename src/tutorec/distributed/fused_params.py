"""Conversion of ``fused_params``, in its several spellings, to an `OptimizerSpec`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tutorec._kernels.specs import OptimizerKind, OptimizerSpec
from tutorec.distributed.core.cache_params import CACHE_KEYS, is_fp32
from tutorec.optim.emb_optim_type import EmbOptimType
from tutorec.optim.optimizers import PartialRowWiseAdam
from tutorec.optim.rates import check_rate
from tutorec.optim.rowwise_adagrad import RowWiseAdagrad

# Names as in EmbOptimType, fbgemm's enum of the same values, and OptimizerSpec. All updates are
# exact: the gradients of ids that repeat in a batch are summed before the one update of their row.
_KINDS: dict[str, OptimizerKind] = {
    "sgd": "sgd",
    "exact_sgd": "sgd",
    "adagrad": "adagrad",
    "exact_adagrad": "adagrad",
    "rowwise_adagrad": "rowwise_adagrad",
    "row_wise_adagrad": "rowwise_adagrad",
    "exact_row_wise_adagrad": "rowwise_adagrad",
    "adam": "adam",
    "partial_rowwise_adam": "partial_rowwise_adam",
    "partial_row_wise_adam": "partial_rowwise_adam",
}
_NUMBERS = ("learning_rate", "eps", "beta1", "beta2", "weight_decay", "max_gradient")
_SWITCHES = ("gradient_clipping", "stochastic_rounding")
_KEYS = ("optimizer", "learning_rate", "lr", *_NUMBERS[1:], *_SWITCHES)
# TorchRec's keys without effect here: pipelines call prefetch themselves.
_WITHOUT_EFFECT = ("prefetch_pipeline", "bounds_check_mode", "enforce_hbm")
_ADAM_DEFAULTS = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8}
_ADAM_NEUTRAL = {"amsgrad": False, "maximize": False, "capturable": False, "differentiable": False}
_ADAGRAD_NEUTRAL = {
    "lr_decay": 0,
    "initial_accumulator_value": 0,
    "maximize": False,
    "differentiable": False,
}
# Optimizers in backward with a fused form: their defaults, and the arguments that do not change it.
# The eps of Adagrad is the fused kernel's 1e-8, as in TorchRec, not the class's 1e-10.
_IN_BACKWARD: dict[type[torch.optim.Optimizer], tuple[dict[str, Any], dict[str, Any]]] = {
    torch.optim.SGD: (
        {"optimizer": "exact_sgd", "lr": 1e-3},
        {
            "momentum": 0,
            "dampening": 0,
            "nesterov": False,
            "maximize": False,
            "differentiable": False,
        },
    ),
    torch.optim.Adagrad: (
        {"optimizer": "exact_adagrad", "lr": 1e-2, "eps": 1e-8},
        _ADAGRAD_NEUTRAL,
    ),
    RowWiseAdagrad: (
        {"optimizer": "exact_row_wise_adagrad", "lr": 1e-2, "eps": 1e-8},
        _ADAGRAD_NEUTRAL,
    ),
    # torch's Adam adds weight decay to the gradient; fused Adam decouples it from the gradient, as
    # AdamW does.
    torch.optim.Adam: (
        {"optimizer": "adam", **_ADAM_DEFAULTS},
        {"weight_decay": 0, **_ADAM_NEUTRAL},
    ),
    torch.optim.AdamW: (
        {"optimizer": "adam", **_ADAM_DEFAULTS, "weight_decay": 1e-2},
        _ADAM_NEUTRAL,
    ),
    PartialRowWiseAdam: ({"optimizer": "partial_row_wise_adam", **_ADAM_DEFAULTS}, {}),
}
# Arguments that select an implementation, not a result.
_MANNER = ("foreach", "fused")


def optimizer_spec(fused_params: Mapping[str, Any] | None) -> OptimizerSpec:
    """The optimizer described by ``fused_params``; SGD with a learning rate of 0.01 by default.

    Args:
        fused_params: Keys are ``optimizer`` (`EmbOptimType`, fbgemm's member, or its value as
            text), ``learning_rate`` or ``lr``, ``eps``, for Adam variants ``beta1``, ``beta2`` and
            ``weight_decay``, and ``gradient_clipping=True`` with ``max_gradient`` (1.0 by default),
            which clips each element of the gradient of pooled rows. ``stochastic_rounding=True``
            rounds updated FP16 and BF16 rows up or down at random, the nearer the likelier; by
            default they are rounded to nearest. `cache_params` reads the keys in `CACHE_KEYS`.
            ``prefetch_pipeline``, ``bounds_check_mode`` and ``enforce_hbm`` have no effect:
            pipelines prefetch by themselves, and an invalid id is an error. ``output_dtype`` must
            be FP32.

    Raises:
        TypeError: A value that must be a number is not.
        ValueError: A key is unknown, the optimizer is not supported, or a number is negative or has
            no effect.

    Example:
        >>> optimizer_spec(
        ...     {"optimizer": "exact_row_wise_adagrad", "learning_rate": 0.02, "eps": 0.002}
        ... ).kind
        'rowwise_adagrad'
    """
    options = {
        key: value
        for key, value in (fused_params or {}).items()
        if key not in (*CACHE_KEYS, *_WITHOUT_EFFECT)
    }
    if "output_dtype" in options and not is_fp32(output := options.pop("output_dtype")):
        raise ValueError(
            f"fused_params: output_dtype={output} is not what rows leave sharded tables in, "
            "DataType.FP32; leave it out: get_qcomm_codecs_registry narrows what travels between "
            "ranks"
        )

    unknown = sorted(str(key) for key in options if key not in _KEYS)
    if unknown:
        raise ValueError(
            f"fused_params has unknown keys {unknown}: known are {', '.join((*_KEYS, *CACHE_KEYS))}"
        )

    if "lr" in options:
        if "learning_rate" in options:
            raise ValueError(
                "fused_params names the learning rate twice: "
                f"learning_rate={options['learning_rate']} and lr={options['lr']}; keep one"
            )
        options["learning_rate"] = options.pop("lr")

    optimizer_type = _kind(options.pop("optimizer", "exact_sgd"))
    if options.pop("gradient_clipping", False):
        options.setdefault("max_gradient", 1.0)
    elif "max_gradient" in options:
        raise ValueError(
            f"fused_params: max_gradient={options['max_gradient']} has no effect without "
            "gradient_clipping=True"
        )
    rounding = bool(options.pop("stochastic_rounding", False))
    for name, number in options.items():
        if not isinstance(number, int | float):
            raise TypeError(
                f"fused_params: {name}={number!r} is a {type(number).__name__}, not a number"
            )

    numbers = {name: float(number) for name, number in options.items()}
    return OptimizerSpec(optimizer_type, **numbers, stochastic_rounding=rounding)


def names_optimizer(fused_params: Mapping[str, Any] | None) -> bool:
    """Whether ``fused_params`` say which optimizer, or how fast it learns.

    Example:
        >>> names_optimizer({"learning_rate": 0.1}), names_optimizer({"cache_load_factor": 0.2})
        (True, False)
    """
    return any(key in (fused_params or {}) for key in ("optimizer", "learning_rate", "lr"))


def optimizer_spec_of_parameter(name: str, parameter: torch.Tensor) -> OptimizerSpec | None:
    """The optimizer that ``apply_optimizer_in_backward`` has set on an unsharded table, or None.

    Args:
        name: Name of the table, for messages.
        parameter: Its weights.

    Raises:
        ValueError: There are several optimizers, or one without a fused form, or arguments without
            a fused form.
    """
    classes = getattr(parameter, "_optimizer_classes", ())
    if not classes:
        return None

    if len(classes) > 1:
        names = [optimizer.__name__ for optimizer in classes]
        raise ValueError(f"table {name!r} has several optimizers in backward, {names}: apply one")
    (optimizer,) = classes
    (arguments,) = getattr(parameter, "_optimizer_kwargs", ({},))
    if optimizer not in _IN_BACKWARD:
        known = ", ".join(known_class.__name__ for known_class in _IN_BACKWARD)
        raise ValueError(
            f"table {name!r}: {optimizer.__name__} in backward has no fused form for sharded "
            f"tables; use one of {known}"
        )

    defaults, neutral = _IN_BACKWARD[optimizer]
    options = {**defaults, **{key: value for key, value in arguments.items() if key not in _MANNER}}
    for key, value in neutral.items():
        # Fused Adam uses another weight decay: see _IN_BACKWARD.
        if options.pop(key, value) != value:
            remedy = "use AdamW, whose decay it has" if key == "weight_decay" else "leave it out"
            raise ValueError(
                f"table {name!r}: {optimizer.__name__}({key}={arguments[key]!r}) in backward has "
                f"no fused form for sharded tables; {remedy}"
            )

    # The learning rate may have been changed since, by hand or by a schedule.
    for live in getattr(parameter, "_in_backward_optimizers", ()):
        options["lr"] = check_rate(
            live.param_groups[0]["lr"], f"table {name!r}: {optimizer.__name__} in backward"
        )
    if "betas" in options:
        options["beta1"], options["beta2"] = options.pop("betas")

    try:
        return optimizer_spec(options)
    except (TypeError, ValueError) as error:
        raise ValueError(f"table {name!r}: {optimizer.__name__} in backward: {error}") from None


def emb_optim_type(optimizer_class: type[torch.optim.Optimizer]) -> EmbOptimType:
    """The fused form of an optimizer class, without its arguments.

    Raises:
        ValueError: The class has no fused form.

    Example:
        >>> emb_optim_type(RowWiseAdagrad).name
        'EXACT_ROWWISE_ADAGRAD'
    """
    if optimizer_class not in _IN_BACKWARD:
        known = ", ".join(known_class.__name__ for known_class in _IN_BACKWARD)
        raise ValueError(f"Cannot cast {optimizer_class} to an EmbOptimType; use one of {known}")
    return EmbOptimType(_IN_BACKWARD[optimizer_class][0]["optimizer"])


def _kind(optimizer: Any) -> OptimizerKind:
    # fbgemm's enum is recognized by its values, so that fbgemm need not be imported.
    value = getattr(optimizer, "value", optimizer)
    optimizer_type = _KINDS.get(value) if isinstance(value, str) else None
    if optimizer_type is None:
        raise ValueError(
            f"fused_params names the optimizer {value!r}, which has no fused form here: use one of "
            f"{', '.join(map(repr, _KINDS))} (EmbOptimType.EXACT_SGD, ...)"
        )
    return optimizer_type
