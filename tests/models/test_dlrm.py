from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import tutorec
from tutorec.awaitable import LazyAwaitable
from tutorec.datasets.random import shop
from tutorec.datasets.utils import Batch
from tutorec.fx import symbolic_trace
from tutorec.models.dlrm import (
    DLRM,
    DLRM_DCN,
    DenseArch,
    DLRM_Projection,
    DLRMTrain,
    InteractionArch,
    InteractionProjectionArch,
    OverArch,
    SparseArch,
    choose,
)
from tutorec.modules.embedding_configs import EmbeddingBagConfig
from tutorec.modules.embedding_modules import EmbeddingBagCollection
from tutorec.sparse.keyed import KeyedTensor
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor
from tutorec.spmd import device


def _collection(*widths: int, shared: bool = False) -> EmbeddingBagCollection:
    features = [["user"], ["item", "clicked"]]
    tables = [
        EmbeddingBagConfig(
            500, width, f"t{i}", feature_names=[*features[i], *(["user"] if shared and i else [])]
        )
        for i, width in enumerate(widths)
    ]
    return EmbeddingBagCollection(tables)


def _model(shared: bool = False) -> DLRM:
    return DLRM(
        _collection(8, 8, shared=shared),
        4,
        dense_arch_layer_sizes=[16, 8],
        over_arch_layer_sizes=[16, 1],
    )


def _brute_force_interaction(dense: Tensor, sparse: Tensor) -> Tensor:
    vectors = torch.cat([dense[:, None], sparse], dim=1)
    n = vectors.shape[1]
    products = [
        (vectors[:, i] * vectors[:, j]).sum(dim=1) for i in range(n) for j in range(i + 1, n)
    ]
    return torch.cat([dense, torch.stack(products, dim=1)], dim=1)


@pytest.mark.parametrize("features", [1, 2, 7])
def test_interaction_is_all_inner_products_of_two_vectors_and_their_gradient(features: int) -> None:
    dense = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    sparse = torch.randn(5, features, 4, dtype=torch.float64, requires_grad=True)
    found = InteractionArch(features).double()(dense, sparse)
    expected = _brute_force_interaction(dense, sparse)
    assert found.shape == (5, 4 + features * (features + 1) // 2)
    torch.testing.assert_close(found, expected)
    weights = torch.randn_like(found)
    for one, other in zip(
        torch.autograd.grad((found * weights).sum(), [dense, sparse]),
        torch.autograd.grad((expected * weights).sum(), [dense, sparse]),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


def test_interaction_without_features_is_the_dense_vector() -> None:
    dense = torch.randn(3, 4)
    assert torch.equal(InteractionArch(0)(dense, torch.empty(3, 0, 4)), dense)


def test_interaction_has_no_state_and_survives_the_meta_device() -> None:
    arch = InteractionArch(2)
    assert not arch.state_dict()
    dense, sparse = torch.randn(3, 4).to(device()), torch.randn(3, 2, 4).to(device())
    expected = arch.to(device())(dense, sparse)
    with torch.device("meta"):
        made = InteractionArch(2)
    for on_meta in (made, arch.to("meta")):
        revived = on_meta.to_empty(device=device())
        revived.reset_parameters()
        assert torch.equal(revived(dense, sparse), expected)


@pytest.mark.parametrize("shared", [False, True])
def test_dlrm_gives_a_logit_per_sample_and_a_gradient_to_every_parameter(shared: bool) -> None:
    model = _model(shared)
    batch = next(shop().batches(32))
    logits = model(batch.dense_features, batch.sparse_features)
    assert logits.shape == (32, 1)
    logits.sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name


def test_dlrm_equals_its_parts_in_plain_torch() -> None:
    model = _model()
    batch = next(shop().batches(16))
    pooled = model.sparse_arch.embedding_bag_collection(batch.sparse_features).to_dict()
    sparse = torch.stack([pooled[name] for name in ("user", "item", "clicked")], dim=1)
    expected = model.over_arch(
        _brute_force_interaction(model.dense_arch(batch.dense_features), sparse)
    )
    torch.testing.assert_close(model(batch.dense_features, batch.sparse_features), expected)


def test_dlrm_has_torchrecs_parameter_names() -> None:
    assert set(_model().state_dict()) == {
        "sparse_arch.embedding_bag_collection.embedding_bags.t0.weight",
        "sparse_arch.embedding_bag_collection.embedding_bags.t1.weight",
        "dense_arch.model._mlp.0._linear.weight",
        "dense_arch.model._mlp.0._linear.bias",
        "dense_arch.model._mlp.1._linear.weight",
        "dense_arch.model._mlp.1._linear.bias",
        "over_arch.model.0._mlp.0._linear.weight",
        "over_arch.model.0._mlp.0._linear.bias",
        "over_arch.model.1.weight",
        "over_arch.model.1.bias",
    }


def test_dlrm_train_gives_the_mean_log_loss_and_detached_results() -> None:
    train = DLRMTrain(_model())
    batch = next(shop().batches(16))
    loss, (detached, logits, labels) = train(batch)
    p = logits.double().sigmoid()
    expected = -(labels * p.log() + (1 - labels) * (1 - p).log()).mean()
    assert float(loss.detach()) == pytest.approx(float(expected), rel=1e-5)
    assert loss.requires_grad and not (detached.requires_grad or logits.requires_grad)
    assert logits.shape == labels.shape == (16,)


class _Late(LazyAwaitable[KeyedTensor]):
    """What a sharded collection answers with."""

    def __init__(self, pooled: KeyedTensor) -> None:
        super().__init__()
        self._pooled = pooled

    def _wait_impl(self) -> KeyedTensor:
        return self._pooled


def test_sparse_arch_takes_an_awaitable_of_pooled_rows() -> None:
    class Sharded(EmbeddingBagCollection):
        def forward(self, features):
            return _Late(super().forward(features))

    local = _collection(8, 8)
    sharded = Sharded(local.embedding_bag_configs())
    sharded.load_state_dict(local.state_dict())
    features = next(shop().batches(16)).sparse_features
    assert torch.equal(SparseArch(sharded)(features), SparseArch(local)(features))


def test_sparse_arch_names_its_vectors_in_order() -> None:
    assert SparseArch(_collection(8, 8)).sparse_feature_names == ["user", "item", "clicked"]
    assert SparseArch(_collection(8, 8, shared=True)).sparse_feature_names == [
        "user@t0",
        "item",
        "clicked",
        "user@t1",
    ]


def test_a_collection_without_tables_is_refused_as_callers_of_torchrec_expect() -> None:
    empty = EmbeddingBagCollection(tables=[])
    for expected in (ValueError, AssertionError):
        with pytest.raises(expected, match="its collection has none"):
            DLRM(
                empty,
                dense_in_features=4,
                dense_arch_layer_sizes=[4, 2],
                over_arch_layer_sizes=[2, 1],
            )


def test_tables_of_different_widths_are_named() -> None:
    with pytest.raises(ValueError, match=r"embedding_dim is \{'t0': 8, 't1': 16\}"):
        DLRM(_collection(8, 16), 4, [8], [8, 1])


def test_a_dense_arch_of_another_width_is_named() -> None:
    with pytest.raises(ValueError, match=r"dense_arch_layer_sizes=\[16, 4\].*8"):
        DLRM(_collection(8, 8), 4, [16, 4], [8, 1])


def test_no_tables_and_one_layer_raise() -> None:
    with pytest.raises(ValueError, match="needs one or more tables"):
        SparseArch(_collection())
    with pytest.raises(ValueError, match=r"layer_sizes=\[1\]"):
        OverArch(8, [1])


def test_dense_arch_ends_in_its_last_layer() -> None:
    assert DenseArch(13, [32, 16, 3])(torch.randn(5, 13)).shape == (5, 3)


@pytest.mark.parametrize("shape", [(5, 3, 4), (5, 1, 4), (5, 2, 3), (5, 8)])
def test_interaction_of_other_vectors_than_its_features_is_refused(shape: tuple[int, ...]) -> None:
    expected = r"dense vectors are \[5, 4\] .*, not \[B, D\] and \[B, 2, D\]"
    with pytest.raises(ValueError, match=expected):
        InteractionArch(2)(torch.zeros(5, 4), torch.zeros(shape))


def test_dense_rows_for_other_samples_than_the_ids_are_refused() -> None:
    batch = next(shop().batches(6))
    with pytest.raises(ValueError, match=r"\[5, 8\].* features.* \[6, "):
        _model()(batch.dense_features[:5], batch.sparse_features)


@pytest.mark.parametrize("label", [2, -1, float("nan"), float("inf")])
def test_a_label_that_is_no_probability_is_named(label: float) -> None:
    batch = next(shop().batches(6))
    train, labels = DLRMTrain(_model()), batch.labels.float()
    labels[3] = label
    with pytest.raises(
        ValueError,
        match=f"the label of sample 3 is {float(label)}; the log loss wants 1 for a click",
    ):
        train(Batch(batch.dense_features, batch.sparse_features, labels))
    with tutorec.validation(False):
        train(Batch(batch.dense_features, batch.sparse_features, labels))
    labels[3] = 0.5
    assert train(Batch(batch.dense_features, batch.sparse_features, labels))[0].isfinite()
    assert train(Batch(batch.dense_features, batch.sparse_features, batch.labels.bool()))[
        0
    ].isfinite()


def test_a_traced_model_takes_other_batch_sizes() -> None:
    train = DLRMTrain(_model())
    traced = symbolic_trace(train)
    for samples in (3, 6):
        batch = next(shop().batches(samples))
        torch.testing.assert_close(traced(batch)[0], train(batch)[0])


def _crossed() -> DLRM_DCN:
    return DLRM_DCN(_collection(8, 8), 4, [16, 8], [16, 1], dcn_num_layers=2, dcn_low_rank_dim=3)


def _projected(second: list[int] | None = None) -> DLRM_Projection:
    return DLRM_Projection(_collection(8, 8), 4, [16, 8], [16, 1], [10, 3 * 8], second or [2 * 8])


@pytest.mark.parametrize("make", [_crossed, _projected])
def test_other_interactions_train_trace_and_take_a_rank_without_samples(make) -> None:
    model = make()
    train, batch = DLRMTrain(model), next(shop().batches(6))
    loss, _ = train(batch)
    loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
    traced = symbolic_trace(train)
    for samples in (3, 6):
        other = next(shop().batches(samples))
        torch.testing.assert_close(traced(other)[0], train(other)[0])
    none = torch.empty(0, dtype=torch.long)
    no_ids = KeyedJaggedTensor(batch.sparse_features.keys(), none, lengths=none)
    empty = Batch(torch.empty(0, batch.dense_features.shape[1]), no_ids, torch.empty(0))
    assert train(empty)[0].item() == 0
    with pytest.raises(ValueError, match=r"\[5, 8\].* features.* \[6, "):
        model(batch.dense_features[:5], batch.sparse_features)


def test_a_projection_is_all_inner_products_of_its_branches_vectors() -> None:
    branches = [torch.nn.Linear(12, 3 * 4), torch.nn.Linear(12, 2 * 4)]
    dense, sparse = torch.randn(5, 4), torch.randn(5, 2, 4)
    columns = torch.cat([dense[:, None], sparse], dim=1).reshape(5, 12)
    one, other = branches[0](columns).reshape(5, 3, 4), branches[1](columns).reshape(5, 4, 2)
    products = torch.stack(
        [(one[:, i] * other[:, :, j]).sum(1) for i in range(3) for j in range(2)], dim=1
    )
    found = InteractionProjectionArch(2, *branches)(dense, sparse)
    torch.testing.assert_close(found, torch.cat([dense, products], dim=1))


def test_a_branch_that_ends_beside_a_multiple_of_the_width_is_named() -> None:
    with pytest.raises(ValueError, match=r"interaction_branch2_layer_sizes=\[12\].*8"):
        _projected([12])


def test_the_dense_parts_are_compiled_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[tuple[nn.Module, object]] = []
    monkeypatch.setattr(
        nn.Module, "compile", lambda part, **options: compiled.append((part, options))
    )
    model = DLRM(_collection(4, 4), 3, [8, 4], [5, 1])
    names = list(model.state_dict())
    model.compile_dense_path(compile_mode="default")
    parts = model.dense_arch, model.inter_arch, model.over_arch
    assert compiled == [(part, {"mode": "default"}) for part in parts]
    assert list(model.state_dict()) == names


def test_all_dense_parts_are_made_on_their_device() -> None:
    tables = _collection(8, 8)
    meta = torch.device("meta")
    for model in (
        DLRM_DCN(tables, 4, [8], [16, 1], 2, 3, dense_device=meta),
        DLRM_Projection(tables, 4, [8], [16, 1], [8], [8], dense_device=meta),
    ):
        assert all(
            p.is_meta for name, p in model.named_parameters() if not name.startswith("sparse_arch.")
        )


@pytest.mark.parametrize(
    ("n", "k", "ways"), [(5, 2, 10), (5, 0, 1), (2, 3, 0), (3, -1, 0), (-1, 0, 0)]
)
def test_choose_counts_sets_and_none_where_there_are_none(n: int, k: int, ways: int) -> None:
    assert choose(n, k) == ways
