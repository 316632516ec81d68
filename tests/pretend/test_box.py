"""The quick start, chapters, the examples and the tests of sharded modules on pretended GPU boxes.

By default the short part runs, most of it on 2 GPUs. `pytest -m full tests/pretend` runs every
chapter on 1, 2 and 8 GPUs and the tests of all sharded modules; `make gpu` runs every chapter on
real ones.
"""

from __future__ import annotations

import re
from itertools import chain
from typing import Any

import pytest
from examples.criteo_days import CRITEO, write_days
from parity.moved_script import write
from pretend.boxes import HERE, ROOT, in_an_interpreter, on_box, pytest_on_box

NOTEBOOKS = sorted(path.name for path in (ROOT / "notebooks").glob("*.ipynb"))
DISTRIBUTED = ROOT / "tests/distributed"
PARITY = "tests/distributed/sharding/test_parity.py"
BY_DEFAULT = ("test_bad_inputs.py", "test_exchanges.py")
# Tests of ranks that a pretended box cannot run: the file, which of its tests, and why.
BEYOND = {
    # they fork processes, which cannot use a GPU
    "checkpoint/test_faults.py": "(kill_at_every_step or is_killed)",
    "test_growing.py": "memory_of_each_rank",  # on a GPU a table takes memory for all its rows
    "test_state_dict.py": "written_into_a_state_dict",  # torch.device(number) wants a real GPU
    "train_pipeline/test_failures.py": "[id-",  # on a GPU an id is found with a later batch
    # sizes of nested tensors belong to no pretended device
    "train_pipeline/test_parity.py": "(tensor and dict)",
}
# The chapters that run by default. Between them they use each part of the library that moves
# tensors to GPUs: DistributedModelParallel, optimizers, pipelines with their streams, managed
# collisions, load balancing, a TensorDict.
CHAPTERS = (
    "10_dmp.ipynb",
    "11_optimizers.ipynb",
    "15_train_pipelines.ipynb",
    "18_dynamic_vocabularies.ipynb",
    "19_load_balancing.ipynb",
    "document_5_tensordict.ipynb",
)
# What makes a chapter shorter and runs no other line of it: fewer samples, steps, seeds or tables.
SHORTER = {
    "01_recommender.ipynb": {"store = shop()": "store = shop(rows=20_000, test_rows=4_000)"},
    "05_first_training.ipynb": {"rows=240_000": "rows=9_000", "compare(234": "compare(17"},
    "06_anatomy.ipynb": {"range(80)": "range(10)"},
    "07_sharding.ipynb": {
        "100_000, 256, 400": "10_000, 256, 40",
        "100_000, 256, 1)": "10_000, 256, 1)",
        "range(20)": "range(3)",
        "take_turns(calls,": "take_turns(calls, rounds=2,",
    },
    "09b_planner_at_work.ipynb": {"plan_many(100,": "plan_many(25,", "repeat=15": "repeat=2"},
    "10_dmp.ipynb": {
        "store = shop()": "store = shop(rows=17 * 256, test_rows=4_000)",
        "= 1_024, 200 ": "= 256, 24 ",
        "ROWS = 1_000_000": "ROWS = 100_000",
        "400_000, 4, 300_000, 8": "40_000, 4, 30_000, 8",
        "[400_000:700_000,": "[40_000:70_000,",
    },
    "11_optimizers.ipynb": {"ROWS, COLUMNS = 200_000": "ROWS, COLUMNS = 20_000"},
    "13_quantization.ipynb": {
        "store = shop()": "store = shop(rows=8_000, test_rows=2_000)",
        "26, 20_000, 512, 10, 16": "26, 2_000, 64, 10, 1",
    },
    "14_serving.ipynb": {
        "rows=30_000": "rows=8_000",
        "rounds=80": "rounds=2",
        "rounds=10": "rounds=1",
    },
    "15_train_pipelines.ipynb": {"(20)": "(8)", "draw_visits(10)": "draw_visits(8)"},
    "16_compressed_tables.ipynb": {
        "rows=60_000": "rows=8_000",
        "SEEDS = (0, 1, 2)": "SEEDS = (0,)",
    },
    "17_caches.ipynb": {
        "rows=48 * 1024": "rows=4 * 1024",
        "PERCENT = (2, 5, 10, 20)": "PERCENT = (10, 10, 10, 20)",
    },
    "17b_cache_or_file.ipynb": {
        "ROWS = 65_536": "ROWS = 4_096",
        **{f"rounds={rounds}": "rounds=1" for rounds in (4, 8, 12)},
    },
    "18_dynamic_vocabularies.ipynb": {"visits=20_000": "visits=4_000"},
    # a nested tensor's sizes belong to no pretended device: a TensorDict stays away from it
    "document_5_tensordict.ipynb": {
        "model(td.to(device()))": "model(kjt.to(device()))",
        "features = kjt_to_td(batch.idlist_features)": "features = batch.idlist_features",
        "BATCHES = 6": "BATCHES = 2",
        "RUNS = 4": "RUNS = 2",
    },
    "page_equivalence.ipynb": {'("sum", "mean", "none")': '("mean", "none")'},
    "page_server.ipynb": {
        "1_000": "100",
        "10 * bodies": "bodies",
        "10 * right": "right",
        "[500]": "[52]",
    },
    "page_own_data.ipynb": {
        "1_200": "240",
        "BATCH, EPOCHS = 512, 6": "BATCH, EPOCHS = 512, 1",
        "1.5 * by_popular": "0",
    },
    "page_two_tower.ipynb": {"store = shop()": "store = shop(rows=30_000, test_rows=4_000)"},
}


def files_of_ranks() -> list[Any]:
    """Tests of sharded modules, most of them in the full run; the planner touches no device."""
    paths = [
        path for path in sorted(DISTRIBUTED.rglob("test_*.py")) if path.parent.name != "planner"
    ]
    marks = [() if path.name in BY_DEFAULT else pytest.mark.full for path in paths]
    names = [path.relative_to(DISTRIBUTED).as_posix() for path in paths]
    return [pytest.param(name, marks=mark) for name, mark in zip(names, marks, strict=True)]


@pytest.mark.parametrize(
    ("gpus", "run"), [(1, on_box), (2, in_an_interpreter), (8, on_box)], ids=["1", "2", "8"]
)
def test_the_quick_start_runs(gpus, run, tmp_path):
    """On 2 GPUs by an interpreter and a fork server of ranks that are started for it, as a reader's
    are.
    """
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    code, shown = (
        re.search(rf"```{kind}\n(.*?)```", readme, flags=re.DOTALL).group(1)
        for kind in ("python", "text")
    )
    (tmp_path / "quick_start.py").write_text(code, encoding="utf-8")
    printed = run(gpus, [tmp_path / "quick_start.py"])
    number = re.compile(r"\d+\.\d+")
    assert number.sub("x", printed) == number.sub("x", shown)
    assert [float(n) for n in number.findall(printed)] == pytest.approx(
        [10.222113, 10.222113], abs=1e-3
    )


def chapters() -> list[Any]:
    """Every chapter on 1, 2 and 8 GPUs, most of them in the full run."""
    cases = [(notebook, gpus) for gpus in (1, 2, 8) for notebook in NOTEBOOKS]
    return [
        pytest.param(*case, marks=() if case[0] in CHAPTERS and case[1] == 2 else pytest.mark.full)
        for case in cases
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("notebook", "gpus"), chapters())
def test_a_chapter_runs(notebook, gpus):
    on_box(gpus, [ROOT / "notebooks" / notebook, *chain(*SHORTER.get(notebook, {}).items())])


def test_ranks_of_a_program_are_forks_of_the_box():
    """An interpreter of its own for each of them would import torch again."""
    look = "from tutorec.spmd import Ranks\nwith Ranks(2) as world:\n    print(world.run(look))"
    code = f"def look():\n    return 'box_server' in open('/proc/self/cmdline').read()\n{look}"
    assert on_box(2, ["-c", code]) == "[True, True]\n"


@pytest.mark.slow
def test_ranks_share_the_only_gpu():
    """The recipe of the page on training, on one rank and on two."""
    printed = pytest_on_box(1, "tests/book/test_recipes.py", "-k", "share_a_gpu")
    assert "2 passed" in printed


@pytest.mark.slow
def test_the_script_that_chapter_20_moves_trains_on_gpus(tmp_path):
    """The chapter itself runs it on the CPU, on which the losses that it is compared with were
    made.
    """
    write(tmp_path, "tutorec")
    script = tmp_path / "train.py"
    folder = repr(str(tmp_path))
    saved = "import torch\n", f"import os\nimport torch\nos.chdir({folder})\n"
    script.write_text(script.read_text().replace(*saved, 1))
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    losses = [float(line) for line in on_box(2, [*launch, script]).splitlines()[-20:]]
    assert losses[-1] < losses[0] / 2


SMALL = "--rows 600 --test-rows 100 --items 30 --batch-size 100 --no-progress".split()


@pytest.mark.slow
def test_the_examples_run_under_torchrun(tmp_path):
    """The click model on 1 rank, two others on 2; the two towers run on 2 in the next test."""
    launch = ["-m", "torch.distributed.run", "--standalone"]
    words = [*SMALL, "--epochs", "2"]
    alone = [*launch, "--nproc-per-node=1", "-m", "tutorec.examples.dlrm", *words]
    assert "steps, " in on_box(2, alone)
    of_criteo = [str(write_days(tmp_path, {"train": 700})), *CRITEO, "--interaction", "dcn"]
    both = tmp_path / "both.py"
    both.write_text(
        "from tutorec.examples import criteo, sequence\n\n"
        f"assert sequence.main({words}) == 0\nassert criteo.main({of_criteo}) == 0\n"
    )
    assert on_box(2, [*launch, "--nproc-per-node=2", both]).count("steps, ") == 2


@pytest.mark.slow
def test_a_run_on_gpus_goes_on_where_ranks_share_one(tmp_path):
    launch = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        "-m",
        "tutorec.examples.two_tower",
    ]
    assert "3 steps, " in on_box(2, [*launch, *SMALL, "--steps", "3", "--checkpoints", tmp_path])
    gone_on = on_box(1, [*launch, *SMALL, "--checkpoints", tmp_path])
    assert (
        "goes on from step-3, saved by 2 rank(s) after 300 samples" in gone_on
        and "9 steps, " in gone_on
    )


def test_a_model_made_on_a_gpu_computes_there_and_after_a_move():
    print_devices = """
import torch
from tutorec.datasets.random import shop
from tutorec.models.dlrm import DLRM
from tutorec.modules.embedding_configs import EmbeddingBagConfig
from tutorec.modules.embedding_modules import EmbeddingBagCollection

gpu = torch.device("cuda")
table = EmbeddingBagConfig(500, 8, "t", feature_names=["user", "item", "clicked"])
model = DLRM(EmbeddingBagCollection([table], device=gpu), 4, [8], [8, 1], dense_device=gpu)
batch = next(shop().batches(2))
here = batch.to(gpu)
print(model(here.dense_features, here.sparse_features).device)
print(model.cpu()(batch.dense_features, batch.sparse_features).device)
"""
    assert on_box(1, ["-c", print_devices]).split() == ["cuda:0", "cpu"]


def test_batches_that_an_iterator_makes_on_the_gpu_are_made_on_the_stream_of_the_copies():
    """And what the caller made before is waited for."""
    code = """
import torch
from tutorec.distributed.train_pipeline.train_pipelines import TrainPipelineSparseDist

gpu, default, made, waited = torch.device("cuda"), torch.cuda.current_stream(), [], []
torch.cuda.Stream.wait_stream = lambda self, other: waited.append((self, other))

def batches():
    for _ in range(3):
        made.append(torch.cuda.current_stream())
        yield torch.ones(2, 1, device=gpu)

class Model(torch.nn.Linear):
    def forward(self, batch):
        return super().forward(batch).sum(), batch

model, source = Model(1, 1, device=gpu), batches()
pipeline = TrainPipelineSparseDist(model, torch.optim.SGD(model.parameters(), 0.1), gpu)
for _ in range(3):
    pipeline.progress(source)
[copies] = set(made)
assert copies is not default and torch.cuda.current_stream() is default
assert waited[0] == (copies, default)
print("3 batches")
"""
    assert on_box(1, ["-c", code]) == "3 batches\n"


@pytest.mark.slow
def test_bench_gpu_measures_on_the_first_gpu_and_on_all():
    code = """
import sys
sys.path.insert(0, ".")
from benchmarks import gpu
from benchmarks.runner import Options
from tutorec.spmd import Ranks, device

class Counted(Ranks):
    def run(self, fn, *args):
        print(super().run(lambda: str(device())))
        return super().run(fn, *args)

gpu.Ranks = Counted
cases = ("forward", "step-rowwise_adagrad", "int8", "sharded-row_wise")
report = gpu.run(Options(rounds=1, cases=cases, tiny=True))
print(sorted(name.split(":")[0] for name in report.samples if name.endswith("tutorec")))
"""
    assert on_box(2, ["-c", code]).splitlines() == [
        "['cuda:0', 'cuda:1']",
        "['forward', 'int8', 'sharded-row_wise', 'step-rowwise_adagrad']",
    ]


@pytest.mark.slow
def test_ids_and_rows_that_cross_streams_keep_their_memory():
    """Ids that a stage prefetches, and rows that another looks up, are read on the main stream."""
    pipelines = DISTRIBUTED / "train_pipeline/test_pipelines.py"
    chosen = "trained_to_its_end_as_the_plain_loop_does and (prefetch or fused)"
    pytest_on_box(2, pipelines, "-k", chosen)


@pytest.mark.slow
@pytest.mark.parametrize("file", files_of_ranks())
def test_tests_of_ranks_pass(file):
    chosen = ["-k", f"not {BEYOND[file]}"] if file in BEYOND else []
    pytest_on_box(2, DISTRIBUTED / file, *chosen)


OF_THE_BOX = (
    "one_group or pinned or (over_all_gpus and torch) or "
    "(every_sharding_type and torch and (table_wise or mixed))"
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gpus", "chosen"),
    [(2, OF_THE_BOX), *(pytest.param(gpus, "", marks=pytest.mark.full) for gpus in (2, 3, 8))],
)
def test_the_tests_of_a_gpu_box_pass(gpus, chosen):
    pytest_on_box(gpus, ROOT / "tests/gpu", "-k", chosen)


@pytest.mark.slow
@pytest.mark.parametrize(("gpus", "cases"), [(1, "-1-"), (8, "-2- or -4-")])
def test_sharded_tables_equal_unsharded_ones(gpus, cases):
    pytest_on_box(gpus, PARITY, "-k", f"equal_unsharded and ({cases}) and not module")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gpus", "shows", "places"),
    [(2, [], "cuda:0 cuda:1"), (2, ["--virtual-local-rank"], "cuda:0 cuda:0"), (1, [], "cpu cpu")],
    ids=["all", "its own alone", "one for both"],
)
def test_a_rank_finds_its_gpu_whatever_the_launcher_shows_it(gpus, shows, places, tmp_path):
    script = tmp_path / "place.py"
    script.write_text(
        "import torch\nimport torch.distributed as dist\nfrom tutorec import spmd\n\nspmd.init()\n"
        "total = torch.ones(1, device=spmd.device())\ndist.all_reduce(total)\nassert total.item() "
        "== 2\n"
        "places = [None] * 2\ndist.all_gather_object(places, str(spmd.device()))\n"
        "if dist.get_rank() == 0:\n    print(*places)\n"
    )
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *shows]
    assert on_box(gpus, [*launch, script]).strip() == places


@pytest.mark.slow
def test_a_script_with_a_group_of_nccl_alone_keeps_its_tensors_on_gpus():
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    printed = on_box(2, [*launch, HERE / "nccl_script.py"])
    assert printed.count("on the GPUs: the loss fell by 10.22") == 2
    assert printed.count("on the CPU: No backend type associated with device type cpu") == 2
