"""`bench pipeline` on small tables: what it measures and judges, beside a peer that is tutorec
under another name.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks import pipeline, pipeline_document, pipeline_rank
from benchmarks.harness import Bar, Sample
from benchmarks.peer import Library, Sizes
from benchmarks.pipeline_document import DocumentShape
from benchmarks.pipeline_rank import PLAIN, Contender, Feed
from benchmarks.runner import Options, main
from benchmarks.train_rank import Shape
from tutorec.awaitable import Awaitable, NoWait

_TWIN = (
    "sparse.jagged_tensor modules.embedding_configs modules.embedding_modules "
    "optim.rowwise_adagrad optim.keyed optim.apply_optimizer_in_backward optim.optimizers "
    "distributed.types distributed.embeddingbag streamable distributed.model_parallel models.dlrm "
    "datasets.utils distributed.train_pipeline.train_pipelines"
).split()
_SPARSE_DIST = "TrainPipelineSparseDist"


@pytest.fixture
def twin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a package ``twin`` beside tutorec that has its names."""
    for module in _TWIN:
        file = tmp_path / "twin" / f"{module.replace('.', '/')}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"from tutorec.{module} import *\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.split(".")[0] == "twin"]:
        monkeypatch.delitem(sys.modules, name)
    return tmp_path / "twin"


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = Shape(Sizes(tables=3, rows=20, columns=4, pooling=1), 8, 3, (5,), (6, 1), steps=2)
    for name in ("SHAPE", "CACHED_SHAPE", "MEMORY_SHAPE"):
        monkeypatch.setattr(pipeline, name, shape)
    monkeypatch.setattr(pipeline, "_MEMORY_RUNS", 1)
    monkeypatch.setattr(pipeline_document, "SHAPE", DocumentShape(2, 4, 8, 2, 3, steps=2))


@pytest.mark.parametrize(("world", "bar"), [(1, 0.98), (2, 1.03)])
def test_the_plain_loop_and_the_peer_are_bars_on_both_clocks(
    twin: Path, world: int, bar: float
) -> None:
    report = pipeline.run(Options(rounds=2, vs=twin.name, cases=("loop",), world=world))
    ours = f"tutorec {_SPARSE_DIST}"
    expected = {
        (f"tutorec {PLAIN} / {ours}", Bar("at least", bar)),
        (f"twin {_SPARSE_DIST} / {ours}", Bar("at least", 1.05)),
    }
    for clock in ("cpu", "wall"):
        assert {(c.title, c.bar) for c in report.comparisons if c.clock == clock} == expected
    assert {len(samples) for samples in report.samples.values()} == {2}


def test_a_peer_whose_losses_differ_is_refused_before_anything_is_timed(twin: Path) -> None:
    text = "from tutorec.models.dlrm import *\n\n\nclass DLRMTrain(DLRMTrain):\n"
    text += "    def forward(self, batch):\n        loss, (lost, *parts) = super().forward(batch)\n"
    text += "        return loss, (1.1 * lost, *parts)\n"
    (twin / "models/dlrm.py").write_text(text)
    with pytest.raises(
        ValueError,
        match=r"losses of tutorec plain loop, .* differ by up to .* on rank 0; nothing was timed",
    ):
        pipeline.run(Options(rounds=1, vs=twin.name, cases=("loop",), world=1))


def test_delay_prefetch_and_memory_are_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = ("delay", "prefetch", "memory") if sys.platform == "linux" else ("delay",)
    report = pipeline.run(Options(rounds=2, cases=cases, world=2))
    judged = [
        (c.title.partition(":")[0], c.clock, c.bar) for c in report.comparisons if c.bar is not None
    ]
    expected = [
        ("delay", "wall", Bar("at least", 0.7)),
        ("cache of 10 %", "wall", Bar("at least", 1.2)),
        ("memory", "memory", Bar("at most", 1.0, rounds=1)),
    ]
    assert judged == expected[: len(cases)]


def test_the_document_has_a_line_for_every_pipeline_and_form_and_four_conclusions(
    twin: Path,
) -> None:
    pytest.importorskip("tensordict")
    report = pipeline.run(
        Options(rounds=2, vs=twin.name, cases=("document",), world=2, scale=0.001)
    )
    form = re.compile(
        r"(\w+)( of twin)? +\| Runtime \(P90\): [\d.]+ ms \| Memory \(P90\): ([\d.]+ MB|.*) "
        r"\((TD|KJT)\)"
    )
    lines = [match for note in report.notes if (match := form.fullmatch(note))]
    forms = ("TD", "KJT")
    ours = [(name, None, each) for name in pipeline_document.PIPELINES for each in forms]
    theirs = [
        (name, " of twin", each) for name in ("TrainPipelineBase", _SPARSE_DIST) for each in forms
    ]
    assert [line.group(1, 2, 4) for line in lines] == ours + theirs
    starts = [
        "1. conversion: ",
        "2. copies: 4 tensors of a TD and 2 of a KJT ",
        "3. critical path: ",
        "4. total: ",
    ]
    for start, note in zip(starts, report.notes[-4:], strict=True):
        assert note.startswith(start)


def test_tables_have_the_documents_rows_times_a_factor() -> None:
    shape = DocumentShape(tables=120, scale=0.5)
    assert [shape.rows(i) for i in (0, 99, 100, 119)] == [50_000, 50_000, 50_500, 60_000]
    assert [config.feature_names for config in shape.configs(weighted=True)[:2]] == [
        ["weighted_feature_0"],
        ["weighted_feature_1"],
    ]


def test_both_forms_of_a_batch_hold_the_same_ids() -> None:
    pytest.importorskip("tensordict")
    library, shape = Library("tutorec"), DocumentShape(2, 4, 8, 2, 3)
    td, kjt = (pipeline_document.draw(library, form, shape, 1, 5) for form in ("TD", "KJT"))
    assert torch.equal(td.idscore_features.weights(), kjt.idscore_features.weights())
    converted = library.get("sparse.jagged_tensor.td_to_kjt")(td.idlist_features)
    assert torch.equal(converted.values(), kjt.idlist_features.values())
    assert torch.equal(converted.lengths(), kjt.idlist_features.lengths())


def test_a_late_value_is_that_of_the_exchange_and_is_late_for_who_asks_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits: list[float] = []
    monkeypatch.setattr(pipeline_rank.time, "monotonic", iter([10.0, 10.25, 20.0, 23.0]).__next__)
    monkeypatch.setattr(pipeline_rank.time, "sleep", waits.append)
    for _ in range(2):
        sizes: Awaitable[Awaitable[str]] = NoWait(NoWait("ids"))
        assert pipeline_rank._LateIds(sizes, 1.0).wait().wait() == "ids"
    assert waits == [0.75, 0.0]


def test_the_share_that_is_hidden_is_that_of_each_round() -> None:
    def samples(*seconds: float) -> list[Sample]:
        return [Sample(0.0, each) for each in seconds]

    measured = {
        Contender(_SPARSE_DIST).name: samples(0.1, 0.1, 0.1),
        Contender(_SPARSE_DIST, delay=pipeline.DELAY).name: samples(0.101, 0.102, 0.1),
    }
    assert pipeline._hidden_shares(measured).median == pytest.approx(0.8)


def test_a_feed_makes_batches_in_order_before_they_are_asked_for() -> None:
    made: list[int] = []
    feed = Feed(lambda number: made.append(number) or number)
    feed.refill(2)
    assert made == [0, 1]
    assert [next(feed) for _ in range(3)] == [0, 1, 2]


def test_bytes_of_a_batch_count_its_ids_twice() -> None:
    batch = pipeline_rank.draw_batch(Library("tutorec"), pipeline.SHAPE, 0, 0)
    features = batch.sparse_features
    ids = features.values().nbytes + features.lengths().nbytes
    assert (
        pipeline_rank.bytes_of_batch(vars(batch))
        == 2 * ids + batch.dense_features.nbytes + batch.labels.nbytes
    )


def test_a_model_without_sharded_modules_is_not_delayed() -> None:
    model = nn.Linear(1, 1)
    pipeline_rank.delay_ids(model, 1.0)
    assert "input_dist" not in vars(model)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["pipeline", "--scale", "0"], "--scale 0.0: it must be above 0"),
        (["kjt", "--scale", "2"], "bench kjt has tables of one size and takes no --scale"),
    ],
)
def test_a_scale_without_meaning_is_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(words)
    assert message in capsys.readouterr().err


def test_an_unknown_world_is_refused() -> None:
    with pytest.raises(ValueError, match="--world 3: there are 1, 2"):
        pipeline.run(Options(rounds=1, world=3))
