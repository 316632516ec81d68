"""What the table says of names that TorchRec has and tutorec does not, and who reads it."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
from parity.test_paths import importable

from tutorec._migrate import defined_elsewhere
from tutorec._torchrec_names import absent_names, instead_of

USED_NAMES = Path(__file__).with_name("parity") / "used_names.txt"


def there(name: str, root: str) -> bool:
    """Whether a module or a name in a module is there under this root."""
    try:
        importlib.import_module(f"{root}.{name}")
    except ModuleNotFoundError:
        return importable(f"torchrec.{name}", root)
    return True


@pytest.mark.parametrize(
    ("package", "name"),
    [("tutorec", "pt2"), ("tutorec.modules", "itep_modules"), ("tutorec.distributed", "maglev")],
)
def test_a_package_says_what_to_use_instead_of_a_missing_name(package: str, name: str):
    module = importlib.import_module(package)
    assert not hasattr(module, name)
    assert getattr(module, name, None) is None
    with pytest.raises(AttributeError) as caught:
        getattr(module, name)

    remedy = instead_of(f"{package}.{name}".removeprefix("tutorec."))
    assert str(caught.value).startswith(f"module {package!r} has no attribute {name!r}. ")
    assert str(caught.value).endswith(f": {remedy}")
    assert (caught.value.name, caught.value.obj) == (name, module)


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("import tutorec.nothing", "No module named 'tutorec.nothing'"),
        ("import tutorec.modules.itep_modules", "No module named 'tutorec.modules.itep_modules'"),
        ("from tutorec.pt2.checks import is_pt2_compiling", "No module named 'tutorec.pt2'"),
        (
            "from tutorec.optim.optimizers import LAMB",
            r"cannot import name 'LAMB' from 'tutorec.optim.optimizers' \(.*\)",
        ),
        ("from tutorec import nothing", r"cannot import name 'nothing' from 'tutorec' \(.*\)"),
        (
            "from tutorec.types import nothing",
            r"cannot import name 'nothing' from 'tutorec.types' \(.*\)",
        ),
        (
            "import tutorec.types; tutorec.types.nothing",
            "module 'tutorec.types' has no attribute 'nothing'",
        ),
        (
            "import tutorec.distributed as d; d.nothing",
            "module 'tutorec.distributed' has no attribute 'nothing'",
        ),
    ],
)
def test_imports_of_missing_names_get_the_ordinary_error(statement: str, message: str):
    with pytest.raises((ImportError, AttributeError)) as caught:
        exec(statement, {})
    assert re.fullmatch(message, str(caught.value))


def test_the_table_is_read_when_something_is_missing_and_not_before():
    code = (
        "import sys, tutorec.modules as m; assert not hasattr(m, '__wrapped__')\n"
        "assert 'tutorec._torchrec_names' not in sys.modules\n"
        "assert not hasattr(m, 'nothing') and 'tutorec._torchrec_names' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_no_name_of_the_table_is_here():
    here = [name for name in absent_names() if there(name, "tutorec")]
    assert not here, f"remove from _torchrec_names.toml: {here}"


def used_names() -> list[tuple[int, int, str]]:
    """Projects and families of projects that import a name, and the name below the root."""
    lines = USED_NAMES.read_text(encoding="utf-8").splitlines()
    fields = [line.split() for line in lines if not line.startswith("#")]
    return [
        (int(projects), int(families), name.removeprefix("torchrec."))
        for projects, families, name in fields
    ]


def test_names_that_projects_import_are_here_or_have_a_sentence():
    neither = [
        name
        for _, _, name in used_names()
        if instead_of(name) is None and not there(name, "tutorec")
    ]
    assert not neither, f"add to _torchrec_names.toml what to use instead of {neither}"
    both = [
        name
        for _, _, name in used_names()
        if instead_of(name) is not None and there(name, "tutorec")
    ]
    assert not both, f"the table has a sentence for {both}, which are here"


def test_names_that_three_families_of_projects_import_are_here():
    often = [name for _, families, name in used_names() if families >= 3]
    assert len(often) == 60
    assert not [name for name in often if not there(name, "tutorec")]


# What generative-recommenders takes of TorchRec, dlrm_v3 among it (commit db1bf8f), below the root.
GENERATIVE_RECOMMENDERS = """
EmbeddingCollection KeyedJaggedTensor
distributed.model_parallel.DistributedModelParallel distributed.planner.EmbeddingShardingPlanner
distributed.planner.Topology distributed.quant_embedding.QuantEmbeddingCollection
distributed.sharding_plan.get_default_sharders distributed.types.ShardedTensor
distributed.types.ShardingEnv
metrics.accuracy.AccuracyMetricComputation metrics.gauc.GAUCMetricComputation
metrics.mae.MAEMetricComputation metrics.mse.MSEMetricComputation
metrics.ne.NEMetricComputation metrics.rec_metric.RecMetricComputation
modules.embedding_configs.DataType modules.embedding_configs.EmbeddingConfig
modules.embedding_configs.QuantConfig modules.embedding_modules.EmbeddingBagCollection
modules.embedding_modules.EmbeddingCollection
modules.sorted_index_select.maybe_sorted_index_select
optim.RowWiseAdagrad optim.SGD optim.keyed.CombinedOptimizer optim.keyed.KeyedOptimizerWrapper
optim.optimizers.in_backward_optimizer_filter
sparse.jagged_tensor.JaggedTensor sparse.jagged_tensor.KeyedJaggedTensor
sparse.tensor_dict.maybe_td_to_kjt test_utils.get_free_port
"""


def test_a_whole_project_for_a_newer_release_imports():
    assert not [name for name in GENERATIVE_RECOMMENDERS.split() if not there(name, "tutorec")]


def test_nine_in_ten_uses_are_here():
    uses = sum(projects for projects, _, _ in used_names())
    here = sum(projects for projects, _, name in used_names() if there(name, "tutorec"))
    assert here >= 0.9 * uses, f"{here} of {uses}"


def test_sentences_are_sentences_and_name_what_there_is():
    for name, sentence in absent_names().items():
        assert sentence.endswith(".") and "\n" not in sentence and 20 < len(sentence) < 220, (
            name,
            sentence,
        )
        for path in re.findall(r"tutorec(?:\.\w+)+", sentence):
            assert there(path.removeprefix("tutorec."), "tutorec"), f"{name}: {path} is not here"


def test_the_module_of_a_name_has_it():
    for name in ("DataType", "EmbeddingCollectionInterface", "ShardedModule", "none_throws"):
        sentence = defined_elsewhere(f"modules.mlp.{name}")
        assert sentence and hasattr(importlib.import_module(sentence.split()[-1][:-1]), name)
    # A module of TorchRec imports this name, and the table has it in another module.
    path = "distributed.embedding_types.EmbeddingTableConfig"
    assert instead_of(path) is None
    assert defined_elsewhere(path) == instead_of("modules.embedding_configs.EmbeddingTableConfig")
    assert defined_elsewhere("modules.mlp.nothing") is None


def test_an_entry_for_a_module_stands_for_all_inside():
    assert instead_of("metrics.ctr.CTRMetric") == absent_names()["metrics.ctr"]
    assert instead_of("metrics.ctrs") is None
    assert instead_of("distributed.planner.types.Shard") is None


def public_names(root: Path) -> list[str]:
    """Modules of a package, and the classes and functions that they define, below the root."""
    found = []
    for file in sorted(root.rglob("*.py")):
        parts = file.relative_to(root).with_suffix("").parts
        module = ".".join(parts).removesuffix("__init__").removesuffix(".")
        if {"tests", "github", "fb"} & set(parts) or not module:
            continue
        body = ast.parse(file.read_text(encoding="utf-8")).body
        defined = [node.name for node in body if isinstance(node, ast.ClassDef | ast.FunctionDef)]
        found += [module, *(f"{module}.{name}" for name in defined if not name.startswith("_"))]
    return found


@pytest.mark.live
def test_every_public_name_of_torchrec_is_here_or_has_a_sentence():
    """`tutorec migrate` says of any other name that TorchRec lacks it, too."""
    spec = importlib.util.find_spec("torchrec")
    if spec is None or spec.origin is None:
        pytest.skip("torchrec is installed by `make parity` only")
    names = public_names(Path(spec.origin).parent)
    assert len(names) > 1500
    neither = [
        name
        for name in names
        if not there(name, "tutorec") and not instead_of(name) and not defined_elsewhere(name)
    ]
    assert not neither, f"{spec.origin}: a sentence in _torchrec_names.toml: {neither}"


@pytest.mark.live
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what TorchRec's modules import
def test_every_name_of_the_table_is_one_of_torchrec():
    peer = pytest.importorskip("torchrec", reason="torchrec is installed by `make parity` only")
    needs_more_packages = {"inference.client", "inference.dlrm_packager"}
    # Without a GPU there is no Triton.
    needs_more_packages |= {f"sparse.triton_permute_{name}" for name in ("2d", "multi_embedding")}
    # These import TorchRec's own tests, which are not in its wheel.
    tests = ("modules", "model_parallel", "model_parallel_base", "sharding")
    needs_more_packages |= {f"distributed.test_utils.test_{name}" for name in tests}
    absent = {name for name in absent_names() if not there(name, "torchrec")}
    new = {
        name for name, text in absent_names().items() if text.startswith("it is new in TorchRec")
    }
    if peer.__version__ == "1.8.0":
        assert new <= absent
        absent -= new
    assert absent <= needs_more_packages
