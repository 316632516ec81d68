"""Imports point down: the layers of the design, and who alone may touch fbgemm and
torch.distributed.
"""

from __future__ import annotations

import ast

import pytest
from policy.tree import PACKAGE, SourceFile, Tree, assert_none

# Bottom first. A line is a list of groups: modules of one group may import one another, modules of
# two groups may not.
LAYERS: tuple[tuple[str, tuple[tuple[str, ...], ...]], ...] = (
    (
        "ground",
        (
            (
                "_kernels",
                "_lazy",
                "awaitable",
                "streamable",
                "types",
                "errors",
                "_check",
                "_loaded",
                "_style",
                "_text",
                "_validation",
                "spmd",
                "_doctor",
                "_calibration",
                "_whole_file",
                "_torchrec_names",
            ),
        ),
    ),
    ("data", (("sparse",),)),
    ("local", (("modules", "optim", "fx", "balance"),)),
    ("quantized rows", (("quant",),)),
    (
        "vocabulary",
        (
            tuple(
                f"distributed.{name}"
                for name in ("plan core traffic hit_rate fused_params comm").split()
            ),
        ),
    ),
    ("moves", (("distributed.collectives", "distributed.lookup"),)),
    ("sharding types", (("distributed.sharding",),)),
    (
        "sharded modules",
        (
            tuple(
                f"distributed.{name}"
                for name in (
                    "state "
                    "embedding_base embeddingbag embedding fused_embeddingbag "
                    "fused_embedding mc_modules mc_resharding mc_embedding_modules "
                    "mc_embedding mc_embeddingbag quant_state quant_behind_mappings "
                    "quant_sharding quant_embeddingbag quant_embedding mix_vocab"
                ).split()
            ),
            ("distributed.planner",),
        ),
    ),
    (
        "assembly",
        (
            tuple(
                f"distributed.{name}"
                for name in (
                    "sharding_plan shard utils data_parallel gradient_norm embedding_sharding "
                    "planner.planners replicas model_parallel checkpoint calibration"
                ).split()
            ),
        ),
    ),
    ("pipelines", (("distributed.train_pipeline",),)),
    (
        "users",
        (
            (
                "inference",
                "metrics",
                "models",
                "datasets",
                "nano",
                "teach",
                "examples",
                "distributed.simulate",
                "distributed.step_times",
                "distributed.test_utils",
                "test_utils",
                "quant.report",
                "_migrate",
                "cli",
                "table_files",
                "__main__",
            ),
        ),
    ),
)
# They gather names of every layer and hold nothing else; nobody inside the library imports them.
FACADES = (
    "distributed.types",
    "distributed.embedding_types",
    "distributed.dist_data",
)
FACADES += (
    "distributed.embedding_lookup",
    "distributed.comm_ops",
    "sparse.jagged_tensor",
    "distributed.fbgemm_qcomm_codec",
)
FACADES += ("distributed.train_pipeline.utils",)
FACADES += ("distributed.cache",)

COLLECTIVE_MODULES = (
    "distributed.collectives",
    "distributed.comm",
    "spmd",
)
# they start groups as TorchRec's tests do
COLLECTIVE_MODULES += ("test_utils", "distributed.test_utils")
# solutions do what a reader writes in a notebook
COLLECTIVE_MODULES += ("teach.exercises",)
COLLECTIVES = frozenset(
    """all_gather all_gather_into_tensor all_gather_object all_gather_single all_reduce all_to_all all_to_all_single
    barrier batch_isend_irecv broadcast broadcast_object_list destroy_process_group gather gather_object
    init_process_group irecv isend monitored_barrier new_group recv reduce reduce_scatter reduce_scatter_single
    reduce_scatter_tensor scatter
    scatter_object_list send""".split()  # noqa: E501
)


def covers(entry: str, name: str) -> bool:
    """Whether a layer's entry stands for a module: itself, what is inside it, a private part (`_x`:
    `_x_y`).
    """
    return (
        name == entry
        or name.startswith(entry + ".")
        or (entry.startswith("_") and name.startswith(entry + "_"))
    )


def place(name: str) -> tuple[int, int] | None:
    """Layer and group of a module, named below the package; None when the table has no place for
    it.
    """
    best: tuple[int, tuple[int, int]] | None = None
    for level, (_, groups) in enumerate(LAYERS):
        for index, group in enumerate(groups):
            for entry in group:
                if covers(entry, name) and (best is None or len(entry) > best[0]):
                    best = (len(entry), (level, index))
    return best[1] if best else None


def below(module: str) -> str:
    return module.removeprefix(PACKAGE).removeprefix(".")


def is_gathering(file: SourceFile) -> bool:
    """Facades and package fronts re-export from anywhere; test_facades.py holds them to that."""
    return file.is_package or below(file.module) in FACADES


def layer_violations(tree: Tree) -> list[str]:
    found = []
    for file in tree.files:
        name = below(file.module)
        if is_gathering(file):
            continue
        here = place(name)
        if here is None:
            found.append(
                f"{file.where}: no layer; give it a place in LAYERS of "
                "tests/policy/test_layers.py and in the design"
            )
            continue
        for imported in file.imports():
            target = tree.target(imported)
            if target is None:
                continue
            problem = import_problem(tree, name, here, below(target))
            if problem:
                found.append(f"{file.where}:{imported.line}: imports {target}: {problem}")
    return found


def import_problem(tree: Tree, name: str, here: tuple[int, int], target: str) -> str | None:
    package = tree.modules.get(f"{PACKAGE}.{target}".rstrip("."))
    if target in FACADES or target == "" or (package is not None and package.is_package):
        return "a facade or a package front; import from the module that defines the name"
    there = place(target)
    if there is None:
        return "it has no layer"
    if covers("teach", target) and not covers("teach", name):
        return "teach is for notebooks; nothing in the library imports it"
    if there[0] > here[0]:
        return f"layer {LAYERS[there[0]][0]!r} lies above {LAYERS[here[0]][0]!r}"
    if there[0] == here[0] and there[1] != here[1]:
        return f"a bar stands between them in layer {LAYERS[here[0]][0]!r}"
    return None


def foreign_violations(tree: Tree) -> list[str]:
    """fbgemm outside _kernels, collectives outside the three places that may call them, torchrec
    anywhere.
    """
    found = []
    for file in tree.files:
        name = below(file.module)
        kernels = covers("_kernels", name)
        for imported in file.imports():
            top = imported.base.partition(".")[0]
            if top == "torchrec" or (top == "fbgemm_gpu" and not kernels):
                found.append(f"{file.where}:{imported.line}: imports {imported.base}")
            if (
                not allowed_collectives(name)
                and imported.base == "torch.distributed"
                and imported.name in COLLECTIVES
            ):
                found.append(
                    f"{file.where}:{imported.line}: imports torch.distributed.{imported.name}; "
                    "use distributed/comm.py"
                )
        if not any(word in file.text for word in ("fbgemm", *COLLECTIVES)):
            continue
        for node in file.nodes:
            if not isinstance(node, ast.Attribute):
                continue
            dotted = ast.unparse(node)
            if dotted.startswith("torch.ops.fbgemm") and not kernels:
                found.append(f"{file.where}:{node.lineno}: {dotted}; only _kernels calls fbgemm")
            if not allowed_collectives(name) and is_collective(dotted):
                found.append(
                    f"{file.where}:{node.lineno}: {dotted}; use distributed/comm.py or "
                    "distributed/collectives"
                )
    return sorted(set(found))


def allowed_collectives(name: str) -> bool:
    return any(covers(entry, name) for entry in COLLECTIVE_MODULES)


def is_collective(dotted: str) -> bool:
    base, _, attribute = dotted.rpartition(".")
    return attribute in COLLECTIVES and base in {
        "dist",
        "torch.distributed",
        "distributed",
        "c10d",
        "dist_nn",
    }


def cycles(tree: Tree) -> list[str]:
    """Cycles among module-level imports (an import inside a function breaks a cycle, and is the
    last resort).
    """
    graph: dict[str, set[str]] = {}
    for file in tree.files:
        top = SourceFile(
            file.module,
            "\n".join(
                ast.unparse(n) for n in file.ast.body if isinstance(n, ast.Import | ast.ImportFrom)
            ),
        )
        targets = {tree.target(imported) for imported in top.imports()}
        graph[file.module] = {t for t in targets if t in tree.modules and t != file.module}
    done: set[str] = set()
    found: list[str] = []

    def visit(module: str, path: tuple[str, ...]) -> None:
        if module in path:
            found.append(" -> ".join((*path[path.index(module) :], module)))
        elif module not in done:
            for target in sorted(graph[module]):
                visit(target, (*path, module))
            done.add(module)

    for module in sorted(graph):
        visit(module, ())
    return found


def test_imports_point_down():
    assert_none(layer_violations(Tree.of_repository()))


def test_fbgemm_collectives_and_torchrec_stay_where_they_belong():
    assert_none(foreign_violations(Tree.of_repository()))


def test_modules_import_without_cycles():
    assert_none(cycles(Tree.of_repository()))


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (("sparse.keyed", "from tutorec.modules.mlp import MLP", "modules.mlp"), "lies above"),
        (("sparse.keyed", "def f():\n    from tutorec.cli import main", "cli"), "lies above"),
        (
            (
                "distributed.embeddingbag",
                "import tutorec.distributed.planner.cost",
                "distributed.planner.cost",
            ),
            "a bar",
        ),
        (
            (
                "modules.mlp",
                "from tutorec.sparse.jagged_tensor import KeyedTensor",
                "sparse.jagged_tensor",
            ),
            "facade",
        ),
        (("modules.mlp", "from tutorec.sparse import KeyedTensor", "sparse/"), "package front"),
        (("examples.x", "from tutorec.teach.draw import draw", "teach.draw"), "teach"),
        (("helpers", "", "cli"), "no layer"),
    ],
)
def test_layer_policy_rejects(case, words):
    importer, text, imported = case
    violations = layer_violations(Tree.of({importer: text, imported: ""}))
    assert len(violations) == 1, violations
    assert words in violations[0]


@pytest.mark.parametrize(
    "text",
    [
        "import fbgemm_gpu",
        "from torchrec.sparse import jagged_tensor",
        "import torch\n\ndef f(x):\n    return torch.ops.fbgemm.permute_2D_sparse_data(x)",
        "import torch.distributed as dist\n\ndef f(x):\n    dist.all_reduce(x)",
        "from torch.distributed import all_to_all_single",
    ],
)
def test_foreign_policy_rejects(text):
    assert foreign_violations(Tree.of({"sparse.keyed": text})) != []


def test_cycle_policy_rejects():
    tree = Tree.of(
        {"sparse.a": "from tutorec.sparse.b import x", "sparse.b": "from tutorec.sparse.a import y"}
    )
    assert cycles(tree) == ["tutorec.sparse.a -> tutorec.sparse.b -> tutorec.sparse.a"]


def test_ground_modules_may_use_torch_distributed():
    assert_none(
        foreign_violations(
            Tree.of({"spmd.child": "import torch.distributed as dist\ndist.barrier()"})
        )
    )
