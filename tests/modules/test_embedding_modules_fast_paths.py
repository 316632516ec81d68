"""EmbeddingBagCollection pools the same rows on every road: one call for all tables, one for each,
traced, exported.
"""

import copy
import io
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from reference import pool_collection
from strategies import jagged_batches, rows_of, table_sets
from torch import Tensor, nn

from tutorec._kernels.backend import backend, use_backend
from tutorec._kernels.older_torch import BEFORE_2_11
from tutorec._kernels.scattered_tables import ScatteredTables
from tutorec._validation import validation
from tutorec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from tutorec.modules.embedding_modules import EmbeddingBagCollection
from tutorec.sparse.keyed_jagged import KeyedJaggedTensor
from tutorec.types import DataType

needs_fbgemm = pytest.mark.skipif(backend().name != "fbgemm", reason="no fbgemm")
BACKENDS = ["torch", pytest.param("fbgemm", marks=needs_fbgemm)]
KEYS = ["user", "other", "item"]


def collection(
    pooling: PoolingType = PoolingType.SUM, weighted: bool = False, **more: object
) -> EmbeddingBagCollection:
    tables = [
        EmbeddingBagConfig(7, 8, "t1", feature_names=["item", "user"], pooling=pooling, **more),  # type: ignore[arg-type]
        EmbeddingBagConfig(9, 4, "t2", feature_names=["item"], pooling=pooling, **more),  # type: ignore[arg-type]
    ]
    return EmbeddingBagCollection(tables, is_weighted=weighted)


def batch(weighted: bool = False) -> KeyedJaggedTensor:
    """Two samples; ``other`` belongs to no table, and keys stand in another order than the tables
    read them.
    """
    ids = torch.tensor([1, 2, 99, 6, 6, 0])
    weights = torch.tensor([0.5, 1.0, 7.0, 2.0, -1.0, 0.25]) if weighted else None
    return KeyedJaggedTensor(KEYS, ids, weights, lengths=torch.tensor([2, 0, 0, 1, 2, 1]))


def table_by_table(ebc: EmbeddingBagCollection, features: KeyedJaggedTensor) -> Tensor:
    """With gradients wanted, each table is looked up by itself."""
    with torch.enable_grad():
        return ebc(features).values().detach()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each call for all tables: how many features it had."""
    seen: list[int] = []
    pool = ScatteredTables.pool

    def counted(self: ScatteredTables, *arguments: object) -> Tensor:
        seen.append(self.geometry.starts.numel())
        return pool(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(ScatteredTables, "pool", counted)
    return seen


@pytest.mark.parametrize("name", BACKENDS)
@given(data=st.data(), weighted=st.booleans())
def test_rows_without_grad_equal_plain_loops(
    name: str, data: st.DataObject, weighted: bool
) -> None:
    pooling = data.draw(
        st.sampled_from(
            [PoolingType.SUM, PoolingType.SQRTN, *([] if weighted else [PoolingType.MEAN])]
        )
    )
    tables = data.draw(table_sets(pooling=pooling))
    drawn = data.draw(jagged_batches(rows_of(tables), weighted=weighted))
    widened = [  # half of the examples get widths that fbgemm can address
        EmbeddingBagConfig(
            one.num_embeddings,
            one.embedding_dim * 4,
            one.name,
            feature_names=one.feature_names,
            pooling=pooling,
        )
        for one in tables
    ]
    chosen = data.draw(st.sampled_from([tables, widened]))
    features = drawn.kjt()
    order = data.draw(st.permutations(range(len(features.keys()))))
    with use_backend(name), torch.no_grad():
        ebc = EmbeddingBagCollection(chosen, is_weighted=weighted)
        pooled = ebc(features.permute(list(order))).values()
    weights = {key: table.weight.detach() for key, table in ebc.embedding_bags.items()}
    expected = pool_collection(chosen, weights, drawn.ids, drawn.weights, drawn.samples)
    torch.testing.assert_close(pooled, expected, rtol=1e-5, atol=1e-6)


@needs_fbgemm
@pytest.mark.parametrize("pooling", [PoolingType.SUM, PoolingType.MEAN, PoolingType.SQRTN])
@torch.no_grad()
def test_one_call_is_made_for_all_tables_and_equals_table_by_table(
    calls: list[int], pooling: PoolingType
) -> None:
    ebc = collection(pooling)
    pooled = ebc(batch())
    assert calls == [3]
    torch.testing.assert_close(pooled.values(), table_by_table(ebc, batch()))
    assert pooled.keys() == ["item@t1", "user", "item@t2"]
    with use_backend("torch"):
        torch.testing.assert_close(pooled.values(), ebc(batch()).values())
    assert calls == [3]


@needs_fbgemm
@torch.no_grad()
def test_one_call_reads_tables_where_they_are_now(calls: list[int]) -> None:
    ebc = collection()

    def weights() -> list[nn.Parameter]:
        return list(ebc.parameters())

    def replace_data() -> None:
        for weight in weights():
            weight.data = torch.rand_like(weight)

    def assign() -> None:
        ebc.load_state_dict(
            {name: torch.rand_like(weight) for name, weight in ebc.state_dict().items()},
            assign=True,
        )

    def in_place() -> None:
        weights()[0].mul_(2.0)

    def swap_tables() -> None:
        first, second = weights()
        first.data, second.data = torch.rand(7, 8), first.data.view(-1)[:36].view(9, 4)

    def transpose() -> None:  # same memory, same numbers of rows and columns, other strides
        weights()[0].data = torch.rand(8, 7).t()

    def move() -> None:
        ebc.to(torch.float64).to(torch.float32)

    for change in (replace_data, in_place, assign, move, swap_tables, transpose):
        before = ebc(batch()).values()
        change()
        after = ebc(batch()).values()
        torch.testing.assert_close(after, table_by_table(ebc, batch()))
        assert not torch.equal(before, after) or change is move, change.__name__


@needs_fbgemm
@torch.no_grad()
def test_tied_tables_are_one_table(calls: list[int]) -> None:
    tables = [
        EmbeddingBagConfig(5, 4, name, feature_names=[name + "_id"]) for name in ("a", "b", "c")
    ]
    ebc = EmbeddingBagCollection(tables)
    ebc.embedding_bags["c"].weight = ebc.embedding_bags["a"].weight
    features = KeyedJaggedTensor(
        ["a_id", "b_id", "c_id"], torch.tensor([4, 1, 4]), lengths=torch.tensor([1, 1, 1])
    )
    pooled = ebc(features)
    assert calls == [3]
    assert torch.equal(pooled["a_id"], pooled["c_id"])
    torch.testing.assert_close(pooled.values(), table_by_table(ebc, features))


@needs_fbgemm
@pytest.mark.parametrize("weighted", [False, True])
@torch.no_grad()
def test_float16_tables_are_summed_in_float32(calls: list[int], weighted: bool) -> None:
    ebc = collection(weighted=weighted, data_type=DataType.FP16)
    pooled = ebc(batch(weighted)).values()
    assert calls == [3]
    assert pooled.dtype == torch.float32
    torch.testing.assert_close(pooled, table_by_table(ebc, batch(weighted)), rtol=1e-3, atol=1e-3)


@torch.no_grad()
def test_bfloat16_tables_go_table_by_table(calls: list[int]) -> None:
    ebc = collection(data_type=DataType.BF16)
    assert torch.equal(ebc(batch()).values(), table_by_table(ebc, batch()))
    assert calls == []


@torch.no_grad()
def test_many_ids_on_several_threads_go_table_by_table(calls: list[int]) -> None:
    ebc = collection()
    many = KeyedJaggedTensor(
        ["item", "user"], torch.ones(100_000, dtype=torch.int64), lengths=torch.tensor([50_000] * 2)
    )
    torch.set_num_threads(2)
    pooled = ebc(many).values()
    assert calls == []
    torch.set_num_threads(1)
    torch.testing.assert_close(pooled, ebc(many).values())
    assert calls == ([3] if backend().name == "fbgemm" else [])


@torch.no_grad()
def test_hooks_and_replaced_bags_are_called() -> None:
    ebc, seen = collection(), []
    handle = ebc.embedding_bags["t2"].register_forward_hook(
        lambda *parts: seen.append(parts[2].shape)
    )
    ebc(batch())
    handle.remove()
    assert seen == [torch.Size([2, 4])]

    class Doubled(nn.EmbeddingBag):
        def forward(self, *arguments: Tensor) -> Tensor:
            return 2.0 * super().forward(*arguments)

    plain = ebc(batch())["item@t2"]
    twice = Doubled(9, 4, mode="sum", include_last_offset=True)
    twice.weight = ebc.embedding_bags["t2"].weight
    ebc.embedding_bags["t2"] = twice
    torch.testing.assert_close(ebc(batch())["item@t2"], 2.0 * plain)


def test_frozen_tables_make_one_call_and_weights_keep_their_gradient(calls: list[int]) -> None:
    ebc = collection(weighted=True).requires_grad_(False)
    ebc(batch(weighted=True))
    assert calls == ([3] if backend().name == "fbgemm" else [])
    calls.clear()
    features = batch(weighted=True)
    features.weights().requires_grad_()
    ebc(features).values().sum().backward()
    assert calls == []
    assert features.weights().grad is not None


@pytest.mark.parametrize("name", BACKENDS)
@torch.no_grad()
def test_a_batch_without_samples_gives_no_rows(name: str) -> None:
    with use_backend(name):
        empty = KeyedJaggedTensor(
            ["item", "user"],
            torch.zeros(0, dtype=torch.int64),
            lengths=torch.zeros(0, dtype=torch.int64),
        )
        assert collection()(empty).values().shape == (0, 20)
        assert EmbeddingBagCollection([])(batch()).values().shape == (2, 0)


@pytest.mark.parametrize("name", BACKENDS)
@torch.no_grad()
def test_an_id_outside_its_table_is_an_error_without_checks_too(name: str) -> None:
    bad = KeyedJaggedTensor(["item", "user"], torch.tensor([1, 2000]), lengths=torch.tensor([1, 1]))
    with use_backend(name), validation(False), pytest.raises(RuntimeError):
        collection()(bad)


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("name", BACKENDS)
def test_a_variable_batch_is_spread_by_its_inverse_indices(name: str, grad: bool) -> None:
    ebc = collection()
    stored = KeyedJaggedTensor(
        ["user", "item"],
        torch.tensor([5, 3, 1, 2]),
        lengths=torch.tensor([1, 1, 0, 2]),
        stride_per_key_per_rank=[[1], [3]],
        inverse_indices=(["item", "user"], torch.tensor([[2, 0, 1, 2], [0, 0, 0, 0]])),
    )
    full = KeyedJaggedTensor(
        ["user", "item"],
        torch.tensor([5] * 4 + [1, 2, 3, 1, 2]),
        lengths=torch.tensor([1, 1, 1, 1, 2, 1, 0, 2]),
    )
    with use_backend(name), torch.set_grad_enabled(grad):
        pooled = ebc(stored)
        assert pooled.keys() == ["item@t1", "user", "item@t2"]
        torch.testing.assert_close(pooled.values(), ebc(full).values())


def test_a_variable_batch_without_inverse_indices_is_refused() -> None:
    stored = KeyedJaggedTensor(
        ["user", "item"],
        torch.tensor([5, 3]),
        lengths=torch.tensor([1, 1, 0]),
        stride_per_key_per_rank=[[1], [2]],
    )
    with pytest.raises(ValueError, match=r"\{'item': 2, 'user': 1\}.*inverse_indices"):
        collection()(stored)
    inverse = (["item"], torch.tensor([[0, 1]]))
    lacking = KeyedJaggedTensor(
        ["user", "item"],
        torch.tensor([5, 3]),
        lengths=torch.tensor([1, 1, 0]),
        stride_per_key_per_rank=[[1], [2]],
        inverse_indices=inverse,
    )
    with (
        validation(False),
        pytest.raises(KeyError, match=r"inverse_indices.*features \['user'\]"),
    ):
        collection()(lacking)


def test_a_tensor_dict_is_taken() -> None:
    tensordict = pytest.importorskip("tensordict")
    from tutorec.sparse.tensor_dict import kjt_to_td

    ebc = collection()
    td = kjt_to_td(batch())
    assert isinstance(td, tensordict.TensorDict)
    assert torch.equal(ebc(td).values(), ebc(batch()).values())


class Rows(nn.Module):
    """Tensors in, tensor out: what tracers take."""

    def __init__(self) -> None:
        super().__init__()
        self.ebc = collection()

    def forward(self, values: Tensor, lengths: Tensor) -> Tensor:
        return self.ebc(KeyedJaggedTensor(KEYS, values, lengths=lengths)).values()


def exported(model: nn.Module, arguments: tuple[Tensor, ...]) -> nn.Module:
    return torch.export.export(model, arguments).module()


def compiled(model: nn.Module, arguments: tuple[Tensor, ...]) -> Callable[..., Tensor]:
    torch._dynamo.reset()
    return torch.compile(model, backend="eager", fullgraph=True)


def traced(model: nn.Module, arguments: tuple[Tensor, ...]) -> nn.Module:
    return torch.jit.trace(model, arguments, check_trace=False)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize(
    "transform",
    [
        exported,
        pytest.param(
            compiled,
            marks=pytest.mark.skipif(BEFORE_2_11, reason="torch 2.8 compiles no list.count()"),
        ),
        traced,
    ],
)
def test_transformed_collections_pool_the_same_rows(
    transform: Callable[..., Callable[..., Tensor]], grad: bool
) -> None:
    model, arguments = Rows(), (batch().values(), batch().lengths())
    with torch.set_grad_enabled(grad):
        expected = model(*arguments)
        torch.testing.assert_close(transform(model, arguments)(*arguments), expected)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("grad", [True, False])
def test_a_traced_collection_scripts_saves_and_loads(grad: bool) -> None:
    ebc = collection()
    with torch.set_grad_enabled(grad):
        graph = torch.fx.symbolic_trace(ebc)
        expected = ebc(batch()).values()
        torch.testing.assert_close(graph(batch()).values(), expected)
        stream = io.BytesIO()
        torch.jit.save(torch.jit.script(graph), stream)
        stream.seek(0)
        assert torch.jit.load(stream) is not None


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("pooling", "weighted"),
    [
        (PoolingType.SUM, False),
        (PoolingType.SUM, True),
        (PoolingType.MEAN, False),
        (PoolingType.SQRTN, False),
        (PoolingType.SQRTN, True),
    ],
)
def test_a_scripted_collection_pools_the_same_rows(pooling: PoolingType, weighted: bool) -> None:
    tables = [
        EmbeddingBagConfig(10, 4, "t1", feature_names=["f2", "f1"], pooling=pooling),
        EmbeddingBagConfig(10, 8, "t2", feature_names=["f1"], pooling=pooling),
    ]
    ebc = EmbeddingBagCollection(tables, is_weighted=weighted)
    weights = torch.tensor([0.5, 2.0, 1.0, 3.0]) if weighted else None
    features = KeyedJaggedTensor(
        ["f1", "f2"], torch.tensor([0, 1, 2, 3]), weights, torch.tensor([2, 1, 0, 1])
    )
    pooled = torch.jit.script(ebc)(features)
    assert pooled.keys() == ["f2", "f1@t1", "f1@t2"]
    torch.testing.assert_close(pooled.values(), ebc(features).values())


@torch.no_grad()
def test_copies_look_up_their_own_tables() -> None:
    ebc = collection()
    twin = copy.deepcopy(ebc)
    before = twin(batch()).values()
    for table in ebc.parameters():
        table.zero_()
    assert torch.equal(twin(batch()).values(), before)
    assert float(ebc(batch()).values().abs().max()) == 0.0
