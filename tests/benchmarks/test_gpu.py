"""`bench gpu` on the CPU with small sizes: all but the device, beside a peer that is tutorec under
another name.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from benchmarks import gpu, quant
from benchmarks.harness import Bar
from benchmarks.peer import Sizes, finish, fresh_batches
from benchmarks.runner import Options, main

_FUSED = """
from tutorec.modules.embedding_modules import EmbeddingBagCollection
from tutorec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

def FusedEmbeddingBagCollection(tables, optimizer_type, optimizer_kwargs, device):
    made = EmbeddingBagCollection(tables=tables, device=device)
    apply_optimizer_in_backward(optimizer_type, made.parameters(), optimizer_kwargs)
    return made
"""
_SAME = (
    "sparse.jagged_tensor",
    "modules.embedding_configs",
    "modules.embedding_modules",
    "quant.embedding_modules",
    "optim.rowwise_adagrad",
    "optim.apply_optimizer_in_backward",
    "distributed.types",
    "distributed.embeddingbag",
)


@pytest.fixture
def twin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    texts = {f"{name.replace('.', '/')}.py": f"from tutorec.{name} import *\n" for name in _SAME}
    for path, text in {**texts, "modules/fused_embedding_modules.py": _FUSED}.items():
        file = tmp_path / "twin" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.split(".")[0] == "twin"]:
        monkeypatch.delitem(sys.modules, name)
    return "twin"


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quant, "_TABLES", 3)
    for name, value in {"ROWS": 50, "SAMPLES": 8, "CALLS": 2}.items():
        monkeypatch.setattr(gpu, name, value)
    monkeypatch.setattr(gpu, "SHARDED_SIZES", Sizes(tables=3, rows=50, columns=4, pooling=2))


def test_lookups_steps_and_sharded_steps_are_judged_by_wall_time(twin: str) -> None:
    cases = ("forward", "step-sgd", "step-rowwise_adagrad", "int8", "sharded-row_wise")
    report = gpu.run(Options(rounds=2, vs=twin, cases=cases, device="cpu"))
    bar = Bar("at least", 1.0)
    assert {c.title: c.bar for c in report.comparisons} == {
        **{
            f"{case}: twin / {side}": bar
            for case in ("forward", "int8")
            for side in ("tutorec", "tutorec checked")
        },
        **{
            f"{case}: share of the copy's bandwidth, {side}": None
            for case in ("forward", "int8")
            for side in ("tutorec", "twin")
        },
        **{
            f"{case}: twin fused / {side}": bar
            for case in ("step-sgd", "step-rowwise_adagrad")
            for side in ("tutorec", "tutorec checked")
        },
        "sharded-row_wise: twin / tutorec": bar,
    }
    assert {c.clock for c in report.comparisons} == {"wall"}
    assert {len(samples) for samples in report.samples.values()} == {2}
    assert {"gpus", "driver", "cuda"} <= report.context["hardware"].keys()


def test_a_share_is_the_time_of_a_copy_of_as_many_bytes() -> None:
    report = gpu.run(Options(rounds=1, cases=("forward",), device="cpu"))
    [share] = report.comparisons
    assert share.variants == ("forward: copy of as many bytes", "forward: tutorec")
    [(_, values, lengths)] = fresh_batches(gpu.SHARDED_SIZES, 8, -1000, 1)
    moved = 8 * len(values) + 8 * len(lengths) + 4 * 4 * len(values) + 4 * 3 * 8 * 4
    [note] = report.notes
    assert note.startswith("forward: tutorec reads and writes ") and note.endswith(
        f"; {moved:,} bytes each"
    )


def test_a_peer_with_other_results_is_refused(twin: str, tmp_path: Path) -> None:
    text = "from tutorec.modules.embedding_configs import *\nimport functools\n"
    text += "EmbeddingBagConfig = functools.partial(EmbeddingBagConfig, pooling=PoolingType.MEAN)\n"
    (tmp_path / "twin/modules/embedding_configs.py").write_text(text)
    for case in ("forward", "step-sgd", "int8", "sharded-table_wise"):
        with pytest.raises(ValueError, match=f"{case}: tutorec and twin( fused)? differ by up to"):
            gpu.run(Options(rounds=1, vs=twin, cases=(case,), device="cpu"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_without_a_gpu_it_stops_with_one_line() -> None:
    with pytest.raises(
        ValueError, match=r"bench gpu needs a CUDA device, and torch 2\.\S+ finds none here"
    ):
        gpu.run(Options(rounds=1))


def test_the_device_can_be_named_and_is_not_advertised(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gpu", "--device", "cpu", "--rounds", "1", "--cases", "step-sgd"]) == 0
    assert "step-sgd: tutorec checked" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "--device" not in capsys.readouterr().out


def test_finishing_reads_a_number_of_any_shape_and_dtype() -> None:
    for result in (
        torch.ones(2, 3, requires_grad=True),
        torch.tensor(1.0),
        torch.ones(3, dtype=torch.uint8),
    ):
        finish(result)
