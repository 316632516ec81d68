"""What ``import tutorec`` loads, and what it does not."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import tutorec

ROOT = Path(__file__).parent.parent

LOADED_BY_TORCH = """
import sys, torch
before = set(sys.modules)
"""


def modules_after(code: str, **environment: str) -> set[str]:
    """Modules that a fresh process holds after ``code`` beyond those of ``import torch``."""
    script = f"{LOADED_BY_TORCH}\n{code}\nprint(*sorted(set(sys.modules) - before), sep='\\n')"
    ran = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )
    assert ran.returncode == 0, ran.stderr
    return set(ran.stdout.split())


def test_import_loads_the_root_alone():
    loaded = {name for name in modules_after("import tutorec") if not name.startswith("importlib")}
    assert loaded == {"tutorec", "tutorec._lazy"}


IMPORT_SYSTEM = """
import sys
import tutorec, tutorec.types, tutorec.modules.mlp, tutorec.optim.optimizers

assert not hasattr(tutorec, "pt2") and not hasattr(tutorec.types, "nothing")
assert hooks == (sys.meta_path, sys.path_hooks, builtins.__import__, PathFinder.find_spec)
assert code == (SourceFileLoader.exec_module, SourceFileLoader.create_module)
for name, module in [*sys.modules.items()]:
    if name.startswith("tutorec"):
        loader = module.__spec__.loader
        assert type(loader) is SourceFileLoader and vars(loader).keys() == {"name", "path"}, name
        ours = getattr(module, "__getattr__", None)
        assert ours is None or ours.__module__ == "tutorec._lazy", name
"""


def test_import_changes_nothing_in_the_import_system():
    modules_after(
        "import builtins\n"
        "from importlib.machinery import PathFinder, SourceFileLoader\n"
        "hooks = ([*sys.meta_path], [*sys.path_hooks], builtins.__import__, PathFinder.find_spec)\n"
        "code = (SourceFileLoader.exec_module, SourceFileLoader.create_module)\n" + IMPORT_SYSTEM
    )


def test_import_does_not_even_load_torch():
    ran = subprocess.run(
        [sys.executable, "-c", "import sys, tutorec; print('torch' in sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stdout.strip() == "False"


FIRST_FORWARD = """
import tutorec
from tutorec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
tables = [EmbeddingBagConfig(num_embeddings=10, embedding_dim=4, name="t", feature_names=["f"])]
batch = KeyedJaggedTensor.from_lengths_sync(keys=["f"], values=torch.tensor([1, 2]), lengths=torch.tensor([1, 1]))
EmbeddingBagCollection(tables=tables)(batch).values()
"""  # noqa: E501


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_first_forward_loads_nothing_heavy(backend: str):
    extra = modules_after(FIRST_FORWARD, TUTOREC_BACKEND=backend)
    heavy = (
        "tensordict",
        "torch._dynamo",
        "torch._inductor",
        "sympy",
        "fbgemm_gpu",
        "torchrec",
        "matplotlib",
        "numba",
    )
    assert not [name for name in extra if name.startswith(heavy)]
    assert not [
        name
        for name in extra
        if name.startswith(("tutorec.distributed", "tutorec.spmd", "tutorec.teach"))
    ]


JAGGED_WORK = """
import warnings
warnings.simplefilter("error")
from tutorec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor
batch = KeyedJaggedTensor.from_lengths_sync(
    ["f", "g"], torch.tensor([1, 2]), torch.tensor([1, 1]), torch.tensor([0.5, 1.0])
)
batch.permute([1, 0]).split([1, 1]), batch.to_dict(), batch["f"].to_padded_dense(), str(batch)
KeyedTensor.regroup([KeyedTensor(["f"], [1], torch.ones(1, 1))], [["f"]])
from tutorec.sparse.tensor_dict import maybe_td_to_kjt
maybe_td_to_kjt(batch)
"""
DATA_LAYER = (
    "_lazy sparse _kernels awaitable streamable types errors _check _validation _doctor spmd"
).split()


@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize(
    "code", ["from tutorec import JaggedTensor, KeyedJaggedTensor, KeyedTensor", JAGGED_WORK]
)
def test_jagged_types_load_layers_0_and_1_only(code: str, backend: str):
    extra = modules_after(code, TUTOREC_BACKEND=backend)
    ours = {name.split(".")[1] for name in extra if name.startswith("tutorec.")}
    assert ours <= set(DATA_LAYER), sorted(ours)
    assert "spmd" not in ours
    heavy = (
        "fbgemm_gpu",
        "tensordict",
        "torch._dynamo",
        "torch._inductor",
        "torch.export",
        "sympy",
        "torchrec",
    )
    heavy += (
        "matplotlib",
        "numba",
        "multiprocess",
        "torch.distributed.tensor",
        "torch.nested._internal",
    )
    assert not [name for name in extra if name.startswith(heavy)]


@pytest.mark.parametrize("name", [*tutorec.__all__, "distributed", "modules", "spmd", "types"])
def test_every_public_name_is_there(name: str):
    assert getattr(tutorec, name) is not None
    assert name in dir(tutorec)


def test_public_functions_are_not_replaced_by_modules():
    import tutorec._doctor
    import tutorec._validation

    assert callable(tutorec.doctor)
    assert callable(tutorec.validation)


def test_lazy_table_and_all_agree():
    assert sorted(tutorec._DEFINED_IN) == sorted(tutorec.__all__)


def test_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match=r"module 'tutorec'.*no.*'EmbeddingBgaCollection'"):
        tutorec.EmbeddingBgaCollection  # noqa: B018
    with pytest.raises(ImportError, match="nothing_here"):
        from tutorec import nothing_here  # noqa: F401


def test_version_is_the_one_of_the_package():
    written = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert tutorec.__version__ == written


def test_modules_of_distributed_are_reached_through_the_package():
    extra = modules_after(
        "import tutorec.distributed as d\nd.comm_ops.get_gradient_division()\nd.types.ShardingEnv"
    )
    assert {"tutorec.distributed.comm_ops", "tutorec.distributed.types"} <= set(extra)
    assert "tutorec.distributed.planner" not in extra
    assert "sharding_plan" in dir(tutorec.distributed)


def test_operators_of_fbgemm_are_there_after_an_import_of_a_jagged_type():
    pytest.importorskip("fbgemm_gpu")
    look = "assert hasattr(torch.ops.fbgemm, 'jagged_2d_to_dense')"
    modules_after(
        f"import torch\nfrom tutorec.sparse.jagged_tensor import KeyedJaggedTensor\n{look}",
        TUTOREC_BACKEND="auto",
    )
    modules_after(
        f"import torch\nimport tutorec\n{look.replace('assert', 'assert not')}",
        TUTOREC_BACKEND="auto",
    )


DOTS = """
import tutorec
for path in paths:
    found = tutorec
    for name in path.split("."):
        found = getattr(found, name)
    assert found.__name__ == f"tutorec.{path}", path
"""


def test_every_public_submodule_is_reached_by_dots():
    source = ROOT / "src" / "tutorec"
    folders = [source / name for name in ("modules", "sparse", "quant", "distributed")]
    files = [file for folder in folders for file in folder.rglob("*.py")]
    paths = sorted(".".join(file.relative_to(source).with_suffix("").parts) for file in files)
    public = [path for path in paths if "._" not in path]
    assert "distributed.planner.storage_reservations" in public
    # The longest first: what is reached must not depend on what was imported before.
    modules_after(f"paths = {sorted(public, key=len, reverse=True)}\n{DOTS}")
