"""Every benchmark runs on tiny tables, beside a peer that is tutorec under another name."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tutorec._kernels.backend import backend

ROOT = Path(__file__).parents[1]
LINUX = sys.platform == "linux"
SPARSE_DIST = "tutorec TrainPipelineSparseDist"

pytestmark = pytest.mark.filterwarnings("ignore")  # as of a peer: its warnings stop no benchmark

_FUSED = """
from tutorec.modules.embedding_modules import EmbeddingBagCollection
from tutorec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

def FusedEmbeddingBagCollection(tables, optimizer_type, optimizer_kwargs, device):
    collection = EmbeddingBagCollection(tables=tables, device=device)
    apply_optimizer_in_backward(optimizer_type, collection.parameters(), optimizer_kwargs)
    return collection
"""
# Bags are averaged, not summed.
_OTHER_POOLING = """
import functools
EmbeddingBagConfig = functools.partial(EmbeddingBagConfig, pooling=PoolingType.MEAN)
"""
_OTHER_REGROUP = """
class KeyedTensor(KeyedTensor):
    @staticmethod
    def regroup(tensors, groups):
        return [tensors[0].values()]
"""
_OTHER_LOSS = """
class DLRMTrain(DLRMTrain):
    def forward(self, batch):
        loss, (detached, *others) = super().forward(batch)
        return 1.1 * loss, (1.1 * detached, *others)
"""
_MODULES = (
    "sparse.jagged_tensor sparse.tensor_dict modules.embedding_configs modules.embedding_modules "
    "optim.rowwise_adagrad optim.keyed optim.apply_optimizer_in_backward optim.optimizers "
    "quant.embedding_modules distributed.types distributed.dist_data distributed.embeddingbag "
    "distributed.sharding_plan distributed.model_parallel distributed.planner.types "
    "distributed.planner.planners distributed.planner.enumerators "
    "distributed.planner.storage_reservations distributed.train_pipeline.train_pipelines "
    "models.dlrm datasets.utils"
).split()


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder beside the benchmarks' on the path of this process and of those that it starts."""
    for folder in (ROOT, tmp_path):
        monkeypatch.syspath_prepend(folder)
    before = [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *before]))
    return tmp_path


@pytest.fixture
def twin(folders: Path) -> Iterator[Path]:
    """The folder of a package ``twin`` that has tutorec's names."""
    texts = {name: f"from tutorec.{name} import *\n" for name in _MODULES}
    texts["modules.fused_embedding_modules"] = _FUSED
    for name, text in texts.items():
        file = folders / "twin" / f"{name.replace('.', '/')}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    exported = "EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor"
    (folders / "twin/__init__.py").write_text(f"from tutorec import {exported}\n")

    yield folders / "twin"
    for name in [name for name in sys.modules if name.partition(".")[0] == "twin"]:
        del sys.modules[name]


def outcomes_of(*runs: list[str]) -> list[Any]:
    """Of each run its exit status, or the text of its error."""
    from benchmarks.runner import main

    outcomes: list[Any] = []
    for arguments in runs:
        try:
            outcomes.append(main(arguments))
        except (ValueError, SystemExit) as error:
            outcomes.append(str(error))
    return outcomes


def reports_of(twin: Path, *runs: str, peer: bool = True, rounds: int = 2) -> list[dict[str, Any]]:
    """The JSON of each run on tiny tables."""
    files = [twin.parent / f"report-{number}.json" for number in range(len(runs))]
    options = ["--tiny", "--rounds", str(rounds), *(["--vs", "twin"] if peer else [])]
    lines = [
        [*run.split(), *options, "--json", str(file)] for run, file in zip(runs, files, strict=True)
    ]
    assert outcomes_of(*lines) == [0] * len(runs)

    reports = [json.loads(file.read_text()) for file in files]
    for run, report in zip(runs, reports, strict=True):
        assert report["benchmark"] == run.split()[0]
        assert report["versions"]["torch"] and report["hardware"]["cores"] >= 1
        assert {len(samples) for samples in report["samples"].values()} <= {1, 2}
    return reports


def bars_of(report: dict[str, Any], clock: str = "cpu") -> dict[str, float | None]:
    """Title -> bar of each comparison by a clock."""
    return {
        comparison["title"]: comparison["bar"] and comparison["bar"]["value"]
        for comparison in report["comparisons"]
        if comparison["clock"] == clock
    }


@pytest.mark.slow
def test_operations_are_compared_with_the_peer(twin: Path):
    kjt, ebc, quant = reports_of(
        twin,
        "kjt",
        "ebc --cases forward-1,forward-256,forward-4096-2threads,step-sgd,step-sgd-large",
        "quant --cases int8-1,int8-32,int8-32-10ids,int8-512-10ids,rows",
    )
    bars = bars_of(kjt)
    cases = {title.split(":")[0] for title in bars} - {"tiny, geometric mean"}
    assert len(cases) == 3 * (13 - (importlib.util.find_spec("tensordict") is None))
    assert len(bars) == 2 * len(cases) + 1
    assert bars["tiny permute: twin / tutorec"] == 2.0
    assert bars["tiny permute: twin / tutorec checked"] is None
    assert bars["mid split: twin / tutorec checked"] == 4.0
    assert bars["large concat: twin / tutorec"] == 0.97
    assert bars["mid getitem: twin / tutorec"] == 1.0
    assert bars["tiny, geometric mean: twin / tutorec"] == 3.5

    bars = bars_of(ebc)
    assert bars["forward-1: twin / tutorec"] == 10.0
    assert bars["forward-1: twin / tutorec checked"] is None
    assert bars["forward-256: twin / tutorec checked"] == 1.5
    assert bars["step-sgd: twin fused / tutorec checked"] == 1.05
    assert bars["step-sgd: twin / tutorec"] is None
    assert bars["step-sgd-large: twin / tutorec"] == 10.0
    assert "step-sgd-large: twin fused / tutorec" not in bars
    assert bars["forward-1: tutorec checked / forward-1: tutorec"] is None
    assert bars_of(ebc, "wall")["forward-4096-2threads: twin / tutorec"] == 0.95

    bars = bars_of(quant)
    assert bars["int8-1: twin / tutorec"] == 2.5
    assert bars["int8-1, p99: twin / tutorec"] == 1.0
    assert bars["int8-1: twin / tutorec checked"] is None
    assert bars["int8-32: twin / tutorec checked"] == 1.5
    assert bars["int8-32-10ids, p99: twin / tutorec"] is None
    assert bars["int8-512-10ids: operator alone / tutorec"] == 0.87
    assert "int8-32: operator alone / tutorec" not in bars
    rows = [c for c in quant["comparisons"] if c["title"].startswith("rows: ")]
    assert [row["ratio"]["median"] for row in rows if "tutorec" in row["title"]] == [1.0, 1.0]


@pytest.mark.slow
def test_benchmarks_without_a_peer_judge_what_they_say(twin: Path):
    mc, cache = reports_of(twin, "mc", "cache --sizes 10,50", peer=False)
    bars = bars_of(mc)
    judged = {title: bar for title, bar in bars.items() if bar is not None}
    assert judged == {f"{size} ids a bag: remap / look up": 1.0 for size in (1, 10)}
    assert len(bars) == 10
    occupied, admitted, evictions = (mc["notes"][2].split()[index] for index in (2, 5, -1))
    assert occupied == "100.0" and 50 < float(admitted) < 100 and evictions != "0"

    judged = {title: bar for title, bar in bars_of(cache).items() if bar is not None}
    assert judged == {"10 % of the rows, lru: all rows in memory / cached": 0.6}
    if LINUX:
        title = "plain file, 10 % of the pages in memory / 10 % of the rows in memory, no pages"
        assert title in bars_of(cache, "wall")
    rates = [note.split(": ")[0] for note in cache["notes"] if "hit rate 0." in note]
    assert rates == ["10 % of the rows, lru", "50 % of the rows, lru", "10 % of the rows, lfu"]


@pytest.mark.slow
def test_backends_are_compared_on_the_cpu_clock(twin: Path):
    if backend().name == "fbgemm":
        [report] = reports_of(twin, "backends", peer=False)
        bars = bars_of(report)
        assert bars == {"forward: torch / fbgemm": 2.0, "step: torch / fbgemm": 2.0}


@pytest.mark.slow
def test_planner_compares_plans_and_times(twin: Path):
    [report] = reports_of(twin, "planner --sizes 10x2,10x8")
    titles = [comparison["title"] for comparison in report["comparisons"]]

    seeds = [title for title in titles if title.startswith("seed ")]
    assert sum(title.endswith(": tutorec / twin, its estimates") for title in seeds) == 2
    growth = "growth, 10 tables x 8 ranks"
    assert bars_of(report, "plan")[f"{growth}: plan / lower bound"] == 1.5
    assert "geometric mean of 2: tutorec / twin, its estimates" in titles
    assert growth in report["samples"]
    judged = {c["verdict"] for c in report["comparisons"] if c["bar"] is not None}
    assert judged <= {"met", "missed"}


@pytest.mark.slow
def test_ranks_are_compared_with_the_peer(twin: Path):
    cases = (
        "exchange,forward-table_wise,step-table_wise,step-table_wise-sgd,step-row_wise,"
        "step-data_parallel-sgd,step-grid_shard,step-1"
    )
    two, alone, train, pipeline = reports_of(
        twin,
        f"sharded --cases {cases}",
        "sharded --world 1 --cases exchange,step-1,step-row_wise",
        "train",
        "pipeline --cases loop",
    )
    assert two["settings"]["world"] == 2
    assert bars_of(two) == {
        "exchange: twin / tutorec": 1.3,
        "forward-table_wise: twin / tutorec": 1.4,
        "step-table_wise-sgd: twin / tutorec": None,
        "step-table_wise: twin / tutorec": 1.05,
        "step-row_wise: twin / tutorec": 1.15,
        "step-data_parallel-sgd: twin / tutorec": 3.0,
        "step-grid_shard: twin / tutorec": None,
    }
    assert set(bars_of(two, "wall").values()) == {None}
    # 3 integers per peer
    assert any("input sizes 1 x, 24 bytes" in note for note in two["notes"])

    assert bars_of(alone) == {
        "step-row_wise: twin / tutorec": None,
        "step-row_wise: twin / tutorec checked": None,
        "step-1: twin / tutorec": 1.6,
        "step-1: twin / tutorec checked": None,
    }
    for clock in ("cpu", "wall"):
        assert bars_of(train, clock) == {
            "dlrm: twin / tutorec": 1.05,
            "dlrm-one-interaction: twin / tutorec": 1.05,
            "dlrm-row_wise: twin / tutorec": None,
            "dlrm-adam: twin / tutorec": None,
        }
        assert bars_of(pipeline, clock) == {
            f"loop: tutorec plain loop / {SPARSE_DIST}": 1.03,
            f"loop: twin TrainPipelineSparseDist / {SPARSE_DIST}": 1.05,
        }
    samples = train["samples"]["dlrm: tutorec"]
    cpu, wall = (np.median([sample[clock] for sample in samples]) for clock in ("cpu", "wall"))
    # 8 samples of each of two ranks
    text = f"{16 / cpu:,.0f} examples per CPU second, {16 / wall:,.0f} per second (medians)"
    assert f"dlrm: tutorec: {text}" in train["notes"]


@pytest.mark.slow
def test_pipelines_are_beside_delays_a_cache_and_tensor_dicts(twin: Path):
    [report] = reports_of(twin, "pipeline --cases delay,prefetch,document", peer=False)
    bars = bars_of(report, "wall")
    assert bars["delay: share of 5 ms that TrainPipelineSparseDist hides"] == 0.7
    if LINUX:
        title = f"cache of 10 %: {SPARSE_DIST} / tutorec PrefetchTrainPipelineSparseDist"
        assert bars[title] == 1.2
    form = re.compile(r"(\w+) +\| Runtime \(P90\): [\d.]+ ms \((TD|KJT)\)")
    lines = [match for note in report["notes"] if (match := form.fullmatch(note))]
    if importlib.util.find_spec("tensordict"):
        assert [line[2] for line in lines] == ["TD", "KJT"] * 4
        assert len({line[1] for line in lines}) == 4


@pytest.mark.slow
@pytest.mark.skipif(not LINUX, reason="memory is measured on Linux only")
def test_memory_is_judged(twin: Path):
    runs = ("ebc --cases memory", "quant --cases memory", "sharded --cases memory")
    *reports, sharded, pipeline = reports_of(twin, *runs, "pipeline --cases memory", peer=False)
    judged = [list(bars_of(report, "memory").values()) for report in (*reports, sharded, pipeline)]
    assert judged == [[1.1], [1.0, 1.35], [1.1], [1.0]]
    # weights of a rank that has one or two of the three tables
    [comparison] = sharded["comparisons"]
    assert comparison["medians"][1] in (2 * 2000 * 64 * 4, 2000 * 64 * 4)
    assert comparison["bar"]["rounds"] == 1


@pytest.mark.slow
def test_estimates_judge_order_and_factor_on_both_clocks(twin: Path):
    [report] = reports_of(twin, "estimates", peer=False)
    assert len(report["samples"]) == 4
    for clock in ("wall", "cpu"):
        assert list(bars_of(report, clock).values()) == [0.8, 1.5]
    assert report["notes"][0].startswith("measured on this machine on ")


@pytest.mark.slow
def test_import_compares_cold_processes(twin: Path):
    [report] = reports_of(twin, "import", rounds=1)
    assert bars_of(report) == {
        "import tutorec / import torch": 1.15,
        "tutorec, first forward / import torch": None,
        "import twin / import tutorec": 1.9,
        "twin, first forward / tutorec, first forward": 1.5,
    }


@pytest.mark.slow
def test_gpu_judges_wall_time_and_shows_the_share_of_a_copy(twin: Path):
    [report] = reports_of(twin, "gpu --device cpu")
    bars = bars_of(report, "wall")
    sides = ("tutorec", "tutorec checked")

    expected = {f"{case}: twin / {side}": 1.0 for case in ("forward", "int8") for side in sides}
    for step in ("step-sgd", "step-rowwise_adagrad"):
        expected |= {f"{step}: twin fused / {side}": 1.0 for side in sides}
    for sharding in ("table_wise", "row_wise", "column_wise"):
        expected[f"sharded-{sharding}: twin / tutorec"] = 1.0

    for case in ("forward", "int8"):
        shares = [f"{case}: share of the copy's bandwidth, {side}" for side in ("tutorec", "twin")]
        expected |= dict.fromkeys(shares)
    assert bars == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "change", "runs"),
    [
        (
            "sparse.jagged_tensor",
            _OTHER_REGROUP,
            {
                "kjt --sizes mid --cases regroup": (
                    "mid regroup: tutorec and twin differ by up to inf; nothing was timed"
                )
            },
        ),
        (
            "modules.embedding_configs",
            _OTHER_POOLING,
            {
                "ebc --cases forward-256": "forward-256: tutorec and twin differ by up to",
                "quant --cases int8-32-10ids": "int8-32-10ids: tutorec and twin differ by up to",
                "gpu --device cpu --cases step-sgd": "step-sgd: tutorec and twin fused differ",
                "sharded --cases step-table_wise": (
                    r"step-table_wise: tutorec and twin differ by up to \S+ on rank [01]; nothing"
                ),
            },
        ),
        (
            "models.dlrm",
            _OTHER_LOSS,
            {
                "train --cases dlrm": (
                    r"dlrm: tutorec and twin differ by up to \S+ on rank [01]; nothing was timed"
                ),
                "pipeline --world 1 --cases loop": (
                    f"loop: {SPARSE_DIST} and twin .* differ by up to .*; nothing was timed"
                ),
            },
        ),
    ],
)
def test_a_peer_with_other_results_is_not_timed(
    twin: Path, module: str, change: str, runs: dict[str, str]
):
    with (twin / f"{module.replace('.', '/')}.py").open("a") as file:
        file.write(change)
    options = ["--tiny", "--rounds", "1", "--vs", "twin"]
    outcomes = outcomes_of(*([*run.split(), *options] for run in runs))

    for outcome, message in zip(outcomes, runs.values(), strict=True):
        assert re.search(message, str(outcome)), outcome


@pytest.mark.usefixtures("folders")
def test_options_that_a_benchmark_lacks_are_refused(capsys: pytest.CaptureFixture[str]):
    parser_errors = {
        "no-such": "invalid choice: 'no-such'",
        "ebc --sizes tiny": "ebc takes no --sizes",
        "import --cases a": "import takes no --cases",
        "mc --world 2": "mc takes no --world",
        "backends --vs torchrec": "backends measures tutorec alone and takes no --vs",
    }
    value_errors = {
        "kjt --sizes mid,huge": "--sizes huge: there are tiny, mid, large",
        "sharded --world 3": "--world 3: there are 1, 2, 4",
        "kjt --vs no_such_peer": "--vs no_such_peer: no such package",
    }
    runs = [run.split() for run in (*parser_errors, *value_errors)]
    outcomes, errors = outcomes_of(*runs), capsys.readouterr().err

    assert outcomes[: len(parser_errors)] == ["2"] * len(parser_errors)
    assert all(message in errors for message in parser_errors.values())
    for outcome, message in zip(outcomes[len(parser_errors) :], value_errors.values(), strict=True):
        assert message in outcome


def test_help_lists_every_benchmark_and_names_are_files():
    command = [sys.executable, "-m", "benchmarks", "--help"]
    text = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    names = re.findall(r"^  (\w+)\s{2,}\S.*\.$", text.partition("benchmarks:")[2], re.MULTILINE)
    files = {path.stem for path in (ROOT / "benchmarks").glob("*.py")}
    assert len(names) == 13 and {*names} - {"import"} <= files
    assert "--device" not in text


# ---- the statistics


@pytest.fixture(scope="module")
def harness() -> Any:
    """The module that computes ratios and judges them."""
    spec = importlib.util.spec_from_file_location("bench_harness", ROOT / "benchmarks/harness.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look names up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def test_paired_ratio_cancels_what_a_round_shares(harness: Any):
    drift = np.random.default_rng(0).uniform(1.0, 10.0, 40)
    ratio = harness.paired_ratio(list(3.0 * drift), list(drift))
    assert (ratio.median, ratio.low, ratio.high, ratio.rounds) == (pytest.approx(3.0),) * 3 + (40,)
    assert harness.paired_ratio([1.0, 10.0, 6.0], [1.0, 1.0, 3.0]).median == 2.0


def test_bootstrap_interval_covers_the_true_median_about_as_often_as_it_says(harness: Any):
    rng = np.random.default_rng(1)
    covered = 0
    for seed in range(200):
        noise = np.exp(0.2 * rng.standard_normal(31))
        ratio = harness.paired_ratio(list(2.0 * noise), [1.0] * 31, seed=seed)
        covered += ratio.low <= 2.0 <= ratio.high
    assert 0.88 <= covered / 200 <= 0.99


@pytest.mark.parametrize(
    ("above", "below", "message"),
    [
        ([1.0, 2.0], [1.0], "2 and 1 measurements"),
        ([], [], "0 and 0 measurements"),
        ([1.0, 1.0], [1.0, 0.0], "not positive"),
    ],
)
def test_measurements_that_are_no_pairs_are_refused(
    harness: Any, above: list[float], below: list[float], message: str
):
    with pytest.raises(ValueError, match=message):
        harness.paired_ratio(above, below)


@pytest.mark.parametrize(
    ("bar", "ratio", "verdict"),
    [
        (("at least", 1.9), (1.95, 1.88, 2.0, 30), "met"),
        (("at least", 1.9), (1.95, 1.86, 2.0, 30), "missed"),
        (("at least", 1.9), (1.89, 1.88, 2.0, 30), "missed"),
        (("at least", 1.9), (1.95, 1.94, 2.0, 29), "undecided"),
        (("at most", 1.15), (1.10, 1.0, 1.17, 30), "met"),
        (("at most", 1.15), (1.10, 1.0, 1.19, 30), "missed"),
        (("at most", 1.15), (1.16, 1.0, 1.17, 30), "missed"),
    ],
)
def test_a_bar_needs_median_interval_and_thirty_rounds(
    harness: Any, bar: tuple[Any, ...], ratio: tuple[Any, ...], verdict: str
):
    assert harness.Bar(*bar).judge(harness.Ratio(*ratio)) == verdict


def test_sides_run_once_a_round_in_every_order(harness: Any):
    calls: list[tuple[str, int]] = []

    def side(name: str):
        def measure(number: int) -> Any:
            calls.append((name, number))
            return harness.Sample(float(number), 0.0)

        return measure

    samples = harness.interleave({name: side(name) for name in "abc"}, rounds=60, warmup=2)
    rounds = [calls[index : index + 3] for index in range(0, len(calls), 3)]
    assert [{number for _, number in row} for row in rounds] == [{n} for n in range(-2, 60)]
    orders = Counter("".join(name for name, _ in row) for row in rounds)
    assert set(orders) == {"abc", "acb", "bac", "bca", "cab", "cba"}
    assert [[s.cpu for s in row] for row in samples.values()] == [list(range(60))] * 3
    with pytest.raises(ValueError, match="rounds=3 and 0 variants"):
        harness.interleave({}, rounds=3)


def test_each_object_is_called_once_with_the_collector_off(harness: Any):
    import gc

    seen: list[tuple[int, bool]] = []
    harness.time_each(lambda number: seen.append((number, gc.isenabled())), [1, 2, 3])
    assert seen == [(1, False), (2, False), (3, False)] and gc.isenabled()


def test_the_median_and_the_tail_are_of_single_calls(harness: Any, monkeypatch: pytest.MonkeyPatch):
    clock = {"now": 0.0}
    monkeypatch.setattr(harness.time, "perf_counter", lambda: clock["now"])
    monkeypatch.setattr(harness.time, "process_time", lambda: clock["now"] / 2)

    def call(seconds: float) -> None:
        clock["now"] += seconds

    middle, tail = harness.time_single_calls(call, [1.0] * 95 + [200.0] * 5)
    assert (middle.wall, middle.cpu) == (1.0, 0.5)
    assert (tail.wall, tail.cpu) == (200.0, 100.0)


def test_a_command_that_fails_shows_its_error(harness: Any):
    script = "import sys; print('no good', file=sys.stderr); sys.exit(3)"
    with pytest.raises(RuntimeError, match=r"(?s)ended with 3.*no good"):
        harness.time_command([sys.executable, "-c", script])
    sample = harness.time_command([sys.executable, "-c", "sum(range(3_000_000))"])
    assert sample.cpu > 0 and sample.wall > 0
