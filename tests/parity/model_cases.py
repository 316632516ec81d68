"""Cross networks and click models: outputs, names of weights, and the weights that a seed gives."""

from __future__ import annotations

from typing import Any

from registry import case, filled, jagged, numbers, of, same_width


def with_known_weights(module: Any) -> Any:
    """The module, every weight a formula of its place."""
    import torch

    with torch.no_grad():
        for index, parameter in enumerate(module.parameters()):
            parameter.copy_(
                torch.sin(torch.arange(parameter.numel()) + index).view_as(parameter) / 2
            )
    return module


@case
def cross_nets(root: str) -> Any:
    import torch

    made, found = of(root, "modules.crossnet"), {}
    nets = {
        "full": lambda: made.CrossNet(4, 3),
        "low rank": lambda: made.LowRankCrossNet(4, 3, low_rank=2),
        "vector": lambda: made.VectorCrossNet(4, 3),
        "mixture": lambda: made.LowRankMixtureCrossNet(4, 2, num_experts=3, low_rank=2),
        "one expert": lambda: made.LowRankMixtureCrossNet(4, 2, low_rank=2, activation=torch.tanh),
    }
    for name, make in nets.items():
        torch.manual_seed(7)
        net = make()
        drawn = {
            weight: [list(value.shape), numbers(value.sum())]
            for weight, value in net.state_dict().items()
        }
        found[name] = [drawn, numbers(with_known_weights(net)(filled(3, 4) / 4))]
    return found


@case
def click_models_with_other_interactions(root: str) -> Any:
    """A cross network, and two projections: logits, and the same after a step."""
    import torch

    models, batches, found = of(root, "models.dlrm"), of(root, "datasets.utils"), []
    for kind, arguments in (
        ("DLRM_DCN", {"dcn_num_layers": 2, "dcn_low_rank_dim": 3}),
        (
            "DLRM_Projection",
            {"interaction_branch1_layer_sizes": [5, 8], "interaction_branch2_layer_sizes": [12]},
        ),
    ):
        model = with_known_weights(
            getattr(models, kind)(
                embedding_bag_collection=same_width(root),
                dense_in_features=3,
                dense_arch_layer_sizes=[5, 4],
                over_arch_layer_sizes=[3, 1],
                **arguments,
            )
        )
        train = models.DLRMTrain(model)
        batch = batches.Batch(filled(3, 3) / 4, jagged(root), torch.tensor([1.0, 0.0, 1.0]))
        optimizer, losses = torch.optim.SGD(train.parameters(), lr=0.1), []
        for _ in range(3):
            optimizer.zero_grad()
            loss, (_, logits, _) = train(batch)
            loss.backward()
            optimizer.step()
            losses += [numbers(loss), numbers(logits)]
        found.append([losses, sorted(model.state_dict())])
    return found


@case
def fused_collection(root: str) -> Any:
    """Tables after three steps, under every optimizer that TorchRec's runs with on a CPU."""
    import torch

    fused, row_wise = (
        of(root, "modules.fused_embedding_modules"),
        of(root, "optim.rowwise_adagrad").RowWiseAdagrad,
    )
    found = {}
    for name, kind, arguments in (
        ("sgd", torch.optim.SGD, {"lr": 0.1}),
        ("sgd by default", torch.optim.SGD, {}),
        ("adagrad", torch.optim.Adagrad, {"learning_rate": 0.1}),
        ("row-wise adagrad", row_wise, {"lr": 0.1}),
    ):
        tables = same_width(root).embedding_bag_configs()
        made = with_known_weights(fused.FusedEmbeddingBagCollection(tables, kind, arguments))
        for _ in range(3):
            values = made(jagged(root)).values()
            values.backward(torch.arange(1.0, values.shape[1] + 1).expand_as(values) / 10)
        found[name] = {table: numbers(rows) for table, rows in made.state_dict().items()}
    return found


@case
def deepfm(root: str) -> Any:
    model = with_known_weights(of(root, "models.deepfm").SimpleDeepFMNN(3, same_width(root), 5, 4))
    return [numbers(model(filled(3, 3) / 4, jagged(root))), sorted(model.state_dict())]
