"""What an import of a name says that TorchRec has and tutorec does not."""

from __future__ import annotations

import ast
import copy
import doctest
import importlib
import importlib.util
import inspect
import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest
from parity.test_paths import importable

from tutorec._torchrec_names import absent_names, elsewhere, instead_of

USED_NAMES = Path(__file__).with_name("parity") / "used_names.txt"


def there(name: str, root: str) -> bool:
    """Whether a module or a name in a module is there under this root."""
    try:
        importlib.import_module(f"{root}.{name}")
    except ModuleNotFoundError:
        return importable(f"torchrec.{name}", root)
    return True


LAMB = "TorchRec has it and tutorec does not: fbgemm has no such update on a CPU; use Adam"


def test_from_import_of_a_missing_name_says_what_to_use():
    with pytest.raises(ImportError, match=re.escape(LAMB)) as caught:
        from tutorec.optim.optimizers import LAMB as _  # noqa: F401
    assert type(caught.value) is ImportError
    assert str(caught.value).startswith(
        "cannot import name 'LAMB' from 'tutorec.optim.optimizers' (/"
    )
    assert (caught.value.name, caught.value.path) == (
        "tutorec.optim.optimizers",
        sys.modules["tutorec.optim.optimizers"].__file__,
    )


def test_from_import_is_known_behind_256_other_names():
    others = "\n".join(f"x{number} = {number}" for number in range(300))
    with pytest.raises(ImportError, match=LAMB):
        exec(f"{others}\nfrom tutorec.optim.optimizers import LAMB", {})


@pytest.mark.parametrize(
    ("statement", "start"),
    [
        ("import tutorec.modules.itep_modules", "No module named 'tutorec.modules.itep_modules'. "),
        ("import tutorec.pt2.checks", "No module named 'tutorec.pt2'. "),
        ("import tutorec.distributed.maglev", "No module named 'tutorec.distributed.maglev'. "),
        ("from tutorec.pt2.checks import is_pt2_compiling", "No module named 'tutorec.pt2'. "),
        (
            "import importlib; importlib.import_module('tutorec.metrics.throughput')",
            "No module named 'tutorec.metrics.throughput'. ",
        ),
    ],
)
def test_import_of_a_missing_module_says_what_to_use(statement: str, start: str):
    with pytest.raises(ModuleNotFoundError) as caught:
        exec(statement, {})
    assert str(caught.value).startswith(f"{start}TorchRec has it and tutorec does not: ")
    assert start.split("'")[1] == caught.value.name


@pytest.mark.parametrize(
    ("package", "name"), [("tutorec", "pt2"), ("tutorec.modules", "itep_modules")]
)
def test_from_import_of_a_missing_module_says_what_to_use(package: str, name: str):
    with pytest.raises(
        ImportError, match=f"cannot import name '{name}' from '{package}' .* TorchRec has it"
    ):
        exec(f"from {package} import {name}", {})


def test_attributes_say_what_to_use_and_hasattr_answers():
    for module, name in [("tutorec", "pt2"), ("tutorec.optim.optimizers", "LAMB")]:
        holder = importlib.import_module(module)
        assert not hasattr(holder, name)
        assert getattr(holder, name, None) is None
        with pytest.raises(
            AttributeError, match=f"module '{module}' has no attribute '{name}'. TorchRec has it"
        ):
            getattr(holder, name)


@pytest.mark.parametrize(
    ("statement", "end"),
    [
        ("from tutorec.distributed.comm import JaggedTensor", "Import it from tutorec."),
        (
            "from tutorec.modules.mlp import append_prefix",
            "Import it from tutorec.distributed.utils.",
        ),
        (
            "from tutorec.distributed.embedding_types import EmbeddingTableConfig",
            "Use EmbeddingBagConfig, or EmbeddingConfig for rows that are not pooled.",
        ),
    ],
)
def test_a_name_in_another_module_than_its_own_is_found(statement: str, end: str):
    """TorchRec's modules import from one another, and programs import from any of them."""
    with pytest.raises(ImportError) as caught:
        exec(statement, {})
    assert str(caught.value).endswith(f".py). {end}")


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("import tutorec.nothing", "No module named 'tutorec.nothing'"),
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
def test_names_that_torchrec_lacks_too_get_the_ordinary_error(statement: str, message: str):
    with pytest.raises((ImportError, AttributeError)) as caught:
        exec(statement, {})
    assert re.fullmatch(message, str(caught.value))


def test_modules_are_inspected_copied_and_reloaded_as_before():
    module = importlib.import_module("tutorec.optim.optimizers")
    assert inspect.getmodule(module.SGD) in (module, sys.modules[module.SGD.__module__])
    assert "SGD" in dict(inspect.getmembers(module))
    assert "SGD" in inspect.getsource(module)
    assert doctest.DocTestFinder().find(module)
    assert copy.copy(module.SGD) is module.SGD
    assert (
        pickle.loads(pickle.dumps(module.in_backward_optimizer_filter))
        is module.in_backward_optimizer_filter
    )
    assert importlib.util.find_spec("tutorec.optim.nothing") is None
    assert importlib.util.find_spec("tutorec.pt2") is None
    assert importlib.util.find_spec("tutorec.cli") is not None
    version = importlib.import_module("tutorec._validation")
    for _ in range(3):
        version = importlib.reload(version)
    with pytest.raises(AttributeError, match=r"has no attribute 'nothing'$"):
        version.nothing  # noqa: B018


def test_the_table_is_read_when_something_is_missing_and_not_before():
    code = (
        "import sys, tutorec.types, tutorec.errors as e; assert not hasattr(e, '__wrapped__')\n"
        "from tutorec._torchrec_names import absent_names as table; assert not "
        "table.cache_info().currsize\n"
        "hasattr(e, 'nothing'); assert table.cache_info().currsize"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_no_name_of_the_table_is_here():
    here = [name for name in absent_names() if there(name, "tutorec")]
    assert not here, f"remove from _torchrec_names.toml: {here}"


def test_an_import_stops_at_a_module_that_has_a_sentence():
    """Python imports ``a``, then ``a.b``, then ``a.b.c``: a sentence for ``c`` is read only where
    ``a.b`` is here.
    """
    for name in absent_names():
        parents = [name.rsplit(".", count)[0] for count in range(name.count("."), 0, -1)]
        first = next((parent for parent in parents if not there(parent, "tutorec")), name)
        assert instead_of(first), f"{first} of {name} is not here, and its import says nothing"


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
        sentence = elsewhere(f"modules.mlp.{name}")
        assert sentence and hasattr(importlib.import_module(sentence.split()[-1][:-1]), name)
    assert elsewhere("modules.mlp.nothing") is None


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
        if not there(name, "tutorec") and not instead_of(name) and not elsewhere(name)
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
