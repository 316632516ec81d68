"""`bench kjt` and `bench ebc` on small sizes, beside a peer that is tutorec under another name."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks import ebc, kjt, memory
from benchmarks.harness import Bar, Ratio, Report, Sample
from benchmarks.peer import Library, chosen, libraries, time_each
from benchmarks.runner import Options

_FUSED = """
from tutorec.modules.embedding_modules import EmbeddingBagCollection
from tutorec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

def FusedEmbeddingBagCollection(tables, optimizer_type, optimizer_kwargs, device):
    made = EmbeddingBagCollection(tables=tables, device=device)
    apply_optimizer_in_backward(optimizer_type, made.parameters(), optimizer_kwargs)
    return made
"""
_TWIN = {
    "sparse/jagged_tensor.py": "from tutorec.sparse.jagged_tensor import *",
    "sparse/tensor_dict.py": "from tutorec.sparse.tensor_dict import *",
    "modules/embedding_configs.py": "from tutorec.modules.embedding_configs import *",
    "modules/embedding_modules.py": "from tutorec.modules.embedding_modules import *",
    "modules/fused_embedding_modules.py": _FUSED,
    "optim/rowwise_adagrad.py": "from tutorec.optim.rowwise_adagrad import *",
    "optim/apply_optimizer_in_backward.py": (
        "from tutorec.optim.apply_optimizer_in_backward import *"
    ),
}


@pytest.fixture
def twin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A package beside tutorec that has its names."""
    for path, text in _TWIN.items():
        file = tmp_path / "twin" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
    _on_path(monkeypatch, tmp_path)
    return "twin"


def _on_path(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.syspath_prepend(str(folder))
    for name in [name for name in sys.modules if name.split(".")[0] == "twin"]:
        monkeypatch.delitem(sys.modules, name)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {
        "tiny": kjt.Size(2, 2, 3, 2, 4),
        "mid": kjt.Size(3, 5, 2, 1, 4),
        "large": kjt.Size(4, 3, 2, 1, 4),
    }
    monkeypatch.setattr(kjt, "_SIZES", sizes)
    steps = {
        "step-sgd": ("sgd", 40, 1.05, None),
        "step-rowwise_adagrad": ("rowwise_adagrad", 40, 1.05, None),
        "step-sgd-large": ("sgd", 50, None, 10.0),
    }
    monkeypatch.setattr(ebc, "_STEP", steps)
    for name, value in {
        "_TABLES": 3,
        "_ROWS": 50,
        "_TRAIN_ROWS": 40,
        "_COLUMNS": 4,
        "_TRAIN_BATCH": 8,
    }.items():
        monkeypatch.setattr(ebc, name, value)
    monkeypatch.setattr(
        ebc,
        "_FORWARD",
        {"forward-1": (1, 1, 2, "cpu", 10.0), "forward-256": (4, 2, 1, "wall", 1.5)},
    )


def _ratios(report: Report) -> dict[str, Bar | None]:
    return {c.title: c.bar for c in report.comparisons}


@pytest.mark.usefixtures("small")
def test_kjt_compares_every_operation_at_every_size(twin: str) -> None:
    bars = _ratios(kjt.run(Options(rounds=2, vs=twin)))
    cases = len(kjt.CASES) - (find_spec("tensordict") is None)
    assert len(bars) == 3 * cases * 2 + 1
    assert bars["tiny permute: twin / tutorec"] == Bar("at least", 2.0)
    assert bars["tiny permute: twin / tutorec checked"] is None
    assert bars["mid split: twin / tutorec checked"] == Bar("at least", 4.0)
    assert bars["large concat: twin / tutorec"] == Bar("at least", 0.97)
    assert bars["mid getitem: twin / tutorec"] == Bar("at least", 1.0)
    assert bars["tiny, geometric mean: twin / tutorec"] == Bar("at least", 3.5)


@pytest.mark.usefixtures("small")
def test_kjt_runs_what_was_chosen_and_needs_no_peer() -> None:
    report = kjt.run(Options(rounds=1, sizes=("mid",), cases=("permute", "split halves")))
    assert sorted(report.samples) == [
        f"mid {case}: tutorec{checks}"
        for case in ("permute", "split halves")
        for checks in ("", " checked")
    ]
    assert not report.comparisons


@pytest.mark.usefixtures("small")
def test_kjt_leaves_out_what_needs_a_package_that_is_not_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kjt, "find_spec", lambda name: None)
    report = kjt.run(Options(rounds=1, sizes=("tiny",), cases=("permute", "td_to_kjt")))
    assert sorted(report.samples) == ["tiny permute: tutorec", "tiny permute: tutorec checked"]
    assert "td_to_kjt was left out: tensordict is not installed" in report.notes


@pytest.mark.usefixtures("small")
def test_kjt_refuses_a_peer_with_other_tensors(
    twin: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "from tutorec.sparse.jagged_tensor import *\nclass KeyedTensor(KeyedTensor):\n"
    text += "    @staticmethod\n    def regroup(many, groups):\n        return [many[0].values()]\n"
    (tmp_path / "twin/sparse/jagged_tensor.py").write_text(text)
    _on_path(monkeypatch, tmp_path)
    with pytest.raises(ValueError, match="mid regroup: tutorec and twin give different tensors"):
        kjt.run(Options(rounds=1, vs=twin, sizes=("mid",), cases=("regroup",)))


def test_geometric_mean_is_taken_in_every_round() -> None:
    samples = {
        "tiny a: peer": [Sample(4.0, 1), Sample(8.0, 1)],
        "tiny a: tutorec": [Sample(1.0, 1), Sample(2.0, 1)],
        "tiny b: peer": [Sample(9.0, 1), Sample(9.0, 1)],
        "tiny b: tutorec": [Sample(1.0, 1), Sample(1.0, 1)],
    }
    assert kjt._geometric_mean(samples, ["a", "b"], "peer").ratio == Ratio(
        pytest.approx(6.0), *[pytest.approx(6.0)] * 2, 2
    )


@pytest.mark.usefixtures("small")
def test_ebc_compares_forward_and_both_roads_of_a_step(twin: str) -> None:
    names = ("forward-1", "forward-256", "step-sgd", "step-rowwise_adagrad", "step-sgd-large")
    forward, fused, large = Bar("at least", 1.5), Bar("at least", 1.05), Bar("at least", 10.0)
    assert _ratios(ebc.run(Options(rounds=2, vs=twin, cases=names))) == {
        "forward-1: twin / tutorec": large,
        "forward-1: twin / tutorec checked": None,
        "forward-256: twin / tutorec": forward,
        "forward-256: twin / tutorec checked": forward,
        "step-sgd: twin fused / tutorec": fused,
        "step-sgd: twin fused / tutorec checked": fused,
        "step-sgd: twin / tutorec": None,
        "step-sgd: twin / tutorec checked": None,
        "step-rowwise_adagrad: twin fused / tutorec": fused,
        "step-rowwise_adagrad: twin fused / tutorec checked": fused,
        "step-rowwise_adagrad: twin / tutorec": None,
        "step-rowwise_adagrad: twin / tutorec checked": None,
        "step-sgd-large: twin / tutorec": large,
        "step-sgd-large: twin / tutorec checked": large,
    }


@pytest.mark.usefixtures("small")
def test_ebc_refuses_a_peer_that_pools_otherwise(
    twin: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "from tutorec.modules.embedding_configs import *\nimport functools\n"
    text += "EmbeddingBagConfig = functools.partial(EmbeddingBagConfig, pooling=PoolingType.MEAN)\n"
    (tmp_path / "twin/modules/embedding_configs.py").write_text(text)
    _on_path(monkeypatch, tmp_path)
    with pytest.raises(ValueError, match="forward-256: tutorec and twin differ by up to"):
        ebc.run(Options(rounds=1, vs=twin, cases=("forward-256",)))


@pytest.mark.usefixtures("small")
def test_ebc_judges_memory_after_three_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(ebc, "measurable", lambda: True)
    monkeypatch.setattr(
        ebc, "bytes_of", lambda expression: asked.append(expression) or 3 * 40 * 4 * 4 * 2
    )
    [found] = ebc.run(Options(rounds=1, cases=("memory",))).comparisons
    assert (found.ratio.median, found.verdict, found.clock) == (2.0, "missed", "memory")
    assert asked == ["benchmarks.ebc:step_memory('tutorec', False, 40)"] * 3


def test_ebc_says_where_memory_cannot_be_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ebc, "measurable", lambda: False)
    report = ebc.run(Options(rounds=1, cases=("memory",)))
    assert report.notes == ["memory is measured on Linux only"] and not report.comparisons


@pytest.mark.skipif(not memory.measurable(), reason="needs /proc/self/clear_refs")
def test_peak_counts_what_a_call_held_and_gave_back() -> None:
    def allocate() -> None:
        bytearray(64 << 20)

    before = memory.resident()
    assert (60 << 20) < memory.peak_during(allocate) - before < (80 << 20)
    assert memory.peak_during(lambda: None) - before < (16 << 20)


def test_bytes_of_runs_the_expression_in_a_new_process() -> None:
    assert memory.bytes_of("math:floor(2.5)") == 2
    with pytest.raises(
        RuntimeError, match=r"(?s)measuring memory of math:nothing\(\) failed.*AttributeError"
    ):
        memory.bytes_of("math:nothing()")


def test_chosen_keeps_the_known_order_and_names_what_there_is() -> None:
    assert chosen(["a", "b", "c"], ("c", "a"), "--cases") == ["a", "c"]
    assert chosen(["a", "b"], None, "--cases") == ["a", "b"]
    with pytest.raises(ValueError, match="--sizes huge: there are tiny, mid"):
        chosen(["tiny", "mid"], ("huge", "mid"), "--sizes")


def test_a_library_is_found_by_name() -> None:
    assert libraries(None) == [Library("tutorec")]
    with pytest.raises(ValueError, match="--vs no_such_peer: no such package"):
        libraries("no_such_peer")


def test_a_module_is_found_where_its_package_has_a_function_of_that_name() -> None:
    name = "optim.apply_optimizer_in_backward"
    assert callable(Library("tutorec").get(f"{name}.apply_optimizer_in_backward"))


def test_time_each_calls_once_for_every_object_with_the_collector_at_rest() -> None:
    import gc

    seen: list[tuple[int, bool]] = []
    time_each(lambda one: seen.append((one, gc.isenabled())), [1, 2, 3])
    assert seen == [(1, False), (2, False), (3, False)] and gc.isenabled()
