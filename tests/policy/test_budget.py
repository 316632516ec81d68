"""Sizes: a file, a function and a parameter list that outgrow their ceiling are missing
a concept.
"""

from __future__ import annotations

import ast

import pytest
from policy.tree import SourceFile, Tree, assert_none

FILE_TOKENS = 5000
FILE_LINES = 750
FUNCTION_TOKENS = 600
PARAMETERS = 8

# One class with TorchRec's whole surface; a class is not cut into files.
LONG_FILES = frozenset({"tutorec.sparse.keyed_jagged"})
# TorchRec's public signatures are longer than ours would be; each stands here by module and name.
# `train` has keywords for what a run may want to do between its steps.
LONG_SIGNATURES = frozenset(
    {
        "tutorec.sparse.keyed_jagged.KeyedJaggedTensor.__init__",
        "tutorec.datasets.criteo_memory.InMemoryBinaryCriteoIterDataPipe.__init__",
        "tutorec.datasets.criteo_npy.BinaryCriteoUtils.shuffle",
        "tutorec.datasets.random_rec.RandomRecDataset.__init__",
        "tutorec.datasets.test_utils.criteo_test_utils.CriteoTest._create_dataset_npys",
        "tutorec.distributed.collectives.functions.alltoall_sequence",
        "tutorec.distributed.model_parallel.DMPCollection.__init__",
        "tutorec.distributed.planner.types.Stats.log",
        "tutorec.distributed.planner.planners.EmbeddingShardingPlanner.__init__",
        "tutorec.distributed.planner.stats.EmbeddingStats.log",
        "tutorec.distributed.planner.topology.Topology.__init__",
        "tutorec.distributed.test_utils.test_model.ModelInput.generate",
        "tutorec.distributed.test_utils.test_model.TestSparseNN.__init__",
        "tutorec.distributed.train_pipeline.semi_sync.TrainPipelineSemiSync.__init__",
        "tutorec.distributed.train_pipeline.fused_sparse_dist.TrainPipelineFusedSparseDist.__init__",
        "tutorec.distributed.train_pipeline.sparse_dist.TrainPipelineSparseDist.__init__",
        "tutorec.inference.modules.shard_quant_model",
        "tutorec.modules.hash_mc_metrics.ScalarLogger.__init__",
        "tutorec.modules.hash_mc_modules.HashZchManagedCollisionModule.__init__",
        "tutorec.modules.mc_adapter.McEmbeddingBagCollectionAdapter.__init__",
        "tutorec.modules.mc_adapter.McEmbeddingCollectionAdapter.__init__",
        "tutorec.models.training.train",
        "tutorec.modules.mch_module.MCHManagedCollisionModule.__init__",
        "tutorec.quant.embedding_collection.QuantManagedCollisionEmbeddingCollection.__init__",
        "tutorec.quant.embedding_modules.QuantManagedCollisionEmbeddingBagCollection.__init__",
    }
)


def parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Parameters that a caller sees; `self` and `cls` are not."""
    names = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    names += [a.arg for a in (node.args.vararg, node.args.kwarg) if a]
    return len([name for i, name in enumerate(names) if not (i == 0 and name in {"self", "cls"})])


def file_violations(file: SourceFile) -> list[str]:
    found = []
    lines = file.text.count("\n")
    long = file.module in LONG_FILES
    if lines > FILE_LINES and not long:
        found.append(f"{file.where}: {lines} lines, at most {FILE_LINES}")
    if file.tokens() > FILE_TOKENS and not long:
        found.append(f"{file.where}: {file.tokens()} tokens, at most {FILE_TOKENS}")
    for name, node in file.functions():
        where = f"{file.where}:{node.lineno}: {name}"
        if file.tokens(node) > FUNCTION_TOKENS:
            found.append(f"{where} has {file.tokens(node)} tokens, at most {FUNCTION_TOKENS}")
        if parameters(node) > PARAMETERS and f"{file.module}.{name}" not in LONG_SIGNATURES:
            found.append(f"{where} has {parameters(node)} parameters, at most {PARAMETERS}")
    return found


def test_files_functions_and_signatures_stay_small():
    assert_none([v for file in Tree.of_repository().files for v in file_violations(file)])


def test_allowed_long_signatures_exist_and_are_long():
    tree = Tree.of_repository()
    long = {
        f"{f.module}.{n}"
        for f in tree.files
        for n, node in f.functions()
        if parameters(node) > PARAMETERS
    }
    assert_none(sorted(LONG_SIGNATURES - long))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x = [" + "1, " * 2500 + "]\n", "5004 tokens"),
        ("# why\n" * 751, "751 lines"),
        ("def f():\n" + "    x = 1\n" * 199, "602 tokens"),
        ("def f(a, b, c, d, e, f, g, *, h, i):\n    pass\n", "9 parameters"),
    ],
)
def test_budget_policy_rejects(text, words):
    violations = file_violations(SourceFile("tutorec.x", text))
    assert len(violations) == 1, violations
    assert words in violations[0]


def test_docstrings_comments_and_blank_lines_are_not_tokens():
    text = (
        '"""One.\n\nTwo.\n"""\n\n# why\nx = """a\nb"""\n\n\ndef f(self, a):\n    """Doc."""\n   '
        " return a  # because\n"
    )
    assert SourceFile("tutorec.x", text).tokens() == 13
