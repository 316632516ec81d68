"""Sizes and density: a file and a function that outgrow a screen or two miss a concept, and code
without blank lines, with packed assignments or with names that say nothing is not shorter to read.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

import pytest
from policy.tree import SourceFile, Tree, assert_none

FILE_LINES = 750
FUNCTION_LINES = 90
PARAMETERS = 8

# Of the whole library. Raise the first and lower the others when a change allows it.
LEAST_BLANK = 0.06  # of the lines in bodies of functions of more than six lines
MOST_PACKED = 0.005  # of assignments: `a, b = x, y`
MOST_VAGUE = 0.01  # of bound names
VAGUE = re.compile(
    r"_*(of_\w+|\w+_of|one|each|pieces?|places?|parts?|kinds?|held|facts?|due|told|asked|mine|home"
    r"|taken|took|words?|what|why|whole|made|given|wanted|kept|found|done|there|shown|answer)"
)

# One class with TorchRec's whole surface; a class is not cut into files.
LONG_FILES = frozenset({"tutorec.sparse.keyed_jagged"})
# TorchRec's public signatures are longer than ours would be; each stands here by module and name.
# `train` has keywords for what a run may want to do between its steps.
LONG_SIGNATURES = frozenset(
    {
        "tutorec.sparse.keyed_jagged.KeyedJaggedTensor.__init__",
        "tutorec.datasets.criteo.InMemoryBinaryCriteoIterDataPipe.__init__",
        "tutorec.datasets.criteo.BinaryCriteoUtils.shuffle",
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
        "tutorec.distributed.train_pipeline.train_pipelines.TrainPipelineSemiSync.__init__",
        "tutorec.distributed.train_pipeline.train_pipelines.TrainPipelineFusedSparseDist.__init__",
        "tutorec.distributed.train_pipeline.train_pipelines.TrainPipelineSparseDist.__init__",
        "tutorec.inference.modules.shard_quant_model",
        "tutorec.modules.hash_mc_metrics.ScalarLogger.__init__",
        "tutorec.modules.hash_mc_modules.HashZchManagedCollisionModule.__init__",
        "tutorec.modules.mc_adapter._Adapter.__init__",
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


def first_statement(node: ast.FunctionDef | ast.AsyncFunctionDef) -> ast.stmt:
    """The first statement of a function after its docstring, or the docstring alone."""
    return node.body[1] if ast.get_docstring(node) and len(node.body) > 1 else node.body[0]


def file_violations(file: SourceFile) -> list[str]:
    found = []
    lines = file.text.count("\n")
    long = file.module in LONG_FILES
    if lines > FILE_LINES and not long:
        found.append(f"{file.where}: {lines} lines, at most {FILE_LINES}")
    for name, node in file.functions():
        where = f"{file.where}:{node.lineno}: {name}"
        body_lines = (node.end_lineno or node.lineno) - first_statement(node).lineno + 1
        if body_lines > FUNCTION_LINES:
            found.append(f"{where} has a body of {body_lines} lines, at most {FUNCTION_LINES}")
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


class Density(NamedTuple):
    """Counts in a file or a tree."""

    blank: int = 0
    body_lines: int = 0
    packed: int = 0
    assignments: int = 0
    vague: int = 0
    names: int = 0


def density(files: Iterable[SourceFile]) -> Density:
    """Blank lines, packed assignments and vague names of files."""
    total = Counter[str]()
    for file in files:
        lines = file.text.splitlines()
        for node in file.nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                first = first_statement(node).lineno
                last = node.end_lineno or first
                if last - first >= 6:
                    total["body_lines"] += last - first + 1
                    total["blank"] += sum(not line.strip() for line in lines[first - 1 : last])
            elif isinstance(node, ast.Assign):
                pairs = isinstance(node.targets[0], ast.Tuple), isinstance(node.value, ast.Tuple)
                total["assignments"] += 1
                total["packed"] += all(pairs)

            name = None
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                name = node.id
            elif isinstance(node, ast.arg):
                name = node.arg
            if name is not None:
                total["names"] += 1
                total["vague"] += VAGUE.fullmatch(name) is not None
    return Density(**total)


def density_violations(files: Iterable[SourceFile]) -> list[str]:
    counts = density(files)
    found = []
    blank = counts.blank / max(1, counts.body_lines)
    if blank < LEAST_BLANK:
        found.append(f"{blank:.1%} of lines in functions are blank, at least {LEAST_BLANK:.1%}")
    packed = counts.packed / max(1, counts.assignments)
    if packed > MOST_PACKED:
        found.append(f"{packed:.1%} of assignments are packed, at most {MOST_PACKED:.1%}")
    vague = counts.vague / max(1, counts.names)
    if vague > MOST_VAGUE:
        found.append(f"{vague:.1%} of names are vague, at most {MOST_VAGUE:.1%}")
    return found


def test_functions_have_paragraphs_and_names_that_say_something():
    assert_none(density_violations(Tree.of_repository().files))


@pytest.mark.parametrize(
    ("body", "fact"),
    [
        ("    x = 1\n" * 40, "0.0% of lines"),
        ("    a, b = 1, 2\n\n" * 20, "100.0% of assignments"),
        ("    piece = 1\n\n" * 20, "95.2% of names"),
    ],
)
def test_density_policy_rejects(body, fact):
    [violation] = density_violations([SourceFile("tutorec.x", f"def f(argument):\n{body}")])
    assert fact in violation


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("# why\n" * 751, "751 lines"),
        ("def f():\n" + "    x = 1\n" * 91, "91 lines"),
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
