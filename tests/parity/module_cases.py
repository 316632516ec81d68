"""Collections of tables: outputs, names, dtypes, and steps with the optimizer in the
backward pass.
"""

from __future__ import annotations

import warnings
from typing import Any

from jagged_cases import shared, variable
from registry import case, collection, filled, jagged, numbers, of, same_width


@case
def pooled_sum(root: str) -> Any:
    out = collection(root)(jagged(root))
    return [out.keys(), out.length_per_key(), numbers(out.values())]


@case
def pooled_mean(root: str) -> Any:
    return numbers(collection(root, "MEAN")(jagged(root)).values())


@case
def pooled_weighted(root: str) -> Any:
    return numbers(collection(root, weighted=True)(jagged(root, weighted=True)).values())


@case
def names_of_shared_features(root: str) -> Any:
    configs, modules = of(root, "modules.embedding_configs"), of(root, "modules.embedding_modules")
    tables = [
        configs.EmbeddingBagConfig(
            name=name, embedding_dim=4, num_embeddings=10, feature_names=features
        )
        for name, features in (("a", ["item", "user"]), ("b", ["item"]))
    ]
    made = modules.EmbeddingBagCollection(tables=tables)
    return [
        modules.get_embedding_names_by_table(tables),
        sorted(made.state_dict()),
        str(made.embedding_bags),
    ]


@case
def click_model(root: str) -> Any:
    import torch

    model = of(root, "models.dlrm").DLRM(
        embedding_bag_collection=same_width(root),
        dense_in_features=3,
        dense_arch_layer_sizes=[5, 4],
        over_arch_layer_sizes=[3, 1],
    )
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            parameter.copy_(
                torch.sin(torch.arange(parameter.numel()) + index).view_as(parameter) + 0.2
            )
    return [numbers(model(filled(3, 3), jagged(root))), sorted(model.state_dict())]


def sequences(root: str, **arguments: Any) -> Any:
    """Two tables of width 4 with known rows, one of them for both features."""
    import torch

    configs, modules = of(root, "modules.embedding_configs"), of(root, "modules.embedding_modules")
    tables = [
        configs.EmbeddingConfig(
            name=name, embedding_dim=4, num_embeddings=10, feature_names=features
        )
        for name, features in (("t_both", ["item", "user"]), ("t_user", ["user"]))
    ]
    made = modules.EmbeddingCollection(tables=tables, **arguments)
    with torch.no_grad():
        for index, table in enumerate(made.embeddings.values()):
            table.weight.copy_(filled(*table.weight.shape, first=index))
    return made


def sequence_parts(found: Any) -> Any:
    return {
        name: [
            numbers(jt.values()),
            jt.lengths().tolist(),
            None if jt.weights_or_none() is None else jt.weights().tolist(),
        ]
        for name, jt in found.items()
    }


@case
def sequences_of_rows(root: str) -> Any:
    made, indices = sequences(root), sequences(root, need_indices=True)
    return {
        "rows": sequence_parts(made(jagged(root))),
        "weighted": sequence_parts(made(jagged(root, weighted=True))),
        "indices": sequence_parts(indices(jagged(root))),
        "variable": {
            name: jt.lengths().tolist() for name, jt in made(variable(root, weighted=False)).items()
        },
        "names": [
            made.embedding_names_by_table(),
            made.need_indices(),
            made.embedding_dim(),
            sorted(made.state_dict()),
        ],
        "text": str(made),
    }


@case
def half_precision_tables(root: str) -> Any:
    """Tables of float16 give float32."""
    import torch

    configs, modules, types = (
        of(root, "modules.embedding_configs"),
        of(root, "modules.embedding_modules"),
        of(root, "types"),
    )
    common = {"embedding_dim": 4, "num_embeddings": 10, "data_type": types.DataType.FP16}
    found = []
    for config, made, tables in (
        (configs.EmbeddingBagConfig, modules.EmbeddingBagCollection, "embedding_bags"),
        (configs.EmbeddingConfig, modules.EmbeddingCollection, "embeddings"),
    ):
        one = made(
            tables=[config(name="t", feature_names=["item"], **common)], device=torch.device("cpu")
        )
        weight = getattr(one, tables)["t"].weight
        with torch.no_grad():
            weight.copy_(filled(*weight.shape))
        out = one(jagged(root))
        values = (out if tables == "embedding_bags" else out["item"]).values()
        found.append(
            [
                str(weight.dtype),
                str(values.dtype),
                [[round(x, 2) for x in row] for row in values.tolist()],
            ]
        )
    return found


@case
def pooled_variable_batch(root: str) -> Any:
    """Each feature's samples are looked up once; the indices say which of them a sample of the
    batch has.
    """
    out = collection(root)(shared(root, ["user", "item"]))
    return [out.keys(), numbers(out.values())]


@case
def names_of_parameters(root: str) -> Any:
    """What a checkpoint's keys are."""
    return [sorted(collection(root).state_dict()), sorted(sequences(root).state_dict())]


def steps_in_backward(root: str, optimizer: Any, arguments: dict[str, Any], steps: int = 3) -> Any:
    """Tables after steps; a pooled number's gradient is its column's number. One id comes twice,
    most never.
    """
    import torch

    made = collection(root)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        of(root, "optim.apply_optimizer_in_backward")
        of(root, "optim").apply_optimizer_in_backward(optimizer, made.parameters(), arguments)
    for _ in range(steps):
        values = made(jagged(root)).values()
        values.backward(torch.arange(1.0, values.shape[1] + 1).expand_as(values))
    gradients = [parameter.grad is None for parameter in made.parameters()]
    return {
        "tables": {name: numbers(t) for name, t in sorted(made.state_dict().items())},
        "no gradient": gradients,
    }


@case
def in_backward_sgd(root: str) -> Any:
    import torch

    return steps_in_backward(root, torch.optim.SGD, {"lr": 0.1})


@case
def in_backward_adagrad(root: str) -> Any:
    import torch

    return steps_in_backward(root, torch.optim.Adagrad, {"lr": 0.1})


@case
def in_backward_rowwise_adagrad(root: str) -> Any:
    kind = of(root, "optim.rowwise_adagrad").RowWiseAdagrad
    return steps_in_backward(root, kind, {"lr": 0.1, "eps": 1e-8})


@case
def rowwise_adagrad_on_dense_gradients(root: str) -> Any:
    import torch

    kind, weight = (
        of(root, "optim.rowwise_adagrad").RowWiseAdagrad,
        torch.nn.Parameter(filled(3, 4)),
    )
    optimizer = kind([weight], lr=0.1, weight_decay=0.01, eps=1e-8)
    for _ in range(2):
        weight.grad = torch.tensor([[1.0, 2, 3, 4], [0, 0, 0, 0], [1, 1, 1, 1]])
        optimizer.step()
    [state] = optimizer.state_dict()["state"].values()
    return [
        numbers(weight),
        {key: [list(value.shape), numbers(value)] for key, value in sorted(state.items())},
    ]
