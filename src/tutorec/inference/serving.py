"""Models for servers: plain tensors in, one tensor out.

A server in another language has tensors, not batches of id lists. `with_tensor_inputs` wraps a
model with a layer that builds its batch from tensors. A *request* is one set of such tensors by
name; its text form can be read by people, Python and ``cpp/tensor_text.h``.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.node import has_side_effect

from tutorec.sparse.keyed import KeyedTensor
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor

__all__ = [
    "ServedModel",
    "check_lists",
    "request_of",
    "tensors_from_text",
    "tensors_to_text",
    "with_tensor_inputs",
]

_DTYPES = {
    "int64": torch.int64,
    "int32": torch.int32,
    "float32": torch.float32,
    "float64": torch.float64,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


# Kept in a graph although its result is unused; TorchScript compiles it as it is.
@has_side_effect
@torch.fx.wrap
def check_lists(keys: list[str], values: Tensor, lengths: Tensor, weights: Tensor | None) -> None:
    """Check that the tensors of a request form a valid batch, so that a lookup stays in bounds.

    Args:
        keys: Its features.
        values: Ids of all bags [N].
        lengths: Ids per bag [F * B].
        weights: One per id [N], or None.

    Raises:
        ValueError: They do not match; under TorchScript a ``torch.jit.Error`` contains its text.

    Example:
        >>> import torch
        >>> check_lists(["item"], torch.tensor([7, 8]), torch.tensor([2, 1]), None)
        Traceback (most recent call last):
            ...
        ValueError: lengths add up to 3, and there are 2 values
    """
    if values.dim() != 1 or lengths.dim() != 1:
        raise ValueError(
            f"values and lengths have one dimension each, got {values.dim()} and {lengths.dim()}"
        )
    if lengths.numel() % max(len(keys), 1) != 0:
        raise ValueError(
            f"there are {lengths.numel()} lengths, not a multiple of the {len(keys)} features "
            f"{keys}"
        )
    if lengths.numel() > 0 and int(lengths.min()) < 0:
        samples = lengths.numel() // len(keys)
        at = int(torch.nonzero(lengths < 0)[0])
        raise ValueError(
            f"lengths has a negative number, {int(lengths[at])}, for feature "
            f"'{keys[at // samples]}', sample {at % samples}"
        )

    total = int(lengths.sum())
    if total != values.numel():
        raise ValueError(f"lengths add up to {total}, and there are {values.numel()} values")
    if lengths.numel() > 0 and int(lengths.max()) > values.numel():  # the sum has overflowed
        raise ValueError(
            f"lengths has the number {int(lengths.max())}, and there are {values.numel()} values"
        )
    if weights is not None and weights.numel() != values.numel():
        raise ValueError(f"there are {weights.numel()} weights for {values.numel()} values")
    if weights is not None and weights.is_complex():
        raise ValueError(
            f"{weights.numel()} weights are complex numbers, and a weight is a real one; give "
            "their real part: weights.real"
        )


def batch_of_lists(
    keys: list[str], values: Tensor, lengths: Tensor, weights: Tensor | None = None
) -> KeyedJaggedTensor:
    """Build a batch from a request's tensors; a graph checks them first, as eager code does.

    Args:
        keys: Its features.
        values: Ids of all bags [N].
        lengths: Ids per bag [F * B].
        weights: One per id [N], or None.
    """
    if isinstance(values, torch.fx.Proxy):
        check_lists(keys, values, lengths, weights)
    return KeyedJaggedTensor(keys, values, weights, lengths)


class ServedModel(torch.fx.GraphModule):
    """A model behind plain tensors, which calls it without recording gradients."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it on tensors."""
        with torch.no_grad():
            return super().__call__(*args, **kwargs)


def with_tensor_inputs(
    model: nn.Module, example: Sequence[Tensor | KeyedJaggedTensor]
) -> ServedModel:
    """Wrap a model that takes batches of id lists, so that its inputs are plain tensors.

    A batch becomes ``values`` [N] and ``lengths`` [F * B], and with weights also ``weights`` [N];
    its features and their order are those of the example. Other tensors keep the names of the
    model's ``forward``. If a model takes several batches, the names begin with those of its
    arguments. The result is a tensor, or a tuple of tensors; a ``KeyedTensor`` becomes its values.

    Args:
        model: The model; it is called, not copied, and can be trained on. The result records no
            gradients.
        example: Its inputs, in the order of its arguments; also run, to find the form of the
            result.

    Returns:
        A module to script, export or call.

    Raises:
        TypeError: The result contains something other than a tensor or a KeyedTensor.
        ValueError: The number of inputs is not the number of arguments, or the batch is a variable
            batch.

    Example:
        >>> import torch
        >>> from tutorec.modules.embedding_configs import EmbeddingBagConfig
        >>> from tutorec.modules.embedding_modules import EmbeddingBagCollection
        >>> tables = [
        ...     EmbeddingBagConfig(
        ...         num_embeddings=10,
        ...         embedding_dim=4,
        ...         name="item_table",
        ...         feature_names=["item"],
        ...     )
        ... ]
        >>> batch = KeyedJaggedTensor(
        ...     ["item"], torch.tensor([3, 1, 3]), lengths=torch.tensor([2, 0, 1])
        ... )
        >>> served = with_tensor_inputs(EmbeddingBagCollection(tables), [batch])
        >>> served(values=torch.tensor([7]), lengths=torch.tensor([0, 1])).shape
        torch.Size([2, 4])
    """
    names = _argument_names(model, len(example))
    several = sum(isinstance(value, KeyedJaggedTensor) for value in example) > 1
    graph = torch.fx.Graph()
    # TorchScript's signature follows the placeholders, which must come first.
    inputs: list[Any] = [
        {
            field: graph.placeholder(f"{name}_{field}" if several else field, Tensor)
            for field in _fields(name, value)
        }
        if isinstance(value, KeyedJaggedTensor)
        else graph.placeholder(name, Tensor)
        for name, value in zip(names, example, strict=True)
    ]
    values = [
        graph.call_function(batch_of_lists, (), {"keys": list(value.keys()), **nodes})
        if isinstance(value, KeyedJaggedTensor)
        else nodes
        for value, nodes in zip(example, inputs, strict=True)
    ]
    result = graph.call_module("model", tuple(values))

    with torch.no_grad():
        graph.output(_tensors_of(graph, result, model(*example)))
    return ServedModel({"model": model}, graph, type(model).__name__)


def request_of(
    served: torch.fx.GraphModule, *inputs: Tensor | KeyedJaggedTensor
) -> dict[str, Tensor]:
    """The tensors by name with which to call a served model, from inputs of the original model.

    Args:
        served: Made by `with_tensor_inputs`.
        inputs: A dense tensor, a batch, and so on, in the order of the model's arguments.

    Raises:
        ValueError: The inputs give another number of tensors; a batch has other features, or
            another order.
    """
    names = [node.name for node in served.graph.nodes if node.op == "placeholder"]
    keys = [node.kwargs["keys"] for node in served.graph.nodes if node.target is batch_of_lists]

    tensors = []
    for value in inputs:
        if not isinstance(value, KeyedJaggedTensor):
            tensors.append(value)
            continue
        expected = keys.pop(0) if keys else None
        if value.keys() != expected:
            raise ValueError(
                f"the model is served for a batch of {expected}, and the given batch has the "
                f"keys {value.keys()}"
            )
        weights = value.weights_or_none()
        tensors += [value.values(), value.lengths(), *([] if weights is None else [weights])]

    if len(tensors) != len(names):
        raise ValueError(
            f"the model is served with {len(names)} tensors {names}; the inputs hold {len(tensors)}"
        )
    return dict(zip(names, tensors, strict=True))


def tensors_to_text(tensors: Mapping[str, Tensor]) -> str:
    """Tensors as text: for each a line with name, dtype and sizes, and a line with its elements.

    Args:
        tensors: By name; int64, int32, float32 or float64.

    Raises:
        ValueError: A name contains a space, or a dtype is not supported.

    Example:
        >>> import torch
        >>> print(
        ...     tensors_to_text(
        ...         {"values": torch.tensor([7, 8]), "dense": torch.tensor([[0.5], [0.1]])}
        ...     )
        ... )
        values int64 2
        7 8
        dense float32 2 1
        0.5 0.10000000149011612
    """
    lines = []
    for name, tensor in tensors.items():
        if tensor.dtype not in _NAMES or len(name.split()) != 1:
            raise ValueError(
                f"tensor {name!r} is {tensor.dtype}; a request holds {list(_DTYPES)} and no "
                "space in a name"
            )
        lines.append(" ".join([name, _NAMES[tensor.dtype], *map(str, tensor.shape)]))
        lines.append(" ".join(map(repr, tensor.detach().reshape(-1).tolist())))

    return "\n".join(lines)


def tensors_from_text(text: str) -> dict[str, Tensor]:
    r"""Parse tensors from their text form, bit for bit.

    Args:
        text: As `tensors_to_text` and the C++ loader write it.

    Raises:
        ValueError: A line is not a header, or its elements do not match dtype and sizes.

    Example:
        >>> tensors_from_text("answer float32 1 2\n0.25 1e-3")
        {'answer': tensor([[0.2500, 0.0010]])}
    """
    tensors = {}
    lines = iter(text.splitlines())
    for line in lines:
        if not line.strip():
            continue

        name, *rest = line.split()
        numbers = next(lines, "").split()
        try:
            if name in tensors:
                raise ValueError(f"{name} is there twice")
            (dtype, *size_texts) = rest
            tensor_dtype = _DTYPES[dtype]
            sizes = [int(size) for size in size_texts]
            if min(sizes, default=0) < 0:
                raise ValueError(f"the size {min(sizes)} is negative")
            tensors[name] = _numbers(numbers, tensor_dtype).reshape(sizes)
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            reason = str(error).partition("\n")[0]
            raise ValueError(
                f"not the text of a tensor: {line!r} with {len(numbers)} numbers: {reason}"
            ) from error

    return tensors


def _numbers(texts: list[str], dtype: torch.dtype) -> Tensor:
    """The elements of a tensor from their text [N]."""
    if not dtype.is_floating_point:
        return torch.tensor([int(number) for number in texts], dtype=dtype)

    parsed = torch.tensor([float(number) for number in texts], dtype=dtype)
    for index in parsed.isinf().nonzero().flatten().tolist():
        if "inf" not in texts[index].lower():
            raise ValueError(f"{texts[index]} does not fit")
    return parsed


def _argument_names(model: nn.Module, inputs: int) -> list[str]:
    """Names of the arguments of a model's forward for the inputs."""
    arguments = inspect.signature(model.forward).parameters
    names = list(arguments)
    needed = [name for name, argument in arguments.items() if argument.default is argument.empty]
    if not len(needed) <= inputs <= len(names):
        raise ValueError(
            f"{type(model).__name__}.forward takes {names}, and the example has {inputs} inputs"
        )
    return names[:inputs]


def _fields(name: str, batch: KeyedJaggedTensor) -> list[str]:
    """The tensors of a batch."""
    if batch.variable_stride_per_key():
        raise ValueError(f"input {name!r} has a number of samples for each feature, not one")

    return (
        ["values", "lengths"]
        if batch.weights_or_none() is None
        else ["values", "lengths", "weights"]
    )


def _tensors_of(graph: torch.fx.Graph, result: torch.fx.Node, example: Any) -> Any:
    """The tensors of a result, as nodes."""
    if isinstance(example, Tensor):
        return result
    if isinstance(example, KeyedTensor):
        return graph.call_method("values", (result,))
    if isinstance(example, tuple) and example:
        elements = [
            graph.call_function(operator.getitem, (result, index)) for index in range(len(example))
        ]
        return tuple(
            _tensors_of(graph, element, value)
            for element, value in zip(elements, example, strict=True)
        )

    raise TypeError(f"the model returns a {type(example).__name__}, not a tensor or a KeyedTensor")
